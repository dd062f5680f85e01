"""Reinforcement learning on generated samples: rollouts, rewards, advantages, policy gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from automodel_cli.evaluation.validation import check_tasks
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.teacher_config import TeacherConfig
from automodel_cli.objectives.base import PolicyObjective
from automodel_cli.rollout.config import RolloutConfig
from automodel_cli.rollout.config_checks import why_prompts_not_shared
from automodel_cli.rollout.recipe_checks import CHECKS, check_prompts_per_rank, check_sampled_model
from automodel_cli.rollout.rewards.base import RewardFunction
from automodel_cli.run.checks.cross_section_checks import check_exported
from automodel_cli.run.frozen_models.reference_sync import ReferenceSync
from automodel_cli.run.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from automodel_cli.config.composition.compose import Composed
    from automodel_cli.launch.generation_servers import GenerationServers


@dataclass(frozen=True, kw_only=True)
class GRPORecipe(Recipe):
    """Generate samples, score them, compute advantages, update the policy, and sync weights to the sampler.

    A step is one rollout and the updates on it. `train.global_batch_size` counts the samples of one update. The reward
    of a sample is the sum of weight x score over `rewards`.
    """

    objective: PolicyObjective
    """Loss of the recipe, for example `objective=dpo`, `kto`, `kd`, `grpo` or `ppo`."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Settings of sampling and of advantages."""
    rewards: dict[str, RewardFunction] = field(default_factory=dict)
    """Rewards by name. The reward of a sample is the sum of weight x score."""
    teacher: TeacherConfig | None = None
    """Model that replaces the reference, to learn from (on-policy distillation). Rewards are then optional."""
    reference_sync: ReferenceSync | None = None
    """Let the reference model follow the policy. null: it stays as loaded."""

    kind: ClassVar[str] = "grpo"
    row_name: ClassVar[str] = "prompts"

    @property
    def frozen_model(self) -> ModelConfig | None:
        """Return the teacher, or the initial policy. None if the policy without its adapters is the reference."""
        asks = "teacher_ids_BTN" in self.objective.columns
        if not (asks or self.compares_reference):
            return None
        if self.teacher is not None:
            return self.teacher.as_model()
        is_base = self.model.lora is not None and self.model.lora.starts_as_base
        return None if is_base and self.reference_sync is None else self.model

    @property
    def compares_reference(self) -> bool:
        """Whether log-probs of a reference are read."""
        return "ref_logprobs_BT" in self.objective.columns or self.objective.reward_kl is not None

    @property
    def reads_loaded_weights(self) -> bool:
        return super().reads_loaded_weights or (self.compares_reference and self.teacher is None)

    @property
    def extra_memory_user(self) -> str | None:
        return "rollouts"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tasks(self)
        for check in CHECKS:
            check(self)

    @property
    def packing_note(self) -> str | None:
        """The samples of an update lie side by side in rows, a group's perhaps behind one copy of its prompt."""
        if self.data.packing == "none":
            return None
        shared = (
            "" if self.why_prompts_not_shared else ", and may read the prompt of a group once (share_prompt_prefix)"
        )
        size = self.train.global_batch_size
        return f"an update is counted as {size} full rows; a run packs its {size} samples into fewer{shared}"

    @property
    def why_prompts_not_shared(self) -> str:
        """See the function of this name, for these sections."""
        return why_prompts_not_shared(self.rollout, self.data, self.model, self.mesh, self.parallelizer)

    @property
    def sample_len(self) -> int:
        """Maximum tokens of a prompt with its response: half of a row if pairs share one."""
        return self.data.seq_len // (2 if "pairs_P2" in self.objective.columns else 1)

    def _check_batch(self, dp_size: int) -> None:
        check_prompts_per_rank(self, dp_size)
        super()._check_batch(dp_size)

    def generation_servers(self) -> GenerationServers | None:
        """Return the generation servers that the run starts."""
        return self.rollout.generation_servers(self.model, self.data.seq_len)

    def check_model(self, hf_config: PretrainedConfig) -> None:
        check_sampled_model(self, hf_config)

    def prepared(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Prepare the prompts: rows without their answers."""
        from automodel_cli.data.preparation.prompts import prepare_prompts
        from automodel_cli.run.checks.token_ids import check_prepared

        room = self.sample_len - self.rollout.max_new_tokens
        found = prepare_prompts(
            self.data,
            tokenizer,
            seed=self.seed,
            max_tokens=room,
            tools_of=self.rollout.tools_of,
            samples_per_row=self.data.seq_len // self.sample_len,
        )
        check_prepared(found, tokenizer, self.model)
        return found

    def rows_of_a_step(self) -> dict[str, int]:
        return {"global_batch_size": self.rollout.prompts_per_step, "microbatch_size": 1}

    def run(self, source: Composed) -> int:
        check_exported(self.model)
        from automodel_cli.evaluation.validation import add_tasks
        from automodel_cli.rollout.rollout_manager import Rollouts
        from automodel_cli.run.build_trainer import build_trainer
        from automodel_cli.run.startup_summary import show_header

        with build_trainer(self, source) as session:
            rollouts = Rollouts(session, self.rollout, self.rewards, self.objective, self.teacher, self.reference_sync)
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

            from automodel_cli.run.finalize import (
                finalize_run,  # later: the first step should not wait for the last page
            )

            return finalize_run(session, rollouts.accuracy)
