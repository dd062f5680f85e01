"""Check module and parameter names in the config against the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from automodel_cli.config.name_patterns import NameList, check_entries
from automodel_cli.distributed.tensor_parallel.plan import custom_plan, wildcard
from automodel_cli.models import transformers_compat
from automodel_cli.training.optimizers.nodes import Muon

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from automodel_cli.distributed.strategies.base import Strategy
    from automodel_cli.models.config import ModelConfig

_OF_ADAPTERS = ("lora_A", "lora_B", "lora_magnitude_vector", "lora_embedding_A", "lora_embedding_B")
_OF_PARTS = ("value_head", "multi_token")


def check_names(optimizer: object, parallelizer: Strategy, config: ModelConfig, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError for an entry of `optimizer.adamw_names` or `parallelizer.tp_plan` without a parameter or
    module.

    Names refer to the complete model, so every layout rejects the same entries.
    """
    names = _adamw_names(optimizer)
    plan = parallelizer.axis_options().tp_plan
    if not names and plan is None:
        return
    model = _full_model(hf_config, config)
    if names:
        _check_adamw_names(names, model)
    if plan is not None:
        _check_plan(plan, model)


def _full_model(hf_config: PretrainedConfig, config: ModelConfig) -> PreTrainedModel:
    dtype = getattr(torch, config.dtype)
    return transformers_compat.meta_model(hf_config, dtype=dtype, trust_remote_code=config.trust_remote_code)


def _adamw_names(optimizer: object) -> tuple[str, ...]:
    """Return the custom entries. The default lists names of many model families."""
    if not isinstance(optimizer, Muon):
        return ()
    own = tuple(optimizer.adamw_names)
    return () if own == Muon.adamw_names else own


def _check_adamw_names(names: tuple[str, ...], model: PreTrainedModel) -> None:
    have = [f"model.{name}" for name, _ in model.named_parameters(remove_duplicate=False)]
    words = {word for name in have for word in name.split(".") if not word.isdigit()} - {"weight", "bias"}
    listed = NameList("optimizer.adamw_names", names, "no parameter name contains")
    have += [*_OF_ADAPTERS, *_OF_PARTS]
    check_entries(listed, lambda entry: any(entry in name for name in have), words)


def _check_plan(plan: object, model: PreTrainedModel) -> None:
    styles = plan if isinstance(plan, Mapping) else custom_plan(plan, model)
    names = {name for name, _ in model.named_modules()} | {n for n, _ in model.named_parameters(remove_duplicate=False)}
    known = {wildcard(name) for name in names if name}
    listed = NameList("parallelizer.tp_plan", styles, "no module or parameter has the name", empty="null")
    check_entries(listed, lambda entry: entry in names or entry in known, known)
