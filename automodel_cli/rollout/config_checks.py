"""Checks between the rollout section and other sections. Torch-free, because `automodel check` runs them."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.formats.builtin import format_name, prompt_format
from automodel_cli.models.config import ModelConfig
from automodel_cli.rollout.config import RolloutConfig
from automodel_cli.rollout.engines.base import Capabilities
from automodel_cli.rollout.environments.base import check_limits
from automodel_cli.run.checks.mesh_checks import written_config

if TYPE_CHECKING:
    from automodel_cli.distributed.mesh_config import MeshConfig
    from automodel_cli.distributed.strategies.base import Strategy

ENVIRONMENT = "environment"
"""Name of the environment's reward among the rewards of a sample."""


def check_environment(rollout: RolloutConfig, data: DataConfig, reward_names: Collection[str]) -> None:
    """Raise ConfigError for settings that several turns do not support."""
    if not rollout.played:
        return
    key = "rollout.environment" if rollout.environment is not None else "rollout.environments"
    for name, environment in rollout.played.items():
        check_limits(environment, f"{key}." if rollout.environment is not None else f"{key}.{name}.")
    if data.chat_template == "none":
        raise ConfigError(
            "data.chat_template=none is not supported with an environment: a chat template must render its messages",
            code="unsupported_combination",
            keys=("data.chat_template", key),
            fix="data.chat_template=auto",
        )
    if ENVIRONMENT in reward_names:
        raise ConfigError(
            f"rewards.{ENVIRONMENT} is reserved for the reward of the environment",
            code="invalid_value",
            keys=(f"rewards.{ENVIRONMENT}",),
            fix=f"another name for rewards.{ENVIRONMENT}",
        )


def check_indexer(model: ModelConfig, rollout: RolloutConfig) -> None:
    """Raise ConfigError if the config of the model declares an indexer and the engine is the sampler. The indexer
    selects the keys of each token from a key cache of its own, which no attention function receives. Indexers that
    the config does not declare are measured at the start of a run (`check_decoding`)."""
    written = written_config(model)
    indexer = written and written.number(("index_topk",))
    if not indexer or not indexer[1] or not rollout.engine.capabilities.live_weights:
        return
    assert written is not None
    name, value = indexer
    where = f" in {written.place(name)}" if written.folder else ""
    raise ConfigError(
        f"{type(rollout.engine).__name__} does not support sparse attention with an indexer ({name}={value}{where}): "
        "the indexer has a key cache of its own",
        code="not_supported_by_model",
        keys=("rollout.engine", written.key_of(name)),
        fix="rollout=hf",
    )


def check_routing(rollout: RolloutConfig, parallelizer: Strategy, *, compares: bool) -> None:
    """Raise ConfigError for settings that router replay does not support. `compares`: the objective compares its
    log-probs with the sampler's."""
    if not rollout.replay_routing:
        return
    if not compares:
        raise ConfigError(
            "rollout.replay_routing=true has no effect: this objective does not use the log-probs of the sampler",
            code="no_effect",
            keys=("rollout.replay_routing", "objective"),
            fix="rollout.replay_routing=false",
        )
    if getattr(parallelizer, "enable_compile", False) is True:
        raise ConfigError(
            "rollout.replay_routing=true is not supported with parallelizer.enable_compile=true, because experts "
            "are replaced inside a compiled layer",
            code="unsupported_combination",
            keys=("rollout.replay_routing", "parallelizer.enable_compile"),
            fix="parallelizer.enable_compile=fused_ops",
        )


def check_routing_engine(rollout: RolloutConfig, able: Capabilities) -> None:
    """The same of an engine that was found out. Raises ConfigError."""
    if rollout.replay_routing and not able.routing:
        raise ConfigError(
            "rollout.replay_routing=true is not supported by this server of "
            f"{type(rollout.engine).__name__}, which does not return routed experts",
            code="server_mismatch",
            keys=("rollout.replay_routing", "rollout.engine"),
            fix=getattr(rollout.engine, "with_experts", "rollout.replay_routing=false"),
        )


def why_prompts_not_shared(
    rollout: RolloutConfig, data: DataConfig, model: ModelConfig, mesh: MeshConfig, parallelizer: Strategy
) -> str:
    """Return why the responses of a group cannot share one copy of their prompt in the update. Empty if they can."""
    moe, engine = model.moe, model.transformer_engine
    reasons = (
        (rollout.group_size == 1, "rollout.group_size=1, so a prompt has one response"),
        (data.packing == "none", "data.packing=none, so a row holds one sample"),
        (
            model.attn_implementation != "packed",
            f"model.attn_implementation={model.attn_implementation} does not support shared prefixes (packed does)",
        ),
        (engine is not None and engine.attention, "attention of Transformer Engine does not support shared prefixes"),
        ((mesh.cp_size or 1) > 1, f"mesh.cp_size={mesh.cp_size}: context parallelism does not support shared prefixes"),
        (parallelizer.enable_compile is True, "it is untested with compiled layers (parallelizer.enable_compile=true)"),
        (bool(moe.aux_loss_coef), "model.moe.aux_loss_coef balances experts over every copy of a prompt"),
        (bool(moe.bias_update_rate), "model.moe.bias_update_rate balances experts over every copy of a prompt"),
    )
    return next((reason for holds, reason in reasons if holds), "")


def check_shared_prompts(rollout: RolloutConfig, reason: str) -> None:
    """Raise ConfigError if `rollout.share_prompt_prefix=true` and sharing is not supported for `reason`."""
    if reason and rollout.share_prompt_prefix is True:
        raise ConfigError(
            f"rollout.share_prompt_prefix=true is not supported: {reason}",
            code="unsupported_combination",
            keys=("rollout.share_prompt_prefix",),
            fix="rollout.share_prompt_prefix=auto",
        )


def check_prompt_data(data: DataConfig) -> None:
    """Raise ConfigError for settings of the data section that do not apply to prompts."""
    if data.loss_mask != "assistant":
        raise ConfigError(
            f"data.loss_mask={data.loss_mask} is not supported for prompts: training uses the generated tokens",
            code="not_supported",
            keys=("data.loss_mask",),
            fix="data.loss_mask=assistant",
        )
    if data.fill_in_the_middle is not None:
        raise ConfigError(
            "data.fill_in_the_middle is not supported for prompts, because it applies to plain text",
            code="wrong_data_kind",
            keys=("data.fill_in_the_middle",),
            fix="data.fill_in_the_middle=null",
        )
    if data.packing == "wrapped" or data.truncation in ("split", "truncate"):
        raise ConfigError(
            f"data.packing={data.packing} with data.truncation={data.truncation} is not supported, "
            "because it splits prompts and responses",
            code="unsupported_combination",
            keys=("data.packing", "data.truncation"),
            fix=data.keep_whole("drop"),
        )
    for node in (data, *(data.datasets or ())):
        fmt = prompt_format(node.format)
        if fmt.makes != "conversations":
            raise ConfigError(
                f"data.format={format_name(fmt)} contains no prompts",
                code="wrong_data_kind",
                keys=("data.format",),
                fix="data.format=auto, with a prompt column",
            )
        for field in node.column_mapping:
            if field not in fmt.fields:
                raise ConfigError(
                    f"data.column_mapping.{field} must be one of: {', '.join(fmt.fields)}. Rewards select "
                    "their columns themselves",
                    code="unknown_name",
                    keys=("data.column_mapping",),
                    fix="data.column_mapping='{prompt: question}' rewards.<name>.column=<the answer's column>",
                )
