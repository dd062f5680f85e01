"""Everything that the head gives, on ranks and in stages, against the library's model in float64 on whole logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import HeadOutput, HeadRequest
from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.layout import MeshConfig
from automodel_cli.models import head_fused, vocabulary
from automodel_cli.objectives.base import Metric
from automodel_cli.parity.compare import Errors, run_rows
from automodel_cli.parity.reference import Original
from automodel_cli.parity.rows import FP32, Row
from automodel_cli.pipelining import stages
from automodel_cli.pipelining.config import PipelineConfig
from tests import tiny
from tests.dist.harness import launch

TOLERANCE = 2e-6


@dataclass(frozen=True)
class Everything:
    """A sum of all fields, each token's with a weight of its own, so that no two errors cancel."""

    needs: HeadRequest = HeadRequest(entropy=True, topk=3, token_ids="teacher_ids_BTN")

    def weight(self, batch: Batch) -> Tensor:
        return batch.num_label_tokens

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        (weight_BT,) = self._weights(output.logprobs_BT[..., None], batch).unbind(-1)
        total = -(output.logprobs_BT * weight_BT).sum()
        assert output.entropy_BT is not None
        total = total - (output.entropy_BT * weight_BT.flip(1)).sum()
        for field in (output.topk_logprobs_BTK, output.token_logprobs_BTN):
            assert field is not None
            total = total - (field * self._weights(field, batch)).sum()
        return total

    @property
    def metrics(self) -> dict[str, Metric]:
        return {"topk_ids": Metric()}

    def measure(self, output: HeadOutput, batch: Batch) -> dict[str, Tensor]:
        assert output.topk_ids_BTK is not None
        return {"topk_ids": output.topk_ids_BTK.sum().float()}

    def _weights(self, field: Tensor, batch: Batch) -> Tensor:
        positions = batch.input_ids_BT[..., None] * 31 + batch.position_ids_BT[..., None] * 7
        return (positions + torch.arange(field.shape[-1])).remainder(11).to(field.dtype) / 10


def row(*, dp: int = 1, pp: int = 1, cp: int = 1, tp: int = 1, schedule: str = "1f1b", **options: object) -> Row:
    mesh = MeshConfig(dp_size=dp, pp_size=pp, cp_size=cp, tp_size=tp)
    runtime = options.pop("runtime", "torch")
    pipeline = PipelineConfig(schedule=schedule, runtime=runtime) if pp > 1 else None  # type: ignore[arg-type]
    return Row(mesh, FSDP2Config(mp_policy=FP32, **options), pipeline, objective=Everything())  # type: ignore[arg-type]


LAYOUTS = {
    "fsdp2": row(dp=2),
    "pp": row(pp=2),
    "pp-zbv": row(pp=2, schedule="zbv"),
    "pp-eager": row(pp=2, runtime="eager"),
    "cp": row(cp=2),
    "tp": row(tp=2),
    "tp-recomputed": row(tp=2, sequence_parallel=True, activation_checkpointing=True),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Original]:
    folder = tmp_path_factory.mktemp("originals")
    return {
        family: Original.write(folder / family, tiny.build_hf(family), Everything(), kinds=(True,))
        for family in ("llama", "gemma2")
    }


def test_every_field_has_the_numbers_of_one_process_on_ranks_and_in_stages(originals: dict[str, Original]):
    found = launch(run_rows, 2, originals["llama"], list(LAYOUTS.values()))
    for name, errors in zip(LAYOUTS, found, strict=True):
        assert isinstance(errors, Errors) and errors.within(TOLERANCE), (name, errors)


def test_a_soft_cap_is_part_of_every_field(originals: dict[str, Original]):
    for errors in launch(run_rows, 2, originals["gemma2"], [LAYOUTS["tp"]]):
        assert isinstance(errors, Errors) and errors.within(TOLERANCE), errors


def _entropies_apart(batches: list[Batch]) -> list[Batch]:
    """Each rank's share of the vocabulary on its own."""
    real = vocabulary.Vocabulary._combine

    def combine(self, lse_S, picked_SN, entropy_S):
        return *real(self, lse_S, picked_SN, entropy_S)[:2], entropy_S

    vocabulary.Vocabulary._combine = combine  # type: ignore[method-assign]
    return batches


def _likeliest_of_this_rank(batches: list[Batch]) -> list[Batch]:
    vocabulary.Vocabulary.topk = lambda self, logits_SV, k: logits_SV.topk(k)  # type: ignore[method-assign]
    return batches


def _entropy_without_gradient(batches: list[Batch]) -> list[Batch]:
    real = head_fused._Chunk._replace
    head_fused._Chunk._replace = lambda self, **fields: real(self)  # type: ignore[method-assign]
    return batches


def _request_lost_between_stages(batches: list[Batch]) -> list[Batch]:
    """Teacher's tokens of another microbatch."""
    real = stages.PipelineStages._run

    def run(self, runtime, given, on_last, request):
        first = given[0].extra["teacher_ids_BTN"]
        moved = [replace(b, extra={**b.extra, "teacher_ids_BTN": first}) for b in given]
        return real(self, runtime, moved, on_last, request)

    stages.PipelineStages._run = run  # type: ignore[method-assign]
    return batches


@pytest.mark.parametrize(
    ("sabotage", "layout"),
    [
        (_entropies_apart, "tp"),
        (_likeliest_of_this_rank, "tp"),
        (_entropy_without_gradient, "fsdp2"),
        (_request_lost_between_stages, "pp"),
    ],
)
def test_sabotage_is_noticed(originals: dict[str, Original], sabotage: object, layout: str):
    (errors,) = launch(run_rows, 2, originals["llama"], [LAYOUTS[layout]], sabotage)
    assert isinstance(errors, Errors) and errors.gradient > 1e-4, errors
