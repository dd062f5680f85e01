"""Write docs/support_vision.md: which image-text families of transformers train on text and on pictures.

Every family is built tiny from its default config and probed with the checks of a run, as `support_table.py` does.
The image processor is the family's own, for pictures of the size of the tower. Its number of tokens for a picture is
that of the features that the composite computes, so that no tokenizer is needed. Some processors need torchvision.

    python scripts/support_vision.py [--families qwen3_vl,llava] [--output docs/support_vision.md]
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import inspect
import re
import resource
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from support_table import measure, short, with_usual_fields
from torch import Tensor
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PretrainedConfig
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.utils import is_torchvision_available

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.tensor_parallel.apply import cut_parameters
from automodel_cli.models import transformers_compat
from automodel_cli.models.builder import part_of
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub.multimodal_backbone import text_config
from automodel_cli.models.packing_support import probe_packing
from automodel_cli.models.vision.probe import probe_pictures
from automodel_cli.models.vision.processor import FamilyProcessor
from automodel_cli.models.vision.small import build_composite, small_composite
from automodel_cli.pipelining.cut.picture_split import layers_of_first_stage
from automodel_cli.rollout.engines.decoding_check import check_decoding

UNMEASURED = ("a small copy of the model does not run", "cannot be built")
SECONDS, MOST_BYTES = 20, 8 << 30
CAPABILITIES = ("text", "pictures", "pipeline", "tp", "sampling")
# Families without a mapping of their own use the image processor of a relative.
LIKE = {"qwen3_vl_moe": "qwen3_vl", "glm4v_moe": "glm4v", "diffusion_gemma": "gemma4", "mistral4": "mistral3",
        "glm_ocr": "glm46v", "fast_vlm": "llava"}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_interleaved": True}
SECTIONS = {"ernie4_5_vl_moe": [22, 22, 20]}
"""Rotary dimensions of time, height and width, as published. The two of a plane are equal here."""
# Default sizes of the library that do not fit each other, as (part, field): a size that does.
FITTING: dict[str, dict[tuple[str, str], int]] = {
    "aya_vision": {("vision_config", "num_attention_heads"): 16, ("vision_config", "image_size"): 364},
    "gemma3": {("", "mm_tokens_per_image"): 49},
    "shieldgemma2": {("", "mm_tokens_per_image"): 49},
    "smolvlm": {("vision_config", "patch_size"): 16},
    "idefics3": {("vision_config", "patch_size"): 16},
}


@dataclass(frozen=True)
class Row:
    """One family: `yes`, `no` or `unknown` for each capability, with the reason where it is not yes."""

    family: str
    model_class: str
    verdicts: tuple[str, ...]
    notes: tuple[str, ...]


def families() -> Iterator[tuple[str, type[PretrainedConfig], Any]]:
    """(model_type, config class, composite class) of every image-text family."""
    listed: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.items()
    for config_class, found in sorted(listed, key=lambda item: item[0].model_type):
        yield config_class.model_type, config_class, found[0] if isinstance(found, tuple) else found


class ImagesOnly(FamilyProcessor):
    """The image processor of a family without its tokenizer."""

    def __init__(self, image_processor: Any, composite_config: PretrainedConfig):
        self.image_processor = image_processor
        self._image_settings: dict[str, Any] = {}
        self.processor: Any = self
        self._set_model(composite_config)
        self.original_placeholder = self.placeholder
        self.takes = frozenset(inspect.signature(self._meta.base_model.forward).parameters)
        self.has_grid = self._rope_index is not None
        self._small = build_composite(small_composite(composite_config))
        self._expanded = functools.lru_cache(maxsize=64)(self._expand)

    def cache_key(self) -> str:
        return hashlib.sha256(self.image_processor.to_json_string().encode()).hexdigest()

    def _expand(self, height: int, width: int) -> tuple[np.ndarray, tuple[int, int, int]]:
        from PIL import Image

        inputs = self.inputs([Image.new("RGB", (width, height), (255, 255, 255))])
        grid = inputs["image_grid_thw"][0].tolist() if "image_grid_thw" in inputs else (0, 0, 0)
        ids = np.full(self._num_features(inputs), self.original_placeholder, np.int32)
        return ids, (int(grid[0]), int(grid[1]), int(grid[2]))

    @torch.no_grad()
    def _num_features(self, inputs: dict[str, Tensor]) -> int:
        holder = self._small if hasattr(self._small, "get_image_features") else self._small.base_model
        takes = inspect.signature(holder.get_image_features).parameters
        found = holder.get_image_features(**{name: value for name, value in inputs.items() if name in takes})
        features = getattr(found, "pooler_output", found)
        pieces = features if isinstance(features, (list, tuple)) else [features]
        return sum(piece.numel() // piece.shape[-1] for piece in pieces)


def image_processor_names(family: str) -> dict[str, str] | None:
    """Return the image processors of a family by backend, `pil` and `torchvision`."""
    found: Any = IMAGE_PROCESSOR_MAPPING_NAMES
    names: dict[str, str] | None = found.get(family) or found.get(LIKE.get(family, ""))
    return names


def image_processor_of(family: str, config: PretrainedConfig) -> Any:
    """Return the family's image processor, for the sizes of the config. Raises ConfigError if a package is missing."""
    names = image_processor_names(family)
    if not names:
        raise ConfigError("the library lists no image processor for it", code="not_measured")
    if "pil" not in names and not is_torchvision_available():
        raise ConfigError(f"{names['torchvision']} needs torchvision", code="not_measured")
    cls: Any = getattr(transformers, names.get("pil") or names["torchvision"])
    vision = next((v for n, v in vars(config).items() if hasattr(v, "get_text_config") and "vision" in n), config)
    size = getattr(vision, "image_size", None)
    side = size[0] if isinstance(size, (list, tuple)) else size
    default: Any = cls()
    chosen: dict[str, Any] = {}
    given = getattr(default, "size", None)
    keys = {name for name in ("height", "width", "shortest_edge", "longest_edge") if getattr(given, name, None)}
    if isinstance(side, int) and keys == {"height", "width"}:
        chosen["size"] = {"height": side, "width": side}
    elif isinstance(side, int) and keys == {"shortest_edge"}:
        chosen["size"] = {"shortest_edge": side}
    elif isinstance(side, int) and getattr(default, "max_image_size", None):
        chosen |= {"size": {"longest_edge": 2 * side}, "max_image_size": {"longest_edge": side}}
    if isinstance(side, int) and getattr(default, "crop_size", None) is not None:
        chosen["crop_size"] = {"height": side, "width": side}
    for name, own in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size"),
                      ("temporal_patch_size", "temporal_patch_size")):  # fmt: skip
        value = getattr(vision, own, None)
        if isinstance(value, int) and isinstance(getattr(default, name, None), int):
            chosen[name] = value
    if isinstance(getattr(default, "patch_size", None), dict) or hasattr(
        getattr(default, "patch_size", None), "height"
    ):
        merged = vision.patch_size * getattr(config, "spatial_merge_size", 1)  # Pixtral: sides are multiples of it
        chosen["patch_size"] = {"height": merged, "width": merged}
    return cls(**chosen)


def default_config(config_class: type[PretrainedConfig]) -> PretrainedConfig:
    """Return the default config of a family, with fields that every published config has."""
    config = config_class()
    if getattr(config, "vision_config", "") is None:  # Gemma 4: a default config has no tower
        config.vision_config = config_class.sub_configs["vision_config"]()
    config = with_usual_fields(config)
    for (part, name), value in FITTING.get(config.model_type, {}).items():
        setattr(getattr(config, part) if part else config, name, value)
    text: Any = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    has_grid = any(hasattr(config, f"{name}_start_token_id") for name in ("vision", "image"))
    if has_grid and isinstance(rope, dict) and "mrope_section" not in rope and "full_attention" not in rope:
        text.rope_parameters = {**_MROPE, "mrope_section": SECTIONS.get(config.model_type, [24, 20, 20]), **rope}
    return config


def row_of(family: str, config_class: type[PretrainedConfig], composite_class: Any) -> Row:
    """Every capability of a family."""
    found: dict[str, tuple[str, str]] = dict.fromkeys(CAPABILITIES, ("unknown", ""))
    kept: dict[str, Any] = {}

    def text() -> None:
        kept["config"] = default_config(config_class)
        if kept["config"].is_encoder_decoder:
            raise ConfigError("it is an encoder-decoder", code="not_supported_by_model")
        kept["text"] = text_config(copy.deepcopy(kept["config"]))
        if kept["text"].get_text_config() is not kept["text"]:
            reason = "its text model has no causal LM class, and none can be made"
            raise ConfigError(reason, code="not_supported_by_model")
        probe_packing(copy.deepcopy(kept["text"]))

    def pictures() -> None:
        with transformers_compat.quiet():
            processor = image_processor_of(family, kept["config"])
            kept["processor"] = ImagesOnly(processor, kept["config"])
        probe_pictures(kept["config"], kept["processor"])

    def tensor_parallel() -> None:
        part = part_of(copy.deepcopy(kept["text"]), ModelConfig(pretrained="-"), device="meta")
        if not list(cut_parameters(part.model, FSDP2Config().axis_options(), 2)):
            raise ConfigError("no parameter has a plan", code="not_supported_by_model")

    found["text"] = measure(text, SECONDS)
    if "config" in kept and not kept["config"].is_encoder_decoder:
        found["pictures"] = measure(pictures, SECONDS)
        if found["pictures"][0] == "yes":
            found["pipeline"] = measure(lambda: layers_of_first_stage(kept["config"], kept["processor"]), SECONDS)
    if found["text"][0] == "yes":
        found["tp"] = measure(tensor_parallel, SECONDS)
        found["sampling"] = measure(lambda: check_decoding(copy.deepcopy(kept["text"])), SECONDS)
    notes = tuple(f"{what}: {short(reason)}" for what, (_, reason) in found.items() if reason)
    return judged(Row(family, composite_class.__name__, tuple(found[what][0] for what in CAPABILITIES), notes))


def judged(row: Row) -> Row:
    """Return the row with `unknown` where the small copy of the default config says nothing about the family."""
    notes = [re.sub(r"pictures are not supported for \S+ because | \(works with: .*", "", note) for note in row.notes]
    is_unknown = any(note.startswith("pictures: ") and any(w in note for w in UNMEASURED) for note in notes)
    verdicts = list(row.verdicts)
    if is_unknown:
        verdicts[CAPABILITIES.index("pictures")] = "unknown"
    return replace(row, verdicts=tuple(verdicts), notes=tuple(notes))


INTRO = """# Supported vision-language models

Image-text families of transformers are tested on a tiny copy of their default config. A run also tests your own
config before training and rejects what does not work, so this page is information and not a restriction. Families that
are absent have not been measured.

| column | yes means |
|---|---|
| text | the text model trains alone, packed, with the head of the composite |
| pictures | packed documents with several pictures, one and none give the log-probs and gradients of the unmodified \
composite on each document |
| pipeline | three stages give the log-probs and gradients of the unsplit model with pictures |
| tp | the text model has a plan of transformers, or one that was measured |
| sampling | the built-in sampler continues texts without pictures exactly |
"""


def render(rows: list[Row]) -> str:
    """Return the page."""
    totals = {what: Counter(row.verdicts[i] for row in rows) for i, what in enumerate(CAPABILITIES)}
    library, torch_version = transformers.__version__, torch.__version__.split("+")[0]
    only_torchvision = [r.family for r in rows if "pil" not in (image_processor_names(r.family) or {"pil": ""})]
    return "\n".join(
        [
            INTRO,
            f"Measured with transformers {library} and torch {torch_version} by `scripts/support_vision.py`.",
            "*Unknown*: the copy, or its image processor, cannot be built or run. Published configs can have fields",
            "that the default config lacks. Image processors run on PIL. These families have one for torchvision",
            f"only, and need it: {', '.join(only_torchvision)}.",
            "",
            f"| {len(rows)} families | yes | no | unknown |",
            "|---|--:|--:|--:|",
            *(f"| {what} | {c['yes']} | {c['no']} | {c['unknown']} |" for what, c in totals.items()),
            "",
            f"| family | class | {' | '.join(CAPABILITIES)} |",
            f"|---|---|{'---|' * len(CAPABILITIES)}",
            *(f"| {r.family} | {r.model_class} | {' | '.join(r.verdicts)} |" for r in rows),
            "",
            "## Reasons",
            "",
            *(f"- {r.family}: {'; '.join(r.notes).removesuffix('.')}." for r in rows if r.notes),
            "",
        ]
    )


def rows_of(page: str) -> list[Row]:
    """Return the rows of a rendered page."""
    notes = dict(line[2:-1].split(": ", 1) for line in page.splitlines() if line.startswith("- "))
    starts = re.compile("; (?=(?:" + "|".join(CAPABILITIES) + "): )")
    rows = []
    for line in page.splitlines():
        cells = line.strip("| ").split(" | ")
        if line.startswith("| ") and len(cells) == 2 + len(CAPABILITIES) and cells[0] != "family":
            found = tuple(starts.split(notes[cells[0]])) if cells[0] in notes else ()
            rows.append(Row(cells[0], cells[1], tuple(cells[2:]), found))
    return rows


def main() -> None:
    """Measure and write the page after each family. With `--families`, all other rows stay."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", help="comma-separated model types (default: all)")
    parser.add_argument("--output", type=Path, default=Path("docs/support_vision.md"))
    options = parser.parse_args()
    wanted = options.families.split(",") if options.families else None
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))  # some default configs are not made small
    known: dict[str, Row] = {}
    if wanted is not None and options.output.exists():
        known = {row.family: judged(row) for row in rows_of(options.output.read_text(encoding="utf-8"))}
    for family, config_class, composite_class in families():
        if wanted is None or family in wanted:
            row = known[family] = row_of(family, config_class, composite_class)
            verdicts = " ".join(f"{w} {v:8s}" for w, v in zip(CAPABILITIES, row.verdicts, strict=True))
            print(f"{family:24s} {verdicts} {'; '.join(row.notes)[:200]}", flush=True)
            rows = [known[name] for name in sorted(known)]
            options.output.write_text(render(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
