"""Rules between the rollout section and others. No torch here: `automodel check` asks them too."""

from __future__ import annotations

from collections.abc import Collection

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.formats import format_name, prompt_format
from automodel_cli.models.config import ModelConfig
from automodel_cli.rollout.environment import check_limits
from automodel_cli.rollout.rollout_config import RolloutConfig
from automodel_cli.run.sizes import written_config

ENVIRONMENT = "environment"
"""What an environment's reward is called among those of a sample."""


def check_environment(rollout: RolloutConfig, data: DataConfig, reward_names: Collection[str]) -> None:
    """What several turns cannot be combined with. Raises ConfigError."""
    if not rollout.played:
        return
    key = "rollout.environment" if rollout.environment is not None else "rollout.environments"
    for name, environment in rollout.played.items():
        check_limits(environment, f"{key}." if rollout.environment is not None else f"{key}.{name}.")
    if data.chat_template == "none":
        raise ConfigError(
            "data.chat_template=none: what an environment says is rendered by a chat template",
            keys=("data.chat_template", key),
            fix="data.chat_template=auto",
        )
    if ENVIRONMENT in reward_names:
        raise ConfigError(
            f"rewards.{ENVIRONMENT} is what the environment's own reward is called",
            keys=(f"rewards.{ENVIRONMENT}",),
            fix=f"another name for rewards.{ENVIRONMENT}",
        )


def check_indexer(model: ModelConfig, rollout: RolloutConfig) -> None:
    """Refuse the sampler for a model whose config says in writing that an indexer chooses the keys of each token: it
    keeps keys of its own, which no attention function is shown. What no field tells is measured when a run starts
    (`check_decoding`). Raises ConfigError.
    """
    written = written_config(model)
    found = written and written.number(("index_topk",))
    if not found or not found[1] or not rollout.engine.capabilities.live_weights:
        return
    assert written is not None
    name, value = found
    where = f" in {written.place(name)}" if written.folder else ""
    raise ConfigError(
        f"{type(rollout.engine).__name__} keeps the keys and values of attention, and a sparse indexer "
        f"({name}={value}{where}) keeps keys of its own besides",
        keys=("rollout.engine", written.key_of(name)),
        fix="rollout=hf",
    )


def check_prompt_data(data: DataConfig) -> None:
    """Refuse settings of the data section that have no meaning for prompts. Raises ConfigError."""
    if data.mask != "assistant":
        raise ConfigError(
            f"data.mask={data.mask}: prompts have no answer to learn from; what the model says is trained",
            keys=("data.mask",),
            fix="data.mask=assistant",
        )
    if data.packing == "wrapped" or data.long_documents in ("split", "truncate"):
        raise ConfigError(
            f"packing={data.packing} with long_documents={data.long_documents} cuts prompts and responses",
            keys=("data.packing", "data.long_documents"),
            fix="data.packing=best_fit data.long_documents=drop",
        )
    for node in (data, *(data.sources or ())):
        fmt = prompt_format(node.format)
        if fmt.makes != "conversations":
            raise ConfigError(
                f"data.format={format_name(fmt)} holds no prompts",
                keys=("data.format",),
                fix="data.format=auto, with a prompt column",
            )
        for field in node.columns:
            if field not in fmt.fields:
                raise ConfigError(
                    f"data.columns.{field} is not read from prompts, only {', '.join(fmt.fields)}; rewards name the "
                    "columns that they read",
                    keys=("data.columns",),
                    fix="data.columns='{prompt: question}' rewards.<name>.column=<the answer's column>",
                )
