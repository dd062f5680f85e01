"""What the probe calls fine trains as a run builds it, and what a run refuses the probe refuses, with what works."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.gradients import _norm
from automodel_cli.models.builder import part_of
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.packing_support import probe_packing
from automodel_cli.models.probes.tiny_model import build_small, shrink
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.batches import step_batches
from automodel_cli.parity.reference import one_process, reference_logprobs
from tests.errors import raises


def published(family: str, **fields) -> PretrainedConfig:
    return CONFIG_MAPPING[family](**fields)


@pytest.mark.parametrize("family", ["opt", "modernbert-decoder"])
def test_families_whose_head_needed_care_train_like_the_library(family: str):
    """OPT calls its decoder inside the base model; ModernBERT's decoder may not do without a pad token."""
    probe_packing(published(family))
    small = shrink(published(family))
    model = build_small(small, lambda c: _library(c))
    part = part_of(copy.deepcopy(small), ModelConfig(pretrained="-"), device="cpu")
    part.model.load_state_dict(model.state_dict())
    batch = step_batches(packed=False, count=1)[0]
    got = part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT
    for row, length in enumerate((11, 20)):
        logits_TV = model(input_ids=batch.input_ids_BT[row : row + 1, :length], use_cache=False).logits[0]
        assert (got[row, :length] - reference_logprobs(logits_TV, batch.labels_BT[row, :length])).abs().max() < 1e-5


def _library(config: PretrainedConfig):
    from automodel_cli.models import transformers_compat

    return transformers_compat.causal_lm(config, dtype=torch.float32)


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        ("gpt_neo", "packed"),  # attention classes of its own, which know no other by name
        ("codegen", "packed"),  # its attention needs the library's mask, and packed attention has none
        ("biogpt", "padded"),  # dropout, which packed attention has not
    ],
)
def test_what_packed_attention_cannot_compute_is_run_by_the_librarys_own(family: str, rows):
    probe_packing(published(family), rows=rows)


def test_what_a_run_refuses_is_refused_before_it():
    fix = "model.attn_implementation=eager"
    with raises(ConfigError, "not_supported_by_model", keys=("data.packing",), fix=fix):
        probe_packing(published("gpt_neox_japanese"))


def test_a_composite_whose_text_model_has_no_class_of_its_own_is_measured():
    probe_packing(published("emu3"), attention="sdpa")


def test_layers_that_each_rank_would_drop_by_itself_are_refused():
    with raises(ConfigError, "not_supported", values=("layerdrop", 0.1)):
        probe_packing(published("biogpt", layerdrop=0.1))


def test_gemma_4s_shared_keys_and_values_are_exact_but_for_the_networks_own_conditioning():
    """In float64 the packed rows give what documents alone give. In float32 both are off by the same, because this
    network amplifies rounding: its attention multiplies normed queries and keys without a scale."""
    fields = {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    small = shrink(published("gemma4_text", **fields))
    model = build_small(small, _library)
    batches = step_batches(packed=True, count=2)
    weight = sum(int(batch.num_label_tokens) for batch in batches)
    exact = one_process(copy.deepcopy(model).double(), batches, SFT())
    own = _worst(one_process(copy.deepcopy(model), batches, SFT()).gradients, exact.gradients)
    part = part_of(copy.deepcopy(small), ModelConfig(pretrained="-"), device="cpu")
    part.model.load_state_dict(model.state_dict())
    for batch in batches:
        (-part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT.sum() / weight).backward()
    got = {part.hub_name(name): param.grad for name, param in part.named_parameters() if param.grad is not None}
    assert _worst(got, exact.gradients) < 4 * own < 1e-3


def _worst(got, want) -> float:
    scale = max(grad.abs().max().item() for grad in want.values())
    return max((got[name] - grad).abs().max().item() for name, grad in want.items()) / scale


def test_the_gradient_norm_of_millions_of_values_is_exact():
    grad = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0)) * 1e-3
    want = grad.double().square().sum().sqrt().item()
    assert _norm(grad).item() == pytest.approx(want, rel=1e-8)
    assert _norm(grad.view(-1, 1).t()).item() == pytest.approx(want, rel=1e-8)
    assert torch.linalg.vector_norm(grad).item() != pytest.approx(want, rel=1e-6), "one float32 sum is not enough"
