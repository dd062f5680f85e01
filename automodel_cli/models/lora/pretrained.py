"""Adapters of peft on disk or on the hub, to continue."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.name_patterns import ends_in
from automodel_cli.models import transformers_compat
from automodel_cli.models.lora import experts as expert_lora

if TYPE_CHECKING:
    import peft

_PREFIX = "base_model.model."
_FILE = "adapter_model.safetensors"
_UNSUPPORTED = {
    "lora_bias": False,
    "bias": "none",
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "megatron_config": None,
}
"""Fields of adapter_config.json with the values that are read."""


@cache
def adapter_folder(name: str) -> Path:
    """Return the local folder of an adapter, downloaded from the hub if it is no folder."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked(folder, name)
    try:
        from huggingface_hub import snapshot_download

        return _checked(Path(snapshot_download(name, allow_patterns=["adapter_*"])), name)
    except (OSError, ValueError) as error:
        raise _not_found(name, f"it is no folder, and the hub does not return it: {error}".splitlines()[0]) from error


def _checked(folder: Path, name: str) -> Path:
    for file in ("adapter_config.json", _FILE):
        if not (folder / file).is_file():
            raise _not_found(name, f"it contains no {file}")
    return folder


def _not_found(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"lora.pretrained={name} is not an adapter of peft: {reason}",
        code="model_not_found",
        keys=("lora.pretrained",),
        fix="model.lora.pretrained=null",
    )


def read_peft_config(name: str) -> peft.LoraConfig:
    """Return the `peft.LoraConfig` of an adapter, to train. Raises ConfigError for features that are not supported."""
    import peft

    config: peft.LoraConfig = peft.PeftConfig.from_pretrained(str(adapter_folder(name)))
    kind = getattr(config.peft_type, "value", config.peft_type)
    wrong = {} if kind == "LORA" else {"peft_type": kind}
    if not wrong:
        found = {key: getattr(config, key, usual) for key, usual in _UNSUPPORTED.items()}
        wrong = {key: value for key, value in found.items() if value != _UNSUPPORTED[key] and value}
    if wrong:
        key, value = next(iter(wrong.items()))
        raise ConfigError(
            f"lora.pretrained={name} is not supported, because its adapter_config.json has {key}={value!r}",
            code="not_supported",
            keys=("lora.pretrained",),
            fix="model.lora.pretrained=null",
        )
    config.inference_mode = False
    config.init_lora_weights = True  # of new adapters; these are read
    return config


def check_matrices(name: str, wanted: list[str]) -> None:
    """Raise ConfigError unless the file has a matrix of each wanted name, and no others.

    Names of composite models have another prefix, so they are compared by their endings.
    """
    keys = _keys(name)
    missing = [want for want in wanted if not any(ends_in(key, want) for key in keys)]
    unread = [key for key in keys if not any(ends_in(key, want) for want in wanted)]
    if missing or unread:
        what = f"has no {missing[0]}" if missing else f"has {unread[0]}, which no layer reads"
        raise ConfigError(
            f"lora.pretrained={name} does not fit the model: the adapter {what} "
            f"({len(missing)} missing, {len(unread)} not read)",
            code="not_supported_by_model",
            keys=("lora.pretrained", "pretrained"),
            fix="model.lora.pretrained=null, or set model.pretrained to the base model of the adapter",
        )


@cache
def _keys(name: str) -> tuple[str, ...]:
    from safetensors import safe_open

    with safe_open(adapter_folder(name) / _FILE, "pt") as file:
        return tuple(key.removeprefix(_PREFIX) for key in file.keys())  # noqa: SIM118  # not a mapping


@torch.no_grad()
def fill(name: str, targets: Mapping[str, nn.Parameter], of_experts: Collection[str] = ()) -> None:
    """Read this rank's parameters, by their names in the file. Raises ConfigError for a matrix of another shape."""
    from safetensors import safe_open

    with safe_open(adapter_folder(name) / _FILE, "pt") as file:
        for wanted, target in targets.items():
            key = next(key for key in _keys(name) if ends_in(key, wanted))
            full: Tensor = file.get_tensor(_PREFIX + key)
            if wanted in of_experts and full.numel() == target.numel():
                full = expert_lora.from_file(wanted, full, len(target))
            if full.shape != target.shape:
                raise ConfigError(
                    f"lora.pretrained={name} does not fit the model: {wanted} has shape {list(full.shape)} in the "
                    f"adapter and {list(target.shape)} in the model",
                    code="not_supported_by_model",
                    keys=("lora.pretrained", "pretrained"),
                    fix="model.lora.pretrained=null, or set model.pretrained to the base model of the adapter",
                )
            local = transformers_compat.local(target)
            local.copy_(transformers_compat.local_part(target, full.to(local.dtype)))
