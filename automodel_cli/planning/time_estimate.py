"""Step time of a plan: closed-form counts of a config's stages, timed by the formulas of the dry run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from torch import nn

from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.mesh_config import Layout
from automodel_cli.models.freezing import trained_work
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.vision.work import FrontWork
from automodel_cli.pipelining.cut.stage_plan import StagePlan
from automodel_cli.pipelining.timeline.simulator import Costs
from automodel_cli.planning.activation_memory import Activations
from automodel_cli.planning.hardware import GPUS, Links
from automodel_cli.planning.kernel import Kernel
from automodel_cli.planning.layer_calls import Call
from automodel_cli.planning.layer_costs import Unit, Units
from automodel_cli.planning.layer_times import LayerTimes
from automodel_cli.planning.memory import Accounting, Memory
from automodel_cli.planning.request import PlanRequest
from automodel_cli.planning.segments import Segment
from automodel_cli.planning.step_time import RankTimes, StepTime, program_to_json, step_time, total

TIME_MARGIN = 0.20
"""Of a plan's step time, for what closed forms get wrong: bundled recipes agree with their dry runs to 20%."""


class Ends(TypedDict):
    is_first: bool
    is_last: bool
    depths: int


@dataclass(frozen=True, eq=False)
class TimeEstimate:
    """Times any cut of one model."""

    request: PlanRequest
    times: LayerTimes
    units: Units
    activations: Activations
    front: tuple[Call, ...]
    """Of a vision tower."""
    head: tuple[Call, ...]
    flops_per_token: float | None
    lowest: int
    """Lowest decoder layer with a backward."""

    def on(self, layout: Layout, links: Links) -> TimeEstimate:
        """Return the estimate with other data-parallel sizes. The other axes determine the counts."""
        accounting = replace(self.times.accounting, layout=layout)
        return replace(
            self,
            request=replace(self.request, layout=layout),
            times=replace(self.times, accounting=accounting, links=links),
        )

    def static(self, cut: StagePlan | None) -> list[Memory]:
        """Return the parameters, gradients and optimizer states of each pipeline rank."""
        return [self.times.accounting.rank_memory(stages) for stages in self._held(cut)]

    def stored(self, cut: StagePlan | None) -> list[float]:
        """Return the bytes of each pipeline rank in a checkpoint: parameters and optimizer states."""
        of, ranks = self.times.accounting, self._held(cut)
        resident = (sum(of.resident([unit for stage in stages for unit in stage])) for stages in ranks)
        return [one + of.rank_memory(stages).optimizer for one, stages in zip(resident, ranks, strict=True)]

    def _held(self, cut: StagePlan | None) -> list[list[list[Unit]]]:
        """Units of each stage of each pipeline rank."""
        if cut is None:
            return [[self.units.of_stage(range(len(self.units.layers)), is_first=True, is_last=True, depths=1)]]
        stages = [self.units.of_stage(cut.layers[s], **_ends(cut, s)) for s in range(cut.num_stages)]
        return [[stages[s] for s in range(cut.num_stages) if cut.owner[s] == rank] for rank in range(cut.pp_size)]

    def whole(self) -> StepTime:
        """Return the time of a step without a pipeline."""
        every = range(len(self.units.layers))
        once, microbatch = self.times.whole_step(
            self._segments(every, self.lowest, is_first=True, is_last=True, depths=1), self.request.num_microbatches
        )
        return self._step_time([self._rank({}, None, once, microbatch, {})])

    def with_pipeline(self, cut: StagePlan) -> StepTime:
        """Return the time of a step with the schedule of `cut`."""
        program = cut.program(self.request.num_microbatches)
        pipeline = program_to_json(program, self.costs(cut).forward)
        ranks = []
        for rank in range(cut.pp_size):
            own = [stage for stage in range(cut.num_stages) if cut.owner[stage] == rank]
            actions: dict[str, dict[str, dict[str, float]]] = {}
            for stage in own:
                for kind, seconds in self._actions_of(cut, stage).items():
                    actions.setdefault(kind, {})[str(stage)] = seconds
            held = [self._segments(cut.layers[stage], cut.lowest_backward(stage), **_ends(cut, stage)) for stage in own]
            ranks.append(self._rank(actions, pipeline, {}, {}, self.times.outside(held)))
        return self._step_time(ranks)

    def costs(self, cut: StagePlan) -> Costs:
        """Return the seconds of each stage's forward and backward."""
        stages = [self._actions_of(cut, stage) for stage in range(cut.num_stages)]
        forward, inputs, weights = (tuple(total(stage[kind]) for stage in stages) for kind in ("F", "I", "W"))
        return Costs(forward, inputs, weights, self.times.hop())

    def _actions_of(self, cut: StagePlan, stage: int) -> dict[str, dict[str, float]]:
        return self._actions(cut.layers[stage], cut.lowest_backward(stage), **_ends(cut, stage))

    @functools.cache  # noqa: B019  # compared schedules share most stages, and a plan lives as long as its estimate
    def _actions(
        self, layers: range, lowest: int, *, is_first: bool, is_last: bool, depths: int
    ) -> dict[str, dict[str, float]]:
        return self.times.actions(self._segments(layers, lowest, is_first=is_first, is_last=is_last, depths=depths))

    def _segments(self, layers: range, lowest: int, *, is_first: bool, is_last: bool, depths: int) -> list[Segment]:
        """`lowest`: lowest decoder layer with a backward, -1 for what runs before the layers."""
        calls, units, times = self.activations.calls, self.units, self.times
        found = []
        if is_first:
            before = times.end((*self.front, *calls[0]), [units.before])
            found.append(replace(before, has_backward=lowest <= 0))
        for place, i in enumerate(layers):
            found.append(replace(self._layer(place, i), has_backward=i >= lowest))
        num_depths = units.num_depths if depths == 1 else 0
        # Each depth is one more layer like the last one.
        found += [self._layer(len(layers), len(units.layers) - 1)] * num_depths
        if is_last:
            found.append(times.end((*calls[-1], *self.head * (1 + units.num_depths)), [units.after]))
        return found

    def _layer(self, place: int, i: int) -> Segment:
        of, unit = self.activations, self.units.layers[i]
        return self.times.layer(place, of.calls[i + 1], unit, of.received[i], of.keys[i])

    def _rank(
        self,
        actions: dict[str, dict[str, dict[str, float]]],
        pipeline: dict[str, object] | None,
        once: dict[str, float],
        microbatch: dict[str, float],
        outside: dict[str, float],
    ) -> RankTimes:
        request = self.request
        return RankTimes(
            num_microbatches=request.num_microbatches,
            tokens_per_microbatch=request.rows * request.seq_len,
            data_parallel=request.layout.dp,
            model_flops_per_token=self.flops_per_token,
            actions=actions,
            pipeline=pipeline,
            once_seconds=once,
            microbatch_seconds=microbatch,
            outside_seconds=outside,
            hop_seconds=self.times.hop(),
        )

    def _step_time(self, ranks: Sequence[RankTimes]) -> StepTime:
        return step_time(ranks, self.times.gpu, self.request.layout.world_size, TIME_MARGIN)


def _ends(cut: StagePlan, stage: int) -> Ends:
    return {"is_first": stage == 0, "is_last": stage == cut.num_stages - 1, "depths": cut.role_of_depths(stage)}


def time_estimate(
    request: PlanRequest,
    part: ModelPart,
    units: Units,
    activations: Activations,
    over_tp: frozenset[nn.Parameter],
    head: tuple[int, int, int],
    num_trained: int,
) -> TimeEstimate:
    """Return the estimate of a model with these counts. `head`: vocabulary on a rank, width, tokens of a chunk."""
    gpu, parallelizer, dtype = GPUS[request.gpu], request.parallelizer, request.compute_dtype
    layout = request.layout
    accounting = Accounting(parallelizer.storage(), layout, request.optimizer, request.num_microbatches, over_tp)
    tokens = request.rows * request.tokens
    times = LayerTimes(
        gpu,
        Links(gpu.link, rates=gpu.rates),
        accounting,
        activations.boundary,
        parallelizer.activation_checkpointing,
        sequence_parallel=parallelizer.axis_options().sequence_parallel,
        ring=isinstance(parallelizer, FSDP2Config) and parallelizer.context_parallel == "ring",
        reduces_every=parallelizer.reduces_every_microbatch,
    )
    document = request.document or request.seq_len
    flops = None if request.model_flops is None else request.model_flops(part, document, num_trained)
    calls = _head_calls(*head, tokens, dtype.itemsize, is_trained=_has_trained_head(part))
    return TimeEstimate(
        request,
        times,
        units,
        activations,
        _front_calls(request, part, tokens),
        calls if request.head.logprobs else (),
        flops,
        trained_work(part, logits=request.head.logprobs)[0],
    )


def _has_trained_head(part: ModelPart) -> bool:
    return any(param.requires_grad for param in part.model.get_output_embeddings().parameters())


def _head_calls(
    vocabulary: int, width: int, chunk: int, tokens: int, size: int, *, is_trained: bool
) -> tuple[Call, ...]:
    """Logits in chunks, computed again in backward, where two more GEMMs use their gradient."""
    # S tokens in chunks of c: each chunk reads the whole weight (V x D), so small chunks cost memory traffic.
    number = -(-tokens // chunk)
    logits = tokens * vocabulary * size
    moved = logits + tokens * width * size + number * vocabulary * width * size
    gemm = Kernel("gemm", 2.0 * tokens * vocabulary * width, moved, 8 * size, number=number)
    read, written = (Kernel("memory", 0.0, times * logits, number=number) for times in (1, 2))
    return (
        Call(gemm, (gemm, gemm), (gemm,) if is_trained else ()),
        Call(read, (written,)),
    )


def _front_calls(request: PlanRequest, part: ModelPart, tokens: int) -> tuple[Call, ...]:
    """GEMMs of a vision tower if all tokens are image tokens. Attention and memory-bound kernels do not count."""
    if part.front is None or request.model.vision is None:
        return ()
    work = FrontWork.of(part.front)
    weights = work.tower * request.patches_per_image_token + work.projector
    gemm = Kernel("gemm", 2.0 * tokens * weights, 0.0, number=max(1, 4 * work.blocks))
    vision = request.model.vision
    of_inputs = () if vision.front_is_frozen else (gemm,)
    return (Call(gemm, of_inputs, (gemm,) if "trained" in (vision.tower, vision.projector) else ()),)
