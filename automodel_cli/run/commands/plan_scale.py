"""Implementation of `automodel plan --scale`: a recipe on 64 to 4,096 GPUs, on paper."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.hub import bundled_configs
from automodel_cli.planning.goodput import HOURS, Cluster
from automodel_cli.planning.hardware import GPUS, Links
from automodel_cli.run.memory.auto_activation_checkpointing import decided
from automodel_cli.run.plan_request import plan_request

if TYPE_CHECKING:
    from automodel_cli.run.recipe import Recipe


def print_scale(
    recipe: Recipe,
    num_gpus: int,
    gpu: str,
    memory_gib: float | None,
    json_file: Path | None,
    network: tuple[float, float],
    rates: dict[str, float | None],
) -> int:
    """Print the table, and write it to `json_file`. Raises ConfigError.

    Args:
        network: relative deviation of a node's step time, and oversubscription of the spine (at least 1).
        rates: options of `--goodput`.
    """
    from automodel_cli.planning.plan import make_plan
    from automodel_cli.planning.scale import LARGEST, Assumptions, render, scale

    jitter, oversubscription = network
    if oversubscription < 1:
        raise ConfigError(
            f"--oversubscription {oversubscription:g} must be at least 1 (as much bandwidth between leaves as below)",
            code="out_of_range",
            keys=("--oversubscription",),
            fix="--oversubscription 1",
        )
    if num_gpus > LARGEST:
        raise ConfigError(
            f"--gpus {num_gpus} must be at most {LARGEST} with --scale",
            code="out_of_range",
            keys=("--gpus", "--scale"),
            fix=f"--gpus {LARGEST} --scale",
        )
    device = GPUS[gpu]
    memory_gib = device.memory_gib if memory_gib is None else memory_gib
    layout = recipe.mesh.resolve(num_gpus)
    with bundled_configs.preferred():
        recipe, _ = decided(recipe, layout, memory_gib * 2**30)
        plan = make_plan(plan_request(recipe, layout, gpu))
    links = Links(device.link, rates=device.rates, oversubscription=oversubscription)
    rate = device.host * device.rates.copy if recipe.checkpoint.async_save else 1e9
    assumed = Assumptions(_cluster(rates, links.gpus_per_node), links, rates["save_seconds"], rate, jitter)
    rows = scale(plan, assumed, memory_gib=memory_gib)
    print(
        f"{plan.request.num_microbatches} microbatches of {plan.request.rows} x {plan.request.seq_len} tokens on each "
        f"data-parallel rank\n{device.name}\n"
        "full: parameters sharded over all ranks; hybrid: in each node (mesh.dp_replicate_size)\n"
        f"a GPU fails every {rates['gpu_mtbf_hours']:g} hours; checkpoints at the best interval (Daly)\n"
    )
    print(render(rows))
    if json_file is not None:
        json_file.write_text(json.dumps([row.to_json() for row in rows], indent=2) + "\n", encoding="utf-8")
        print(f"\nwritten to {json_file}")
    return 0


def _cluster(rates: dict[str, float | None], gpus_per_node: int) -> Cluster:
    """Of one node."""
    known = {name: value or 0.0 for name, value in rates.items()}
    never = math.inf
    return Cluster(
        nodes=1,
        step=1.0,
        node_mtbf=known["gpu_mtbf_hours"] * HOURS / gpus_per_node if known["gpu_mtbf_hours"] else never,
        restart=known["restart_minutes"] * 60,
        spares=int(known["spare_nodes"]),
        repair=known["repair_hours"] * HOURS,
        slow_mtbf=known["slow_node_hours"] * HOURS if known["slow_node_hours"] else never,
        slow_for=known["slow_for_hours"] * HOURS,
        slow_factor=known["slow_factor"],
    )
