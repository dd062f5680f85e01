"""The Hugging Face engine against the library itself: one prompt at a time, and log-probs against a full forward."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import transformers

from automodel_cli.config.errors import ConfigError, DataError, RunError
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.rollout.engines.transformers_engine import HFEngine
from automodel_cli.rollout.monitoring.accuracy import measure_accuracy
from automodel_cli.rollout.types import Completion, SamplingParams
from tests import tiny
from tests.errors import raises

PAD, STOP = 0, 2
NEW = 12


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    model = tiny.build_hf("qwen3").eval()
    model.set_attn_implementation("sdpa")
    return model


@pytest.fixture
def engine(model):
    return HFEngine(copy.deepcopy(model), stop_token_ids=[STOP, 5, 9], pad_token_id=PAD)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, tiny.VOCAB, (n,), generator=generator).tolist() for n in (7, 2, 11, 5, 1, 7, 3, 20)]


def one_by_one(model, prompt, **options):
    """The library's own answer to one prompt, without padding: new tokens."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), eos_token_id=[STOP, 5, 9], pad_token_id=PAD, **options
    )
    return out[0, len(prompt) :].tolist()


def distribution(model, prompt, tokens, temperature=1.0, top_k=0, top_p=1.0):
    """Log-probs `[tokens, V]` of what follows, from one full forward; filters written out from their definitions."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double() / temperature
    if top_k:
        logits[logits < logits.topk(top_k, dim=-1).values[:, -1:]] = -torch.inf
    if top_p < 1:
        probs, order = logits.softmax(-1).sort(dim=-1, descending=True)
        cut = probs.cumsum(-1) - probs >= top_p  # a token stays while the ones before it sum to less than top_p
        logits = logits.scatter(1, order, logits.gather(1, order).masked_fill(cut, -torch.inf))
    return logits.log_softmax(-1)


def drawn(logprobs, tokens):
    return logprobs[torch.arange(len(tokens)), torch.tensor(tokens)]


@pytest.mark.parametrize("max_batch_tokens", [16_384, 60, 1])
def test_greedy_is_what_the_library_says_one_prompt_at_a_time(model, prompts, max_batch_tokens):
    engine = HFEngine(
        copy.deepcopy(model), stop_token_ids=[STOP, 5, 9], pad_token_id=PAD, max_batch_tokens=max_batch_tokens
    )
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=NEW, temperature=0.0))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.tokens == one_by_one(model, prompt, max_new_tokens=NEW, do_sample=False)
        expected = drawn(distribution(model, prompt, completion.tokens), completion.tokens)
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=NEW, seed=1),
        SamplingParams(max_new_tokens=NEW, temperature=0.6, seed=2),
        SamplingParams(max_new_tokens=NEW, temperature=1.4, top_k=5, seed=3),
        SamplingParams(max_new_tokens=NEW, temperature=0.8, top_p=0.7, top_k=30, seed=4),
    ],
)
def test_sampled_logprobs_are_those_of_the_filtered_distribution(model, engine, prompts, params):
    filters = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
    for prompt, completion in zip(prompts, engine.generate(prompts, params), strict=True):
        expected = drawn(distribution(model, prompt, completion.tokens, **filters), completion.tokens)
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, atol=1e-5, rtol=0)


def test_samples_follow_the_distribution(model, engine):
    """4000 draws of one token against its probabilities: chi-square over the most likely tokens."""
    prompt, params = [10, 20, 30], SamplingParams(max_new_tokens=1, temperature=0.7, seed=0)
    draws = torch.tensor([c.tokens[0] for c in engine.generate([prompt] * 4000, params)])
    probs = distribution(model, prompt, [0], temperature=0.7)[0].exp()
    top = probs.topk(8).indices
    expected = torch.cat([probs[top], (1 - probs[top].sum())[None]]) * 4000
    counts = torch.stack([(draws == token).sum() for token in top])
    observed = torch.cat([counts, (4000 - counts.sum())[None]])
    chi2 = ((observed - expected) ** 2 / expected).sum()
    assert chi2 < 26.1, chi2  # 99.9% quantile at 8 degrees of freedom


def test_every_stop_token_ends_a_row_and_is_kept(engine, prompts):
    params = SamplingParams(max_new_tokens=40, temperature=2.0, seed=0)
    completions = engine.generate(prompts * 8, params)
    reasons = {c.finish_reason for c in completions}
    assert reasons == {"stop", "length"}
    for c in completions:
        assert len(c.tokens) == len(c.logprobs) <= 40
        assert not {STOP, 5, 9} & set(c.tokens[:-1])
        assert (c.tokens[-1] in (STOP, 5, 9)) == (c.finish_reason == "stop")
        assert c.finish_reason == "stop" or len(c.tokens) == 40
    assert {c.tokens[-1] for c in completions if c.finish_reason == "stop"} == {STOP, 5, 9}


def test_a_seed_repeats_and_leaves_the_callers_random_state_alone(engine, prompts):
    params = SamplingParams(max_new_tokens=NEW, seed=7)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert engine.generate(prompts, params) == engine.generate(prompts, params)
    assert torch.equal(torch.get_rng_state(), before)
    free = SamplingParams(max_new_tokens=NEW)
    assert engine.generate(prompts, free) != engine.generate(prompts, free)


def test_sampling_defaults_of_a_checkpoint_do_not_leak(model, prompts):
    hostile = copy.deepcopy(model)
    hostile.generation_config.update(top_k=2, temperature=0.3, repetition_penalty=5.0, do_sample=True, min_new_tokens=9)
    params = SamplingParams(max_new_tokens=NEW, seed=1)
    options = {"stop_token_ids": [STOP], "pad_token_id": PAD}
    assert HFEngine(hostile, **options).generate(prompts, params) == HFEngine(copy.deepcopy(model), **options).generate(
        prompts, params
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_library_has_nothing_to_complain_about(engine, prompts, caplog, temperature):
    logger = logging.getLogger("transformers")  # does not propagate to the root, where caplog listens
    logger.addHandler(caplog.handler)
    transformers.utils.logging.warning_once.cache_clear()  # it may have said it already, in another test
    engine.generate(prompts, SamplingParams(max_new_tokens=2, temperature=temperature))
    logger.removeHandler(caplog.handler)
    assert not caplog.records


def test_a_replica_takes_its_weights_from_the_stream(model, prompts):
    before = torch.get_rng_state()
    replica = HFEngine.from_config(model.config, stop_token_ids=[STOP, 5, 9], pad_token_id=PAD)
    assert torch.equal(torch.get_rng_state(), before)
    params = SamplingParams(max_new_tokens=NEW, temperature=0.0)
    assert replica.generate(prompts, params)[0].weight_version == 0
    named = list(model.named_parameters())
    replica.update_weights(iter([named[:3], [], named[3:]]))
    completions = replica.generate(prompts, params)
    assert [c.tokens for c in completions] == [
        one_by_one(model, p, max_new_tokens=NEW, do_sample=False) for p in prompts
    ]
    assert completions[0].weight_version == replica.weight_version == 1


@pytest.mark.parametrize("both_names", [True, False])
def test_tied_weights_come_under_one_name_or_both(both_names):
    config = tiny.tiny_config("llama", tie_word_embeddings=True)
    replica = HFEngine.from_config(config, stop_token_ids=[STOP], pad_token_id=PAD)
    weights = {name: torch.randn_like(p) for name, p in replica.model.named_parameters()}
    stream = list(weights.items())
    if both_names:
        stream.append(("lm_head.weight", weights["model.embed_tokens.weight"]))
    replica.update_weights([stream])
    assert torch.equal(replica.model.lm_head.weight, weights["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("change", "values"),
    [
        (lambda named: named[:-1], (1, "lm_head.weight")),
        (lambda named: [*named, ("model.extra", torch.zeros(1))], ("model.extra",)),
        (lambda named: [(named[0][0], named[0][1][:5]), *named[1:]], ("model.embed_tokens.weight", 5)),
    ],
)
def test_a_stream_that_does_not_fit_is_refused(model, engine, change, values):
    with raises(RunError, "weights_mismatch", values=values):
        engine.update_weights([change(list(model.named_parameters()))])
    assert engine.weight_version == 0


def test_an_empty_prompt_is_refused_and_no_prompt_is_no_work(engine):
    with pytest.raises(RunError, match="prompt 1 of 2 has no token"):
        engine.generate([[3], []], SamplingParams())
    assert engine.generate([], SamplingParams()) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"temperature": 0.0, "top_k": 5},
    ],
)
def test_wrong_sampling_values_are_refused(fields):
    with pytest.raises(ConfigError):
        SamplingParams(**fields)


class Parrot:
    """An engine that replies with given texts: the bookkeeping of accuracy needs no model."""

    def __init__(self, tokenizer, replies):
        self.tokenizer, self.replies, self.prompts = tokenizer, replies, []

    def generate(self, prompts, params):
        assert params.greedy
        self.prompts = [self.tokenizer.decode(p) for p in prompts]
        out = []
        for text, reason in self.replies:
            tokens = self.tokenizer(text)["input_ids"] + ([self.tokenizer.eos_token_id] if reason == "stop" else [])
            out.append(Completion(tokens, [0.0] * len(tokens), reason, 0))
        return out


def test_accuracy_counts_exact_and_finished_answers():
    tokenizer = ByteTokenizer().build()
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}], "answer": a, "kind": k}
        for q, a, k in (
            ("1 + 1", "2", "add"),
            ("2 + 2", "4", "add"),
            ("Repeat AB.", "AB", "repeat"),
            ("3 + 3", "6", "add"),
        )
    ]
    parrot = Parrot(tokenizer, [("2", "stop"), ("4", "length"), ("AB", "stop"), ("66", "stop")])
    accuracy = measure_accuracy(parrot, tokenizer, rows, lambda reply, answer: reply == answer)
    assert parrot.prompts[0] == "<|user|>1 + 1<|end|><|assistant|>"
    assert [s.correct for s in accuracy.answers] == [True, False, True, False]
    assert (accuracy.num_correct, accuracy.share) == (2, 0.5)
    assert accuracy.by_kind() == {"add": pytest.approx(1 / 3), "repeat": 1.0}
    assert [s.question for s in accuracy.examples(3)] == ["1 + 1", "Repeat AB.", "2 + 2"]
    with pytest.raises(DataError, match="no question"):
        measure_accuracy(parrot, tokenizer, [], lambda reply, answer: True)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_replica_leaves_the_config_of_the_model_it_mirrors_alone(family):
    """A trainer whose attention were switched would let packed documents see each other, and say nothing."""
    config = tiny.tiny_config(family)
    config._attn_implementation = "packed"
    replica = HFEngine.from_config(config, stop_token_ids=[2], pad_token_id=0)
    assert config._attn_implementation == "packed"
    assert replica.model.config._attn_implementation == ("eager" if family == "gpt_oss" else "sdpa")
