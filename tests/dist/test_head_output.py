"""Everything that the head gives, on ranks and in stages, against the library's model in float64 on whole logits."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.data.head_output import HeadOutput, HeadRequest
from automodel_cli.distributed.config import DDPConfig, FSDP2Config
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lm_head import fused_linear_logprobs, vocab_parallel
from automodel_cli.models.lm_head.value_head import FILE, ValueHead, fill_value_head
from automodel_cli.models.model_part import ModelPart
from automodel_cli.objectives.base import Metric
from automodel_cli.objectives.next_token import NextToken
from automodel_cli.objectives.segment_reduce import label_mask
from automodel_cli.parity.batches import step_batches
from automodel_cli.parity.cases import FP32, Case
from automodel_cli.parity.compare import Errors, build_parity_stages, run_rows
from automodel_cli.parity.reference import Original
from automodel_cli.pipelining import stages
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.training.step import train_step
from tests import tiny
from tests.dist.harness import launch

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from own_distillation import Distillation, taught

pytestmark = pytest.mark.slow

_ALL = HeadRequest(entropy=True, values=True, topk=3, token_ids="teacher_ids_BTN", lse=True)
_VALUES = HeadRequest(values=True)


@dataclass(frozen=True)
class Everything:
    """A sum of all fields, each token's with a weight of its own, so that no two errors cancel."""

    needs: HeadRequest = _ALL

    def weight(self, batch: Batch) -> Tensor:
        return batch.num_label_tokens

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        (weight_BT,) = self._weights(output.logprobs_BT[..., None], batch).unbind(-1)
        total = -(output.logprobs_BT * weight_BT).sum()
        assert output.entropy_BT is not None
        total = total - (output.entropy_BT * weight_BT.flip(1)).sum()
        assert output.lse_BT is not None
        total = total + (output.lse_BT * weight_BT.flip(1)).square().sum()
        assert output.values_BT is not None
        total = total + (output.values_BT * weight_BT.roll(1, 1)).square().sum()
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


def row(*, dp: int = 1, pp: int = 1, cp: int = 1, tp: int = 1, schedule: str = "1f1b", **options: object) -> Case:
    mesh = MeshConfig(dp_size=dp, pp_size=pp, cp_size=cp, tp_size=tp)
    pipeline = PipelineConfig(schedule=schedule) if pp > 1 else None
    config = FSDP2Config(mp_policy=FP32, **options)  # type: ignore[arg-type]
    return Case(mesh, config, pipeline, objective=Everything(), num_microbatches=4)


LAYOUTS = {
    "fsdp2": row(dp=2),
    "ddp": replace(row(dp=2), parallelizer=DDPConfig()),
    "pp": row(pp=2),
    "pp-zbv": row(pp=2, schedule="zbv"),
    "cp": row(cp=2),
    "tp": row(tp=2),
    "tp-recomputed": row(tp=2, sequence_parallel=True, activation_checkpointing=True),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Original]:
    folder = tmp_path_factory.mktemp("originals")
    return {
        family: Original.write(folder / family, tiny.build_hf(family), Everything(), kinds=(True,), counts=(4,))
        for family in ("llama", "gemma2")
    }


def test_every_field_has_the_numbers_of_one_process_on_ranks_and_in_stages(originals: dict[str, Original]):
    found = launch(run_rows, 2, originals["llama"], list(LAYOUTS.values()))
    for name, errors in zip(LAYOUTS, found, strict=True):
        assert isinstance(errors, Errors) and errors.within_rounding(), (name, errors)


def test_pretraining_has_the_numbers_of_one_process_on_ranks_and_in_stages(tmp_path: Path):
    """With z-loss and bits per byte."""
    objective = NextToken(z_loss_coef=0.5)
    original = Original.write(tmp_path / "llama", tiny.build_hf("llama"), objective, kinds=(True,), counts=(4,))
    found = launch(run_rows, 2, original, [replace(case, objective=objective) for case in LAYOUTS.values()])
    for name, errors in zip(LAYOUTS, found, strict=True):
        assert isinstance(errors, Errors) and errors.within_rounding(), (name, errors)


def test_a_soft_cap_is_part_of_every_field(originals: dict[str, Original]):
    for errors in launch(run_rows, 2, originals["gemma2"], [LAYOUTS["tp"]]):
        assert isinstance(errors, Errors) and errors.within_rounding(), errors


def _entropies_apart(batches: list[Batch]) -> list[Batch]:
    """Each rank's share of the vocabulary on its own."""
    real = vocab_parallel.Vocabulary._combine

    def combine(self, lse_S, picked_SN, entropy_S):
        return *real(self, lse_S, picked_SN, entropy_S)[:2], entropy_S

    vocab_parallel.Vocabulary._combine = combine  # type: ignore[method-assign]
    return batches


def _likeliest_of_this_rank(batches: list[Batch]) -> list[Batch]:
    vocab_parallel.Vocabulary.topk = lambda self, logits_SV, k: logits_SV.topk(k)  # type: ignore[method-assign]
    return batches


def _entropy_without_gradient(batches: list[Batch]) -> list[Batch]:
    real = fused_linear_logprobs._Chunk._replace
    fused_linear_logprobs._Chunk._replace = lambda self, **fields: real(self)  # type: ignore[method-assign]
    return batches


def _values_without_gradient(batches: list[Batch]) -> list[Batch]:
    """Of the hidden states; the value head itself gets one."""
    real = ValueHead.forward
    ValueHead.forward = lambda self, hidden_BTD: real(self, hidden_BTD.detach())  # type: ignore[method-assign]
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
        (_values_without_gradient, "pp"),
        (_request_lost_between_stages, "pp"),
    ],
)
def test_sabotage_is_noticed(originals: dict[str, Original], sabotage: object, layout: str):
    (errors,) = launch(run_rows, 2, originals["llama"], [LAYOUTS[layout]], sabotage)
    assert isinstance(errors, Errors) and errors.gradient > 1e-4, errors


@dataclass(frozen=True)
class ValueRegression:
    """A critic's loss: squared distance of each label token's value to its reward."""

    needs: HeadRequest = _VALUES

    def weight(self, batch: Batch) -> Tensor:
        return batch.num_label_tokens

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        assert output.values_BT is not None
        errors_BT = output.values_BT - batch.extra["rewards_BT"]
        return errors_BT.square().masked_fill(~label_mask(batch), 0.0).sum()


def _trained_values(rank: int, world: int, original: Original, folder: str) -> list[float]:
    """Losses of three steps from a value head of zeros, which are then exported."""
    layout = Case(MeshConfig(dp_size=1, pp_size=world), FSDP2Config(mp_policy=FP32), objective=ValueRegression())
    layout = replace(layout, pipeline=PipelineConfig(schedule="1f1b") if world > 1 else None)
    mesh = build_mesh(layout.mesh.resolve(world), "cpu")
    stages = build_parity_stages(original, layout, mesh)
    parts = [part for part in stages.parts if isinstance(part, ModelPart)]
    for part in parts:
        if part.value_head is not None:
            fill_value_head(part.value_head, None)
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.01)
    batches = step_batches(packed=True)
    losses = [
        train_step(stages, batches, layout.objective, optimizer, mesh, max_grad_norm=None).loss.item() for _ in range(3)
    ]
    export_hf(parts, original.model_config(), None, folder, pp_group=stages.pp_group)
    return losses


def test_a_value_head_trains_in_stages_like_in_one_process_and_is_exported_beside_the_model(originals, tmp_path: Path):
    paths = [tmp_path / "whole", tmp_path / "cut"]
    whole, cut = (
        launch(_trained_values, world, originals["llama"], str(path)) for world, path in zip((1, 2), paths, strict=True)
    )
    assert whole[2] < whole[0] and cut == pytest.approx(whole, rel=1e-6)
    ours, theirs = (load_file(path / FILE) for path in paths)
    assert ours.keys() == theirs.keys() == {"weight"} and ours["weight"].abs().max() > 0
    for path in paths:
        assert not any("value" in name for name in load_file(path / "model.safetensors"))
    for name, value in ours.items():
        assert torch.allclose(value, theirs[name], atol=1e-6)
    part = build_part(ModelConfig(pretrained=str(paths[1])), request=HeadRequest(values=True))
    load_weights(part, ModelConfig(pretrained=str(paths[1])), device="cpu", seed=0)
    assert part.value_head is not None and torch.equal(part.value_head.weight, theirs["weight"])


def _distilled(rank: int, world: int, teacher: Original, student: Original) -> tuple[list[float], list[float]]:
    """Losses of three steps, and what full logits in float64 say of the first microbatch of the first one."""
    layout = Case(MeshConfig(dp_size=1, pp_size=world), FSDP2Config(mp_policy=FP32), PipelineConfig(schedule="1f1b"))
    mesh = build_mesh(layout.mesh.resolve(world), "cpu")
    teaching, learning = (build_parity_stages(original, layout, mesh) for original in (teacher, student))
    batches = taught(teaching, step_batches(packed=True), 4)
    weight = torch.stack([batch.num_label_tokens for batch in batches]).sum()
    objective = Distillation()
    (first, *_) = learning.forward(batches, lambda output, batch: objective(output, batch) / weight, objective.needs)
    optimizer = torch.optim.Adam([p for part in learning.parts for p in part.parameters()], lr=3e-3)
    losses = [
        train_step(learning, batches, objective, optimizer, mesh, max_grad_norm=None).loss.item() for _ in range(3)
    ]
    models = [AutoModelForCausalLM.from_pretrained(o.folder, attn_implementation="eager") for o in (teacher, student)]
    total = 0.0
    batch = batches[0]
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        ids_1T = batch.input_ids_BT.flatten()[None, start:end]
        p_TV, q_TV = (model.double()(ids_1T).logits[0].softmax(-1) for model in models)
        for p_V, q_V, label in zip(p_TV, q_TV, batch.labels_BT.flatten()[start:end], strict=True):
            top = p_V.topk(4).indices
            p_N, q_N = (torch.cat([x[top], 1 - x[top].sum(0, keepdim=True)]) for x in (p_V, q_V))
            total += (p_N * (p_N / q_N).log()).sum().item() * (label != IGNORE_INDEX).item()
    return losses, [first.item(), total / weight.item()]


def test_a_student_in_stages_learns_a_teachers_likeliest_tokens(originals, tmp_path: Path):
    student = Original.write(tmp_path / "student", tiny.build_hf("llama", seed=1), Everything(), kinds=())
    losses, (ours, definition) = launch(_distilled, 2, originals["llama"], student)
    assert ours == pytest.approx(definition, rel=1e-5)
    assert losses[2] < losses[1] < losses[0]
