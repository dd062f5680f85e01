"""Trace one rank on fake tensors: run two real `train_step`s and measure the second one."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.context_parallel import RankGroup
from automodel_cli.distributed.expert_parallel import permute, token_dispatcher, topk_router
from automodel_cli.distributed.fusion import compiled_regions
from automodel_cli.distributed.mesh import Mesh, build_mesh
from automodel_cli.distributed.mesh_config import Layout
from automodel_cli.distributed.typed_torch import set_attributes
from automodel_cli.dryrun import fake_cuda, flex, sdpa, synthetic_batches, torch_compat
from automodel_cli.dryrun.collectives import Collectives
from automodel_cli.dryrun.dispatch_mode import Counts, TracedRank, Work
from automodel_cli.dryrun.fake_cuda import CUDA
from automodel_cli.dryrun.memory import MemoryTracker, owned_tensors
from automodel_cli.dryrun.model_flops import model_flops_per_token
from automodel_cli.dryrun.strategies import Strategies
from automodel_cli.dryrun.types import GIB, Line, RankResult, TraceRequest
from automodel_cli.models import transformers_compat
from automodel_cli.models.attention import flex as attention_flex
from automodel_cli.models.hub import bundled_configs
from automodel_cli.models.hub.source import hf_config
from automodel_cli.models.lm_head import kernels as lm_head_kernels
from automodel_cli.models.model_part import ModelPart
from automodel_cli.pipelining.timeline.simulator import peak_activations
from automodel_cli.pipelining.torch_runtime.torch_compat import Runtime, Stage
from automodel_cli.planning.plan import Plan, make_plan
from automodel_cli.planning.simulated_clock import Clock, Seconds, critical_path, summed
from automodel_cli.planning.step_time import apart, program_to_json
from automodel_cli.run.memory.auto_activation_checkpointing import decided
from automodel_cli.run.model_builder import Model, empty_stages
from automodel_cli.run.plan_request import plan_request
from automodel_cli.training.metrics.peak_memory import peak_memory_gib
from automodel_cli.training.optimizers.build import build_optimizer
from automodel_cli.training.step import train_step

_LARGEST = 14
_UNLIKE = 2  # microbatches of a step: the first one begins the sums of gradients, the last one ends them
_MEAN_OF = 6  # where microbatches do not hold as much as each other


class RankTrace:
    """The state of one traced rank."""

    def __init__(self, recipe: Any, request: TraceRequest):
        self.recipe, self.request = recipe, request
        self.phase = "build"
        self.parts: list[nn.Module] = []
        self.frozen: list[nn.Module] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self.actions: dict[tuple[str, int], list[Seconds]] = defaultdict(list)
        self._action_began = 0.0
        self.clock = Clock(request.device.rates)
        self.strategies: Strategies | None = None
        self.memory = MemoryTracker(self._what, self._owned)
        self.collectives = Collectives(self.clock, request.links)
        held = self.memory, self.collectives
        self.mode = TracedRank(request.device, self.clock, *held, request.route, request.host)

    def _what(self) -> str:
        if torch_compat.in_backward():
            return "recomputed activations and temporaries"
        return {"forward": "activations", "optimizer": "optimizer temporaries"}.get(self.phase, self.phase)

    def _owned(self) -> list[tuple[str, torch.Tensor]]:
        held = self.strategies.held() if self.strategies is not None else ()
        beside = [("frozen model", tensor) for _, tensor in owned_tensors(self.frozen, None)]
        return [*held, *owned_tensors(self.parts, self.optimizer), *beside]

    @contextmanager
    def faking(self, fake: Any) -> Iterator[None]:
        with fake, self.mode:
            yield

    def watch_stages(self) -> None:
        """Time their actions; nothing has to be connected, and torch's handshake would read what is not there."""
        set_attributes(Runtime, warm_up=lambda self: None)

        def begin() -> None:
            self.clock.host_waits()  # actions are timed apart; the simulator puts them together
            self._action_began = self.clock.now()

        def end(kind: str, stage: int) -> None:
            if self.mode.counts.on:
                self.actions[kind, stage].append(critical_path(self._action_began, self.clock.at(0)))

        torch_compat.on_stage_actions(Stage, begin, end)

    def watch_front(self) -> None:
        """Count the kernels of tower and projector by themselves."""
        for part in self.parts:
            if isinstance(part, ModelPart) and part.front is not None:
                self.mode.in_front = torch_compat.BackwardOf(part.front)

    def step(self, stages: Any, mesh: Mesh, columns: list[synthetic_batches.Columns], hooks: Any) -> Seconds:
        """One optimizer step; returns its model time by kind of cost."""
        assert self.optimizer is not None
        self.phase = "batch"
        batches = synthetic_batches.as_batches(columns, self.mode.twins.put)
        self.phase = "forward"
        began = self.clock.now()
        maximum = self.recipe.train.max_grad_norm
        train_step(
            stages, batches, self.recipe.trained_objective, self.optimizer, mesh, max_grad_norm=maximum, hooks=hooks
        )
        return critical_path(began, self.clock.now())


@dataclass(frozen=True)
class StepTimes:
    """Model seconds of the two steps, which had so many microbatches."""

    warm: Seconds
    measured: Seconds
    num_warm: int
    num_measured: int


def trace(recipe: Any, request: TraceRequest) -> RankResult:
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
        fake = torch_compat.install_fake_cuda(CUDA)
        torch_compat.start_group(request.rank, request.num_gpus)
        torch_compat.on_resize(run.memory.resized)
        torch_compat.without_shape_inference(run.mode.aside)
        compiled_regions.use_region_substitute(compiled_regions.as_one(run.mode.aside, run.mode.ran_as_one))
        mesh = build_mesh(layout, "cuda")
        times = _run(run, plan, mesh, fake, columns)
        result = _result(run, mesh, plan, times, columns)
    chosen = [] if recomputed is None else [f"recompute: {recomputed}"]
    notes = [*chosen, *result.notes, f"documents: {documents.source}"]
    resident = peak_memory_gib(torch.device("cpu"))
    return replace(result, notes=notes, cpu_seconds=time.process_time() - began, rss_gib=resident)


@functools.cache
def _is_cuda(device_type: str) -> bool:
    return device_type == "cuda"


def _run(run: RankTrace, plan: Plan, mesh: Mesh, fake: Any, columns: list[synthetic_batches.Columns]) -> StepTimes:
    recipe = run.recipe
    if mesh.layout.pp > 1:
        run.watch_stages()
    # Kernels cannot be compiled or compared on fake tensors, so they count as available.
    lm_head_kernels.has_head_kernels = _is_cuda
    permute.has_permute_kernels = _is_cuda
    topk_router.has_router_kernels = _is_cuda
    ring: Any = RankGroup
    ring.pass_on = run.collectives.passed_on(RankGroup.pass_on)
    dispatch: Any = token_dispatcher
    dispatch.exchange = run.collectives.exchanged(token_dispatcher.exchange)
    functional: Any = torch.nn.functional
    functional.scaled_dot_product_attention = sdpa.on_cuda(functional.scaled_dot_product_attention)
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
        warm = columns[: _smallest(plan, len(columns))]
        if mesh.layout.pp == 1:  # what a first step makes (optimizer states) would stand against one microbatch
            run.step(stages, mesh, columns[:1], model.step_hooks)
        run.mode.counts.warm = Work()  # not of what was built
        first = run.step(stages, mesh, warm, model.step_hooks)
        run.mode.counts.on = True
        run.memory.forget_peak()
        second = run.step(stages, mesh, columns, model.step_hooks)
    return StepTimes(first, second, len(warm), len(columns))


def _name_phase_of_optimizer(run: RankTrace) -> None:
    optimizer: Any = run.optimizer
    step = optimizer.step

    def stepped(*args: Any, **kwargs: Any) -> Any:
        run.phase = "optimizer"
        try:
            return step(*args, **kwargs)
        finally:
            run.phase = "forward"

    optimizer.step = stepped


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


def number_to_run(recipe: Any, plan: Plan, asked: int | None, *, alike: bool = True) -> int:
    """Microbatches of the measured step: `asked`, or those that show what the config's step does. All but the first and
    the last do the same, if their rows are alike; a pipeline's must keep as many alive at once. Raises ConfigError for
    what a schedule cannot run.
    """
    count, pp = plan.request.num_microbatches, plan.request.layout.pp
    if pp == 1:
        return asked or min(count, _UNLIKE + (1 if alike else _MEAN_OF))
    if asked is None:
        enough = (n for n in range(4 * pp, count) if _can_run(plan, n) and _alive(plan, n) == _alive(plan, count))
        return next(enough, count)
    if not _can_run(plan, asked):
        near = next((n for n in range(asked, count) if _can_run(plan, n)), count)
        raise ConfigError(
            f"--microbatches {asked} is not supported by {recipe.pipeline.schedule or recipe.pipeline.schedule_csv}",
            code="unsupported_combination",
            keys=("--microbatches", "pipeline"),
            fix=f"--microbatches {near}",
        )
    return asked


def _smallest(plan: Plan, most: int) -> int:
    """Of microbatches that a step can have which is not measured; it can have `most`."""
    if plan.cut is None:
        return min(_UNLIKE, max(most - 1, 1))
    return next((number for number in range(_UNLIKE, most) if _can_run(plan, number)), most)


def _can_run(plan: Plan, number: int) -> bool:
    assert plan.cut is not None, "only a schedule refuses a number of microbatches"
    try:
        plan.cut.check(number)
    except ConfigError:
        return False
    return True


def _alive(plan: Plan, number: int) -> tuple[float, ...]:
    """Microbatches on each pipeline rank at the worst moment of a step of so many."""
    assert plan.cut is not None, "without a schedule it is one"
    return peak_activations(plan.cut.program(number))


def check_covered(recipe: Any) -> None:
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


def _result(
    run: RankTrace, mesh: Mesh, plan: Plan, times: StepTimes, columns: list[synthetic_batches.Columns]
) -> RankResult:
    counts, recipe, request, layout = run.mode.counts, run.recipe, run.request, mesh.layout
    snapshot = run.memory.result()
    tokens = round(sum(sum(one.lengths) for one in columns) / len(columns))
    longest = max(one.input_ids.numel() for one in columns)
    per_stage = request.num_gpus // layout.pp
    in_actions = summed([seconds for spans in run.actions.values() for seconds in spans])
    more = max(times.num_measured - times.num_warm, 1)
    once, microbatch = apart(times.warm, times.measured, times.num_warm, times.num_measured)
    whole = _of_all_microbatches(counts, (recipe.train.num_microbatches(layout.dp) - times.num_measured) / more)
    return RankResult(
        rank=request.rank,
        layout=str(layout),
        num_microbatches=recipe.train.num_microbatches(layout.dp),
        measured_microbatches=times.num_measured,
        tokens_per_microbatch=tokens,
        peak=snapshot.total,
        peak_by_kind=dict(snapshot.by_kind.most_common()),
        largest=[
            Line(f"{kind}: {operator} at {line}" if line else f"{kind}: {operator}, blocks below 8 MiB", 1, size)
            for (kind, operator, line), size in snapshot.blocks.most_common(_LARGEST)
        ],
        plan=plan.memory[request.rank // per_stage].total,
        syncs=[Line(f"{what} at {line}", n) for (what, line), n in counts.syncs.most_common()],
        collectives=run.collectives.rows(),
        kernels=[
            Line(name, counts.kernels[name], took)
            for name, took in sorted(counts.seconds.items(), key=lambda entry: -entry[1])
        ],
        num_kernels=sum(counts.kernels.values()),
        flops=counts.flops,
        kernel_seconds=sum(counts.seconds.values()),
        step_flops=whole.flops,
        step_kernel_seconds=whole.seconds,
        data_parallel=layout.dp,
        actions=_means(run),
        pipeline=program_to_json(plan.timeline.program, plan.timeline.costs.forward) if plan.timeline else None,
        once_seconds=once,
        microbatch_seconds=microbatch,
        outside_seconds=summed([times.measured], minus=in_actions),
        hop_seconds=_hop(recipe, request, layout, longest),
        model_flops_per_token=model_flops_per_token(recipe, run.parts, columns, plan.num_trained),
        front_seconds=counts.front_seconds / times.num_measured,
        cpu_seconds=0.0,
        rss_gib=0.0,
        notes=[*_notes(recipe, request), *_of_fewer(plan, times.num_measured)],
    )


def _of_all_microbatches(counts: Counts, more: float) -> Work:
    """Of the config's step: the measured one, and `more` times what it did more than the step before it."""
    measured = Work(counts.flops, sum(counts.seconds.values()))
    return Work(
        measured.flops + more * (measured.flops - counts.warm.flops),
        measured.seconds + more * (measured.seconds - counts.warm.seconds),
    )


def _means(run: RankTrace) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (kind, stage), spans in run.actions.items():
        means = {of: seconds / len(spans) for of, seconds in summed(spans).items()}
        found.setdefault(kind, {})[str(stage)] = means
    return found


def _hop(recipe: Any, request: TraceRequest, layout: Layout, tokens: int) -> float:
    """Seconds that hidden states take to the next stage."""
    if layout.pp == 1:
        return 0.0
    dtype = recipe.compute_dtype
    size = tokens / layout.cp * hf_config(recipe.model).get_text_config().hidden_size * dtype.itemsize
    neighbour = (request.rank + request.num_gpus // layout.pp) % request.num_gpus
    return request.links.seconds("send", size, (request.rank, neighbour))


def _of_fewer(plan: Plan, number: int) -> list[str]:
    """A note where the config's step keeps more microbatches alive than one of so many, which somebody asked for."""
    count = plan.request.num_microbatches
    if plan.cut is None or number >= count or _alive(plan, number) == _alive(plan, count):
        return []
    most = max(_alive(plan, count))
    return [f"--microbatches {number}: the peak is that of so few; in a step of {count} up to {most:g} are alive"]


def _notes(recipe: Any, request: TraceRequest) -> list[str]:
    notes = []
    if recipe.parallelizer.enable_compile is True:
        notes.append("enable_compile=true: counted as if it were false")
    elif recipe.parallelizer.enable_compile:
        notes.append(f"enable_compile={recipe.parallelizer.enable_compile}: fused operations counted as compiled")
    if recipe.parallelizer.autocast_dtype is not None:
        notes.append("autocast_dtype: counted in the dtype that parameters have, torch does not cast fakes")
    if recipe.packing_note is not None:
        notes.append(recipe.packing_note)
    if request.route == "worst":
        notes.append("routers: every token chooses the experts of the first rank")
    if recipe.frozen_model is not None:
        notes.append("the frozen model is held, its own passes are not run")
    return notes
