"""Rotary tables that depend on the length of the text: each document gets the one that it gets alone, wherever it
lies."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.attention import packed as attention_packed
from automodel_cli.models.context_parallel_layout import Context
from automodel_cli.models.document_masking import dynamic_rope
from automodel_cli.models.lm_head.head import HeadKind
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.packing_support import Rows, probe_context, probe_packing
from automodel_cli.models.probes.tiny_model import SWITCH, shrink
from automodel_cli.rollout.engines.decoding_check import check_decoding
from automodel_cli.rollout.engines.policy_engine import check_lengths
from tests import tiny
from tests.errors import raises
from tests.tiny import gradient_error, gradients, next_token_labels, packed_batch, reference_logprobs, token_row

_FACTORS = {"short_factor": [1 + 0.1 * i for i in range(8)], "long_factor": [2 + 0.7 * i for i in range(8)]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": SWITCH, **_FACTORS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
CASES = {
    "phi3": ("phi3", LONGROPE, {"original_max_position_embeddings": SWITCH}),
    "phimoe": ("phimoe", LONGROPE | {"long_mscale": 1.3, "short_mscale": 1.1}, {"num_local_experts": 4}),
    "dynamic": ("llama", DYNAMIC, {"max_position_embeddings": SWITCH}),
    "one layer type": (
        "gemma3_text",
        {"full_attention": LONGROPE, "sliding_attention": DEFAULT},
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6, "query_pre_attn_scalar": 16},
    ),
}
# Lengths on both sides of the switch, the longest one last and first
ROWS = [[token_row(9), token_row(6, 1), token_row(14, 2)], [token_row(20, 3), token_row(9, 4)]]


def case_config(name: str) -> PretrainedConfig:
    family, rope, more = CASES[name]
    return CONFIG_MAPPING[family](**{**tiny._BASE, "rope_parameters": copy.deepcopy(rope), **more})


def case_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(case_config(name), attn_implementation="eager").float()
    tiny.perturb(model, 1)
    return model.eval()


def alone(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Each document through its own untouched copy of the library's model, as in a process of its own."""
    sums: dict[str, torch.Tensor] = {}
    rows = []
    for row in ROWS:
        logprobs = []
        for document in row:
            fresh = copy.deepcopy(model)
            logits_TV = fresh(input_ids=document[None], use_cache=False).logits[0]
            logprobs.append(reference_logprobs(logits_TV, next_token_labels(document)))
            logprobs[-1].sum().backward()
            sums = {name: sums.get(name, 0) + grad for name, grad in gradients(fresh).items()}
        rows.append(torch.cat(logprobs).detach())
    return torch.stack(rows), sums


def ours(model: PreTrainedModel) -> ModelPart:
    attention_packed.register_packed_attention()
    model.set_attn_implementation("packed")
    dynamic_rope.install_document_rope(model)
    return ModelPart(model, HeadKind("generic"))


@pytest.mark.parametrize("name", CASES)
def test_packed_documents_get_the_tables_that_they_get_alone(name: str):
    model = case_model(name)
    want_logprobs, want = alone(model)
    part, batch = ours(model), packed_batch(ROWS)
    for _ in range(2):  # nothing is remembered from the first time
        model.zero_grad()
        logprobs = part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT
        logprobs.sum().backward()
        assert (logprobs - want_logprobs).abs().max() < 2e-6
        assert gradient_error(want, gradients(model)) < 2e-6


@pytest.mark.parametrize("name", CASES)
def test_the_librarys_own_tables_are_wrong_for_packed_rows(name: str):
    """What `install` is for: without it this comparison fails."""
    model, batch = case_model(name), packed_batch(ROWS)
    want, _ = alone(model)
    attention_packed.register_packed_attention()
    model.set_attn_implementation("packed")
    got = ModelPart(model, HeadKind("generic"))(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT
    assert (got - want).abs().max() > 1e-4


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_rank_with_pieces_of_documents_uses_the_lengths_of_the_whole_ones(name: str, num_rows: int):
    """Each of two context-parallel ranks computes the tables of its tokens; put together they are those of the rows."""
    part = ours(case_model(name))
    batch = packed_batch(ROWS[:num_rows])
    rotary = next(module for module in part.modules() if hasattr(module, "rope_type"))
    layer_type = ["full_attention"] if isinstance(rotary.rope_type, dict) else []
    x = torch.zeros(num_rows, 1, 16)
    whole = rotary(x, batch.position_ids_BT, *layer_type)
    for rank in (0, 1):
        group = _Rank(rank)
        context = Context(group, batch.shape, batch.cu_seqlens, x.device)
        inputs = context.local_inputs(batch.input_ids_BT, batch.position_ids_BT)
        dynamic_rope._set_lengths(part.model.base_model, (), inputs)
        for got, want in zip(rotary(x, inputs["position_ids"], *layer_type), whole, strict=True):
            length = batch.shape[1]
            padded = torch.nn.functional.pad(want, (0, 0, 0, context.tokens - length))
            here = context._local_t < length
            assert torch.equal(got[:, here], padded.index_select(1, context._local_t)[:, here])


class _Rank:
    size, ring = 2, False

    def __init__(self, rank: int):
        self.rank = rank


def test_lengths_come_from_runs_of_positions():
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [4, 0, 1, 2, 3, 4]])  # a decoded token is the last of its document
    assert dynamic_rope.document_lengths(positions).tolist() == [[3, 3, 3, 1, 2, 2], [5, 5, 5, 5, 5, 5]]


def published(family: str, **fields) -> PretrainedConfig:
    """Thresholds of the size that published models have."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return CONFIG_MAPPING[family](**fields)


PUBLISHED = {
    "phi3": published(
        "phi3",
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 1.0,
            "short_factor": [1 + 0.01 * i for i in range(48)],
            "long_factor": [1 + 1.3 * i for i in range(48)],
        },
    ),
    "dynamic": published("llama", max_position_embeddings=4096, rope_parameters=DYNAMIC),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_the_probe_measures_on_both_sides_of_a_published_models_threshold(name: str, rows: Rows, monkeypatch):
    probe_packing(PUBLISHED[name], rows=rows)
    probe_context(PUBLISHED[name])
    monkeypatch.setattr(dynamic_rope, "install_document_rope", lambda model: None)
    with raises(ConfigError, "not_supported_by_model", keys=("data.packing",)):
        probe_packing(PUBLISHED[name], rows=rows)
    with raises(ConfigError, "not_supported_by_model", keys=("mesh.cp_size",)):
        probe_context(PUBLISHED[name])


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("phi3", "original_max_position_embeddings"),
        ("llama4_text", "floor_scale"),
        ("llama4_text", "attention_chunk_size"),
        ("gpt_oss", "sliding_window"),
        ("doge", "keep_window_size"),
        ("modernbert-decoder", "local_attention"),
        ("minimax", "block_size"),
        ("inkling2_text", "log_scaling_n_floor"),
        ("deepseek_v32", "index_topk"),
    ],
)
def test_what_is_compared_with_a_length_shrinks_below_the_probes_documents(family: str, field: str):
    assert 0 < getattr(shrink(published(family)), field) <= 9


def test_the_sampler_draws_what_the_trainer_scores_or_is_refused():
    assert dynamic_rope.longest_unswitched(PUBLISHED["phi3"]) == 4096
    assert dynamic_rope.longest_unswitched(PUBLISHED["dynamic"]) == 4096
    for config in PUBLISHED.values():
        check_decoding(config)
        check_lengths(config, 4096)
        with raises(ConfigError, "sequence_length", keys=("data.seq_len",), values=(4096,)) as refusal:
            check_lengths(config, 4097)
        assert refusal.value.fix == "data.seq_len=4096"
    check_lengths(published("llama"), 10**6)
