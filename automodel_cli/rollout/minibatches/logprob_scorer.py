"""Score the tokens of a rollout with policy, reference and teacher before the first update."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from automodel_cli.data.batch import ROUTED_EXPERTS
from automodel_cli.data.head_output import HeadRequest
from automodel_cli.models.lm_head.sampling_transform import SamplingTransform
from automodel_cli.models.teacher_config import TeacherConfig
from automodel_cli.objectives.base import PolicyObjective, selection_of
from automodel_cli.objectives.distillation import Distillation
from automodel_cli.objectives.grpo import GRPO
from automodel_cli.rollout.config import RolloutConfig
from automodel_cli.rollout.engines.sampler.sampling import shaping_of
from automodel_cli.rollout.minibatches.entropy_mask import add_entropy_mask
from automodel_cli.rollout.samples import Minibatch
from automodel_cli.rollout.types import Sample
from automodel_cli.run.frozen_models.reference_model import (
    ReferenceModel,
    batch_logprobs,
    draws_while_training,
    fields_of,
    sampling_distribution,
)
from automodel_cli.run.frozen_models.reference_sync import ReferenceSync
from automodel_cli.run.frozen_models.teacher import add_teacher_logprobs
from automodel_cli.training.stages import Stages

if TYPE_CHECKING:
    from automodel_cli.run.trainer import Trainer


class Scorer:
    """Run the policy, the reference or a teacher on the minibatches of a rollout, each only if the objective needs it.
    Build it before the first step. Collective."""

    def __init__(
        self,
        session: Trainer,
        config: RolloutConfig,
        objective: PolicyObjective,
        teacher: TeacherConfig | None,
        reference_sync: ReferenceSync | None,
    ):
        self._mesh, self._model, self._config, self._objective = session.mesh, session.model, config, objective
        self._draws_while_training = draws_while_training(session.model)
        self._reference = self._build_reference(session, teacher, reference_sync)

    @contextmanager
    def as_sampled(self) -> Iterator[None]:
        """Context in which log-probs of the trainer belong to the sampled distribution, or to the unmodified model if
        the objective selects samples."""
        plain = selection_of(self._objective) is not None
        with sampling_distribution(self._model, SamplingTransform() if plain else shaping_of(self._config.params())):
            yield

    def scored(self, updates: Sequence[Minibatch], samples: Sequence[Sample]) -> list[Minibatch]:
        """Return the minibatches with the columns that are computed before the first update. Collective."""
        updates = self._by_policy(updates, samples)
        if self._reference is None:
            return updates
        with self._reference as stages:
            if isinstance(self._objective, Distillation):
                return [self._with_teacher(update, self._objective, stages) for update in updates]
            device = self._mesh.device
            # The reference selects its own experts, even if it is the model without adapters.
            own = [[batch.without_column(ROUTED_EXPERTS) for batch in update.batches] for update in updates]
            logprobs = [batch_logprobs(stages, batches, device) for batches in own]
            return [u.with_column("ref_logprobs_BT", column) for u, column in zip(updates, logprobs, strict=True)]

    def _by_policy(self, updates: Sequence[Minibatch], samples: Sequence[Sample]) -> list[Minibatch]:
        """Run at most one pass. With a single update, its log-probs come from the update."""
        objective = self._objective
        # In the first update, the policy is the one that sampled, so old log-probs equal its own and need no pass.
        # Dropout is an exception: it makes the update's log-probs differ.
        several = len(updates) * self._config.num_iterations > 1 or self._draws_while_training
        columns = {}
        if ("old_logprobs_BT" in objective.columns and several) or objective.reward_kl is not None:
            columns["logprobs_BT"] = "old_logprobs_BT"
        # A critic: values and log-probs come from one pass.
        if "old_values_BT" in objective.columns:
            columns |= {"logprobs_BT": "old_logprobs_BT", "values_BT": "old_values_BT"}
        share = objective.top_entropy_fraction if isinstance(objective, GRPO) else None
        if not columns and share is None:
            return list(updates)
        fields = [*columns, *([] if share is None else ["entropy_BT"])]
        scored = []
        for update in updates:
            found = self._fields(update, fields)
            for field, column in columns.items():
                update = update.with_column(column, found[field])
            if share is not None:
                update = add_entropy_mask(update, found["entropy_BT"], samples, share, self._mesh)
            scored.append(update)
        return scored

    def _fields(self, update: Minibatch, names: Sequence[str]) -> dict[str, list[Tensor]]:
        """These fields of the head for each microbatch."""
        request = HeadRequest(entropy="entropy_BT" in names, values="values_BT" in names)
        with self.as_sampled():
            by_batch = fields_of(self._model.stages, update.batches, self._mesh.device, request, *names)
        return {name: [field[i] for field in by_batch] for i, name in enumerate(names)}

    def _with_teacher(self, update: Minibatch, objective: Distillation, stages: Stages) -> Minibatch:
        return dataclasses.replace(
            update, batches=add_teacher_logprobs(stages, update.batches, objective.top_k, self._mesh.device)
        )

    def _build_reference(
        self, session: Trainer, teacher: TeacherConfig | None, update: ReferenceSync | None
    ) -> ReferenceModel | None:
        objective = self._objective
        if not {"ref_logprobs_BT", "teacher_ids_BTN"} & objective.columns and objective.reward_kl is None:
            return None
        lora = session.recipe.model.lora
        base = lora is not None and lora.starts_as_base
        temperature = 1.0 if selection_of(objective) is not None else self._config.temperature
        return ReferenceModel(session, without_adapters=base, temperature=temperature, teacher=teacher, update=update)
