"""Processors of transformers without their video part, which requires torchvision. Supports 5.17 to 5.24."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


def images_only_processor(folder: str, revision: str | None, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The processor beside the weights. Without torchvision the library cannot make those with a video part: then one
    of the same class without it."""
    from transformers import AutoImageProcessor, AutoProcessor, ProcessorMixin
    from transformers.models.auto import processing_auto

    options: dict[str, str] = {} if revision is None else {"revision": revision}
    try:
        processor = AutoProcessor.from_pretrained(folder, **options)
        if isinstance(processor, ProcessorMixin):
            return processor
    except (ImportError, AttributeError, ValueError, OSError):
        pass
    from transformers.utils import cached_file

    names: dict[str, str | None] = {}
    for file in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        path = cached_file(folder, file, _raise_exceptions_for_missing_entries=False, **options)
        names |= {} if path is None else {file: json.loads(Path(path).read_text()).get("processor_class")}
    name = next((found for found in names.values() if found), None)
    cls = None if name is None else processing_auto.processor_class_from_name(name)
    if cls is None:
        raise ValueError(f"no file names its processor class ({', '.join(names) or 'there are none'})")
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(folder, use_fast=False, **options),
        "tokenizer": tokenizer,
        "chat_template": tokenizer.chat_template,
    }
    named = inspect.signature(cls.__init__).parameters.values()
    absent = [p.name for p in named if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    return without_video(cls)(**dict.fromkeys(absent) | parts)  # Gemma 4 requires its parts for sound and video


def name_special_tokens(tokenizer: PreTrainedTokenizerBase, tokens: dict[str, str]) -> None:
    """Give special tokens of a tokenizer the attribute names that a family's processor reads."""
    tokenizer._set_model_specific_special_tokens(special_tokens={**tokens})


def without_video(cls: Any, video_settings: Mapping[str, object] | None = None) -> Callable[..., ProcessorMixin]:
    """Return a processor class without its video part, which needs torchvision.

    `save_pretrained` writes `video_settings` as those of the part, so that `AutoProcessor` finds them.
    """

    from transformers import ProcessorMixin

    untyped: Any = ProcessorMixin

    class WithoutVideo(untyped):  # type: ignore[misc]
        def __init__(self, *args: object, video_processor: None = None, **kwargs: object):
            super().__init__(*args, **kwargs)

    class ImagesOnly(cls, WithoutVideo):  # type: ignore[misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if "video" not in name]

        def check_argument_for_proper_class(self, name: str, value: Tensor) -> object:
            return None if value is None else super().check_argument_for_proper_class(name, value)

        def save_pretrained(self, save_directory: str | Path, *args: object, **kwargs: object) -> object:
            saved = super().save_pretrained(save_directory, *args, **kwargs)
            if video_settings is not None:
                text = json.dumps(video_settings, indent=2)
                Path(save_directory, "video_preprocessor_config.json").write_text(text, encoding="utf-8")
            return saved

    ImagesOnly.__name__ = cls.__name__
    return ImagesOnly
