"""The state of a traced rank: its clock, memory and collectives, and the times of its steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from automodel_cli.distributed.mesh import Mesh
from automodel_cli.distributed.typed_torch import set_attributes
from automodel_cli.dryrun.fake_device import torch_compat
from automodel_cli.dryrun.fake_device.collectives import Collectives
from automodel_cli.dryrun.fake_device.dispatch_mode import TracedRank
from automodel_cli.dryrun.fake_device.memory import MemoryTracker, owned_tensors
from automodel_cli.dryrun.fake_device.strategies import Strategies
from automodel_cli.dryrun.fake_device.torch_compat import FakeTensorMode
from automodel_cli.dryrun.synthetic_batches import Columns, as_batches
from automodel_cli.dryrun.types import TraceRequest
from automodel_cli.models.model_part import model_parts
from automodel_cli.pipelining.torch_runtime.runtime_compat import Runtime
from automodel_cli.pipelining.torch_runtime.torch_compat import Stage
from automodel_cli.planning.simulated_clock import Clock, Seconds, critical_path
from automodel_cli.run.recipe import Recipe
from automodel_cli.training.stages import Stages
from automodel_cli.training.step import StepHook, train_step


class RankTrace:
    """The state of one traced rank."""

    def __init__(self, recipe: Recipe, request: TraceRequest):
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
    def faking(self, fake: FakeTensorMode) -> Iterator[None]:
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
        for part in model_parts(self.parts):
            if part.front is not None:
                self.mode.in_front = torch_compat.BackwardOf(part.front)

    def step(self, stages: Stages, mesh: Mesh, columns: list[Columns], hooks: Sequence[StepHook]) -> Seconds:
        """One optimizer step; returns its model time by kind of cost."""
        assert self.optimizer is not None
        self.phase = "batch"
        batches = as_batches(columns, self.mode.twins.put)
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
