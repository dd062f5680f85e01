"""Implementation of `automodel plan`: print the plan of a recipe for a number of GPUs."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.warn import warn
from automodel_cli.distributed.mesh_config import Layout
from automodel_cli.launch.process_startup import disable_gc, enable_gc
from automodel_cli.models.hub import bundled_configs
from automodel_cli.planning.hardware import GPUS
from automodel_cli.planning.reserve import RESERVE_GIB, usable_bytes
from automodel_cli.run.memory.auto_activation_checkpointing import decided
from automodel_cli.run.plan_request import plan_request

GPUS_PER_NODE = 8

if TYPE_CHECKING:
    from automodel_cli.config.composition.compose import Composed
    from automodel_cli.planning.plan import Plan
    from automodel_cli.planning.reserve import MemoryBreakdown
    from automodel_cli.run.recipe import Recipe


def print_plan(
    recipe: Recipe,
    source: Composed,
    *,
    num_gpus: int,
    gpu: str,
    memory_gib: float | None,
    svg: Path | None,
    trace: Callable[[], Sequence[MemoryBreakdown]] | None = None,
) -> int:
    """Print the plan and return the exit code. Raises ConfigError if the mesh or the schedule is invalid.

    Args:
        gpu: of `hardware.GPUS`.
        memory_gib: memory of one GPU. None: of this type.
        trace: measure the memory of every pipeline rank instead of estimating it.
    """
    memory_gib = GPUS[gpu].memory_gib if memory_gib is None else memory_gib
    layout = _layout(recipe, source, num_gpus)
    num_microbatches = recipe.train.num_microbatches(layout.dp)
    if recipe.pipeline is not None:
        recipe.pipeline.check(layout.pp, num_microbatches)
    elif svg is not None:
        raise ConfigError(
            "--svg requires pipeline parallelism, but mesh.pp_size=1",
            code="requires_setting",
            keys=("--svg", "mesh.pp_size"),
            fix="mesh.pp_size=2 pipeline=1f1b, or remove --svg",
        )
    disable_gc()
    from automodel_cli.planning import report
    from automodel_cli.planning.plan import make_plan

    enable_gc()

    with bundled_configs.preferred():
        recipe, recomputed = decided(recipe, layout, memory_gib * 2**30)
        plan = make_plan(plan_request(recipe, layout, gpu))
        export_check = _export_check(recipe, plan)
    traced = trace() if trace is not None else ()
    width = shutil.get_terminal_size((120, 24)).columns
    if recomputed is not None:
        print(f"recompute: {recomputed}\n")
    print(report.render_plan(plan, memory_gib=memory_gib, traced=traced, width=width))
    warn_of_network(layout)
    for line in (_tower(plan), _while_it_generates(recipe, plan, memory_gib), recipe.packing_note, export_check):
        if line is not None:
            print(line)
    if svg is not None:
        svg.write_text(report.svg(plan), encoding="utf-8")
        print(f"\ntimeline written to {svg}")
    return 0


def warn_of_network(layout: Layout, gpus_per_node: int = GPUS_PER_NODE) -> None:
    """Warn if groups of tensor or expert parallelism, whose ranks are neighbors, do not fit in a node."""
    for axis in ("tp", "ep"):
        size: int = getattr(layout, axis)
        if size == 1 or gpus_per_node % size == 0 or layout.world_size <= gpus_per_node:
            continue
        inside = math.gcd(size, gpus_per_node)
        warn(
            "crosses_nodes",
            "mesh.%s_size=%d: ranks of a group are on several nodes of %d GPUs, so up to %.0f%% of what a rank sends "
            "in each layer goes over the network; try mesh.%s_size=%d",
            *(axis, size, gpus_per_node, 100 * (1 - inside / size), axis, inside),
        )


def _tower(plan: Plan) -> str | None:
    """Return a line with what is assumed of pictures."""
    if plan.tower is None:
        return None
    kept = (plan.tower.kept + plan.tower.recomputed) / 2**30
    tokens = plan.request.rows * plan.request.seq_len
    return (
        f"pictures: the plan assumes that all {tokens:,} tokens of a microbatch are image tokens "
        f"({plan.tower.patches:,.0f} patches), for which the tower needs about {kept:.2f} GiB"
    )


def _while_it_generates(recipe: Recipe, plan: Plan, memory_gib: float) -> str | None:
    """Return a line with the memory of colocated servers and of the trainer during generation."""
    servers = recipe.generation_servers()
    if servers is None or not servers.colocated or servers.gpu_memory_utilization is None:
        return None
    stays = max(memory.parameters + memory.frozen + memory.optimizer for memory in plan.memory) / 2**30
    taken = servers.gpu_memory_utilization * memory_gib
    fits = (stays + taken) * 2**30 <= usable_bytes(memory_gib)
    verdict = "fits" if fits else "DOES NOT FIT (a smaller rollout.engine.servers.gpu_memory_utilization)"
    return (
        f"while it generates, {verdict}: {taken:.1f} GiB of a server "
        f"(gpu_memory_utilization={servers.gpu_memory_utilization:g}) beside "
        f"{stays:.1f} GiB of parameters and optimizer and {RESERVE_GIB:g} set aside, of {memory_gib:g} GiB"
    )


def _export_check(recipe: Recipe, plan: Plan) -> str | None:
    """Return a line with the host memory and the FLOPs of the export check on rank 0."""
    import torch

    from automodel_cli.models.checkpoint_io.export_check import host_bytes
    from automodel_cli.models.hub.source import hf_config
    from automodel_cli.run.compared_rows import most_tokens
    from automodel_cli.run.export import NUM_PROMPTS

    minutes = recipe.checkpoint.export_check_minutes
    if not minutes:
        return None
    stored = hf_config(recipe.model).dtype if recipe.model.config is None else None
    dtype = stored if isinstance(stored, torch.dtype) else getattr(torch, recipe.model.dtype)
    needed = host_bytes(plan.num_parameters * dtype.itemsize) / 2**30
    tokens = most_tokens(NUM_PROMPTS, pictures=recipe.model.vision is not None)
    tera = math.ceil(2 * 2 * plan.num_parameters * tokens / 1e12)  # two passes, one multiply and one add per weight
    return (
        f"export check: rank 0 reloads the export into {needed:.1f} GiB of host memory and runs it twice on "
        f"{tokens} tokens (at most {tera:,} TFLOP) in at most {minutes:g} minutes; the other ranks wait"
    )


def _layout(recipe: Recipe, source: Composed, num_gpus: int) -> Layout:
    """Return the mesh on these GPUs. The error of an invalid mesh names the origin of its sizes."""
    try:
        return recipe.mesh.resolve(num_gpus)
    except ConfigError as error:
        keys = [f"mesh.{key}" for key in error.keys]
        origins = [f"{key} ({source.nearest_origin(key)})" for key in keys]
        fix = error.fix and error.fix.replace(" ranks", " GPUs")
        raise ConfigError(error.message, code=error.code, keys=keys, origin="; ".join(origins), fix=fix) from None
