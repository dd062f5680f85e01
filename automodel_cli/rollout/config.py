"""Config of the `rollout` section. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_choice, check_minimums, check_range
from automodel_cli.launch.generation_servers import GenerationServers
from automodel_cli.models.config import ModelConfig
from automodel_cli.rollout.advantages.base import AdvantageNode
from automodel_cli.rollout.engines.base import EngineConfig
from automodel_cli.rollout.engines.config import LiveServerConfig, SamplerConfig
from automodel_cli.rollout.engines.servers.managed_servers import ServerRequirements
from automodel_cli.rollout.environments.base import EnvironmentNode
from automodel_cli.rollout.types import SamplingParams


@dataclass(frozen=True)
class DynamicSampling:
    """Generate for further prompts until `prompts_per_step` groups have different rewards (DAPO, arXiv:2503.14476).

    Groups are kept or dropped as a unit. After `max_gen_batches` batches of prompts the step trains on the groups that
    it has. If it has none, it makes no update. A warning is logged once. This is common late in a run, when the model
    solves most prompts.
    """

    max_gen_batches: int = 10
    """Maximum number of prompt batches per step. After them the step trains on the available groups."""

    def __post_init__(self) -> None:
        check_range("max_gen_batches", self.max_gen_batches, at_least=1, fix="max_gen_batches=10")


@dataclass(frozen=True)
class OverlongConfig:
    """Treatment of responses that reach `max_new_tokens`.

    - `filter`: exclude them from training and from the baseline of their group.
    - `buffer`, `penalty`: within `buffer` tokens of the limit, the reward falls linearly by up to `penalty`
      (arXiv:2503.14476, eq. 13).
    - `factor`: multiply the reward of a truncated response by a number from 0 to 1.

    Whether the rewards of a group differ is decided before these changes.
    """

    filter: bool = False
    """Exclude truncated responses from training and from their group's baseline."""
    buffer: int | None = None
    """Tokens before the limit over which the reward falls linearly (arXiv:2503.14476, eq. 13). null: none."""
    penalty: float = 1.0
    """Largest deduction within `buffer`."""
    factor: float | None = None
    """Factor from 0 to 1 on the reward of a truncated response. null: 1."""

    def __post_init__(self) -> None:
        check_range("buffer", self.buffer, at_least=1, fix="buffer=128")
        if self.buffer is None and self.penalty != 1.0:
            raise ConfigError(
                f"penalty={self.penalty} requires a buffer",
                code="requires_setting",
                keys=("penalty", "buffer"),
                fix="buffer=128",
            )
        check_range("penalty", self.penalty, above=0, fix="penalty=1.0")
        check_range("factor", self.factor, at_least=0, at_most=1, fix="factor=0.5")

    def shaped(self, reward: float, num_tokens: int, truncated: bool, max_new_tokens: int) -> float:
        """The reward as training sees it."""
        if self.factor is not None and truncated:
            reward *= self.factor
        if self.buffer is not None:
            reward += min(-(num_tokens - (max_new_tokens - self.buffer)) / self.buffer * self.penalty, 0.0)
        return reward


@dataclass(frozen=True)
class RolloutConfig:
    """Settings of sampling and of advantages. A step is one rollout and the updates on it.

    Advantages with `advantage_estimator=group`, for the rewards r_1..r_n of one prompt:

    - `r_i - mean(r)`, divided by `std(r)` with `normalize_advantages` (GRPO, arXiv:2402.03300). Without: Dr. GRPO
      (arXiv:2503.20783).
    - `leave_one_out`: minus the mean of the n - 1 other samples. This multiplies advantages by n / (n - 1) (RLOO,
      arXiv:2402.14740).
    - `reward_scaling`: the divisor of `normalize_advantages`: std of the `group`, std of the `batch`
      (arXiv:2508.08221), or `mean` reward of the group (MaxRL, arXiv:2602.02710).
    - Groups with equal rewards (std at most 1e-6 of the largest) have no gradient. They are skipped and counted.
      `dynamic_sampling` replaces them.

    Example: the rewards 1, 0, 0, 1 have the mean 0.5. Dr. GRPO advantages are 0.5, -0.5, -0.5, 0.5.

    Advantages per token, which allow `group_size=1` and a KL term per token:

    - `batch`: discounted rewards, whitened over all tokens of the step with `normalize_advantages` (REINFORCE++,
      arXiv:2501.03262).
    - `critic`: generalized advantage estimation with the values of objective=ppo (arXiv:1506.02438). Uses `gamma` and
      `gae_lambda`.

    An episode of an environment has several messages of up to `max_new_tokens` each. Together with the prompt they
    must fit into `data.seq_len`. `share_prompt_prefix` does not change results. The startup summary shows whether it
    is active. `max_initial_logprob_gap` is measured before the first step, for engines with their own copy of the
    weights.
    """

    engine: EngineConfig = field(default_factory=SamplerConfig)
    """Generation engine: `rollout=sampler`, `hf`, `vllm` or `sglang`, or your own node (examples/own_engine.py)."""
    placement: Literal["colocated", "disaggregated"] | None = None
    """GPUs of generation servers: `disaggregated` from the trainer's, or `colocated` (alternating on the same GPUs).
    null: as the engine requires."""
    prompts_per_step: int = 32
    """Prompts per step over all ranks."""
    group_size: int = 8
    """Responses per prompt."""
    max_new_tokens: int = 512
    """Maximum number of tokens of a response."""
    temperature: float = 1.0
    """Sampling temperature, also used for the trainer's log-probs."""
    top_p: float = 1.0
    """Nucleus sampling: sample from the most likely tokens with this total probability. 1: all."""
    top_k: int = 0
    """Sample from this number of most likely tokens. 0: all."""
    num_iterations: int = 1
    """Number of passes over the samples of a rollout. Each pass has prompts_per_step x group_size /
    train.global_batch_size updates."""
    advantage_estimator: Literal["group", "batch", "critic"] | AdvantageNode = "group"
    """Baseline of the advantages: the `group`, the `batch` (REINFORCE++), a `critic` (PPO), or a node of your own
    (examples/own_advantages.py)."""
    leave_one_out: bool = False
    """Exclude the sample itself from its group's mean (RLOO, arXiv:2402.14740)."""
    normalize_advantages: bool = True
    """Divide advantages by the deviation that `reward_scaling` selects. false: Dr. GRPO."""
    reward_scaling: Literal["group", "batch", "mean"] = "group"
    """Divisor of `normalize_advantages`: the deviation of the `group`, of the `batch`, or the group's `mean` reward
    (MaxRL)."""
    gamma: float = 1.0
    """Discount of later rewards, for `advantage_estimator=batch` and `critic`."""
    gae_lambda: float = 0.95
    """Lambda of generalized advantage estimation, for `advantage_estimator=critic`."""
    dynamic_sampling: DynamicSampling | None = None
    """Replace groups with equal rewards by further samples (DAPO). null: skip and count them."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """Treatment of responses truncated at `max_new_tokens`."""
    environment: EnvironmentNode | None = None
    """Environment that replies to the model, for episodes of several messages. null: one response."""
    environments: dict[str, EnvironmentNode] = field(default_factory=dict)
    """Environments by name. The `environment_column` of a row selects one."""
    environment_column: str = "environment"
    """Column with the name of a row's environment."""
    max_off_policy_steps: int = 0
    """Maximum number of steps between the weights that sampled a token and the weights that train on it. 0: generation
    and training alternate."""
    replay_routing: bool = False
    """Route each token in the update to the experts that were selected during sampling (arXiv:2510.11370)."""
    share_prompt_prefix: bool | Literal["auto"] = "auto"
    """Compute the prompt of a group once for all its responses in a sequence. `auto`: if it is exact."""
    warn_token_mult_prob_error: float = 1.05
    """Warn if the probabilities of sampler and trainer differ by more than this factor on average."""
    max_initial_logprob_gap: float = 0.1
    """Stop before the first step if the log-probs of engine and trainer differ by more nats on average."""
    num_reward_workers: int = 2
    """Worker processes per rank for rewards with a timeout."""
    validation_samples: int = 0
    """Samples per held-out prompt, in addition to the greedy one, for `val_avg_at_k` and `val_pass_at_k`."""
    validation_temperature: float | None = None
    """Temperature of the validation samples. null: `temperature`."""
    log_samples_every: int | None = 10
    """Steps between printed tables of samples. null: none."""
    num_samples_logged: int = 4
    """Samples in a printed table."""

    def __post_init__(self) -> None:
        params = self.params()  # has the rules of the sampling itself
        if params.greedy:
            raise ConfigError(
                "temperature=0 is not supported for training: all samples of a prompt would be identical",
                code="out_of_range",
                keys=("temperature",),
                fix="temperature=1.0",
            )
        self._check_numbers()
        self._check_baseline()
        self._check_staleness()
        self._check_environments()
        self._check_overlong()
        self._check_capabilities()
        self._check_placement()
        if self._servers is not None:
            for params in (self.params(), self.validation_params()):
                self._servers.check_params(params)

    def _check_numbers(self) -> None:
        check_minimums(
            self,
            prompts_per_step=1,
            group_size=1,
            num_iterations=1,
            num_samples_logged=1,
            log_samples_every=1,
            num_reward_workers=1,
        )
        check_range(
            "warn_token_mult_prob_error",
            self.warn_token_mult_prob_error,
            above=1,
            note=" (1 is perfect agreement)",
            fix="warn_token_mult_prob_error=1.05",
        )
        check_range("validation_samples", self.validation_samples, at_least=0, fix="validation_samples=0")
        if self.validation_temperature is not None and not (
            self.validation_samples and self.validation_temperature > 0
        ):
            raise ConfigError(
                f"validation_temperature={self.validation_temperature} requires validation_samples of at least 1, "
                f"and must be above 0 (validation_samples={self.validation_samples})",
                code="out_of_range" if self.validation_samples else "requires_setting",
                keys=("validation_temperature", "validation_samples"),
                fix="validation_temperature=null",
            )
        check_range(
            "max_initial_logprob_gap",
            self.max_initial_logprob_gap,
            above=0,
            unit="nats",
            fix="max_initial_logprob_gap=0.1",
        )

    def _check_overlong(self) -> None:
        buffer = self.overlong.buffer
        if buffer is not None and buffer > self.max_new_tokens:
            raise ConfigError(
                f"overlong.buffer={buffer} must be at most max_new_tokens={self.max_new_tokens}",
                code="out_of_range",
                keys=("overlong.buffer", "max_new_tokens"),
                fix=f"overlong.buffer={max(1, self.max_new_tokens // 4)}",
            )
        if buffer is not None and self.played:
            raise ConfigError(
                f"overlong.buffer={buffer} is not supported with an environment: an episode has several responses",
                code="unsupported_combination",
                keys=("overlong.buffer", "environment"),
                fix="overlong.buffer=null, or overlong.factor=<0..1>",
            )

    def _check_placement(self) -> None:
        way = None if self._servers is None else self._servers.way
        check_choice("placement", self.placement, ("colocated", "disaggregated", None), fix="placement=null")
        if self.placement == "disaggregated" and way is None:
            raise ConfigError(
                f"placement=disaggregated requires generation servers, but {type(self.engine).__name__} "
                "generates in the training processes",
                code="requires_setting",
                keys=("placement", "engine"),
                fix="rollout.placement=null, or rollout=vllm",
            )
        if self.shares_gpus and self.max_off_policy_steps:
            raise ConfigError(
                f"max_off_policy_steps={self.max_off_policy_steps} is not supported with "
                "placement=colocated: the same GPUs cannot train and generate concurrently",
                code="unsupported_combination",
                keys=("max_off_policy_steps", "placement"),
                fix="rollout.max_off_policy_steps=0, or rollout.placement=disaggregated",
            )
        if way == "ipc" and not self.shares_gpus:
            raise ConfigError(
                "transport=ipc requires placement=colocated: vLLM reads the memory of ranks on its own GPUs",
                code="requires_setting",
                keys=("engine.transport", "placement"),
                fix="rollout.placement=colocated, or rollout.engine.transport=files",
            )
        if self.shares_gpus and way in ("nccl", "broadcast"):
            raise ConfigError(
                f"transport={way} is not supported with placement=colocated: trainer and servers need separate GPUs",
                code="unsupported_combination",
                keys=("engine.transport", "placement"),
                fix="rollout.engine.transport=files",
            )

    @property
    def _servers(self) -> LiveServerConfig | None:
        """The engine, if it consists of generation servers."""
        return self.engine if isinstance(self.engine, LiveServerConfig) else None

    @property
    def estimator_name(self) -> str:
        """Name of the advantage estimator, or of its class."""
        chosen = self.advantage_estimator
        return chosen if isinstance(chosen, str) else type(chosen).__name__

    @property
    def shares_gpus(self) -> bool:
        """Return whether servers alternate with the ranks on the same GPUs."""
        return self.placement == "colocated" and self._servers is not None

    def generation_servers(self, model: ModelConfig, max_tokens: int) -> GenerationServers | None:
        """Return the servers that the run starts. `max_tokens` is the length of the longest prompt with its
        response."""
        engine = self._servers
        if engine is None or engine.servers is None:
            return None
        requirements = ServerRequirements(
            model, max_tokens, engine.way, colocated=self.shares_gpus, routing=self.replay_routing
        )
        return engine.servers.started_for(requirements)

    def _check_baseline(self) -> None:
        def reject(code: str, key: str, reason: str, fix: str) -> None:
            value = getattr(self, key)
            raise ConfigError(
                f"{key}={value} is not supported with advantage_estimator={self.estimator_name}: {reason}",
                code=code,
                keys=(key, "advantage_estimator"),
                fix=fix,
            )

        if not isinstance(self.advantage_estimator, str):
            defaults = {"leave_one_out": False, "normalize_advantages": True, "reward_scaling": "group", "gamma": 1.0}
            for key, value in defaults.items():
                if getattr(self, key) != value:
                    fix = f"{key}={str(value).lower()}"
                    reject("no_effect", key, "your estimator computes the advantages", fix)
        elif self.advantage_estimator == "group":
            if self.group_size < 2:
                reject("out_of_range", "group_size", "it must be at least 2 to compare responses", "group_size=2")
            if self.gamma != 1:
                reject("no_effect", "gamma", "each sample has one advantage, so nothing is discounted", "gamma=1.0")
        elif self.leave_one_out:
            reject("no_effect", "leave_one_out", "rewards are not compared within groups", "leave_one_out=false")
        elif self.reward_scaling != "group":
            reject("no_effect", "reward_scaling", "advantages are whitened over all tokens", "reward_scaling=group")
        elif self.dynamic_sampling is not None:
            reject(
                "unsupported_combination",
                "dynamic_sampling",
                "groups with equal rewards are trained",
                "dynamic_sampling=null",
            )
        if self.reward_scaling != "group" and not self.normalize_advantages:
            raise ConfigError(
                f"reward_scaling={self.reward_scaling} has no effect with normalize_advantages=false",
                code="no_effect",
                keys=("reward_scaling", "normalize_advantages"),
                fix="reward_scaling=group",
            )
        if self.gae_lambda != 0.95 and self.advantage_estimator != "critic":
            reject("no_effect", "gae_lambda", "only a critic uses it", "gae_lambda=0.95")
        for key in ("gamma", "gae_lambda"):
            check_range(key, getattr(self, key), at_least=0, at_most=1, fix=f"{key}=1.0")

    def _check_capabilities(self) -> None:
        able = self.engine.capabilities
        if not able.weight_updates:
            raise ConfigError(
                f"{type(self.engine).__name__} is not supported for training, because its weights cannot be updated",
                code="not_supported",
                keys=("engine",),
                fix="rollout=sampler",
            )
        if not (able.logprobs and able.token_ids):
            raise ConfigError(
                f"{type(self.engine).__name__} is not supported for training, which needs token ids and log-probs of "
                f"the sampled distribution. The engine has {able}",
                code="not_supported",
                keys=("engine",),
                fix="rollout=sampler",
            )

        if self.replay_routing and not able.routing:
            raise ConfigError(
                f"replay_routing=true is not supported by {type(self.engine).__name__}, which does not "
                "return routed experts",
                code="not_supported",
                keys=("replay_routing", "engine"),
                fix="replay_routing=false",
            )
        servers = None if self._servers is None else self._servers.servers
        if self.replay_routing and servers is not None and not servers.gpus_per_server and servers.routing_needs_gpus:
            raise ConfigError(
                f"replay_routing=true requires {servers.engine} on GPUs ({servers.routing_needs_gpus}), "
                "but engine.servers.gpus_per_server=0",
                code="hardware_required",
                keys=("replay_routing", "engine.servers.gpus_per_server"),
                fix="replay_routing=false",
            )

    def _check_staleness(self) -> None:
        check_range("max_off_policy_steps", self.max_off_policy_steps, at_least=0, fix="max_off_policy_steps=0")
        if self.max_off_policy_steps and self.engine.capabilities.live_weights:
            name = type(self.engine).__name__
            raise ConfigError(
                f"max_off_policy_steps={self.max_off_policy_steps} is not supported with {name}, which "
                "reads the weights that are being trained",
                code="unsupported_combination",
                keys=("max_off_policy_steps", "engine"),
                fix="rollout=hf, or rollout.max_off_policy_steps=0",
            )

    def _check_environments(self) -> None:
        if self.environment is not None and self.environments:
            raise ConfigError(
                f"environment and environments ({', '.join(self.environments)}) cannot both be set: "
                "environment applies to every row",
                code="mutually_exclusive",
                keys=("environment", "environments"),
                fix="environment=null",
            )
        for name in self.environments:
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
                raise ConfigError(
                    f"environments.{name} may contain only letters, digits, _ and -, because metric names contain it",
                    code="invalid_value",
                    keys=(f"environments.{name}",),
                )
        if not self.environments and self.environment_column != "environment":
            raise ConfigError(
                f"environment_column={self.environment_column} has no effect without environments",
                code="no_effect",
                keys=("environment_column", "environments"),
                fix="environment_column=environment",
            )

    @property
    def played(self) -> dict[str, EnvironmentNode]:
        """Return the environments by name. A single environment is called `environment`."""
        return dict(self.environments) if self.environment is None else {"environment": self.environment}

    def tools_of(self, row: Mapping[str, object]) -> Sequence[dict[str, object]]:
        """Return the tools that the chat template shows for a row: the tools of its environment."""
        if self.environment is not None:
            return self.environment.tools
        environment = self.environments.get(str(row.get(self.environment_column)))
        return () if environment is None else environment.tools

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    def params(self, *, greedy: bool = False) -> SamplingParams:
        """For training, or (`greedy`) to measure with."""
        if greedy:
            return SamplingParams(self.max_new_tokens, temperature=0.0)
        shape = (self.temperature, self.top_p, self.top_k)
        return SamplingParams(self.max_new_tokens, *shape, routing=self.replay_routing)

    def validation_params(self) -> SamplingParams:
        """Return the sampling parameters of validation samples, apart from the greedy ones."""
        temperature = self.temperature if self.validation_temperature is None else self.validation_temperature
        return SamplingParams(self.max_new_tokens, temperature, self.top_p, self.top_k)
