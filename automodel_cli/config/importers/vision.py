"""Keys of other tools for models that read pictures. A draft with pictures is one of kind sft on another base."""

from __future__ import annotations

import re

from automodel_cli.config.importers.framework import Draft, KeyMapping, none

_NAMES = re.compile(
    r"(?i)([-_]vl\b|[-_]vl[-_]|\bllava|internvl|pixtral|smolvlm|idefics|qwen3\.5|gemma-?3-(4|12|27)b|glm-4\.\d+v|vsft)"
)
_CUTS = ("truncate", "split", "auto")

ROWS: dict[str, KeyMapping] = {
    "processor_type": none("found from the model's own files"),
    "processor*": none("model.vision.processor takes another folder; the pixels of pictures stand in its files"),
    "image_*": none("the processor's files decide: model.vision.processor=<folder with preprocessor_config.json>"),
    "video_*": none("no video"),
    "audio_*": none("no audio"),
}
"""Rows that tables share."""


def names_vision_model(*names: object) -> bool:
    """Return whether the name of a model or dataset is usual for pictures."""
    return any(_NAMES.search(str(name)) is not None for name in names if name)


def put_parts(draft: Draft, frozen: dict[str, tuple[str, bool]]) -> None:
    """Set `model.vision`. `frozen`: part -> (source key, whether the part is frozen there)."""
    for part, (key, is_frozen) in frozen.items():
        draft.put(f"model.vision.{part}", "frozen" if is_frozen else "trained", key)


def finish_if_any(draft: Draft) -> None:
    """Replace settings that recipes with pictures do not have. No effect without pictures."""
    if not draft.reads_pictures:
        return
    if draft.values.get("data.truncation", "truncate") in _CUTS:
        theirs = draft.theirs.get("data.truncation", [])
        draft.put("data.truncation", "drop", *theirs, note="no document with pictures is cut; longer ones are dropped")
    if draft.values.get("data.packing") == "wrapped":
        draft.put("data.packing", "best_fit", *draft.theirs["data.packing"], note="no document with pictures is cut")
    if draft.values.get("data.loss_mask") == "all":
        theirs = draft.theirs["data.loss_mask"]
        draft.put("data.loss_mask", "assistant", *theirs, note="image tokens are never trained, nor what stands around")
        draft.undecided.append("data.loss_mask: with pictures only assistant turns are trained")
    if draft.values.get("parallelizer.enable_compile"):
        theirs = draft.theirs["parallelizer.enable_compile"]
        draft.put("parallelizer.enable_compile", False, *theirs, note="sizes of pictures change shapes in every batch")
    targets = draft.values.get("model.lora.target_modules")
    if isinstance(targets, str) and targets != "all-linear":  # a pattern over names of the whole model
        theirs = draft.theirs["model.lora.target_modules"]
        draft.put("model.lora.target_modules", "all-linear", *theirs, note="all-linear means the text model")
        draft.undecided.append("model.lora.target_modules: a list of endings selects fewer layers of the text model")
    if any(key.startswith("model.lora.") for key in draft.values):
        for part in ("tower", "projector"):
            key = f"model.vision.{part}"
            theirs = draft.theirs.get(key, [])
            if draft.values.get(key) == "trained" and theirs:
                draft.undecided.append(f"{', '.join(theirs)}: with model.lora tower and projector must be frozen")
            draft.put(key, "frozen", *theirs, note="adapters are those of the text model")
