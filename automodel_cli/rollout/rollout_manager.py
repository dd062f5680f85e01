"""Run rollouts: from prompts to responses, rewards, advantages and the columns of the objective."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from automodel_cli.config.errors import RunError
from automodel_cli.data.data_sources import answer_checker
from automodel_cli.data.preparation.prompt_dataset import Prompt
from automodel_cli.models.checkpoint_io.weight_stream import iter_hf_weights
from automodel_cli.models.moe.router_hooks import selectors_of
from automodel_cli.models.teacher_config import TeacherConfig
from automodel_cli.objectives.base import PolicyObjective
from automodel_cli.rollout.collection.engine_check import check_engine
from automodel_cli.rollout.collection.sample_collector import CollectionTimes, SampleCollector
from automodel_cli.rollout.config import RolloutConfig
from automodel_cli.rollout.engines.base import sample_seed
from automodel_cli.rollout.minibatches.advantage_estimation import AdvantageEstimator
from automodel_cli.rollout.minibatches.logprob_scorer import Scorer
from automodel_cli.rollout.minibatches.prefix_sharing import shared_prompts_obstacle
from automodel_cli.rollout.minibatches.router_replay import RoutingReplay
from automodel_cli.rollout.monitoring.health_monitor import HealthMonitor, measured_entropies
from automodel_cli.rollout.monitoring.reward_statistics import counted, mean_reward, of_k_samples
from automodel_cli.rollout.rewards.base import RewardFunction
from automodel_cli.rollout.rollout_log import (
    RolloutLog,
    accuracy_of,
    disagreement_warning,
    reward_line,
    sample_table,
    too_few,
)
from automodel_cli.rollout.rollout_result import Rollout
from automodel_cli.rollout.samples import PackingConfig
from automodel_cli.rollout.timers import Idle, StepTimers
from automodel_cli.rollout.types import Sample
from automodel_cli.run.checks.token_ids import num_embeddings, pad_id
from automodel_cli.run.frozen_models.reference_sync import ReferenceSync
from automodel_cli.run.heldout_accuracy import Accuracy
from automodel_cli.training.callback import Callback, Run

if TYPE_CHECKING:
    from automodel_cli.run.trainer import Trainer
    from automodel_cli.training.callback import Number

_HELD_OUT = 0
"""The step in the seeds of samples to held-out prompts: the same ones at each validation."""


class Rollouts(Callback):
    """State of GRPO in addition to a session: engine, rewards, and reference model. As a callback, it evaluates
    held-out prompts and stores prefetched samples in checkpoints. Collective to build."""

    def __init__(
        self,
        session: Trainer,
        config: RolloutConfig,
        rewards: Mapping[str, RewardFunction],
        objective: PolicyObjective,
        teacher: TeacherConfig | None = None,
        reference_sync: ReferenceSync | None = None,
    ):
        self.session, self.recipe, self.config = session, session.recipe, config
        self.mesh, self.model = session.mesh, session.model
        selectors = None
        if config.replay_routing:
            of_parts, trust = self.model.parts[0].source_config, self.recipe.model.trust_remote_code
            selectors = selectors_of(of_parts, trust_remote_code=trust)
        replay = None if selectors is None else RoutingReplay(session, selectors)
        judged = teacher is None and not config.played
        self._rewards = rewards
        self._source = SampleCollector(session, config, rewards, all_judged=judged, selectors=selectors, replay=replay)
        self._scorer = Scorer(session, config, objective, teacher, reference_sync)
        self._prompts_not_shared_reason = shared_prompts_obstacle(session, config, teacher)
        self._plan = PackingConfig(
            seq_len=self.recipe.data.seq_len,
            packed=self.recipe.data.packing != "none",
            pad_to_multiple_of=self.recipe.data.pad_to_multiple_of,
            microbatch_size=self.recipe.train.microbatch_size,
            pad_id=pad_id(session.tokenizer, num_embeddings(self.recipe.model)),
            fits=session.model.stages.takes,
            share_prompt_prefix=not self._prompts_not_shared_reason,
        )
        self._credit = AdvantageEstimator(session, config, objective, self._plan, self._scorer, replay)
        self.accuracy: dict[str, Accuracy] = {}
        self._answers: list[Sample] = []
        self._log = RolloutLog(session.run_dir, session.first_step, is_main=session.is_main)
        self._warned: set[str] = set()
        self._alarms = HealthMonitor(config.max_new_tokens, measured_entropies(session.run_dir / "metrics.jsonl"))
        self._phases, self._idle, self._scored = StepTimers(), Idle(0.0, 0.0), False
        self.sync(session.first_step)
        check_engine(session, config, self._source, self._plan)

    # -- reports of the run

    @property
    def about(self) -> list[tuple[str, str]]:
        """Rows of the header."""
        shared = "shared by the responses of a group in the update"
        apart = f"not shared in the update: {self._prompts_not_shared_reason}"
        prompts = ("prompts", apart if self._prompts_not_shared_reason else shared)
        sampler = getattr(self._source.engine, "about", "") if self.mesh.device.type == "cuda" else ""
        return [("sampler", sampler), prompts] if sampler else [prompts]

    def on_start(self, run: Run, state: Any) -> None:
        """Restore the prefetched samples of the checkpoint."""
        self._source.restore(state)

    def on_checkpoint(self, run: Run, step: int) -> object:
        """Return the samples that are not yet trained. Collective."""
        return self._source.state()

    def on_step(self, run: Run, step: int, values: Mapping[str, Number]) -> dict[str, Number]:
        """Return the times of the phases of the step, idle times, and throughput."""
        self._phases.end("train")
        self._phases.end("step")
        seconds_of = dict(self._phases.taken())
        idle = self._idle.of_step(seconds_of.pop("step_seconds") + seconds_of["sync_seconds"])
        metrics: dict[str, Number] = {**seconds_of, **idle}
        if (share := self._source.idle_fraction()) is not None:
            metrics["engine_idle_fraction"] = share
        passes = {"train": 1}
        if self._scored:
            passes["score"] = self.config.num_iterations  # training reads the rows in each pass, scoring in one
        for name, times in passes.items():
            if seconds := metrics.get(f"{name}_seconds"):
                metrics[f"{name}_tokens_per_second"] = values["num_tokens"] / (times * seconds)
        return metrics

    def on_validation(self, run: Run, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Return the mean reward of greedy responses to the held-out prompts, and metrics of further samples. Samples
        that could not be scored are only counted. Collective."""
        validation = self.session.data.validation
        if validation is None:
            return {}
        limit = self.recipe.validation.num_batches
        prompts = validation.prompts
        if limit is not None:
            prompts = prompts[: limit * self.recipe.train.microbatch_size * self.mesh.dp_size]
        local_prompts = list(enumerate(prompts))[self.mesh.dp_rank :: self.mesh.dp_size]
        requests = [(place, 0, prompt) for place, prompt in local_prompts]
        answers = self._answers = self._source.judged(requests, self.config.params(greedy=True))
        more, samples = self.config.validation_samples, {}
        if more:
            requests = [(place, index, prompt) for place, prompt in local_prompts for index in range(more)]
            seeds = [sample_seed(self.recipe.seed, _HELD_OUT, place, index) for place, index, _ in requests]
            samples = of_k_samples(self._source.judged(requests, self.config.validation_params(), seeds))
        left_out = len(answers) - len(counted(answers))
        metrics = {
            **samples,
            "val_reward": mean_reward(answers),
            **({"val_num_excluded": left_out} if left_out else {}),
            "val_response_length": statistics.fmean(sample.num_generated for sample in answers),
        }
        return {name: value for name, value in metrics.items() if not math.isnan(value)}

    def on_end(self, run: Run, succeeded: bool) -> None:
        """Stop the threads and processes of generation and rewards."""
        self._source.close()
        self._log.close()

    # -- a rollout

    def collect(self, step: int, prompts: Sequence[Sequence[Prompt]]) -> Rollout:
        """Collect the samples of a step and build its minibatches.

        With `max_off_policy_steps`, samples were generated while earlier steps trained, and generation of later steps
        is started. With dynamic sampling, further prompts are used until enough groups have different rewards. They
        come from the queue, or are generated with the newest weights. Collective over all ranks.
        """
        began, source = time.perf_counter(), self._source
        took = source.seconds = CollectionTimes()
        self._phases.begin("step")
        dynamic = self.config.dynamic_sampling
        samples = source.sample(step, prompts)
        collected, num_batches = list(samples), 1
        if dynamic is not None:
            samples, equal = self._credit.filter_groups(samples)
            while len(samples) < self.config.samples_per_step and num_batches < dynamic.max_gen_batches:
                more = source.sample(step, self.session.loader.next_step())
                collected, num_batches = collected + more, num_batches + 1
                different, rest = self._credit.filter_groups(more)
                samples, equal = samples + different, equal + rest
            if len(samples) < self.config.samples_per_step:
                self._warn_once("dynamic_sampling", too_few(step, samples, equal, self.config))
            samples = (samples + equal)[: self.config.samples_per_step]
        seconds = time.perf_counter() - began
        self._idle = Idle.of_rollout(seconds, took.reward, draws_elsewhere=source.is_elsewhere)
        seconds += took.ahead - took.wait  # waiting time is a part of generation time
        source.prefetch(step)
        source.rest(weights_follow=True)
        learnt = self._credit.build_minibatches(samples, self._phases)
        self._scored = learnt.scored
        self._phases.begin("train")
        of_engine = {**getattr(source.engine, "metrics", {}), **learnt.gaps}
        return Rollout(
            version=step - 1,
            samples=samples,
            advantages_N=learnt.advantages_N,
            differs_N=learnt.differs_N,
            trained=learnt.trained,
            updates=learnt.updates,
            num_passes=self.config.num_iterations,
            num_sampled=len(collected),
            num_drawn_tokens=sum(sample.num_generated for sample in collected),
            seconds=seconds,
            reward_seconds=took.reward,
            wait_seconds=source.wait_seconds,
            of_engine=of_engine,
        )

    def _warn_once(self, subject: str, text: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            self.session.meter.print(text)

    def scoring(self) -> AbstractContextManager[None]:
        """Context in which log-probs of the trainer are comparable to those of the sampler."""
        return self._scorer.as_sampled()

    # -- weights, and how good they are

    def sync(self, version: int) -> None:
        """Update the engine to the weights after step `version`. Collective."""
        parts = self.model.parts
        stream = iter_hf_weights(
            parts,
            dtype=parts[0].dtype,
            hub_names=self._source.engine.capabilities.hub_names,
            pp_group=self.model.pp_group,
        )
        with self._phases("sync"):
            self._source.update(stream, version)

    def print_validation(self, when: str) -> None:
        """Print the reward on held-out prompts before or after training. Collective if it must be measured."""
        session, task = self.session, self.recipe.data.generator
        step = 0 if when == "before" else session.last_step
        if session.data.validation is None or (when == "before" and session.first_step > 0):
            return
        if session.last_validation[0] != step:
            session.validate(step)
        elif when == "after" and session.best_restored is not None:
            session.callbacks.validation(step)  # the last answers belong to other weights
        if line := reward_line(self._answers, when):
            session.meter.print(line)
        check = answer_checker(task, (sample.prompt.row for sample in self._answers))
        if check is not None:
            self.accuracy[when] = accuracy_of(self._answers, check)

    def _stop_for(self, name: str, step: int, rollout: Rollout) -> None:
        _, num_calls = rollout.failures[name]
        words = next(s.score.errors[name] for s in rollout.samples if name in s.score.errors)
        raise RunError(
            f"step {step}: reward {name} failed on all {num_calls} samples, so training cannot continue: {words}",
            code="reward_failed",
            keys=(f"rewards.{name}",),
            fix=f"correct it (`errors` in {self.session.run_dir / 'rollouts.jsonl'}), or set rewards.{name}.weight=0",
        )

    def record(self, step: int, rollout: Rollout, measured: Mapping[str, Tensor]) -> None:
        """Write all samples to rollouts.jsonl, print a table of samples periodically, and log warnings."""
        self._log.write(step, rollout)
        meter, config = self.session.meter, self.config
        if config.log_samples_every is not None and (step == 1 or step % config.log_samples_every == 0):
            meter.print(sample_table(step, rollout, config.num_samples_logged))
        values = dict(rollout.unshown)
        if "entropy" in measured:
            values["entropy"] = measured["entropy"].item()
        for sentence in self._alarms.of(values, rollout.failures):
            meter.print(f"step {step}: {sentence}")
        counted = {name: of for name, of in rollout.failures.items() if self._rewards[name].weight != 0}
        if (name := self._alarms.broken(counted)) is not None:
            self._stop_for(name, step, rollout)
        if "token_mult_prob_error" in measured:
            warning = disagreement_warning(measured["token_mult_prob_error"].item(), config.warn_token_mult_prob_error)
            if warning is not None and not rollout.staleness:
                meter.print(f"step {step}: {warning}")
            elif warning is not None:  # stale samples always differ, because the weights have changed
                reason = "older weights sampled them, as rollout.max_off_policy_steps allows; reported once"
                self._warn_once("staleness", f"step {step}: {warning} ({reason})")
