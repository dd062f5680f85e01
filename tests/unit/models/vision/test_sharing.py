"""DPO on pairs with pictures equals the composite one document at a time, reference included, in float64."""

from __future__ import annotations

import pytest
import torch

from automodel_cli.data.head_output import HeadOutput
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.vision import sharing
from automodel_cli.models.vision.front import Front
from automodel_cli.models.vision.probe import small_part
from automodel_cli.models.vision.processor import FamilyProcessor
from automodel_cli.objectives.dpo import DPO
from tests.vision import config_of, model_of, processor_of
from tests.vision_pairs import BETA, MICROBATCHES, batch_of, loss_of_composite, reference_model


def _part(whole: object) -> ModelPart:
    part = small_part(whole).eval()
    part.model.set_experts_implementation("eager")
    return part


def _logprobs(part: ModelPart, batch: object) -> torch.Tensor:
    hidden_BTD = part.hidden(batch.model_inputs())  # the head computes in float32
    logprobs_BTV = part.model.get_output_embeddings()(hidden_BTD).log_softmax(-1)
    labels_BT = batch.labels_BT.clamp(min=0)
    return logprobs_BTV.gather(-1, labels_BT[..., None])[..., 0] * (batch.labels_BT >= 0)


@pytest.mark.parametrize("shared", [True, False], ids=["tower once a picture", "tower once a response"])
@pytest.mark.parametrize(
    "kind",
    ["qwen3_vl", pytest.param("llava", marks=pytest.mark.slow), pytest.param("qwen3_vl_moe", marks=pytest.mark.slow)],
)
def test_loss_and_every_gradient_are_those_of_documents_one_by_one(kind: str, shared: bool):
    processor = FamilyProcessor(processor_of(kind), config_of(kind))
    want, gradients = loss_of_composite(kind, processor, torch.float64)
    policy, reference = _part(model_of(kind, torch.float64)), _part(reference_model(kind, torch.float64))
    front = policy.front
    assert front is not None
    objective, total, count = DPO(beta=BETA), torch.zeros((), dtype=torch.float64), 0
    for rows in MICROBATCHES:
        batch = batch_of(rows, processor, shared=shared)
        with torch.no_grad():
            batch = batch.with_columns(ref_logprobs_BT=_logprobs(reference, batch))
        output = HeadOutput(logprobs_BT=_logprobs(policy, batch))
        total = total + objective(output, batch)
        count += int(objective.weight(batch))
    loss = total / count
    loss.backward()
    assert abs(loss.item() - want) < 1e-12 * want
    # The towers of Qwen rotate queries in float32: the sum of two responses is rounded once, not each of them.
    bound = 1e-10 if shared and kind.startswith("qwen") else 1e-12
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    got = {name: param.grad for name, param in front.composite.named_parameters() if param.grad is not None}
    assert any(float(gradient.abs().max()) > 1e-3 * largest for gradient in got.values())
    got |= {
        f"{front.text_name}.{name}": param.grad
        for name, param in policy.model.base_model.named_parameters()
        if param.grad is not None
    }
    for name, gradient in gradients.items():
        if not name.startswith(front.head_name):
            assert (got[name] - gradient).abs().max().item() < bound * largest, name


@pytest.mark.parametrize("kind", ["qwen3_vl", "llava"])
def test_one_reading_of_a_picture_is_measured_before_it_is_used(kind: str, monkeypatch: pytest.MonkeyPatch):
    config = config_of(kind)
    processor = FamilyProcessor(processor_of(kind), config)
    assert sharing.shares_pictures(config, processor)
    monkeypatch.setattr(sharing, "_measured", {})
    own = Front._shared

    def first_features(self, ids_BT, positions, shared_P, placeholder, inputs):
        return own(self, ids_BT, positions, shared_P.roll(1), placeholder, inputs)

    monkeypatch.setattr(Front, "_shared", first_features)
    assert not sharing.shares_pictures(config, processor)
