"""Source of the reference log-probs: the model before the first training step.

`precomputed`: one forward pass over the data before the run starts. The result is stored with the cached data, so later
and resumed runs read it. Costs 4 bytes per token on disk and in host memory, and nothing
on the device. `disable_adapter`: the same model with its adapters switched off, one more forward pass each step, no
memory. `frozen_copy`: a second model, sharded like the first: its parameters once more on the device (no gradients, no
optimizer), and one more forward pass each step. Only such a copy can follow the policy (`reference_sync`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor

from automodel_cli.data.batch import Batch, Columns
from automodel_cli.data.preparation.dataset import PackedDataset
from automodel_cli.models.hub.source import model_files
from automodel_cli.models.lora.pretrained import adapter_folder
from automodel_cli.objectives.base import ReferenceSource
from automodel_cli.objectives.kto import reference_point_of, reference_point_sums
from automodel_cli.run.frozen_models.logprob_cache import RowCache, RowScores, content_of
from automodel_cli.run.frozen_models.reference_model import ReferenceModel, batch_logprobs
from automodel_cli.run.trainer import Trainer

if TYPE_CHECKING:
    from automodel_cli.run.frozen_models.reference_sync import ReferenceSync
    from automodel_cli.run.recipe import Recipe


def reference_columns(session: Trainer, choice: ReferenceSource, update: ReferenceSync | None = None) -> Columns:
    """`ref_logprobs_BT` for the batches of this run. Call it while the model is still as loaded. Collective."""
    if choice == "auto" and update is not None:
        choice = "frozen_copy"
    if choice == "auto":
        lora = session.recipe.model.lora
        choice = "disable_adapter" if lora is not None and lora.starts_as_base else "precomputed"
    if choice == "precomputed":
        _precompute(session)
        return lambda batches: batches
    reference = ReferenceModel(session, without_adapters=choice == "disable_adapter", update=update)

    def measured(batches: list[Batch]) -> list[Batch]:
        with reference as stages:
            return _with(batches, batch_logprobs(stages, batches, session.mesh.device))

    return measured


def _with(batches: Sequence[Batch], logprobs: Sequence[Tensor]) -> list[Batch]:
    pairs = zip(batches, logprobs, strict=True)
    return [batch.with_columns(ref_logprobs_BT=values_BT) for batch, values_BT in pairs]


def _precompute(session: Trainer) -> None:
    """Attach `ref_logprobs_BT` to the rows that the run trains on and validates with. Collective."""
    stages, device = session.model.stages, session.mesh.device
    per_call = stages.forward_size(session.recipe.train.num_microbatches(session.mesh.dp_size))

    def scorer() -> RowScores:
        return RowScores(lambda batches: batch_logprobs(stages, batches, device), per_call)

    def key(rows: PackedDataset, root: Path) -> str:
        return _key(session.recipe, rows, root)

    RowCache(session, "reference", key, "reference log-probs", scorer).attach_all("ref_logprobs_BT")


def _key(recipe: Recipe, rows: PackedDataset, root: Path) -> str:
    """Hash of the data, of the content of the model's files (not their path), and of the compute settings."""
    lora = recipe.model.lora
    base = lora.quantization if lora is not None else "none"
    named_by_content = dict.fromkeys(("tokenizer", "pretrained", "gguf_file", "revision"))
    model = {**dataclasses.asdict(recipe.model), **named_by_content, "lora": None if base == "none" else base}
    files = model_files(recipe.model)
    if lora is not None and lora.pretrained is not None:
        files = [*files, *sorted(adapter_folder(lora.pretrained).glob("adapter_*"))]
    ingredients = {
        "rows": [store.content for store in rows.stores],
        "model": repr(sorted(model.items(), key=lambda item: item[0])),
        "files": [[path.name, content_of(path, root)] for path in files],
        "libraries": [torch.__version__, transformers.__version__],
        "pictures": None if rows.pictures is None else rows.pictures.processor.cache_key(),
        "seed": recipe.seed,
        "dtype": str(recipe.compute_dtype),
    }
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()[:32]


def reference_point(session: Trainer, batches: list[Batch]) -> list[Batch]:
    """`kl_baseline_1` for the batches of one step: one more forward pass of the model as it is now. Collective."""
    mesh = session.mesh
    on_device = [batch.to(mesh.device) for batch in batches]
    sums = session.model.stages.forward(on_device, reference_point_sums)
    baseline_1 = reference_point_of(mesh.sum_over(mesh.dp, torch.stack(sums).sum(0)))
    return [batch.with_columns(kl_baseline_1=baseline_1) for batch in on_device]
