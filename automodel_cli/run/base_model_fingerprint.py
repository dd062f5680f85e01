"""Fingerprint of the initial weights of a run, checked when the run resumes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from automodel_cli.config.errors import RunError
from automodel_cli.data.storage.checksums import Checksum
from automodel_cli.models.hub.source import model_files

if TYPE_CHECKING:
    from automodel_cli.models.config import ModelConfig
    from automodel_cli.run.recipe import Recipe

_END = 1 << 20  # bytes at each end of a file


def base_model_fingerprint(config: ModelConfig) -> dict[str, str] | None:
    """Return the name and the fingerprint of the initial weights, or None for random weights. Collective.

    The fingerprint covers the sizes and the first and last MiB of each file. It does not depend on the location of the
    files. Further training changes it.
    """
    fingerprints: list[dict[str, str] | None] = [None]
    if config.config is None and dist.get_rank() == 0:
        keys = ("pretrained", "gguf_file", "revision")
        named = " ".join(f"model.{key}={value}" for key in keys if (value := getattr(config, key)) is not None)
        weights = sorted(path for path in model_files(config) if path.suffix not in (".json", ".py"))
        fingerprints = [{"named": named, "fingerprint": _fingerprint(weights)}]
    dist.broadcast_object_list(fingerprints, src=0, device=torch.device("cpu"))
    return fingerprints[0]


def check_base_model_unchanged(
    recipe: Recipe, mine: Mapping[str, str] | None, theirs: Mapping[str, str] | None
) -> str | None:
    """Return a warning if the run of a checkpoint started from other weights than the config names now.

    Raises RunError if the loaded weights matter: adapters belong to their base model, and the reference model is the
    model that training started from.
    """
    if mine is None or theirs is None or mine["fingerprint"] == theirs["fingerprint"]:
        return None
    message = f"the run started from {theirs['named']}, but {mine['named']} has other weights"
    if not recipe.reads_loaded_weights:
        return f"{message}; training resumes from the weights of the checkpoint"
    if recipe.model.lora is not None:
        what = "its adapters belong"
    else:
        what = "its frozen parameters belong" if recipe.train.selects else "its reference model belongs"
    raise RunError(
        f"{message}; {what} to the original weights",
        code="checkpoint_mismatch",
        keys=("model.pretrained", "model.gguf_file"),
        fix=theirs["named"],
    )


def _fingerprint(files: list[Path]) -> str:
    digest = Checksum()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(_END))
            file.seek(max(0, size - _END))
            digest.update(file.read(_END))
    return digest.hexdigest()
