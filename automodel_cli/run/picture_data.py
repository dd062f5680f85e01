"""Data of a recipe with pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from automodel_cli.data.preparation.pipeline import PreparedData
    from automodel_cli.run.recipe import Recipe


def prepare_with_pictures(recipe: Recipe, tokenizer: Any) -> PreparedData:
    """Prepare rows with pictures for a recipe with `model.vision`. Raises ConfigError for unsupported models."""
    from automodel_cli.data.pictures.reader import PictureSupport
    from automodel_cli.data.pictures.rows import PictureRows
    from automodel_cli.data.preparation.pipeline import prepare_data
    from automodel_cli.models.hub.source import composite_config, stop_ids
    from automodel_cli.models.vision.probe import probe_pictures
    from automodel_cli.models.vision.processor import picture_processor
    from automodel_cli.models.vision.sharing import shares_pictures
    from automodel_cli.run.tower_cost import image_token_cost

    model, data = recipe.model, recipe.data
    processor, whole_config = picture_processor(model, tokenizer), composite_config(model)
    if tokenizer.chat_template is None:  # repositories may store it with the processor only
        tokenizer.chat_template = getattr(processor.processor, "chat_template", None)
    probe_pictures(whole_config, processor)
    assert model.vision is not None, "`check_vision` requires it"
    support = PictureSupport(
        PictureRows(data.media_dir or _folder_of(data.path), data.max_image_pixels),
        processor,
        data.picture_memory_gib * 2**30,
        image_token_cost(whole_config, model.vision, processor),
        lambda: shares_pictures(whole_config, processor),
    )
    return prepare_data(
        data,
        tokenizer,
        seed=recipe.seed,
        preferences=recipe.data_kind == "preferences",
        stop_ids=stop_ids(model),
        pictures=support,
    )


def _folder_of(path: str | None) -> str:
    """Return the folder of a local file or folder of rows, else the working directory."""
    if path is None or not Path(path).exists():
        return ""
    return str(path if Path(path).is_dir() else Path(path).parent)
