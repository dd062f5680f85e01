"""Trace one rank on fake tensors: run two real `train_step`s and measure the second one."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.context_parallel import RankGroup
from automodel_cli.distributed.expert_parallel import permute, token_dispatcher, topk_router
from automodel_cli.distributed.fusion import compiled_regions
from automodel_cli.distributed.fusion.region_kernels import as_one
from automodel_cli.distributed.mesh import Mesh, build_mesh
from automodel_cli.distributed.typed_torch import set_attributes
from automodel_cli.dryrun import synthetic_batches
from automodel_cli.dryrun.fake_device import fake_cuda, fake_tensor_compat, flex, sdpa, torch_compat
from automodel_cli.dryrun.fake_device.counts import Work
from automodel_cli.dryrun.fake_device.fake_cuda import CUDA
from automodel_cli.dryrun.fake_device.strategies import Strategies
from automodel_cli.dryrun.fake_device.torch_compat import FakeTensorMode
from automodel_cli.dryrun.microbatch_count import number_to_run, smallest
from automodel_cli.dryrun.rank_result import result_of
from automodel_cli.dryrun.rank_state import RankTrace, StepTimes
from automodel_cli.dryrun.types import GIB, RankResult, TraceRequest
from automodel_cli.models import transformers_compat
from automodel_cli.models.attention import flex as attention_flex
from automodel_cli.models.hub import bundled_configs
from automodel_cli.models.lm_head import kernels as lm_head_kernels
from automodel_cli.planning.plan import Plan, make_plan
from automodel_cli.run.memory.auto_activation_checkpointing import decided
from automodel_cli.run.model_builder import Model, empty_stages
from automodel_cli.run.plan_request import plan_request
from automodel_cli.run.recipe import Recipe
from automodel_cli.training.metrics.peak_memory import peak_memory_gib
from automodel_cli.training.optimizers.build import build_optimizer


def trace(recipe: Recipe, request: TraceRequest) -> RankResult:
    """Raises what the step raises, and ConfigError for what a dry run does not cover."""
    began = time.process_time()
    layout = recipe.mesh.resolve(request.num_gpus)
    check_covered(recipe)
    with bundled_configs.preferred():
        recipe, recomputed = decided(recipe, layout, request.device.memory_gib * GIB)
        documents = synthetic_batches.lengths_of(recipe, request)
        plan = make_plan(plan_request(recipe, layout))
        number = number_to_run(recipe, plan, request.microbatches, alike=documents.alike)
        columns = synthetic_batches.microbatches(recipe, documents, number)
        run = RankTrace(recipe, request)
        fake_cuda.pretend(request.device, run.clock, run.mode.synchronised)
        fake = fake_tensor_compat.install_fake_cuda(CUDA)
        torch_compat.start_group(request.rank, request.num_gpus)
        torch_compat.on_resize(run.memory.resized)
        torch_compat.without_shape_inference(run.mode.aside)
        compiled_regions.use_region_substitute(as_one(run.mode.aside, run.mode.ran_as_one))
        mesh = build_mesh(layout, "cuda")
        times = _run(run, plan, mesh, fake, columns)
        result = result_of(run, mesh, plan, times, columns)
    chosen = [] if recomputed is None else [f"recompute: {recomputed}"]
    notes = [*chosen, *result.notes, f"documents: {documents.source}"]
    resident = peak_memory_gib(torch.device("cpu"))
    return replace(result, notes=notes, cpu_seconds=time.process_time() - began, rss_gib=resident)


@functools.cache
def _is_cuda(device_type: str) -> bool:
    return device_type == "cuda"


def _run(
    run: RankTrace, plan: Plan, mesh: Mesh, fake: FakeTensorMode, columns: list[synthetic_batches.Columns]
) -> StepTimes:
    recipe = run.recipe
    if mesh.layout.pp > 1:
        run.watch_stages()
    # Kernels cannot be compiled or compared on fake tensors, so they count as available.
    lm_head_kernels.has_head_kernels = _is_cuda
    permute.has_permute_kernels = _is_cuda
    topk_router.has_router_kernels = _is_cuda
    set_attributes(RankGroup, pass_on=run.collectives.passed_on(RankGroup.pass_on))
    set_attributes(token_dispatcher, exchange=run.collectives.exchanged(token_dispatcher.exchange))
    set_attributes(F, scaled_dot_product_attention=sdpa.on_cuda(F.scaled_dot_product_attention))
    transformers_compat.look_at_positions()
    attention_flex.use_flex_substitute(flex.modelled(run.mode.twins.get, run.mode.ran_as_one))
    run.strategies = Strategies(run.clock, lambda part: _materialise(part, CUDA), lambda: run.faking(fake))
    stages = empty_stages(recipe, mesh)
    run.phase, run.parts = "buffers", list(stages.parts)
    if recipe.frozen_model is not None:
        run.frozen = list(empty_stages(replace(recipe, model=recipe.frozen_model), mesh, frozen=True).parts)
    run.watch_front()
    with run.faking(fake):
        for part in (*run.frozen, *run.parts):
            _materialise(part, recipe.parallelizer.parameter_device(mesh.device))
        model = Model.filled(stages, recipe, mesh)
        run.optimizer = build_optimizer(recipe.optimizer, model.parts)
        _name_phase_of_optimizer(run)
        warm = columns[: smallest(plan, len(columns))]
        if mesh.layout.pp == 1:  # what a first step makes (optimizer states) would stand against one microbatch
            run.step(stages, mesh, columns[:1], model.step_hooks)
        run.mode.counts.warm = Work()  # not of what was built
        first = run.step(stages, mesh, warm, model.step_hooks)
        run.mode.counts.on = True
        run.memory.forget_peak()
        second = run.step(stages, mesh, columns, model.step_hooks)
    return StepTimes(first, second, len(warm), len(columns))


def _name_phase_of_optimizer(run: RankTrace) -> None:
    assert run.optimizer is not None
    step = run.optimizer.step

    def stepped() -> object:
        run.phase = "optimizer"
        try:
            return step()
        finally:
            run.phase = "forward"

    set_attributes(run.optimizer, step=stepped)


def _materialise(part: nn.Module, device: torch.device) -> None:
    """Fake memory for everything on meta; tied parameters stay one."""
    done: dict[int, torch.Tensor] = {}
    for module in part.modules():
        stores: tuple[tuple[dict[str, Any], torch.device], ...] = (
            (module._parameters, device),
            (module._buffers, CUDA),
        )
        for store, where in stores:
            for name, old in store.items():
                if old is None or isinstance(torch_compat.local_part(old), torch_compat.FakeTensor):
                    continue
                if id(old) not in done:
                    local = torch_compat.local_part(old)
                    new = torch_compat.with_local(old, torch.empty(local.shape, dtype=local.dtype, device=where))
                    done[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                store[name] = done[id(old)]


def check_covered(recipe: Recipe) -> None:
    refused: list[tuple[bool, str, str | None, str]] = [
        (recipe.model.transformer_engine is not None, "model.transformer_engine", "Transformer Engine",
         "model.transformer_engine=null"),
        (recipe.parallelizer.axis_options().expert_dispatch == "deepep", "parallelizer.expert_dispatch", "DeepEP",
         "parallelizer.expert_dispatch=all_to_all"),
        (recipe.model.lora is not None and recipe.model.lora.quantization != "none",
         "model.lora.quantization", "a 4-bit base", "model.lora.quantization=none"),
    ]  # fmt: skip
    for is_it, key, what, fix in refused:
        if is_it:
            raise ConfigError(
                f"dryrun does not support {what}, because its kernels do not run on fake tensors",
                code="not_supported",
                keys=(key,),
                fix=fix,
            )
