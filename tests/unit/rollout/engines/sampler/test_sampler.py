"""The sampler against the trainer's own log-probs and against the library's `generate`, family by family."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.data.batch import one_document
from automodel_cli.models.attention import flex as attention_flex
from automodel_cli.models.attention import kernel_selection
from automodel_cli.models.attention.packed import packed_attention, register_packed_attention
from automodel_cli.models.lm_head.detection import detect_head
from automodel_cli.models.lm_head.sampling_transform import SamplingTransform
from automodel_cli.models.model_part import ModelPart
from automodel_cli.rollout.engines.base import sample_seed
from automodel_cli.rollout.engines.decoding_check import check_decoding
from automodel_cli.rollout.engines.sampler.decoder import Decoder
from automodel_cli.rollout.engines.sampler.sampler import Sampler
from automodel_cli.rollout.engines.sampler.sampling import draw, sample_tokens, shaping_of, streams, uniforms
from automodel_cli.rollout.engines.transformers_engine import HFEngine
from automodel_cli.rollout.types import SamplingParams
from tests import tiny
from tests.errors import raises
from tests.marks import slow

STOP = [2, 5, 9]
NEW = 14
FAMILIES = ["llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "gemma2", "mistral", "granite"]


def make_part(family: str, **extra) -> ModelPart:
    torch.set_num_threads(1)
    register_packed_attention()
    model = tiny.build_hf(family, **extra)
    model.set_attn_implementation("packed")
    return ModelPart(model, detect_head(model.config))


@pytest.fixture(scope="module", params=FAMILIES)
def part(request) -> ModelPart:
    return make_part(request.param)


@pytest.fixture(scope="module")
def llama() -> ModelPart:
    return make_part("llama")


def make_sampler(part: ModelPart, max_num_seqs: int = 3, **options) -> Sampler:
    return Sampler(Decoder.from_part(part), packed_attention, stop_token_ids=STOP, max_num_seqs=max_num_seqs, **options)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(3, tiny.VOCAB, (n,), generator=generator).tolist() for n in (7, 2, 11, 1, 20)]
    return [prompt for prompt in drawn for _ in range(2)]  # samples of one prompt share its prefill


def trainer_logprobs(part: ModelPart, prompt, tokens, shaping):
    """What the trainer computes for the completion, in training mode and with gradients."""
    batch = one_document([*prompt, *tokens])
    part.head.shaping = shaping
    try:
        return part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT[0, len(prompt) - 1 : -1]
    finally:
        part.head.shaping = None


@pytest.mark.parametrize(
    "params",
    [
        *slow(SamplingParams(max_new_tokens=NEW, seed=1)),
        SamplingParams(max_new_tokens=NEW, temperature=0.6, top_k=30, top_p=0.8, seed=2),
        SamplingParams(max_new_tokens=NEW, temperature=0.0),
    ],
)
def test_logprobs_are_the_trainers(part, prompts, params):
    for prompt, completion in zip(prompts, make_sampler(part).generate(prompts, params), strict=True):
        expected = trainer_logprobs(part, prompt, completion.tokens, shaping_of(params))
        assert len(completion.tokens) == len(completion.logprobs)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected.detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_library_draws_the_same_tokens(part, prompts, temperature):
    params = SamplingParams(max_new_tokens=NEW, temperature=temperature)
    seeds = [sample_seed(3, i) for i in range(len(prompts))]
    replica = copy.deepcopy(part.model)
    replica.set_attn_implementation("eager")
    oracle = HFEngine(replica, stop_token_ids=STOP, pad_token_id=0)
    want = oracle.generate(prompts, params, seeds)
    got = make_sampler(part).generate(prompts, params, seeds)
    assert [(c.tokens, c.finish_reason) for c in got] == [(c.tokens, c.finish_reason) for c in want]


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 1}, {"max_num_seqs": 16}, {"max_num_batched_tokens": 1}, {"refill_threshold": 1.0}]
)
def test_batching_changes_nothing(llama, prompts, options):
    params = SamplingParams(max_new_tokens=NEW, seed=5)
    want = make_sampler(llama).generate(prompts, params)
    got = make_sampler(llama, **options).generate(prompts, params)
    assert [c.tokens for c in got] == [c.tokens for c in want]
    assert len({len(c.tokens) for c in want}) > 1 and {c.finish_reason for c in want} == {"stop", "length"}


def test_a_sample_depends_on_its_seed_alone(llama, prompts):
    params, seeds = SamplingParams(max_new_tokens=NEW), [sample_seed(0, 7, i) for i in range(len(prompts))]
    together = make_sampler(llama).generate(prompts, params, seeds)
    order = list(reversed(range(len(prompts))))
    turned = make_sampler(llama).generate([prompts[i] for i in order], params, [seeds[i] for i in order])
    assert [c.tokens for c in reversed(turned)] == [c.tokens for c in together]
    assert together[0].tokens != together[1].tokens  # the same prompt with another seed
    state = torch.get_rng_state()
    free = make_sampler(llama).generate(prompts, SamplingParams(max_new_tokens=NEW))
    assert free != together and not torch.equal(torch.get_rng_state(), state)


def test_it_samples_the_weights_of_now_and_leaves_the_model_as_it_was(prompts):
    part = make_part("qwen3")
    sampler, params = make_sampler(part), SamplingParams(max_new_tokens=NEW, temperature=0.0)
    before = sampler.generate(prompts, params)
    assert part.training and part.model.config._attn_implementation == "packed" and part.head.shaping is None
    tiny.perturb(part.model, 9)
    sampler.update_weights(iter(()))
    after = sampler.generate(prompts, params)
    assert [c.tokens for c in before] != [c.tokens for c in after]
    assert (before[0].weight_version, after[0].weight_version) == (0, 1)
    fresh = make_sampler(part).generate(prompts, params)
    assert [c.tokens for c in fresh] == [c.tokens for c in after]


def test_each_prompt_may_have_a_limit_of_its_own(llama, prompts):
    limits = [1 + 3 * i for i in range(len(prompts))]
    whole = make_sampler(llama).generate(prompts, SamplingParams(max_new_tokens=max(limits), seed=5))
    cut = make_sampler(llama).generate(prompts, SamplingParams(seed=5), limits=limits)
    assert [c.tokens for c in cut] == [c.tokens[:limit] for c, limit in zip(whole, limits, strict=True)]


def test_no_prompt_is_no_work_and_wrong_calls_are_refused(llama):
    sampler = make_sampler(llama)
    assert sampler.generate([], SamplingParams()) == []
    with raises(RunError, "empty_value", values=(1, 2)):
        sampler.generate([[3], []], SamplingParams())
    with raises(RunError, "batch_shape", keys=("seeds",), values=(2, 1)):
        sampler.generate([[3], [4]], SamplingParams(), [1])
    with raises(ConfigError, "out_of_range", keys=("max_num_seqs",), values=(0,)):
        make_sampler(llama, max_num_seqs=0)


def test_the_training_mode_comes_back_after_an_error(llama):
    sampler = make_sampler(llama)
    with pytest.raises(IndexError):
        sampler.generate([[tiny.VOCAB + 5]], SamplingParams())
    assert llama.training and llama.model.config._attn_implementation == "packed"
    assert len(sampler.generate([[4]], SamplingParams(max_new_tokens=3))) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_decode_pass_the_check(family):
    check_decoding(tiny.tiny_config(family))


def test_families_whose_attention_is_not_the_librarys_are_refused():
    with raises(ConfigError, "not_supported_by_model", keys=("rollout.engine",), values=("bloom",), fix="rollout=hf"):
        check_decoding(CONFIG_MAPPING["bloom"]())


def test_prompts_of_soft_capped_families_run_on_compiled_flex_attention():
    """The sampler runs layers as eager code. FlexAttention without its compiler is tokens x tokens: CUDA refuses it."""
    part, params = make_part("gemma2", num_hidden_layers=2), SamplingParams(max_new_tokens=3, temperature=0.0)
    dense = make_sampler(part).generate([[7, 8, 9, 10], [11, 12]], params)
    before = len(attention_flex.compilations)
    kernel_selection.choose_kernel("flex", torch.device("cpu"))
    try:
        flex = make_sampler(part).generate([[7, 8, 9, 10], [11, 12]], params)
    finally:
        kernel_selection.choose_kernel("auto", torch.device("cpu"))
    assert len(attention_flex.compilations) > before
    assert [c.tokens for c in flex] == [c.tokens for c in dense]


@pytest.mark.parametrize("kind", ["llama", "granite", "gemma2"])
@pytest.mark.parametrize("shaping", [SamplingTransform(0.7), SamplingTransform(1.3, top_k=12, top_p=0.9)])
def test_gradients_of_shaped_logprobs(kind, shaping):
    """The head's fused gradients against autograd through full logits, for equal and unequal incoming gradients."""
    part = make_part(kind)
    batch = one_document(tiny.token_row(12).tolist())
    labels_S = batch.labels_BT[0, :-1]
    for factor_S in (torch.ones(11), torch.linspace(-1, 2, 11)):
        part.zero_grad()
        part.head.shaping = shaping
        logprobs_S = part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT[0, :-1]
        (logprobs_S * factor_S).sum().backward()
        got = tiny.gradients(part.model)
        part.head.shaping = None
        part.zero_grad()
        logits_SV = part.model(input_ids=batch.input_ids_BT, use_cache=False).logits[0, :-1]
        plain_S = shaping(logits_SV, labels_S).log_softmax(-1).gather(-1, labels_S[:, None])[:, 0]
        torch.testing.assert_close(logprobs_S, plain_S, atol=1e-5, rtol=0)
        (plain_S * factor_S).sum().backward()
        assert tiny.gradient_error(tiny.gradients(part.model), got) < 2e-5


def test_the_stream_of_a_seed_is_philox_s_own_whatever_else_is_in_the_call():
    seeds = [3, 0, 2**64 + 5, 3]
    drawn = streams(seeds, [5, 0, 9, 7])
    assert [len(stream) for stream in drawn] == [5, 0, 9, 7]
    for seed, stream in zip(seeds, drawn, strict=True):
        assert stream == np.random.Generator(np.random.Philox(key=seed)).random(len(stream)).tolist()
        assert uniforms(seed, len(stream)).tolist() == stream


def test_draws_follow_the_distribution_and_never_what_is_filtered_out():
    logits_SV = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)) * 2
    params = SamplingParams(temperature=0.8, top_k=10)
    uniform_S = uniforms(3, 20_000)
    tokens_S, logprobs_S = sample_tokens(logits_SV.expand(20_000, -1), params, uniform_S)
    kept = (logits_SV / 0.8).topk(10)
    expected = kept.values.softmax(-1)[0]
    counts = torch.stack([(tokens_S == t).sum() for t in kept.indices[0]])
    assert counts.sum() == 20_000
    chi2 = ((counts - expected * 20_000) ** 2 / (expected * 20_000)).sum()
    assert chi2 < 27.9, chi2  # 99.9% quantile at 9 degrees of freedom
    torch.testing.assert_close(logprobs_S[tokens_S == kept.indices[0, 0]][0], expected[0].log())
    edge = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    logprobs_SV = torch.tensor([[-torch.inf, 0.3, 0.7, -torch.inf]]).clamp(min=-torch.inf)
    logprobs_SV = torch.where(logprobs_SV > 0, logprobs_SV.log(), logprobs_SV).expand(2, -1)
    assert draw(logprobs_SV, edge).tolist() == [1, 2]


def test_a_drawn_token_stays_when_rounding_moves_the_edge_of_top_p():
    logits_SV = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    assert SamplingTransform(top_p=0.6)(logits_SV).isinf().tolist() == [[False, True, True, True]]
    assert SamplingTransform(top_p=0.6)(logits_SV, torch.tensor([2])).isinf().tolist() == [[False, True, False, True]]
