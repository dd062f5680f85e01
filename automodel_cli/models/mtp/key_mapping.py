"""Find the multi-token-prediction layers of a checkpoint by its key names.

Three spellings are on the hub. All have a norm of the embeddings, a norm of the hidden states, a projection of both, a
decoder layer of the family's own, and a last norm; some store copies of the model's embedding and head, which are
shared: the model's are used, and the export writes them there too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub import bundled_configs, source
from automodel_cli.models.hub.passthrough_tensors import lazy_tensors
from automodel_cli.models.mtp.layers import ADDED, decoder_list, depths_in_config, last_norm_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class _Spelling:
    """Names below the prefix of a depth. `layer`: prefix of the names in its decoder layer."""

    enorm: str
    hnorm: str
    eh_proj: str
    norm: str
    layer: str = ""
    hidden_first: bool = False
    embedding: str = ""
    head: str = ""


_SPELLINGS = (
    # DeepSeek-V3, GLM-4.5: `model.layers.61.*`, after the last layer of the model
    _Spelling("enorm", "hnorm", "eh_proj", "shared_head.norm", embedding="embed_tokens", head="shared_head.head"),
    # Qwen3-Next, Qwen3.5: `mtp.*`
    _Spelling("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", layer="layers.0."),
    # MiMo: `model.mtp_layers.0.*`
    _Spelling("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", hidden_first=True),
)
_AFTER_THE_LAYERS, _APART, _ = _SPELLINGS


@dataclass(frozen=True)
class OneDepth:
    """Names of one depth. `roles`: parameter of the depth's model -> key, outside its layer. `layer`: prefix of the
    layer's names in its model and in the checkpoint."""

    roles: dict[str, str]
    layer: tuple[str, str]

    def own_name(self, key: str) -> str | None:
        """Convert a checkpoint key to a parameter of the depth's model (before the library's conversions). None for
        other keys."""
        for name, role in self.roles.items():
            if key == role:
                return name
        model_prefix, checkpoint_prefix = self.layer
        return model_prefix + key.removeprefix(checkpoint_prefix) if key.startswith(checkpoint_prefix) else None

    def key(self, name: str) -> str:
        """The other way round."""
        model_prefix, checkpoint_prefix = self.layer
        return self.roles[name] if name in self.roles else checkpoint_prefix + name.removeprefix(model_prefix)


@dataclass(frozen=True)
class DepthNames:
    """`copies`: key of a stored copy -> name of the model's own table."""

    depths: tuple[OneDepth, ...]
    copies: dict[str, str] = field(default_factory=dict)
    hidden_first: bool = False

    def own_names(self, keys: Iterable[str]) -> list[dict[str, str]]:
        """Return for each depth its keys among `keys` with the parameter names of its model."""
        every = [key for key in keys if key not in self.copies]
        return [{key: name for key in every if (name := depth.own_name(key)) is not None} for depth in self.depths]


def of_config(config: ModelConfig, hf_config: PretrainedConfig, model: PreTrainedModel) -> DepthNames:
    """Build from the checkpoint's keys, or from the library's config without a checkpoint (random weights, a plan).
    Raises ConfigError for models without such layers and for unknown names."""
    assert config.mtp is not None
    keys = None if config.config is not None else _keys(config)
    if keys is not None:
        return of_keys(keys, model)
    depths = config.mtp.depths or depths_in_config(hf_config)
    if config.pretrained is not None:  # not every config has the number; almost all repositories have one depth
        depths = depths or 1
    if not depths:
        raise ConfigError(
            f"mtp.depths is required because {type(hf_config).__name__} does not define the number of multi-token "
            "prediction layers",
            code="missing_key",
            keys=("mtp.depths",),
            fix="model.mtp.depths=1",
        )
    return _default(model, depths)


def _keys(config: ModelConfig) -> list[str] | None:
    """Return every key of the checkpoint, or None if only its config is available."""
    folder = config.pretrained or ""
    has_weights = not Path(folder).is_dir() or any(Path(folder).glob("*.safetensors"))
    if not has_weights or bundled_configs.fields(folder, config.revision) is not None:
        return None
    return list(lazy_tensors(source.weights(config).files))


def of_keys(keys: Iterable[str], model: PreTrainedModel) -> DepthNames:
    """`model` is the complete model. Raises ConfigError."""
    keys = set(keys)
    for spelling in _SPELLINGS:
        ends = f".{spelling.eh_proj}.weight"
        prefixes = [key.removesuffix(ends) for key in keys if key.endswith(ends)]
        prefixes = [p for p in prefixes if {f"{p}.{spelling.enorm}.weight", f"{p}.{spelling.hnorm}.weight"} <= keys]
        if prefixes:
            return _spelled(spelling, sorted(prefixes, key=_number), keys, model)
    raise ConfigError(
        "mtp is not supported because the checkpoint has no multi-token prediction layers with known names",
        code="not_supported_by_model",
        keys=("mtp",),
        fix="model.mtp=null",
    )


def _number(prefix: str) -> int:
    digits = re.findall(r"\d+", prefix)
    return int(digits[-1]) if digits else 0


def _spelled(spelling: _Spelling, prefixes: list[str], keys: set[str], model: PreTrainedModel) -> DepthNames:
    if spelling.layer and any(key.startswith(f"{prefixes[0]}.layers.1.") for key in keys):
        raise ConfigError(
            f"mtp is not supported because {prefixes[0]}.layers has several layers after one projection",
            code="not_supported_by_model",
            keys=("mtp",),
            fix="model.mtp=null",
        )
    tables = _tables(model)
    copies = {}
    for prefix in prefixes:
        for name, table in ((spelling.embedding, tables[0]), (spelling.head, tables[1])):
            key = f"{prefix}.{name}.weight"
            if name and key in keys:
                copies[key] = table
    layer, norm = f"{decoder_list(model)[0]}.0.", f"{last_norm_name(model)}.weight"
    depths = tuple(
        OneDepth(
            {
                **{f"{name}.weight": f"{prefix}.{getattr(spelling, name)}.weight" for name in ADDED},
                norm: f"{prefix}.{spelling.norm}.weight",
            },
            (layer, f"{prefix}.{spelling.layer}"),
        )
        for prefix in prefixes
    )
    return DepthNames(depths, copies, spelling.hidden_first)


def _tables(model: PreTrainedModel) -> tuple[str, str]:
    """Names of the weights of embedding and head, as the stream of weights has them: a tied one under its first."""
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(param), name)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return first[id(embedding)], first[id(head)]


def _default(model: PreTrainedModel, depths: int) -> DepthNames:
    """Return the names in repositories of this family, as far as its class lists them."""
    path, layers = decoder_list(model)
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    if depths == 1 and any("mtp" in pattern for pattern in ignored):
        return _spelled(_APART, ["mtp"], set(), model)
    prefixes = [f"{path}.{len(layers) + depth}" for depth in range(depths)]
    return _spelled(_AFTER_THE_LAYERS, prefixes, set(), model)
