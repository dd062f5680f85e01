"""Decide whether the responses of a group share one copy of their prompt in the update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from automodel_cli.models.hub.source import hf_config
from automodel_cli.models.prefix_support import why_not_shared
from automodel_cli.models.teacher_config import TeacherConfig
from automodel_cli.rollout.config import RolloutConfig
from automodel_cli.rollout.config_checks import check_shared_prompts, why_prompts_not_shared
from automodel_cli.run.frozen_models.reference_model import draws_while_training

if TYPE_CHECKING:
    from automodel_cli.run.trainer import Trainer


def shared_prompts_obstacle(session: Trainer, config: RolloutConfig, teacher: TeacherConfig | None) -> str:
    """Return why prompts cannot be shared in this run. Empty if they can. Raise ConfigError if the config requires
    sharing."""
    if config.share_prompt_prefix is False:
        return "rollout.share_prompt_prefix=false"
    reason = _reason(session, config, teacher)
    check_shared_prompts(config, reason)
    return reason


def _reason(session: Trainer, config: RolloutConfig, teacher: TeacherConfig | None) -> str:
    recipe = session.recipe
    models = [recipe.model, *([] if teacher is None else [teacher.as_model()])]
    for model in models:
        if written := why_prompts_not_shared(config, recipe.data, model, recipe.mesh, recipe.parallelizer):
            return written
    if draws_while_training(session.model):
        return "dropout draws other numbers for every copy of a prompt"
    measured = (why_not_shared(hf_config(model), trust_remote_code=model.trust_remote_code) for model in models)
    return next((reason for reason in measured if reason), "")
