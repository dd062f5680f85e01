"""A small copy keeps what is peculiar about a family; the reference of a step is that of one mean over its labels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.models.probes.tiny_model import shrink
from automodel_cli.objectives.dpo import DPO
from automodel_cli.objectives.grpo import GRPO
from automodel_cli.objectives.kto import KTO
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.batches import step_batches
from automodel_cli.parity.gradient_errors import gradient_errors, missing
from automodel_cli.parity.reference import Original, one_process
from tests import tiny


def config(family: str, **fields) -> PretrainedConfig:
    """The library's defaults of a family: those of its published model."""
    return CONFIG_MAPPING[family](**fields)


def test_windows_sinks_and_experts_survive():
    small = shrink(config("gpt_oss"))
    assert set(small.layer_types) == {"sliding_attention", "full_attention"} and len(small.layer_types) == 4
    assert small.sliding_window < 10 and small.num_local_experts == 8 and small.num_experts_per_tok == 2


def test_latent_attention_and_dense_first_layers_survive():
    small = shrink(config("deepseek_v3"))
    assert small.first_k_dense_replace == 1 and small.n_shared_experts == 1 and small.n_group == 2
    assert small.q_lora_rank and small.kv_lora_rank and small.qk_rope_head_dim == 8


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_and_grouped_heads_survive(tied: bool):
    small = shrink(config("llama", tie_word_embeddings=tied, num_attention_heads=32, num_key_value_heads=8))
    assert small.tie_word_embeddings is tied
    assert (small.num_attention_heads, small.num_key_value_heads) == (4, 2)


def test_batches_show_mistakes():
    for packed in (True, False):
        batches = step_batches(packed=packed)
        counts = [int(batch.num_label_tokens) for batch in batches]
        assert len(set(counts)) >= 5 and counts.count(0) == 1
        rows = torch.cat([batch.input_ids_BT for batch in batches])
        assert len({tuple(row.tolist()) for row in rows}) == len(rows)
        assert all(batch.shape[1] % 4 for batch in batches), "context parallelism must pad"


def test_reference_is_the_librarys_own_mean_loss():
    """On padded rows, with the padding cut off by hand, the library's loss over all label tokens is the same number."""
    model, batches = tiny.build_hf("llama"), step_batches(packed=False)
    found = one_process(model, batches, SFT())
    total = torch.zeros(())
    for batch in batches:
        for row, length in enumerate((11, 20)):
            labels_T = batch.labels_BT[row, :length]
            logits_TV = model(input_ids=batch.input_ids_BT[row : row + 1, :length]).logits[0]
            total = total + torch.nn.functional.cross_entropy(
                logits_TV, labels_T, ignore_index=IGNORE_INDEX, reduction="sum"
            )
    weight = sum(int(batch.num_label_tokens) for batch in batches)
    model.zero_grad()
    (total / weight).backward()
    assert found.loss == pytest.approx(total.item() / weight, rel=1e-6)
    grad = model.model.layers[1].mlp.up_proj.weight.grad
    assert torch.allclose(found.gradients["model.layers.1.mlp.up_proj.weight"], grad, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("objective", [SFT(), DPO(), DPO(loss="ipo"), KTO(), GRPO(), GRPO(kl_coef=0.1)])
def test_batches_have_every_objectives_columns(objective):
    found = one_process(tiny.build_hf("llama"), step_batches(packed=True), objective)
    assert found.grad_norm > 0 and found.loss == found.loss


def test_a_saved_original_brings_back_its_numbers(tmp_path: Path):
    original = Original.write(tmp_path / "model", tiny.build_hf("qwen3"), SFT(), kinds=[True])
    found = original.reference(packed=True)
    want = one_process(tiny.build_hf("qwen3"), step_batches(packed=True), SFT())
    assert found.loss == pytest.approx(want.loss, rel=1e-6)
    assert max(gradient_errors(want.gradients, found.gradients).values()) < 1e-6


def test_a_gradient_that_is_missing_unknown_or_not_finite_is_infinitely_wrong():
    want = {"a": torch.ones(2), "b": torch.zeros(2)}
    assert missing(want, ["b"]) == {"a": float("inf")} and missing(want, ["a"]) == {"b": 0.0}
    got = {"a": torch.tensor([1.0, 1.5]), "b": torch.tensor([0.0, torch.nan]), "c": torch.ones(1)}
    assert gradient_errors(want, got) == {"a": 0.5, "b": float("inf"), "c": float("inf")}
