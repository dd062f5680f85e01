"""Packed rows with pictures equal documents one by one through the unmodified composite, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import PaliGemmaConfig

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.models.attention.picture_runs import TwoWay
from automodel_cli.models.hub import composite_text
from automodel_cli.models.vision import probe
from automodel_cli.models.vision.front import TYPE_IDS, Front
from automodel_cli.models.vision.probe import packed_rows, probe_pictures, small_part
from automodel_cli.models.vision.processor import FamilyProcessor
from automodel_cli.models.vision.two_way import two_way_of
from tests.errors import raises
from tests.vision import config_of, documents_of, model_of, processor_of


def _loss(logits_TV: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE_INDEX, reduction="sum")


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_vl", "llava", "qwen3_vl_moe"])
def test_packed_rows_equal_documents_in_loss_and_every_gradient(kind: str):
    whole = model_of(kind, torch.float64)
    processor = FamilyProcessor(processor_of(kind), whole.config)
    if kind == "qwen3_vl_moe":
        whole.set_experts_implementation("eager")
    part = small_part(whole).eval()
    if kind == "qwen3_vl_moe":
        part.model.set_experts_implementation("eager")
    documents = documents_of(processor)
    want = torch.zeros((), dtype=torch.float64)
    for ids_T, images in documents:
        if hasattr(whole.base_model, "rope_deltas"):
            whole.base_model.rope_deltas = None
        given = {name: (ids_T[None] == 2).long() for name in TYPE_IDS if name in processor.takes}
        inputs = processor.inputs(images) if images else {}
        inputs = {name: v.double() if v.is_floating_point() else v for name, v in inputs.items()}
        labels_T = ids_T[1:].masked_fill(ids_T[1:] == 2, IGNORE_INDEX)
        want = want + _loss(whole(input_ids=ids_T[None], **given, **inputs, use_cache=False).logits[0, :-1], labels_T)
    want.backward()
    batch = packed_rows([documents[:2], documents[2:]], processor)
    hidden_BTD = part.hidden(batch.model_inputs())
    got = _loss(part.model.lm_head(hidden_BTD).flatten(0, 1), batch.labels_BT.flatten())
    got.backward()
    assert abs((got - want).item()) < 1e-12 * abs(want.item())
    names = {"model.": f"{part.front.text_name}.", "lm_head.": f"{part.front.head_name}."}
    gradients = {}
    for name, param in part.named_parameters():
        own = part.hub_name(name)
        if not name.startswith("front."):
            prefix = next(prefix for prefix in names if own.startswith(prefix))
            own = names[prefix] + own.removeprefix(prefix)
        gradients[own] = param.grad
    expected = {name: param.grad for name, param in whole.named_parameters() if param.grad is not None}
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    assert expected.keys() <= gradients.keys()
    for name, gradient in expected.items():
        assert gradients[name] is not None, name
        assert (gradients[name] - gradient).abs().max().item() < 1e-12 * largest, name


@pytest.mark.parametrize("kind", ["qwen3_vl", "llava"])
def test_a_microbatch_without_pictures_gives_every_parameter_a_gradient_and_the_same_loss(kind: str):
    whole = model_of(kind)
    processor = FamilyProcessor(processor_of(kind), whole.config)
    part = small_part(whole)
    batch = packed_rows([[documents_of(processor)[1]]], processor)
    ids_T, inputs = processor.blank()
    assert batch.pictures is not None
    blank = batch.pictures.__class__(inputs, processor.placeholder, batch.pictures.positions_3BT, ids_T)
    got = part(**batch.head_inputs(), **{**batch.model_inputs(), "pictures": blank}).logprobs_BT
    got.sum().backward()
    plain_inputs = {name: value for name, value in batch.model_inputs().items() if name != "pictures"}
    plain = part(**batch.head_inputs(), **plain_inputs).logprobs_BT
    assert torch.allclose(got, plain, atol=1e-6)
    for name, param in part.front.named_parameters():
        if "post_layernorm" not in name and "layers.1." not in name:  # LLaVA takes features before the last layer
            assert param.grad is not None and not param.grad.any(), name


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_vl_moe", "qwen2_vl", "llava", "gemma3"])
def test_the_probe_accepts(kind: str):
    config = config_of(kind)
    probe_pictures(config, FamilyProcessor(processor_of(kind), config))


@pytest.mark.parametrize("kind", ["qwen3_vl", "llava"])
def test_other_masks_are_causal(kind: str):
    assert two_way_of(config_of(kind)) is None


def test_prefix_masks_are_refused():
    text = {
        "model_type": "gemma",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    vision = config_of("gemma3").vision_config.to_dict()
    config = PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=2, projection_dim=32)
    with raises(ConfigError, "not_supported_by_model", keys=("model.vision",)):
        probe_pictures(config, FamilyProcessor(processor_of("llava"), config))


def test_wrong_rules_of_two_way_attention_are_noticed(monkeypatch: pytest.MonkeyPatch):
    config = config_of("gemma3")
    for rules in (None, TwoWay("whole", "causal"), TwoWay("causal", "in_window"), TwoWay("whole", "whole")):
        monkeypatch.setattr(probe.two_way, "rules_of", lambda whole, found=rules: found)
        monkeypatch.setattr(probe, "_reasons", {})
        with raises(ConfigError, "not_supported_by_model", keys=("model.vision",)):
            probe_pictures(config, FamilyProcessor(processor_of("gemma3"), config))


def test_the_probe_finds_wrong_positions(monkeypatch: pytest.MonkeyPatch):
    config = config_of("qwen3_vl")
    processor = FamilyProcessor(processor_of("qwen3_vl"), config)
    real = FamilyProcessor.positions

    def transposed(self, *given):
        return real(self, *given)[[0, 2, 1]]

    monkeypatch.setattr(FamilyProcessor, "positions", transposed)
    probe._reasons.clear()
    with raises(ConfigError, "not_supported_by_model", keys=("model.vision",)):
        probe_pictures(config, processor)
    probe._reasons.clear()


@pytest.mark.parametrize(
    ("kind", "projector"),
    [
        ("qwen3_vl", {"model.visual.merger", "model.visual.deepstack_merger_list"}),
        ("llava", {"model.multi_modal_projector.linear_1", "model.multi_modal_projector.linear_2"}),
    ],
)
def test_the_projector_is_what_stands_between_tower_and_text(kind: str, projector: set[str]):
    whole = model_of(kind)
    front = Front(whole, whole.get_submodule(str(composite_text.text_module(whole))))
    outside = {name for name, _ in front.composite.named_parameters() if not front.is_tower(name)}
    assert {".".join(name.split(".")[:3]) for name in outside} == projector
    assert any(front.is_tower(name) for name, _ in front.composite.named_parameters())
