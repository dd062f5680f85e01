"""Cached teacher log-probs: the most likely tokens at every label position, stored with the prepared data.

Size on disk: 8 bytes for each of `top_k` tokens at every token of the data. Host memory during the computation is three
times as large. A file belongs to one dataset, one content of the teacher's files and one `top_k`.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.data.preparation.dataset import PackedDataset
from automodel_cli.models.hub.source import hf_config, model_files
from automodel_cli.models.teacher_config import TeacherConfig
from automodel_cli.run.frozen_models.logprob_cache import RowCache, RowScores, content_of
from automodel_cli.run.frozen_models.teacher import add_teacher_logprobs, build_teacher, check_vocabulary

if TYPE_CHECKING:
    from automodel_cli.data.batch import Columns
    from automodel_cli.run.trainer import Trainer

_BOTH = "teacher_BT2N"
"""Log-probs and then ids of the tokens, as the cache has them: ids below 2^24 are exact in float32."""


def cached_teacher(session: Trainer, config: TeacherConfig, top_k: int | None) -> Columns:
    """`teacher_ids_BTN` and `teacher_logprobs_BTN` for the batches of this run. The teacher is in memory while rows are
    measured that the cache lacks, and not after. Collective."""
    check_vocabulary(session, config)
    vocabulary: int = hf_config(config.as_model()).get_text_config().vocab_size
    count = vocabulary if top_k is None else min(top_k, vocabulary)

    def scorer() -> RowScores:
        stages = build_teacher(session, config).stages

        def measure(batches: Sequence[Batch]) -> list[Tensor]:
            batches_with_teacher = add_teacher_logprobs(stages, batches, count, session.mesh.device)
            names = ("teacher_logprobs_BTN", "teacher_ids_BTN")
            return [torch.cat([batch.extra[name].float() for name in names], -1) for batch in batches_with_teacher]

        return RowScores(measure, stages.forward_size(session.recipe.train.num_microbatches(session.mesh.dp_size)))

    def key(rows: PackedDataset, root: Path) -> str:
        named_by_content = dict.fromkeys(("pretrained", "revision"))
        ingredients = {
            "rows": [store.content for store in rows.stores],
            "teacher": sorted({**dataclasses.asdict(config), **named_by_content}.items()),
            "files": [[path.name, content_of(path, root)] for path in model_files(config.as_model())],
            "libraries": [torch.__version__, transformers.__version__],
            "dtype": str(session.recipe.compute_dtype),
            "top_k": count,
        }
        return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()[:32]

    RowCache(session, "teacher", key, "teacher log-probs", scorer, width=2 * count).attach_all(_BOTH)
    gc.collect()  # the teacher's modules refer to one another
    if session.mesh.device.type == "cuda":
        torch.cuda.empty_cache()
    return lambda batches: [_split(batch, count) for batch in batches]


def _split(batch: Batch, count: int) -> Batch:
    logprobs_BTN, ids_BTN = batch.extra[_BOTH].split(count, -1)
    extra = {name: column for name, column in batch.extra.items() if name != _BOTH}
    return (
        dataclasses.replace(batch, extra=extra)
        .to(batch.input_ids_BT.device)
        .with_columns(teacher_logprobs_BTN=logprobs_BTN, teacher_ids_BTN=ids_BTN.long())
    )
