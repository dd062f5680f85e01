"""Runtime that executes a `Program` on the stages of a rank, with private names of torch (2.11 to 2.15)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules

from automodel_cli.config.warn import warn
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.pipelining.schedule.actions import to_torch
from automodel_cli.pipelining.schedule.program import Program, unsplit_backwards
from automodel_cli.pipelining.torch_runtime.torch_compat import (
    HAS_STAGE_META,
    HAS_WAITS,
    SPLITS_BACKWARD,
    Reduction,
    Stage,
)

_Action = torch_schedules._Action


class Runtime(torch_schedules._PipelineScheduleRuntime):
    """Execute a `Program` on the stages of this rank, for any number of steps with its number of microbatches."""

    def __init__(self, stages: list[Stage], program: Program, *, train: bool, reduce_every_microbatch: bool = False):
        super().__init__(  # type: ignore[no-untyped-call]
            stages,
            program.num_microbatches,
            loss_fn=lambda output, index: self.on_result(output, index),
            scale_grads=False,
        )
        self.given = program
        if program.splits_backward and not SPLITS_BACKWARD:
            program = unsplit_backwards(program)
        self.program = program
        self.on_result: Callable[[HeadOutput, int], Tensor] = _no_step
        self._reduction = Reduction(not program.splits_backward, reduce_every_microbatch)
        self._has_backward = train
        self.results: dict[int, Tensor] = {}
        self.stage_index_to_group_rank = dict(enumerate(program.owner))
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        self.pipeline_order_with_comms = _lower(program, train)

    def run(
        self,
        shapes: Sequence[tuple[int, int]],
        keywords: Sequence[Mapping[str, object]],
        on_result: Callable[[HeadOutput, int], Tensor],
    ) -> dict[int, Tensor]:
        """Run one step and return the values of `on_result` by microbatch, detached. Empty on other ranks than the last
        stage's.

        Args:
            on_result: `on_result(output, microbatch)`, the loss, or the value that a forward pass returns.
        """
        stages = cast("list[Stage]", self._stages)
        for stage in stages:
            stage.reduction = self._reduction
            stage.begin(shapes, self._has_backward)
        self._stages_forward_initialized, self._stages_backward_initialized = True, self._has_backward
        self.on_result = on_result
        self.results = {}
        count = len(shapes)
        try:
            self._step_microbatches([()] * count, list(keywords), list(range(count)), None, False)
            return self.results
        finally:
            self.on_result, self.results = _no_step, {}

    def warm_up(self) -> None:
        """Open the connections between neighbors in an order that cannot deadlock. Call once per process group.

        Warns if this release of torch cannot run the program as it is.
        """
        if self.program != self.given:
            warn(
                "version_mismatch",
                "%s: torch %s cannot split a backward exactly, so weight gradients are computed with input gradients. "
                "try: pip install 'torch>=2.13'",
                self.given.schedule,
                torch.__version__,
            )
        for stage in cast("list[Stage]", self._stages):
            stage.begin([(1, 1)], False)
        if HAS_WAITS:
            self._initialize_pipeline_distributed_state(self._stages, False, True)  # type: ignore[attr-defined]
        elif HAS_STAGE_META:
            self._warmup_p2p(self._stages, False, False)
        else:
            ops = list(itertools.chain.from_iterable(stage._get_init_p2p_neighbors_ops() for stage in self._stages))
            for work in torch_schedules._batch_p2p(ops):
                work.wait()

    def _maybe_compute_loss(
        self, stage: nn.Module, output: Tensor, target_mbs: Sequence[int], mb_index: int, loss_kwargs: object = None
    ) -> None:
        if stage.is_last:
            self.results[mb_index] = self._compute_loss(output, target_mbs[mb_index])  # type: ignore[no-untyped-call]

    def _maybe_get_loss(self, stage: nn.Module, mb_index: int) -> Tensor | None:
        if not stage.is_last:
            return None
        loss = self.results[mb_index]
        self.results[mb_index] = loss.detach()
        return loss

    def _update_losses(self, stages: object, losses: object) -> None:
        """Keep the results, which `run` returns."""


def _no_step(output: HeadOutput, microbatch: int) -> Tensor:
    raise AssertionError("no step is running")


def _lower(program: Program, train: bool) -> dict[int, list[_Action]]:
    """Add communication, FSDP gathers (each stage once per step), and reductions outside backward if needed.

    A forward send ends after the backward of its microbatch, when the next stage has received it for certain.
    """
    owner, count = program.owner, program.num_microbatches
    ranks: dict[int, list[_Action]] = {}
    for rank, steps in enumerate(program.ranks):
        # `max_active_stages` = all chunks of the rank: no stage is resharded between its microbatches.
        actions = torch_schedules._add_unshard_reshard(to_torch(steps), max_active_stages=program.num_chunks)
        if train and program.splits_backward:
            reducing = torch_schedules._add_reduce_grad([*actions], count)
            actions = [action for action in reducing if action is not None]
        ranks[rank] = actions
    sent = torch_schedules._add_send_recv(ranks, stage_to_rank=lambda s: owner[s], num_stages=len(owner))
    return torch_schedules._add_wait_send(sent) if HAS_WAITS else sent  # type: ignore[attr-defined]
