"""Reinforcement learning on the model's own samples: rollouts, rewards, advantages, clipped policy gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from automodel_cli.config.errors import ConfigError
from automodel_cli.evaluation.validation import check_tasks
from automodel_cli.models.config import ModelConfig, TeacherConfig
from automodel_cli.objectives.base import PolicyObjective, selection_of
from automodel_cli.rollout.rewards.base import RewardNode
from automodel_cli.rollout.rewards.combine import check_nodes
from automodel_cli.rollout.rollout_config import RolloutConfig
from automodel_cli.rollout.rules import (
    check_environment,
    check_indexer,
    check_prompt_data,
    check_routing,
    refuse_shared_prompts,
    why_prompts_are_apart,
)
from automodel_cli.run.recipe import Recipe
from automodel_cli.run.reference_update import ReferenceUpdate, check_reference_update
from automodel_cli.run.rules import check_exported

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from automodel_cli.config.compose import Composed
    from automodel_cli.launch.servers import GenerationServers

_OF_ADVANTAGES: tuple[tuple[str, str | bool | None], ...] = (
    ("baseline", "group"),
    ("leave_one_out", False),
    ("scale", "group"),
)


@dataclass(frozen=True, kw_only=True)
class GRPORecipe(Recipe):
    """The whole story: sample, judge, compare within each group, update, give the sampler the new weights.

    A step is one rollout and the updates on it; `train.global_batch_size` counts the samples of one update. `rewards`
    are nodes by name: the sum of weight x score is a sample's reward.
    """

    objective: PolicyObjective
    """The policy loss: `objective=grpo`, `ppo`, `best_of_n` and others."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """How samples are drawn, and how rewards become advantages."""
    rewards: dict[str, RewardNode] = field(default_factory=dict)
    """Rewards by name. A sample's reward is the sum of weight x score."""
    teacher: TeacherConfig | None = None
    """Another model in the reference's place, to learn from (on-policy distillation); rewards may then be missing."""
    reference_update: ReferenceUpdate | None = None
    """Let the reference follow the policy. null: it stays as it was loaded."""

    kind: ClassVar[str] = "grpo"
    row_name: ClassVar[str] = "prompts"

    @property
    def frozen_model(self) -> ModelConfig | None:
        """The teacher, or the policy as it was; of a model with adapters that is the same without them."""
        asks = "teacher_ids_BTN" in self.objective.columns
        if not (asks or self._compares):
            return None
        if self.teacher is not None:
            return self.teacher.as_model()
        return self.model if self.model.lora is None or self.reference_update is not None else None

    @property
    def _compares(self) -> bool:
        """Whether log-probs of a reference are read."""
        return "ref_logprobs_BT" in self.objective.columns or self.objective.reward_kl is not None

    @property
    def reads_loaded_weights(self) -> bool:
        return super().reads_loaded_weights or (self._compares and self.teacher is None)

    @property
    def held_besides(self) -> str | None:
        return "rollouts"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tasks(self)
        check_prompt_data(self.data)
        self._check_rollout()
        check_environment(self.rollout, self.data, self.rewards)
        check_indexer(self.model, self.rollout)
        check_routing(self.rollout, self.parallelizer, compares="sampler_logprobs_BT" in self.objective.columns)
        refuse_shared_prompts(self.rollout, self.why_prompts_are_apart)
        check_nodes(self.rewards)
        self._check_teacher()
        self._check_reference_update()
        self._check_selection()
        self._check_what_is_read()
        self.generation_servers()  # has rules of its own
        self._check_judged()
        self._check_groups_differ()
        if "sampler" not in self.parallelizer.supports and self.rollout.engine.capabilities.live_weights:
            raise ConfigError(
                f"{type(self.rollout.engine).__name__} cannot read weights as {self.parallelizer.name} shards them",
                keys=("parallelizer", "rollout.engine"),
                fix="parallelizer=fsdp2, or rollout=hf",
            )

    def _check_judged(self) -> None:
        """Somebody says what a good response is: a reward that counts, an environment, or a teacher."""
        counts = self.rollout.played or any(node.weight for node in self.rewards.values())
        if counts or (self.teacher is not None and selection_of(self.objective) is None):
            return
        if self.rewards:
            raise ConfigError(
                "every reward has weight 0: all samples would be worth the same",
                keys=tuple(f"rewards.{name}.weight" for name in self.rewards),
                fix=f"rewards.{next(iter(self.rewards))}.weight=1.0",
            )
        raise ConfigError(
            "no reward says what a good response is",
            keys=("rewards",),
            fix="rewards=exact",
        )

    def _check_groups_differ(self) -> None:
        """With a teacher and without rewards all responses of a group are worth the same, so none would be trained."""
        by_group = "advantages_BT" in self.objective.columns and self.rollout.baseline == "group"
        judged = self.rollout.played or any(node.weight for node in self.rewards.values())
        if self.teacher is not None and by_group and not judged:
            raise ConfigError(
                "rollout.baseline=group: no reward tells the responses of a group apart, so none of them would be "
                "trained on, whatever the teacher says of their tokens",
                keys=("rollout.baseline", "rewards", "teacher"),
                fix="rollout.baseline=batch rollout.gamma=0.0 rollout.normalise=false",
            )

    def _check_teacher(self) -> None:
        asks = "teacher_ids_BTN" in self.objective.columns
        if asks and self.teacher is None:
            raise ConfigError(
                f"{type(self.objective).__name__} learns from a teacher, and there is none",
                keys=("teacher", "objective"),
                fix="teacher={pretrained: <a model of the same tokens>}, or objective=grpo",
            )
        if self.teacher is not None and not (asks or self._compares):
            raise ConfigError(
                "this objective compares the samples with no other model, so the teacher would say nothing",
                keys=("teacher", "objective"),
                fix="objective=gkd, or teacher=null",
            )
        if asks and (self.rollout.top_k or self.rollout.top_p < 1):
            raise ConfigError(
                f"rollout.top_k={self.rollout.top_k}, top_p={self.rollout.top_p}: a token that the sampler filters out "
                "has no log-prob to compare with the teacher's",
                keys=("rollout.top_k", "rollout.top_p", "objective"),
                fix="rollout.top_k=0 rollout.top_p=1.0",
            )

    def _check_reference_update(self) -> None:
        check_reference_update(self, self.reference_update, has_reference=self._compares)
        if self.reference_update is not None and self.teacher is not None:
            raise ConfigError(
                "the teacher is another model, which does not follow the policy",
                keys=("reference_update", "teacher"),
                fix="reference_update=null",
            )

    @property
    def packs_fewer(self) -> str | None:
        """The samples of an update lie side by side in rows, a group's perhaps behind one copy of its prompt."""
        if self.data.packing == "none":
            return None
        shared = "" if self.why_prompts_are_apart else ", and may read the prompt of a group once (share_prompts)"
        size = self.train.global_batch_size
        return f"an update is counted as {size} full rows; a run packs its {size} samples into fewer{shared}"

    @property
    def why_prompts_are_apart(self) -> str:
        """See the function of this name, for these sections."""
        return why_prompts_are_apart(self.rollout, self.data, self.model, self.mesh, self.parallelizer)

    @property
    def _sample_len(self) -> int:
        """Tokens that a prompt and its response may have: half a row where pairs share one."""
        return self.data.seq_len // (2 if "pairs_P2" in self.objective.columns else 1)

    def _check_selection(self) -> None:
        selecting, rollout = selection_of(self.objective), self.rollout
        if selecting is None:
            return
        name = type(self.objective).__name__
        if selecting.samples_of_group > rollout.group_size:
            raise ConfigError(
                f"{name} takes up to {selecting.samples_of_group} samples of each group, and rollout.group_size="
                f"{rollout.group_size}",
                keys=("objective", "rollout.group_size"),
                fix=f"rollout.group_size={selecting.samples_of_group}",
            )
        if "pairs_P2" in self.objective.columns and rollout.played:
            raise ConfigError(
                f"an episode may fill a whole row, and {name} needs two samples in one",
                keys=("rollout.environment", "objective"),
                fix="rollout.environment=null, or objective=best_of_n",
            )

    def _check_what_is_read(self) -> None:
        """Refuse settings of advantages and rewards that this objective would not read."""
        if "advantages_BT" in self.objective.columns:
            return
        chooses = selection_of(self.objective) is not None
        missing = "chooses samples by their rewards, and has no advantages" if chooses else "has no advantages"
        unread = [(key, default, missing) for key, default in _OF_ADVANTAGES]
        if not chooses and "rewards_BT" not in self.objective.columns:
            unread += [(f"overlong.{key}", None, "learns from no reward") for key in ("buffer", "factor")]
            if not self.rollout.played and not any(reward.weight for reward in self.rewards.values()):
                unread.append(("dynamic_sampling", None, "has no rewards here, so no two of a group would differ"))
        for key, default, reason in unread:
            value = attrgetter(key)(self.rollout)
            if value != default:
                raise ConfigError(
                    f"rollout.{key}={value}: {type(self.objective).__name__} {reason}",
                    keys=(f"rollout.{key}", "objective"),
                    fix=f"rollout.{key}={'null' if default is None else str(default).lower()}",
                )

    def _check_rollout(self) -> None:
        rollout, per_update = self.rollout, self.train.global_batch_size
        if rollout.samples_per_step % per_update:
            raise ConfigError(
                f"rollout.prompts_per_step={rollout.prompts_per_step} x group_size={rollout.group_size} samples are no "
                f"whole number of updates of train.global_batch_size={per_update} samples",
                keys=("rollout.prompts_per_step", "rollout.group_size", "train.global_batch_size"),
                fix=f"train.global_batch_size={rollout.samples_per_step}",
            )
        weighs_once = "advantages_BT" in self.objective.columns and "old_logprobs_BT" not in self.objective.columns
        if weighs_once and rollout.samples_per_step * rollout.passes > per_update:
            raise ConfigError(
                "this objective compares with no earlier log-probs (ratio=on_policy): it is right for one update per "
                "rollout only",
                keys=("objective", "rollout.passes", "train.global_batch_size"),
                fix=f"rollout.passes=1 train.global_batch_size={rollout.samples_per_step}",
            )
        critic = "old_values_BT" in self.objective.columns
        if critic != (rollout.baseline == "critic"):
            raise ConfigError(
                f"rollout.baseline={rollout.baseline}, but this objective trains {'a' if critic else 'no'} critic",
                keys=("rollout.baseline", "objective"),
                fix="rollout.baseline=critic" if critic else "objective=ppo",
            )
        if rollout.max_staleness and not self.objective.corrects_staleness:
            raise ConfigError(
                f"rollout.max_staleness={rollout.max_staleness} trains on samples of older weights, and this objective "
                "(correction=none) takes them for the policy's own",
                keys=("rollout.max_staleness", "objective"),
                fix="objective.correction=truncate objective.correction_max=2.0",
            )
        if rollout.max_new_tokens >= self._sample_len:
            samples = self.data.seq_len // self._sample_len
            raise ConfigError(
                f"data.seq_len={self.data.seq_len} has no room for {'two prompts' if samples > 1 else 'a prompt'} and "
                f"rollout.max_new_tokens={rollout.max_new_tokens}{' each' if samples > 1 else ''}",
                keys=("data.seq_len", "rollout.max_new_tokens"),
                fix=f"data.seq_len={2 * samples * rollout.max_new_tokens}",
            )

    def _check_batch(self, dp_size: int) -> None:
        if self.rollout.prompts_per_step % dp_size:
            raise ConfigError(
                f"rollout.prompts_per_step={self.rollout.prompts_per_step} is not a multiple of the {dp_size} "
                "data-parallel ranks",
                keys=("rollout.prompts_per_step",),
                fix=f"rollout.prompts_per_step={max(1, self.rollout.prompts_per_step // dp_size) * dp_size}",
            )
        super()._check_batch(dp_size)

    def generation_servers(self) -> GenerationServers | None:
        """Those that generate, where the run starts them itself."""
        return self.rollout.generation_servers(self.model, self.data.seq_len)

    def check_model(self, hf_config: PretrainedConfig) -> None:
        """Its responses are drawn exactly: as long as they may get, and token by token where our sampler draws them."""
        from automodel_cli.rollout.model_engines import check_decoding, check_lengths

        check_lengths(hf_config, self.data.seq_len)
        if self.rollout.engine.capabilities.live_weights:
            trust = self.model.trust_remote_code
            check_decoding(hf_config, attention=self.model.attention, trust_remote_code=trust)
        if self.rollout.share_prompts is True:
            from automodel_cli.models.support import why_not_shared

            reason = why_not_shared(hf_config, trust_remote_code=self.model.trust_remote_code)
            refuse_shared_prompts(self.rollout, reason)
        if self.rollout.replay_routing:
            from automodel_cli.models.routing import selectors_of

            selectors_of(hf_config, trust_remote_code=self.model.trust_remote_code)

    def prepared(self, tokenizer: Any) -> Any:
        """Prompts: the rows without their answers."""
        from automodel_cli.data.prompts import prepare_prompts
        from automodel_cli.run.token_ids import check_prepared

        room = self._sample_len - self.rollout.max_new_tokens
        found = prepare_prompts(
            self.data,
            tokenizer,
            seed=self.seed,
            max_tokens=room,
            tools_of=self.rollout.tools_of,
            samples_per_row=self.data.seq_len // self._sample_len,
        )
        check_prepared(found, tokenizer, self.model)
        return found

    def rows_of_a_step(self) -> dict[str, int]:
        return {"global_batch_size": self.rollout.prompts_per_step, "microbatch_size": 1}

    def run(self, source: Composed) -> int:
        check_exported(self.model)
        from automodel_cli.evaluation.validation import add_tasks
        from automodel_cli.rollout.rollouts import Rollouts
        from automodel_cli.run.header import show_header
        from automodel_cli.run.session import open_session

        with open_session(self, source) as session:
            rollouts = Rollouts(
                session, self.rollout, self.rewards, self.objective, self.teacher, self.reference_update
            )
            session.callbacks.add(rollouts)
            add_tasks(session)
            show_header(session, rollouts.about)
            rollouts.print_validation("before")
            for step, prompts in session.steps():
                rollout = rollouts.collect(step, prompts)
                with rollouts.scoring():
                    measured = session.train(step, *rollout.passes(), shown=rollout.shown, unshown=rollout.unshown)
                rollouts.record(step, rollout, measured)
                rollouts.sync(step)
            if session.stopped_by:
                return session.exit_code()
            if session.best_restored is not None:
                rollouts.sync(session.last_step)
            rollouts.print_validation("after")

            from automodel_cli.run.results import finish  # later: the first step should not wait for the last page

            return finish(session, rollouts.accuracy)
