"""Rules of recipes with pictures. Torch-free."""

from __future__ import annotations

from automodel_cli.config.diagnostics import format_value
from automodel_cli.config.errors import ConfigError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.formats.unused_columns import PICTURES
from automodel_cli.distributed.strategies.base import Strategy
from automodel_cli.distributed.strategies.ddp.config import DDPConfig
from automodel_cli.distributed.strategies.fsdp2.config import FSDP2Config
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.vision.config import VisionConfig


def refuse_vision(kind: str, model: ModelConfig, data: DataConfig, *, may_read: bool) -> None:
    """Raise ConfigError if a recipe without pictures has settings for them. `may_read`: model.vision is supported."""
    if model.vision is not None:
        raise ConfigError(
            f"model.vision is not supported by recipes of kind {kind}, which read text only",
            code="unsupported_combination",
            keys=("model.vision",),
            fix="model.vision=null, or a config that begins with `defaults: [vlm, _self_]`",
        )
    for key, remove in _picture_settings(data).items():
        raise ConfigError(
            f"{key} has no effect in recipes of kind {kind}"
            + (", unless model.vision is set" if may_read else ", which read text only"),
            code="no_effect",
            keys=(key,),
            fix=f"model.vision={{}}, or {remove}" if may_read else remove,
        )


def _picture_settings(data: DataConfig) -> dict[str, str]:
    """Return the keys of `data` that are set and concern pictures, each with the override that removes it."""
    defaults = {name: getattr(type(data), name) for name in ("media_dir", "max_image_pixels", "picture_memory_gib")}
    found = {
        f"data.{name}": f"data.{name}={format_value(default)}"
        for name, default in defaults.items()
        if getattr(data, name) != default
    }
    mappings = {"data": data.column_mapping}
    mappings |= {f"data.datasets.{i}": source.column_mapping for i, source in enumerate(data.datasets or ())}
    columns = [f"{section}.column_mapping.{PICTURES[0]}" for section, names in mappings.items() if PICTURES[0] in names]
    return found | {key: f"~{key}" for key in columns}


def check_vision(kind: str, model: ModelConfig, data: DataConfig, parallelizer: Strategy) -> None:
    """Raise ConfigError if a recipe with pictures has settings that do not support them."""
    vision = model.vision
    if vision is None:
        raise ConfigError(
            f"recipes of kind {kind} read pictures, but model.vision is null",
            code="requires_setting",
            keys=("model.vision",),
            fix="model.vision={}",
        )
    _check_parallelizer(parallelizer)
    _check_model(model, parallelizer)
    if vision.text == "frozen" and vision.front_is_frozen:
        raise ConfigError(
            "tower, projector and text are all frozen, so nothing is trained",
            code="nothing_to_train",
            keys=("model.vision.tower", "model.vision.projector", "model.vision.text"),
            fix=f"model.vision.projector={'trained' if model.lora is None else 'adapters'}",
        )
    if data.loss_mask == "all":
        raise ConfigError(
            "data.loss_mask=all is not supported with pictures, because it would train the tokens around them",
            code="unsupported_combination",
            keys=("data.loss_mask", "model.vision"),
            fix="data.loss_mask=assistant",
        )
    if data.packing == "wrapped" or data.truncation not in ("drop", "error"):
        raise ConfigError(
            f"data.packing={data.packing} with data.truncation={data.truncation} is not supported with "
            "pictures, because it cuts documents, and no cut may be inside a picture",
            code="unsupported_combination",
            keys=("data.packing", "data.truncation"),
            fix=data.keep_whole("drop"),
        )


def _check_parallelizer(parallelizer: Strategy) -> None:
    if not isinstance(parallelizer, (FSDP2Config, DDPConfig)):
        raise ConfigError(
            f"{type(parallelizer).__name__} is not supported with pictures, because its loading, checkpoints and "
            "export have not been run with a vision tower",
            code="unsupported_combination",
            keys=("parallelizer", "model.vision"),
            fix="parallelizer=fsdp2",
        )

    if isinstance(parallelizer, DDPConfig) and not parallelizer.find_unused_parameters:
        raise ConfigError(
            "parallelizer=ddp needs find_unused_parameters=true with pictures, because some towers have layers after "
            "the one whose features are used",
            code="requires_setting",
            keys=("parallelizer.find_unused_parameters", "model.vision"),
            fix="parallelizer.find_unused_parameters=true",
        )


def _check_model(model: ModelConfig, parallelizer: Strategy) -> None:
    vision = model.vision
    assert vision is not None
    refused = {
        "mtp": model.mtp is not None,
        "fp8": model.fp8 is not None,
        "transformer_engine": model.transformer_engine is not None,
        "gguf_file": model.gguf_file is not None,
    }
    for name in (name for name, is_set in refused.items() if is_set):
        raise ConfigError(
            f"model.{name} is not supported with pictures, because the front end does not apply it",
            code="unsupported_combination",
            keys=(f"model.{name}", "model.vision"),
            fix=f"model.{name}=null",
        )
    if model.attn_implementation != "packed":
        raise ConfigError(
            f"model.attn_implementation={model.attn_implementation} is not supported with pictures. The text model "
            "needs packed attention",
            code="unsupported_combination",
            keys=("model.attn_implementation", "model.vision"),
            fix="model.attn_implementation=packed",
        )
    _check_adapters(model, vision)
    if parallelizer.enable_compile is not False:
        raise ConfigError(
            f"parallelizer.enable_compile={parallelizer.enable_compile} is not supported with pictures, whose "
            "sizes change the shapes of the tower in every batch",
            code="unsupported_combination",
            keys=("parallelizer.enable_compile", "model.vision"),
            fix="parallelizer.enable_compile=false",
        )


def _check_adapters(model: ModelConfig, vision: VisionConfig) -> None:
    parts = {"tower": vision.tower, "projector": vision.projector}
    adapted = [f"model.vision.{name}" for name, choice in parts.items() if choice == "adapters"]
    trained = [f"model.vision.{name}" for name, choice in parts.items() if choice == "trained"]
    if model.lora is None and adapted:
        raise ConfigError(
            f"{adapted[0]}=adapters requires model.lora, but it is null",
            code="requires_setting",
            keys=(adapted[0], "model.lora"),
            fix=f"{' '.join(['model.lora={}', *_set(trained, 'frozen')])}, or {' '.join(_set(adapted, 'trained'))}",
        )
    if model.lora is not None and trained:
        raise ConfigError(
            f"{trained[0]}=trained is not supported with model.lora, which trains adapters only",
            code="requires_setting",
            keys=(trained[0], "model.lora"),
            fix=f"{' '.join(_set(trained, 'frozen'))}, or {' '.join(_set(trained, 'adapters'))}",
        )


def _set(keys: list[str], choice: str) -> list[str]:
    return [f"{key}={choice}" for key in keys]
