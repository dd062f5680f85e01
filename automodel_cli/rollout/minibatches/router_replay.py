"""Rollout Routing Replay: use the routed experts of the sampler in the update (arXiv:2510.11370).

Sampler and trainer compute router logits with different kernels, precisions or weights. A small difference may select
other experts, and the log-prob then differs by much more than rounding. With replay, layers of the trainer use the
sampler's experts, with their own gate weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from automodel_cli.config.errors import RunError
from automodel_cli.data.batch import IGNORE_INDEX, ROUTED_EXPERTS, Batch
from automodel_cli.models.moe.router_hooks import Routing, install_routing
from automodel_cli.rollout.minibatches.logprob_scorer import Scorer
from automodel_cli.rollout.samples import Minibatch
from automodel_cli.rollout.types import Sample
from automodel_cli.run.frozen_models.reference_model import batch_logprobs

if TYPE_CHECKING:
    from automodel_cli.models.moe.router_hooks import Selectors
    from automodel_cli.run.trainer import Trainer


class RoutingReplay:
    """Replay of routed experts in the parts of a run. Build it before the engine. Collective."""

    def __init__(self, session: Trainer, selectors: Selectors):
        self._model, self._mesh = session.model, session.mesh
        self.routing: Routing = install_routing(
            session.model.parts, selectors, session.mesh.device, session.model.pp_group
        )
        session.model.step_hooks.append(self.routing)

    def of_layers(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with routed experts of MoE layers only, whichever layers the engine returns. Raises
        RunError."""
        return [
            sample
            if sample.routed_experts is None
            else dataclasses.replace(sample, routed_experts=self.routing.of_layers(sample.routed_experts))
            for sample in samples
        ]

    @staticmethod
    def check_recorded(samples: Sequence[Sample]) -> None:
        """Raise RunError if a token has the same expert twice, because engines return 0 for layers without data."""
        for sample in samples:
            if sample.routed_experts is None:
                continue
            chosen_TLK = np.sort(sample.routed_experts, -1)
            twice_TLK = (chosen_TLK[..., 1:] == chosen_TLK[..., :-1]) & (chosen_TLK[..., 1:] >= 0)
            if twice_TLK.any():
                token, layer, place = np.argwhere(twice_TLK)[0].tolist()
                raise RunError(
                    f"the engine returned expert {chosen_TLK[token, layer, place]} twice for token {token} in MoE "
                    f"layer {layer}, so its routing is incomplete. A server with pipeline parallelism, or "
                    "with kernels that route internally, returns 0 for these layers",
                    code="invalid_response",
                    keys=("rollout.replay_routing", "rollout.engine"),
                    fix="rollout.replay_routing=false",
                )

    def gaps(self, updates: Sequence[Minibatch], scorer: Scorer) -> dict[str, float]:
        """`logprob_abs_diff` and `logprob_abs_diff_without_replay`: mean |sampler's log-prob - trainer's| in nats
        over the tokens
        that the model drew, with and without the sampler's experts, of a microbatch of each data-parallel rank (with
        a pipeline of p stages of p of them) before the first update. Collective."""
        if not updates:
            return {}
        batches = updates[0].batches[: self._mesh.pp.size()]
        with scorer.as_sampled():
            replayed = self._gap(batches)
            unreplayed = self._gap([batch.without_column(ROUTED_EXPERTS) for batch in batches])
        return {"logprob_abs_diff": replayed, "logprob_abs_diff_without_replay": unreplayed}

    def _gap(self, batches: Sequence[Batch]) -> float:
        sums_2 = torch.zeros(2, dtype=torch.float64)
        logprobs = batch_logprobs(self._model.stages, batches, self._mesh.device)
        for batch, logprobs_BT in zip(batches, logprobs, strict=True):
            is_label_BT = batch.labels_BT != IGNORE_INDEX
            gap_BT: Tensor = (logprobs_BT.cpu() - batch.extra["sampler_logprobs_BT"]).abs() * is_label_BT
            sums_2 += torch.stack([gap_BT.sum().double(), is_label_BT.sum().double()])
        gap, count = map(float, self._mesh.sum_over(self._mesh.dp, sums_2))
        return gap / max(count, 1.0)
