"""Checks between the sections of a GRPO recipe. Torch-free, because `automodel check` runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from automodel_cli.config.errors import ConfigError
from automodel_cli.objectives.base import PolicyObjective, selection_of
from automodel_cli.rollout.config import RolloutConfig
from automodel_cli.rollout.config_checks import (
    check_environment,
    check_indexer,
    check_prompt_data,
    check_routing,
    check_shared_prompts,
)
from automodel_cli.rollout.rewards.aggregate import check_nodes
from automodel_cli.rollout.rewards.base import RewardFunction
from automodel_cli.run.frozen_models.reference_sync import ReferenceSync, check_reference_update

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from automodel_cli.data.config import DataConfig
    from automodel_cli.distributed.strategies.base import Strategy
    from automodel_cli.models.config import ModelConfig
    from automodel_cli.models.teacher_config import TeacherConfig
    from automodel_cli.training.train_config import TrainConfig

_OF_ADVANTAGES: tuple[tuple[str, str | bool | None], ...] = (
    ("advantage_estimator", "group"),
    ("leave_one_out", False),
    ("reward_scaling", "group"),
)


class PolicyRecipe(Protocol):
    """The sections and properties of a GRPO recipe that checks read."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def train(self) -> TrainConfig: ...
    @property
    def parallelizer(self) -> Strategy: ...
    @property
    def objective(self) -> PolicyObjective: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def rewards(self) -> Mapping[str, RewardFunction]: ...
    @property
    def teacher(self) -> TeacherConfig | None: ...
    @property
    def reference_sync(self) -> ReferenceSync | None: ...
    @property
    def compares_reference(self) -> bool: ...
    @property
    def sample_len(self) -> int: ...
    @property
    def why_prompts_not_shared(self) -> str: ...


def check_rollout(recipe: PolicyRecipe) -> None:
    """Check the sizes of rollouts and updates, and the requirements of the objective."""
    rollout, per_update = recipe.rollout, recipe.train.global_batch_size
    if rollout.samples_per_step % per_update:
        raise ConfigError(
            f"rollout.prompts_per_step={rollout.prompts_per_step} x group_size={rollout.group_size} must be a "
            f"multiple of train.global_batch_size={per_update}",
            code="not_divisible",
            keys=("rollout.prompts_per_step", "rollout.group_size", "train.global_batch_size"),
            fix=f"train.global_batch_size={rollout.samples_per_step}",
        )
    weighs_once = "advantages_BT" in recipe.objective.columns and "old_logprobs_BT" not in recipe.objective.columns
    if weighs_once and rollout.samples_per_step * rollout.num_iterations > per_update:
        raise ConfigError(
            "this objective (importance_sampling_level=on_policy) supports only one update per rollout, because it "
            "uses no earlier log-probs",
            code="unsupported_combination",
            keys=("objective", "rollout.num_iterations", "train.global_batch_size"),
            fix=f"rollout.num_iterations=1 train.global_batch_size={rollout.samples_per_step}",
        )
    critic = "old_values_BT" in recipe.objective.columns
    if critic != (rollout.advantage_estimator == "critic"):
        raise ConfigError(
            f"rollout.advantage_estimator={rollout.estimator_name} is not supported with this objective, which "
            f"trains {'a' if critic else 'no'} critic",
            code="unsupported_combination",
            keys=("rollout.advantage_estimator", "objective"),
            fix="rollout.advantage_estimator=critic" if critic else "objective=ppo",
        )
    if rollout.max_off_policy_steps and not recipe.objective.corrects_staleness:
        raise ConfigError(
            f"rollout.max_off_policy_steps={rollout.max_off_policy_steps} requires a sampler "
            "correction, but objective.sampler_correction=none",
            code="requires_setting",
            keys=("rollout.max_off_policy_steps", "objective"),
            fix="objective.sampler_correction=truncate objective.sampler_correction_clip_max=2.0",
        )
    if rollout.max_new_tokens >= recipe.sample_len:
        samples = recipe.data.seq_len // recipe.sample_len
        raise ConfigError(
            f"data.seq_len={recipe.data.seq_len} is too short for {'two prompts' if samples > 1 else 'a prompt'} and "
            f"rollout.max_new_tokens={rollout.max_new_tokens}{' each' if samples > 1 else ''}",
            code="sequence_length",
            keys=("data.seq_len", "rollout.max_new_tokens"),
            fix=f"data.seq_len={2 * samples * rollout.max_new_tokens}",
        )


def check_replay(recipe: PolicyRecipe) -> None:
    compares = "sampler_logprobs_BT" in recipe.objective.columns
    check_routing(recipe.rollout, recipe.parallelizer, compares=compares)


def check_teacher(recipe: PolicyRecipe) -> None:
    asks = "teacher_ids_BTN" in recipe.objective.columns
    if asks and recipe.teacher is None:
        raise ConfigError(
            f"{type(recipe.objective).__name__} requires a teacher, which is not set",
            code="requires_setting",
            keys=("teacher", "objective"),
            fix="teacher={pretrained: <a model of the same tokens>}, or objective=grpo",
        )
    if recipe.teacher is not None and not (asks or recipe.compares_reference):
        raise ConfigError(
            "teacher has no effect: this objective does not use its log-probs",
            code="no_effect",
            keys=("teacher", "objective"),
            fix="objective=gkd, or teacher=null",
        )
    if asks and (recipe.rollout.top_k or recipe.rollout.top_p < 1):
        raise ConfigError(
            f"rollout.top_k={recipe.rollout.top_k}, top_p={recipe.rollout.top_p} are not supported "
            "with this objective: filtered tokens have no log-prob to compare with the teacher",
            code="unsupported_combination",
            keys=("rollout.top_k", "rollout.top_p", "objective"),
            fix="rollout.top_k=0 rollout.top_p=1.0",
        )


def check_reference(recipe: PolicyRecipe) -> None:
    update, compares = recipe.reference_sync, recipe.compares_reference
    check_reference_update(recipe.model, recipe.parallelizer, update, has_reference=compares)
    if update is not None and recipe.teacher is not None:
        raise ConfigError(
            "reference_sync is not supported with a teacher, which is another model and cannot follow the policy",
            code="unsupported_combination",
            keys=("reference_sync", "teacher"),
            fix="reference_sync=null",
        )


def check_selection(recipe: PolicyRecipe) -> None:
    selecting, rollout = selection_of(recipe.objective), recipe.rollout
    if selecting is None:
        return
    name = type(recipe.objective).__name__
    if selecting.samples_of_group > rollout.group_size:
        raise ConfigError(
            f"rollout.group_size={rollout.group_size} must be at least {selecting.samples_of_group}, the number of "
            f"samples that {name} selects in a group",
            code="out_of_range",
            keys=("objective", "rollout.group_size"),
            fix=f"rollout.group_size={selecting.samples_of_group}",
        )
    if "pairs_P2" in recipe.objective.columns and rollout.played:
        raise ConfigError(
            f"rollout.environment is not supported with {name}, which packs two samples in a "
            "sequence: an episode may fill it alone",
            code="unsupported_combination",
            keys=("rollout.environment", "objective"),
            fix="rollout.environment=null, or objective=best_of_n",
        )


def check_unread(recipe: PolicyRecipe) -> None:
    """Raise for settings of advantages and rewards that this objective does not use."""
    if "advantages_BT" in recipe.objective.columns:
        return
    chooses = selection_of(recipe.objective) is not None
    missing = "chooses samples by their rewards, and has no advantages" if chooses else "has no advantages"
    unread = [(key, default, missing) for key, default in _OF_ADVANTAGES]
    if not chooses and "rewards_BT" not in recipe.objective.columns:
        unread += [(f"overlong.{key}", None, "learns from no reward") for key in ("buffer", "factor")]
        if not _is_scored(recipe):
            unread.append(("dynamic_sampling", None, "has no rewards here, so no two of a group would differ"))
    for key, default, reason in unread:
        value = attrgetter(key)(recipe.rollout)
        if value != default:
            raise ConfigError(
                f"rollout.{key}={value} has no effect: {type(recipe.objective).__name__} {reason}",
                code="no_effect",
                keys=(f"rollout.{key}", "objective"),
                fix=f"rollout.{key}={'null' if default is None else str(default).lower()}",
            )


def _is_scored(recipe: PolicyRecipe) -> bool:
    """Return whether samples get a reward: from an environment, or from a reward with a weight."""
    return bool(recipe.rollout.played) or any(reward.weight for reward in recipe.rewards.values())


def check_judged(recipe: PolicyRecipe) -> None:
    """Check that samples have a learning signal: a reward with a weight, an environment, or a teacher."""
    if _is_scored(recipe) or (recipe.teacher is not None and selection_of(recipe.objective) is None):
        return
    if recipe.rewards:
        raise ConfigError(
            "every reward has weight 0, so all samples would have the same reward",
            code="nothing_to_train",
            keys=tuple(f"rewards.{name}.weight" for name in recipe.rewards),
            fix=f"rewards.{next(iter(recipe.rewards))}.weight=1.0",
        )
    raise ConfigError("no reward is configured", code="missing_key", keys=("rewards",), fix="rewards=exact")


def check_groups_differ(recipe: PolicyRecipe) -> None:
    """With a teacher and without rewards all responses of a group are worth the same, so none would be trained."""
    by_group = "advantages_BT" in recipe.objective.columns and recipe.rollout.advantage_estimator == "group"
    if recipe.teacher is not None and by_group and not _is_scored(recipe):
        raise ConfigError(
            "rollout.advantage_estimator=group requires a reward: without one all responses of a group are equal, "
            "and none would be trained",
            code="unsupported_combination",
            keys=("rollout.advantage_estimator", "rewards", "teacher"),
            fix="rollout.advantage_estimator=batch rollout.gamma=0.0 rollout.normalize_advantages=false",
        )


def check_engine(recipe: PolicyRecipe) -> None:
    """Check that an engine in this process supports the sharding of the parallelizer."""
    engine = recipe.rollout.engine
    if "sampler" not in recipe.parallelizer.supports and engine.capabilities.live_weights:
        raise ConfigError(
            f"{type(engine).__name__} does not support weights that {recipe.parallelizer.name} shards",
            code="unsupported_combination",
            keys=("parallelizer", "rollout.engine"),
            fix="parallelizer=fsdp2, or rollout=hf",
        )


CHECKS: tuple[Callable[[PolicyRecipe], object], ...] = (
    lambda recipe: check_prompt_data(recipe.data),
    check_rollout,
    lambda recipe: check_environment(recipe.rollout, recipe.data, recipe.rewards),
    lambda recipe: check_indexer(recipe.model, recipe.rollout),
    check_replay,
    lambda recipe: check_shared_prompts(recipe.rollout, recipe.why_prompts_not_shared),
    lambda recipe: check_nodes(recipe.rewards),
    check_teacher,
    check_reference,
    check_selection,
    check_unread,
    lambda recipe: recipe.rollout.generation_servers(recipe.model, recipe.data.seq_len),
    check_judged,
    check_groups_differ,
    check_engine,
)
"""Checks of `GRPORecipe`, in this order. Each raises ConfigError."""


def check_prompts_per_rank(recipe: PolicyRecipe, dp_size: int) -> None:
    """The prompts of a step are dealt out evenly to `dp_size` data-parallel ranks. Raises ConfigError."""
    prompts = recipe.rollout.prompts_per_step
    if prompts % dp_size:
        raise ConfigError(
            f"rollout.prompts_per_step={prompts} must be a multiple of the {dp_size} data-parallel ranks",
            code="not_divisible",
            keys=("rollout.prompts_per_step",),
            fix=f"rollout.prompts_per_step={max(1, prompts // dp_size) * dp_size}",
        )


def check_sampled_model(recipe: PolicyRecipe, hf_config: PretrainedConfig) -> None:
    """Measure that sampling is exact for this model: sequence length, incremental decoding, prompt sharing and routing
    replay, as far as the config uses them. Raises ConfigError."""
    from automodel_cli.rollout.engines.decoding_check import check_decoding
    from automodel_cli.rollout.engines.policy_engine import check_lengths

    model, rollout = recipe.model, recipe.rollout
    check_lengths(hf_config, recipe.data.seq_len)
    if rollout.engine.capabilities.live_weights:
        check_decoding(hf_config, attention=model.attn_implementation, trust_remote_code=model.trust_remote_code)
    if rollout.share_prompt_prefix is True:
        from automodel_cli.models.prefix_support import why_not_shared

        check_shared_prompts(rollout, why_not_shared(hf_config, trust_remote_code=model.trust_remote_code))
    if rollout.replay_routing:
        from automodel_cli.models.moe.router_hooks import selectors_of

        selectors_of(hf_config, trust_remote_code=model.trust_remote_code)
