"""Cutting models in one process: exactness for every family and cut, refusals by name, and small copies of configs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.attention import packed as attention_packed
from automodel_cli.models.lm_head.detection import detect_head
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.probes.tiny_model import shrink
from automodel_cli.pipelining.cut import stage_module as stage_module
from automodel_cli.pipelining.cut.cut_stage import cut_stage
from automodel_cli.pipelining.cut.model_structure import SplitError, find_decoder_layers, observe
from automodel_cli.pipelining.cut.split_check import check_split, probe
from automodel_cli.pipelining.cut.stage_module import StagePart
from tests.errors import raises
from tests.tiny import FAMILIES, build_hf, gradient_error, gradients, packed_batch, tiny_config, token_row

# Ends with and without layers, empty stages in the middle, a stage that starts at layer 0 or ends at the last.
CUTS = ([0, 2, 3, 4], [0, 0, 1, 4], [0, 4, 4, 4], [0, 1, 1, 4], [0, 0, 0, 4], [0, 0, 4, 4])


def _part(family: str, tied: bool) -> ModelPart:
    attention_packed.register_packed_attention()
    model = build_hf(family, tie_word_embeddings=tied)
    model.set_attn_implementation("packed")
    return ModelPart(model, detect_head(model.config), chunk_size=8)


def _stages(part: ModelPart, cuts: list[int]) -> list[StagePart]:
    anatomy = observe(build_hf(part.model.config.model_type))
    last = len(cuts) - 2
    return [
        cut_stage(part, anatomy, layers=range(a, b), is_first=s == 0, is_last=s == last)
        for s, (a, b) in enumerate(itertools.pairwise(cuts))
    ]


@pytest.mark.parametrize(  # by default families are tied and untied in turns
    ("family", "tied"),
    [(family, i % 2 == 0) for i, family in enumerate(FAMILIES)]
    + [pytest.param(family, i % 2 == 1, marks=pytest.mark.slow) for i, family in enumerate(FAMILIES)],
)
def test_stages_compute_what_the_whole_model_does(family: str, tied: bool):
    part = _part(family, tied)
    batch = packed_batch([[token_row(9, 1), token_row(15, 2)]])
    inputs = {"labels": batch.labels_BT, **batch.model_inputs()}
    whole = part(**inputs).logprobs_BT
    whole.sum().backward()
    want = gradients(part)
    part.zero_grad()
    for cuts in CUTS:
        stages = _stages(part, cuts)
        boundaries: list[tuple[Tensor, Tensor]] = []
        output = None
        for stage in stages:
            received = None if output is None else output.detach().requires_grad_()
            if received is not None:
                boundaries.append((output, received))
            output = stage(received, **inputs)
        output.logprobs_BT.sum().backward()
        for sent, received in reversed(boundaries):
            sent.backward(received.grad)
        got: dict[str, Tensor] = {}
        for stage in stages:
            for name, grad in gradients(stage).items():
                got[name] = got[name] + grad if name in got else grad
            stage.zero_grad()
        assert torch.equal(output.logprobs_BT, whole), cuts
        assert set(got) == set(want), cuts
        assert gradient_error(want, got) == 0.0, cuts


def test_every_parameter_is_on_one_stage_under_its_own_name():
    part = _part("qwen3", tied=False)
    stages = _stages(part, [0, 2, 3, 4])
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in part.named_parameters())
    own = {p.data_ptr() for p in part.parameters()}
    assert all(p.data_ptr() in own for stage in stages for p in stage.parameters()), "nothing is copied"


def test_a_tied_table_is_on_both_ends_and_counted_on_the_first():
    first, _, last = _stages(_part("llama", tied=True), [0, 2, 3, 4])
    table = "model.model.embed_tokens.weight"
    assert first.shared == last.shared == last.held_elsewhere == {table} and not first.held_elsewhere
    ours, theirs = dict(first.named_parameters())[table], dict(last.named_parameters())[table]
    assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()
    assert last.model.get_output_embeddings().weight is theirs


class _CountsCopies:
    """A plain attribute of a layer."""

    def __init__(self) -> None:
        self.count = 0

    def __deepcopy__(self, memo: dict) -> _CountsCopies:
        self.count += 1
        return self


def test_a_stage_copies_its_own_layers_only():
    part = _part("llama", False)
    marks = [_CountsCopies() for _ in part.model.model.layers]
    for layer, mark in zip(part.model.model.layers, marks, strict=True):
        layer.mark = mark
    (_, stage, _) = _stages(part, [0, 2, 3, 4])
    assert [mark.count for mark in marks] == [1, 1, 1, 1], "each in one stage of three"
    assert all(slot.mark is mark for slot, mark in zip(stage.model.model.layers, marks, strict=True))


def test_models_with_the_same_small_copy_are_probed_once():
    five, seven = (build_hf("llama", num_hidden_layers=count) for count in (5, 7))
    assert check_split(five) is check_split(seven)
    assert check_split(build_hf("qwen3", num_hidden_layers=5)) is not check_split(five)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_accepts_what_is_exact(family: str):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family, num_hidden_layers=7))
    assert check_split(model).layers == "model.layers"


def test_tuple_layers_and_modules_before_the_decoder_are_seen():
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gptj"](n_embd=64, n_layer=2, n_head=4, rotary_dim=8))
    anatomy = observe(model)
    assert anatomy.layers == "transformer.h" and anatomy.before == ("transformer.wte",)
    bloom = AutoModelForCausalLM.from_config(CONFIG_MAPPING["bloom"](hidden_size=64, n_layer=2, n_head=4))
    assert observe(bloom).before == ("transformer.word_embeddings", "transformer.word_embeddings_layernorm")


REJECTED = (
    "hy_v4",  # its layers pass more than hidden states to each other
    "hrm_text",  # its layers are in several module lists
    "mllama",  # not every layer runs
)
UNUSUAL = {
    "longcat_flash": "layers are counted in a field of their own",
    "llama4_text": "the base model has another name than its class says",
    "xlm-roberta": "the head, tied, comes before the embedding",
    "recurrent_gemma": "layers keep what they computed",
    "dots3_note_text": "some layers have other sizes",
    "openai-gpt": "layers return lists",
}


@pytest.mark.parametrize("family", [family for family in UNUSUAL if family in CONFIG_MAPPING])
def test_the_probe_accepts_unusual_structures(family: str):
    config = CONFIG_MAPPING[family](is_decoder=True)
    probe(AutoModelForCausalLM._model_mapping[type(config)], config)


@pytest.mark.parametrize("family", REJECTED)
def test_the_probe_rejects_other_structures(family: str):
    config = CONFIG_MAPPING[family]()
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    values = (model_class.__name__,)
    with raises(SplitError, "not_supported_by_model", keys=("pp_size",), values=values, fix="mesh.pp_size=1"):
        probe(model_class, config)


def test_encoder_decoders_are_refused():
    model = AutoModelForSeq2SeqLM.from_config(
        CONFIG_MAPPING["t5"](d_model=64, d_ff=64, num_layers=2, num_heads=4, vocab_size=50)
    )
    with raises(SplitError, "not_supported_by_model", values=("T5ForConditionalGeneration",)):
        find_decoder_layers(model)


def test_the_probe_names_the_first_layer_that_differs(monkeypatch: pytest.MonkeyPatch):
    """Sabotage: a stand-in hands over hidden states that are off by a little."""
    right = stage_module.StandIn.forward

    def wrong(self, *args, **kwargs):
        output = right(self, *args, **kwargs)
        return output * 1.001 if self.role == "enter" else output

    monkeypatch.setattr(stage_module.StandIn, "forward", wrong)
    config = tiny_config("llama")
    with raises(SplitError, "not_supported_by_model", values=("model.layers.2",)):
        probe(type(build_hf("llama")), config)


def test_small_copies_keep_the_structure():
    config = tiny_config("gemma3_text", num_hidden_layers=8, num_key_value_heads=1, hidden_size=256)
    config.layer_types = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2
    small = shrink(config)
    assert (small.hidden_size, small.num_hidden_layers, small.num_key_value_heads) == (64, 4, 1)
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert config.hidden_size == 256, "the user's config is left alone"


def test_small_copies_have_both_sides_of_layers_that_share_keys():
    config = CONFIG_MAPPING["gemma3n_text"]()
    small = shrink(config)
    assert (config.num_kv_shared_layers, small.num_kv_shared_layers) == (15, 2)
    assert small.layer_types == ["sliding_attention", "full_attention"] * 2
    if hasattr(config, "kv_sharing_modes"):  # transformers 5.17 derives them where they are used
        assert small.kv_sharing_modes == ["store", "store", "reuse", "reuse"]
    assert small.intermediate_size == [96] * 4


@pytest.mark.skipif("dots3_note_text" not in CONFIG_MAPPING, reason="this transformers has no such family")
def test_small_copies_keep_what_some_layers_have_otherwise():
    config = CONFIG_MAPPING["dots3_note_text"]()
    small = shrink(config)
    widths = [layer.qk_nope_head_dim for layer in config.per_layer_config]
    assert len(set(widths)) == 2 and len(small.per_layer_config) == 4
    assert {layer.head_dim for layer in small.per_layer_config} == {32}


@pytest.mark.skipif("gemma4_unified_assistant" not in CONFIG_MAPPING, reason="this transformers has no such family")
def test_draft_models_are_rejected():
    text = CONFIG_MAPPING["gemma4_unified_assistant"]().get_text_config()
    if not hasattr(text, "num_hidden_layers"):
        pytest.skip("transformers 5.17 does not mark the text config")
    with raises(ConfigError, "wrong_model_kind", keys=("model",)):
        shrink(text)
