"""Processors of transformers for pictures: loading without video parts, tokens by picture size, pixels, positions."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import require_package
from automodel_cli.models import transformers_compat
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub import bundled_configs, source
from automodel_cli.models.tokenizer import load_tokenizer
from automodel_cli.models.vision import processor_compat
from automodel_cli.models.vision.front import TYPE_IDS, composite_on_meta
from automodel_cli.models.vision.nodes import IMAGE, START, STOP, GemmaProcessor, QwenProcessor, image_tokenizer
from automodel_cli.models.vision.small import placeholder_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_GEMMA_NEWLINES = {"\n\n": 108}  # the processor writes this token of the published vocabulary around a picture
_KEYS = ("model.vision.processor",)
_BLANK = 32  # pixels of the side of the blank picture, before the processor resizes it


def load_processor(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the processor of transformers. Raises ConfigError if there is none, or if Pillow is not installed."""
    assert config.vision is not None
    require_package("PIL", "a recipe with pictures", install="pillow", keys=("model.vision",))
    chosen = config.vision.processor or config.pretrained
    if chosen is None:
        raise ConfigError(
            "a model with random weights has no image processor",
            code="missing_key",
            keys=("model.vision.processor",),
            fix="model.vision.processor=<folder or hub id with preprocessor_config.json>",
        )
    if not isinstance(chosen, str):
        return chosen.build_processor(tokenizer)
    try:
        with transformers_compat.quiet():
            return processor_compat.images_only_processor(chosen, config.revision, tokenizer)
    except Exception as error:  # processors raise any class, for packages and for files
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, ImportError) and "torchvision" in reason.lower():  # Pixtral has no other code
            require_package("torchvision", f"the image processor of {chosen}", install="torchvision", keys=_KEYS)
        raise ConfigError(
            f"the image processor of {chosen} cannot be loaded: {reason}",
            code="model_not_found",
            keys=("model.vision.processor",),
            fix="model.vision.processor=<folder with preprocessor_config.json and processor_config.json>",
        ) from error


class FamilyProcessor:
    """Tokens and inputs of pictures for one model (`data/pictures/reader.PictureProcessor`)."""

    def __init__(self, processor: Any, composite_config: PretrainedConfig):
        """Raises ConfigError if the processor does not fit the model."""
        self.processor = processor
        self._set_model(composite_config)
        self.original_placeholder = self.placeholder
        self.marker = int(processor.tokenizer.convert_tokens_to_ids(processor.image_token))
        self.takes = frozenset(inspect.signature(self._meta.base_model.forward).parameters)
        self.has_grid = self._rope_index is not None
        self._image_settings = _image_settings(processor)
        self._expanded = functools.lru_cache(maxsize=4096)(self._expand)
        ids = self.replacement(_BLANK, _BLANK)
        if not (ids == self.placeholder).any():
            raise ConfigError(
                f"the image processor writes no token {self.placeholder}, which is the image token of the model",
                code="not_supported_by_model",
                keys=("model.vision.processor",),
                fix="model.vision.processor=null",
            )

    def resized(self, small: PretrainedConfig) -> FamilyProcessor:
        """Return the same processor for a small copy of the model, with another placeholder."""
        other = copy.copy(self)
        other._set_model(small)
        return other

    def _set_model(self, composite_config: PretrainedConfig) -> None:
        self._meta = composite_on_meta(composite_config, torch.float32)
        self._rope_index = getattr(self._meta.base_model, "get_rope_index", None)
        rope_index = self._rope_index
        self._rope_names = frozenset(() if rope_index is None else inspect.signature(rope_index).parameters)
        self.placeholder = placeholder_of(composite_config)

    def cache_key(self) -> str:
        import transformers

        text = f"{transformers.__version__} {self.processor.image_processor.to_json_string()} {self.placeholder} "
        text += " ".join(map(str, self.replacement(_BLANK, _BLANK).tolist()))
        return hashlib.sha256(text.encode()).hexdigest()

    def replacement(self, height: int, width: int) -> np.ndarray:
        return self._expanded(height, width)[0]

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        return self._expanded(height, width)[1]

    def _expand(self, height: int, width: int) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Let the processor expand its image token for a white picture. Tokens and grid depend on the size only."""
        from PIL import Image

        image = Image.new("RGB", (width, height), (255, 255, 255))
        with transformers_compat.quiet():
            output = self.processor(text=[self.processor.image_token], images=[[image]], add_special_tokens=False)
        ids = output["input_ids"][0]
        grid = output["image_grid_thw"][0] if "image_grid_thw" in output else (0, 0, 0)
        time, rows, columns = (int(number) for number in grid)
        return np.asarray(ids.tolist() if isinstance(ids, Tensor) else ids, np.int32), (time, rows, columns)

    def inputs(self, images: Sequence[object]) -> dict[str, Tensor]:
        output = self.processor.image_processor([list(images)], **self._image_settings, return_tensors="pt")
        return {name: value for name, value in output.items() if name in self.takes}

    def keywords(self, ids_BT: Tensor, images: Sequence[object]) -> dict[str, Tensor]:
        """Return the keywords of the stock model beside the ids, for a document with these pictures."""
        types = {name: (ids_BT == self.placeholder).long() for name in TYPE_IDS if name in self.takes}
        return types | (self.inputs(images) if images else {})

    def positions(self, ids_T: Tensor, grid_N3: Tensor) -> Tensor | None:
        if self._rope_index is None:
            return None
        ids_BT = ids_T[None]
        given = {name: (ids_BT == self.placeholder).int() for name in TYPE_IDS if name in self._rope_names}
        if "image_grid_thw" in self._rope_names:
            given["image_grid_thw"] = grid_N3
        positions_3BT: Tensor = self._rope_index(input_ids=ids_BT, **given)[0]
        return positions_3BT[:, 0]

    @functools.cached_property
    def _blank(self) -> tuple[Tensor, dict[str, Tensor]]:
        from PIL import Image

        image = Image.new("RGB", (_BLANK, _BLANK), (255, 255, 255))
        ids = self.replacement(_BLANK, _BLANK)
        return torch.from_numpy(ids.astype(np.int64)), self.inputs([image])

    def blank(self) -> tuple[Tensor, dict[str, Tensor]]:
        return self._blank


def _image_settings(processor: Any) -> dict[str, object]:
    """Return the keywords that a processor passes to its image processor (Pixtral: the size of merged patches)."""
    from PIL import Image

    own, found = processor.image_processor, {}

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(own, name)

        def __call__(self, *images: object, **settings: object) -> Any:
            found.update(settings)
            return own(*images, **settings)

    processor.image_processor = Recorder()
    try:
        with transformers_compat.quiet():
            processor(text=[processor.image_token], images=[[Image.new("RGB", (_BLANK, _BLANK))]])
    finally:
        processor.image_processor = own
    return {name: value for name, value in found.items() if name not in ("images", "return_tensors")}


_loaded: dict[str, FamilyProcessor] = {}
"""The processors of this process, by model section. Later steps of a start use the one of data preparation."""


def picture_processor(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> FamilyProcessor:
    """Return the processor of the model section, around the tokenizer of the run."""
    found = FamilyProcessor(load_processor(config, tokenizer), source.composite_config(config))
    _loaded[repr(config)] = found
    return found


def shared_processor(config: ModelConfig) -> FamilyProcessor:
    """Return the processor of the model section that this process has, else load it.

    The processor of a bundled config is made from the fields of the config, because `plan` and `dryrun` need no
    network. Raises ConfigError as `picture_processor` does.
    """
    found = _loaded.get(repr(config))
    if found is None:
        found = _of_bundled(config) or picture_processor(config, load_tokenizer(config))
        _loaded[repr(config)] = found
    return found


def _of_bundled(config: ModelConfig) -> FamilyProcessor | None:
    """Return the processor of a bundled config of Qwen3-VL or Gemma 3. None: it is not one."""
    fields = None if config.pretrained is None else bundled_configs.fields(config.pretrained, config.revision)
    if fields is None or (config.vision is not None and config.vision.processor is not None):
        return None
    vision = fields["vision_config"]
    if fields["model_type"].startswith("qwen3_vl"):
        qwen = QwenProcessor(vision["patch_size"], vision["spatial_merge_size"], vision["temporal_patch_size"])
        made = qwen.build_processor(image_tokenizer({IMAGE: fields["image_token_id"]}))
    elif fields["model_type"] == "gemma3":
        ids = {START: "boi_token_index", STOP: "eoi_token_index", IMAGE: "image_token_index"}
        tokenizer = image_tokenizer({token: fields[name] for token, name in ids.items()} | _GEMMA_NEWLINES)
        made = GemmaProcessor(vision["image_size"], fields["mm_tokens_per_image"]).build_processor(tokenizer)
    else:
        return None
    return FamilyProcessor(made, source.composite_config(config))
