"""Distillation: train a student on the token distributions of a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.models.config import ModelConfig
from automodel_cli.models.teacher_config import TeacherConfig
from automodel_cli.objectives.distillation import Distillation
from automodel_cli.recipes.sft import SFTRecipe

if TYPE_CHECKING:
    from automodel_cli.data.batch import Columns
    from automodel_cli.run.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class KDRecipe(SFTRecipe):
    """`SFTRecipe` with a teacher, which runs at each step or once. The student is exported."""

    objective: Distillation
    """Distillation loss: `objective=kd`."""
    teacher: TeacherConfig
    """Teacher model: frozen, sharded like the student, with the same tokens."""
    cache_teacher_logprobs: bool = False
    """Compute the teacher's log-probs once before the first step and store them with the cached data. The teacher then
    needs no memory during training, and further runs reuse them."""

    kind: ClassVar[str] = "kd"

    @property
    def frozen_model(self) -> ModelConfig | None:
        return None if self.cache_teacher_logprobs else self.teacher.as_model()

    def columns(self, session: Trainer) -> Columns:
        """The teacher's likeliest tokens in place of each label. Collective."""
        from automodel_cli.run.frozen_models.teacher import add_teacher_logprobs, build_teacher
        from automodel_cli.run.frozen_models.teacher_cache import cached_teacher

        if self.cache_teacher_logprobs:
            return cached_teacher(session, self.teacher, self.objective.top_k)
        stages = build_teacher(session, self.teacher).stages
        return lambda batches: add_teacher_logprobs(stages, batches, self.objective.top_k, session.mesh.device)
