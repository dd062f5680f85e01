"""Data of a recipe with pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from automodel_cli.data.config import DataConfig
    from automodel_cli.data.pictures.reader import PictureSupport
    from automodel_cli.data.pictures.rows import PictureRows
    from automodel_cli.models.config import ModelConfig


def picture_support(model: ModelConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PictureSupport:
    """Return what reads pictures of rows for a model with `model.vision`. The tokenizer gets the chat template of the
    processor if it has none. Raises ConfigError for unsupported models."""
    from automodel_cli.data.pictures.reader import PictureSupport
    from automodel_cli.models.hub.source import composite_config
    from automodel_cli.models.vision.probe import probe_pictures
    from automodel_cli.models.vision.processor import picture_processor
    from automodel_cli.models.vision.sharing import shares_pictures
    from automodel_cli.run.tower_cost import image_token_cost

    processor, whole_config = picture_processor(model, tokenizer), composite_config(model)
    if tokenizer.chat_template is None:  # repositories may store it with the processor only
        tokenizer.chat_template = getattr(processor.processor, "chat_template", None)
    probe_pictures(whole_config, processor)
    assert model.vision is not None, "`check_vision` requires it"
    return PictureSupport(
        picture_rows(data),
        processor,
        data.picture_memory_gib * 2**30,
        image_token_cost(whole_config, model.vision, processor),
        lambda: shares_pictures(whole_config, processor),
    )


def picture_rows(data: DataConfig) -> PictureRows:
    """Return what finds the pictures of the rows of a data section."""
    from automodel_cli.data.pictures.rows import PictureRows

    return PictureRows(data.media_dir or _folder_of(data.path), data.max_image_pixels)


def _folder_of(path: str | None) -> str:
    """Return the folder of a local file or folder of rows, else the working directory."""
    if path is None or not Path(path).exists():
        return ""
    return str(path if Path(path).is_dir() else Path(path).parent)
