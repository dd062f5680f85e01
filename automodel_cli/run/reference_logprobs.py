"""Where the log-probs of the reference model come from: the model as it was loaded, before the first step.

`precomputed`: one forward pass over the rows that the run will see, before it starts; kept with the cached data, so
that a second run, or one that is resumed, finds them. Costs 4 bytes per token on disk and in host memory, and nothing
on the device. `adapters_off`: the same model with its adapters switched off, one more forward pass each step, no
memory. `frozen_copy`: a second model, sharded like the first: its parameters once more on the device (no gradients, no
optimizer), and one more forward pass each step. Only such a copy can follow the policy (`reference_update`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.data.cache import cache_root, cache_unwritable, file_hash
from automodel_cli.data.checksums import content_hash
from automodel_cli.data.dataset import DUMMY_ROW, PackedDataset
from automodel_cli.models.source import model_files
from automodel_cli.objectives.base import ReferenceSource
from automodel_cli.objectives.kto import reference_point_sums
from automodel_cli.run.scoring import ReferenceModel, logprobs_of
from automodel_cli.run.session import Columns, Session
from automodel_cli.training.memory import max_over_ranks

if TYPE_CHECKING:
    from automodel_cli.run.recipe import Recipe
    from automodel_cli.run.reference_update import ReferenceUpdate

_CHUNK = 1 << 24
"""Values summed over ranks at a time: 64 MiB of device memory."""
_BLOB = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
"""A file's id on the hub: of git for small files, SHA-256 for large ones."""


def reference_columns(session: Session, choice: ReferenceSource, update: ReferenceUpdate | None = None) -> Columns:
    """`ref_logprobs_BT` for the batches of this run. Call it while the model is still as loaded. Collective."""
    if choice == "auto" and update is not None:
        choice = "frozen_copy"
    if choice == "auto":
        choice = "adapters_off" if session.recipe.model.lora is not None else "precomputed"
    if choice == "precomputed":
        _precompute(session)
        return lambda batches: batches
    reference = ReferenceModel(session, without_adapters=choice == "adapters_off", update=update)

    def measured(batches: list[Batch]) -> list[Batch]:
        with reference as stages:
            return _with(batches, logprobs_of(stages, batches, session.mesh.device))

    return measured


def _with(batches: Sequence[Batch], logprobs: Sequence[Tensor]) -> list[Batch]:
    pairs = zip(batches, logprobs, strict=True)
    return [batch.with_columns(ref_logprobs_BT=values_BT) for batch, values_BT in pairs]


def _precompute(session: Session) -> None:
    """Attach `ref_logprobs_BT` to the rows that the run trains on and validates with. Collective."""
    recipe, loader, data = session.recipe, session.loader, session.data
    num_rows = session.num_steps * loader.global_batch_size
    _attach(session, data.train, np.unique(loader.stream.rows(0, num_rows)), "training")
    if data.validation is not None:
        limit = recipe.validation.num_batches
        seen = len(data.validation)
        if limit is not None:
            seen = min(seen, limit * recipe.train.microbatch_size * session.mesh.dp_size)
        _attach(session, data.validation, np.arange(seen), "validation")


def _attach(session: Session, rows: PackedDataset, needed: np.ndarray, name: str) -> None:
    """Read the values of the rows from the cache, measure the missing ones and add them to it. Collective."""
    # 1. one file per data set and model, the same on all ranks
    root = cache_root(session.recipe.data.cache_dir)
    key = [_key(session.recipe, rows, root) if session.is_main else None]
    dist.broadcast_object_list(key, src=0, device=torch.device("cpu"))  # one rank reads the weights for it
    path = root / "reference" / f"{key[0]}.npy"
    # 2. what this host's cache lacks: a row counts as measured if its first token has a value
    values = _read(path, rows.num_tokens)
    missing = needed[np.isnan(values[rows.token_starts[needed]])]
    # 3. caches of several hosts may lack different rows; all ranks must measure the same, so then all rows
    if _any_rank(len(missing) > 0, session):
        missing = needed if _any_rank(len(missing) < len(needed), session) else missing
    # 4. measure together, write once per host
    if _any_rank(len(missing) > 0, session):
        if session.is_main:
            print(f"reference log-probs of {len(missing):,} {name} rows", file=sys.stderr, flush=True)
        values = _measured(session, rows, values, missing)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            _write(path, values)
        dist.barrier()
        values = np.load(path, mmap_mode="r")
    rows.attach("ref_logprobs_BT", values)


def _any_rank(yes: bool, session: Session) -> bool:
    return max_over_ranks(float(yes), session.mesh.device) > 0


def _key(recipe: Recipe, rows: PackedDataset, root: Path) -> str:
    """Of the rows, of the content of the model's files (not their place), and of how the config says they compute."""
    lora = recipe.model.lora
    base = lora.base_quantization if lora is not None else "none"
    named_by_content = dict.fromkeys(("tokenizer", "pretrained", "gguf_file", "revision"))
    model = {**dataclasses.asdict(recipe.model), **named_by_content, "lora": None if base == "none" else base}
    ingredients = {
        "rows": [store.content for store in rows.stores],
        "model": repr(sorted(model.items(), key=lambda item: item[0])),
        "files": [[path.name, _content(path, root)] for path in model_files(recipe.model)],
        "libraries": [torch.__version__, transformers.__version__],
        "seed": recipe.seed,
        "dtype": str(recipe.compute_dtype),
    }
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()[:32]


def _content(path: Path, root: Path) -> str:
    """What names a file's bytes: the hub's blob id where the file is a link into its cache, else a hash."""
    blob = path.resolve()
    if blob.parent.name == "blobs" and _BLOB.fullmatch(blob.name):
        return blob.name
    return file_hash(path, root)


def _read(path: Path, num_tokens: int) -> np.ndarray:
    """The cached values of all rows, nan where a row was never measured; all nan where the file is not as written."""
    note = path.with_suffix(".xxh3")
    if path.exists() and note.exists() and note.read_text() == content_hash(path):
        values = np.load(path, mmap_mode="r")
        if values.shape == (num_tokens,):
            return values
    return np.full(num_tokens, np.nan, np.float32)


def _write(path: Path, values: np.ndarray) -> None:
    """Values, then the hash of their file: a reader in between finds none that fits, and measures again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, note = (path.with_name(f"{path.stem}.tmp-{os.getpid()}{suffix}") for suffix in (".npy", ".xxh3"))
    try:
        np.save(temporary, values)
        note.write_text(content_hash(temporary))
        os.replace(temporary, path)
        os.replace(note, path.with_suffix(".xxh3"))
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise cache_unwritable(path.parent, error) from error


def _measured(session: Session, rows: PackedDataset, values: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """`values` with those of the missing rows filled in, on every rank."""
    mesh, train = session.mesh, session.recipe.train
    per_call = session.model.stages.forward_size(train.num_microbatches(mesh.dp_size))
    unit = train.microbatch_size * mesh.dp_size * per_call
    padded = np.full(-(-len(missing) // unit) * unit, DUMMY_ROW)
    padded[: len(missing)] = missing
    mine = padded.reshape(-1, per_call, mesh.dp_size, train.microbatch_size)[:, :, mesh.dp_rank]
    found = np.zeros(rows.num_tokens, np.float32)
    for numbers in mine:
        batches = [rows.collate(of_batch) for of_batch in numbers]
        for of_batch, values_BT in zip(numbers, logprobs_of(session.model.stages, batches, mesh.device), strict=True):
            for row, values_T in zip(of_batch.tolist(), values_BT.cpu().numpy(), strict=True):
                if row != DUMMY_ROW:
                    first, last = rows.token_starts[row : row + 2]
                    found[first:last] = values_T[: last - first]
    for first in range(0, len(found), _CHUNK):
        part = torch.from_numpy(found[first : first + _CHUNK])
        found[first : first + _CHUNK] = mesh.sum_over(mesh.dp, part).cpu().numpy()
    filled = np.array(values)
    for row in missing.tolist():
        span = slice(rows.token_starts[row], rows.token_starts[row + 1])
        filled[span] = found[span]
    return filled


def reference_point(session: Session, batches: list[Batch]) -> list[Batch]:
    """`kl_baseline_1` for the batches of one step: one more forward pass of the model as it is now. Collective."""
    mesh = session.mesh
    on_device = [batch.to(mesh.device) for batch in batches]
    sums = session.model.stages.forward(on_device, reference_point_sums)
    total, count = mesh.sum_over(mesh.dp, torch.stack(sums).sum(0)).unbind()
    baseline_1 = (total / count.clamp(min=1)).clamp(min=0)[None]
    return [batch.with_columns(kl_baseline_1=baseline_1) for batch in on_device]
