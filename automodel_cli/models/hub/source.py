"""Location of a model's config and weights: a local folder, a hub snapshot, a GGUF file, or none (random weights)."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_cli.config.composition import hub
from automodel_cli.config.errors import ConfigError
from automodel_cli.models import new_tokens
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.files import file_integrity
from automodel_cli.models.hub import bundled_configs, dequantize, multimodal_backbone, rope_scaling
from automodel_cli.models.hub.compressed_tensors import Quantization

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_HUB_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
# Read by base classes of transformers, not by the source of a family.
_GENERAL_FIELDS = {
    "model_type",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "torch_dtype",
    "dtype",
    "architectures",
}


def hf_config(config: ModelConfig) -> PretrainedConfig:
    """Return a new transformers config of the language model. Raises ConfigError if it cannot be loaded."""
    return multimodal_backbone.text_config(
        composite_config(config), exported_alone=config.config is not None and config.vision is None
    )


def composite_config(config: ModelConfig) -> PretrainedConfig:
    """Return the config of the full repository, which may contain more than a language model."""
    from transformers import AutoConfig

    if config.config is not None:
        return _config_from_fields(config.config)
    folder, extra = _folder_and_gguf(config)
    fields = None if extra else bundled_configs.fields(folder, config.revision)
    if fields is not None:
        known: PretrainedConfig = AutoConfig.for_model(**fields)
        new_tokens.grow_config(config, known)
        rope_scaling.scale_rope(config, known)
        return known
    if not extra:
        file_integrity.check_json(folder)
    try:
        loaded: PretrainedConfig = AutoConfig.from_pretrained(
            folder, revision=config.revision, trust_remote_code=config.trust_remote_code, **extra
        )
    except Exception as error:  # config classes raise any error, and may run remote code
        raise _unreachable(config, error) from error
    if not extra:
        # Weights are dequantized while reading. The rest of the program sees a plain model.
        dequantize.check_quantization(vars(loaded).pop("quantization_config", None), folder)
    new_tokens.grow_config(config, loaded)
    rope_scaling.scale_rope(config, loaded)
    return loaded


def stop_ids(config: ModelConfig) -> list[int]:
    """Return the stop tokens of the model from generation_config.json, else config.json (`eos_token_id`).

    Empty for random weights and GGUF files, whose only stop token is the EOS of the tokenizer.
    """
    from transformers import GenerationConfig

    if config.pretrained is None or config.gguf_file is not None:
        return []
    try:
        options: dict[str, Any] = {} if config.revision is None else {"revision": config.revision}
        listed = GenerationConfig.from_pretrained(config.pretrained, **options).eos_token_id
    except OSError:  # the model has no generation config
        listed = hf_config(config).get_text_config().eos_token_id
    ids = listed if isinstance(listed, list) else [listed]
    size = getattr(hf_config(config).get_text_config(), "vocab_size", None)
    return file_integrity.check_stops([i for i in ids if i is not None], size, str(config.pretrained))


@dataclass(frozen=True)
class Weights:
    """Safetensors files of a checkpoint with the quantization of its config, or a GGUF file as (folder, name)."""

    files: tuple[Path, ...] = ()
    quantization: Quantization | None = None
    gguf: tuple[str, str] | None = None


def weights(config: ModelConfig) -> Weights:
    """Locate the weights, and download them for a hub id. Not for random weights."""
    folder, extra = _folder_and_gguf(config)
    if extra:
        return Weights(gguf=(folder, extra["gguf_file"]))
    path = Path(folder)
    if not path.is_dir():
        path = _snapshot(config)
    index = path / "model.safetensors.index.json"
    if index.exists():
        names = file_integrity.shards(index)
    elif (path / "model.safetensors").exists():
        names = ["model.safetensors"]
    else:
        names = sorted(p.name for p in path.glob("*.safetensors"))
    if not names:
        raise ConfigError(
            f"pretrained={config.pretrained!r} has no safetensors files in {path}",
            code="unsupported_file_type",
            keys=("pretrained",),
            fix="convert it once: AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder), then "
            "model.pretrained=folder",
        )
    files = tuple(path / name for name in names)
    file_integrity.check_json(path)
    file_integrity.check_weights(files)
    quantization = json.loads((path / "config.json").read_text()).get("quantization_config")
    return Weights(files=files, quantization=quantization)


def folder(config: ModelConfig) -> Path | None:
    """Return the folder of the checkpoint, None for random weights and GGUF files."""
    if config.config is not None:
        return None
    paths = weights(config)
    return paths.files[0].parent if paths.files else None


def model_files(config: ModelConfig) -> list[Path]:
    """Return the files that determine a loaded model: weights, config and remote code. Empty for random weights."""
    if config.config is not None:
        return []
    paths = weights(config)
    if paths.gguf is not None:
        folder, name = paths.gguf
        if Path(folder).is_dir():
            return [Path(folder) / name]
        from huggingface_hub import hf_hub_download

        return [Path(hf_hub_download(folder, name, revision=config.revision))]
    folder_of_files = paths.files[0].parent
    return [*paths.files, folder_of_files / "config.json", *sorted(folder_of_files.glob("*.py"))]


def _folder_and_gguf(config: ModelConfig) -> tuple[str, dict[str, str]]:
    """Return the arguments of `from_pretrained`: a folder or hub id, and `gguf_file` if there is one."""
    if config.gguf_file is None:
        assert config.pretrained is not None, "a random model has no folder"
        return config.pretrained, {}
    if config.pretrained is not None:
        return config.pretrained, {"gguf_file": config.gguf_file}
    path = Path(config.gguf_file)
    if not path.is_file():
        raise ConfigError(
            f"gguf_file={config.gguf_file!r} does not exist",
            code="missing_file",
            keys=("gguf_file",),
            fix="model.gguf_file=<path of an existing file>, or give model.pretrained=<hub id> with it",
        )
    return str(path.parent.resolve()), {"gguf_file": path.name}


def _snapshot(config: ModelConfig) -> Path:
    from huggingface_hub import snapshot_download

    assert config.pretrained is not None
    try:
        return Path(snapshot_download(config.pretrained, revision=config.revision, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # the hub client raises many unrelated classes
        raise _unreachable(config, error) from error


def _unreachable(config: ModelConfig, error: Exception) -> ConfigError:
    if config.pretrained and not Path(config.pretrained).exists() and hub.is_offline(error):
        message = f"pretrained={config.pretrained!r} cannot be loaded: {hub.not_here(config.pretrained)}"
        return ConfigError(
            message,
            code="model_not_found",
            keys=("pretrained",),
            fix=hub.download(config.pretrained, config.revision),
        )
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ConfigError(
        f"{'pretrained' if config.pretrained else 'gguf_file'}={config.pretrained or config.gguf_file!r} cannot be "
        f"loaded: {reason}",
        code="model_not_found",
        keys=("pretrained",) if config.pretrained else ("gguf_file",),
        fix="model.pretrained=<an existing folder or hub id> (private or gated models need HF_TOKEN)",
    )


def _config_from_fields(fields: dict[str, Any]) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING

    rest = dict(fields)
    family = rest.pop("model_type")
    if family not in CONFIG_MAPPING:
        similar = difflib.get_close_matches(str(family), list(CONFIG_MAPPING.keys()), 1)
        raise ConfigError(
            f"config.model_type={family!r} is not a model type of the installed transformers",
            code="unknown_name",
            keys=("config.model_type",),
            fix=f"model.config.model_type={similar[0] if similar else 'llama'}",
        )
    cls = CONFIG_MAPPING[family]
    _reject_unknown_fields(cls, rest)
    try:
        built: PretrainedConfig = cls(**rest)
    except Exception as error:  # each config class validates its own way
        raise ConfigError(
            f"config is rejected by {cls.__name__}: {error}", code="invalid_arguments", keys=("config",)
        ) from error
    return built


def _reject_unknown_fields(cls: type[PretrainedConfig], fields: dict[str, object]) -> None:
    """Raise for a field that no source file of the family reads. transformers accepts any keyword, so typos pass."""
    known = _known_fields(cls)
    source = None
    for name in fields:
        if name in known:
            continue
        source = _family_source(cls) if source is None else source
        if re.search(rf"\b{re.escape(name)}\b", source) is None:
            similar = difflib.get_close_matches(name, sorted(known), 1)
            raise ConfigError(
                f"config.{name} is not a field of {cls.__name__}, and its model does not read it",
                code="unknown_key",
                keys=(f"config.{name}",),
                fix=f"model.config.{similar[0]}={fields[name]}" if similar else f"remove model.config.{name}",
            )


def _known_fields(cls: type[PretrainedConfig]) -> set[str]:
    names = set(_GENERAL_FIELDS) | set(cls.attribute_map)
    for parent in cls.__mro__:
        names |= set(inspect.signature(parent).parameters) | set(inspect.get_annotations(parent))
    return names - {"self", "args", "kwargs"}


def _family_source(cls: type[PretrainedConfig]) -> str:
    folder = Path(inspect.getfile(cls)).parent
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.py")))
