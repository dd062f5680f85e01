"""Dry runs of models that read pictures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.data.pictures.reader import PictureReader
from automodel_cli.dryrun.synthetic_batches import document_lengths, microbatches
from automodel_cli.dryrun.synthetic_pictures import Document, Size, assumed_document, cut
from automodel_cli.dryrun.types import RankResult, TraceRequest
from automodel_cli.dryrun.worker import load
from automodel_cli.models.hub import bundled_configs
from automodel_cli.models.vision.processor import FamilyProcessor, shared_processor
from tests.dryrun.traces import trace_in_fork
from tests.errors import raises
from tests.vision import config_of, noise, processor_of

KINDS = ("qwen3_vl", "llava")


def processor(kind: str) -> FamilyProcessor:
    return FamilyProcessor(processor_of(kind), config_of(kind))


class _Table:
    """The part of a table of pictures that positions read."""

    def __init__(self, of: FamilyProcessor, sizes: list[Size]):
        self.grids = [of.grid(*size) for size in sizes]

    def grid(self, number: int) -> Any:
        return self.grids[number]


@pytest.mark.parametrize("kind", KINDS)
def test_documents_show_as_many_image_tokens_as_fit(kind: str) -> None:
    of = processor(kind)
    found = assumed_document(of, 60, 80, None)
    shown = [len(of.replacement(*size)) for size in found.pictures]
    assert found.tokens == 60 and 52 - min(shown) < sum(shown) <= 52
    with raises(ConfigError, "out_of_range", keys=("--picture", "data.seq_len")):
        assumed_document(of, 8, 16, "32x32")
    with raises(ConfigError, "wrong_type", keys=("--picture",), values=("32",)):
        assumed_document(of, 60, 80, "32")
    short = cut(Document(60, (Size(16, 16),) * 2), len(of.replacement(16, 16)) + 8, of)
    assert short.pictures == (Size(16, 16),)


def test_a_microbatch_has_the_ids_positions_and_shapes_that_data_would_have() -> None:
    recipe: Any = load(TraceRequest("qwen3_vl_8b_lora_tiny", (), 1))
    of = shared_processor(recipe.model)
    documents = replace(document_lengths(recipe, 60, picture="24x40"), processor=of)
    (one,) = microbatches(recipe, documents, 1)
    assert one.pictures is not None and one.pictures.positions is not None
    sizes = [size for _ in range(3) for size in documents.documents[0].pictures]
    run = torch.from_numpy(of.replacement(40, 24).astype("int64"))
    assert torch.equal(one.input_ids[0, : len(run)], run)
    assert one.lengths == (60, 60, 40)
    assert int((one.input_ids == of.placeholder).sum()) == 3 * int((run == of.placeholder).sum())
    assert not (one.labels == of.placeholder).any() and (one.labels != IGNORE_INDEX).any()
    table: Any = _Table(of, sizes)
    shown: list[Any] = [[(table, 0)], [(table, 1)], [(table, 2)]]
    batch = Batch(one.input_ids, one.labels, one.positions, one.cu_seqlens, 60, one.row_ids)
    assert torch.equal(one.pictures.positions, PictureReader(of, 0)._positions(batch, shown))
    pixels = one.pictures.inputs["pixel_values"]
    assert pixels.is_meta and len(pixels) == int(one.pictures.inputs["image_grid_thw"].prod(1).sum())


def traced(conf: str, gpus: int, rank: int = 0, *overrides: str, **options: Any) -> RankResult:
    return trace_in_fork(TraceRequest(conf, overrides, gpus, rank, **options))


@pytest.mark.nightly
def test_only_the_first_stage_runs_the_tower_and_a_frozen_one_has_no_backward() -> None:
    """Kernels of toys take equally long, and some of the forward have no backward."""
    words = ("model.vision.projector=frozen", "optimizer.state_dtype=float32")
    frozen, last = (traced("qwen3_vl_30b_pp2ep4_tiny", 8, rank, *words) for rank in (0, 4))
    trained = traced("qwen3_vl_30b_pp2ep4_tiny", 8, 0, *words[1:], "model.vision.tower=trained")
    assert last.front_seconds == 0 < frozen.front_seconds
    assert 1.5 < trained.front_seconds / frozen.front_seconds < 5
    assert trained.model_flops_per_token > frozen.model_flops_per_token  # type: ignore[operator]
    assert "conv" not in " ".join(kernel.what for kernel in last.kernels)


def test_the_processor_of_a_bundled_config_needs_no_files() -> None:
    recipe: Any = load(TraceRequest("qwen3_vl_8b_lora", ("data.path=rows.jsonl",), 1))
    with bundled_configs.preferred():
        found = shared_processor(recipe.model)
    assert found.grid(768, 1024) == (1, 48, 64)
    assert found.replacement(768, 1024).tolist() == [151655] * (48 * 64 // 4)


def test_the_processor_of_the_bundled_gemma_writes_the_published_tokens() -> None:
    """Newlines, begin, 256 image tokens, end, newlines: ids of the tokenizer of google/gemma-3-12b-it."""
    recipe: Any = load(TraceRequest("gemma3_12b_vlm", ("data.path=rows.jsonl",), 1))
    with bundled_configs.preferred():
        found = shared_processor(recipe.model)
    assert found.grid(768, 1024) == (0, 0, 0)
    assert found.replacement(768, 1024).tolist() == [108, 255999, *[262144] * 256, 256000, 108]
    assert found.inputs([noise(80, 60)])["pixel_values"].shape == (1, 3, 896, 896)


def test_pictures_of_a_text_model_are_refused() -> None:
    recipe: Any = load(TraceRequest("llama3_8b_tp2cp2_tiny", (), 4))
    with raises(ConfigError, "no_effect", keys=("--picture", "model.vision")):
        document_lengths(recipe, None, picture="10x10")
