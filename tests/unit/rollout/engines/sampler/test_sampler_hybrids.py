"""The sampler on models whose layers carry a state from token to token, against the library's `generate` and the
trainer's own log-probs.

Prompts of different lengths on fewer slots than samples: slots are used again, sequences move, samples of a prompt
start from one state.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import one_document
from automodel_cli.models.attention.packed import packed_attention
from automodel_cli.models.builder import part_of
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.document_masking.recurrent_layers import StateLayer
from automodel_cli.models.model_part import ModelPart
from automodel_cli.rollout.engines.base import sample_seed
from automodel_cli.rollout.engines.decoding_check import check_decoding
from automodel_cli.rollout.engines.sampler.decoder import Decoder
from automodel_cli.rollout.engines.sampler.sampler import Sampler
from automodel_cli.rollout.engines.sampler.sampling import shaping_of
from automodel_cli.rollout.types import SamplingParams
from tests import tiny
from tests.errors import raises
from tests.hybrids import HYBRIDS, hybrid
from tests.marks import slow

STOP = list(range(2, tiny.VOCAB, 12))
NEW = 10
GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0.0)
DRAWN = SamplingParams(max_new_tokens=NEW, temperature=0.7, top_k=40, seed=1)
UNCACHED = ("recurrent_gemma", "rwkv")  # they keep their states in themselves, or hand them from layer to layer
# One of each kind: gated delta net, lightning attention, Mamba-1, Mamba-2 beside attention in one layer, Mamba-2 with
# experts, short convolution
DEFAULT = ("qwen3_5_text", "minimax", "jamba", "falcon_h1", "nemotron_h", "lfm2")
FAMILIES = [*DEFAULT, *slow(*(family for family in HYBRIDS if family not in (*DEFAULT, *UNCACHED)))]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(3, tiny.VOCAB, (n,), generator=generator).tolist() for n in (7, 2, 11, 7)]
    return [prompt for prompt in drawn for _ in range(2)]


def built(family: str) -> tuple[ModelPart, PreTrainedModel]:
    """A part as in training, and the library's own model with the same weights."""
    torch.set_num_threads(1)
    small, model = hybrid(family)
    part = part_of(copy.deepcopy(small), ModelConfig(pretrained="-"), device="cpu")
    part.model.load_state_dict(model.state_dict())
    return part, model


def make_sampler(part: ModelPart, **options: Any) -> Sampler:
    return Sampler(Decoder.from_part(part), packed_attention, stop_token_ids=STOP, **{"max_num_seqs": 3, **options})


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate_and_logprobs_those_of_the_trainer(family: str):
    part, model = built(family)
    asked = prompts()
    greedy = make_sampler(part).generate(asked, GREEDY)
    model.eval()
    for prompt, pair in zip(asked[::2], zip(greedy[::2], greedy[1::2], strict=True), strict=True):
        want = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=STOP)
        assert [c.tokens for c in pair] == [want[0, len(prompt) :].tolist()] * 2
    drawn = make_sampler(part).generate(asked, DRAWN)
    assert {c.finish_reason for c in drawn} == {"stop", "length"}
    assert part.training
    worst = 0.0
    for params, completions in ((GREEDY, greedy), (DRAWN, drawn)):
        part.head.shaping = shaping_of(params)
        for prompt, completion in zip(asked, completions, strict=True):
            batch = one_document([*prompt, *completion.tokens])
            scored_T = part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT[0, len(prompt) - 1 : -1]
            worst = max(worst, (scored_T - torch.tensor(completion.logprobs)).abs().max().item())
    print(f"{family}: log-probs off by {worst:.1e}")
    assert worst < 1e-5


@pytest.fixture(scope="module")
def falcon() -> ModelPart:
    """Attention and a state in each layer: the smallest copy that has both."""
    return built("falcon_h1")[0]


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 1}, {"max_num_seqs": 16}, {"max_num_batched_tokens": 1}, {"refill_threshold": 1.0}]
)
def test_batching_changes_nothing(falcon: ModelPart, options: dict[str, Any]):
    want = make_sampler(falcon).generate(prompts(), DRAWN)
    got = make_sampler(falcon, **options).generate(prompts(), DRAWN)
    assert [c.tokens for c in got] == [c.tokens for c in want]


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
def test_a_prompt_runs_once_for_all_its_samples(falcon: ModelPart, max_num_seqs: int):
    """Also where they do not fit into the slots together."""
    tokens: list[int] = []
    layer = next(module for module in falcon.modules() if isinstance(module, StateLayer))
    handle = _inner(layer).register_forward_pre_hook(lambda module, args: tokens.append(args[0].shape[:2].numel()))
    asked = [[3, 4, 5, 6]] * 5 + [[7, 8, 9, 10]] * 3
    sampler = Sampler(Decoder.from_part(falcon), packed_attention, stop_token_ids=[], max_num_seqs=max_num_seqs)
    drawn = sampler.generate(asked, SamplingParams(max_new_tokens=2, seed=1))
    handle.remove()
    assert sum(tokens) == 8 + 8  # both prompts, then a token for each of the 8 samples
    alone = [
        sampler.generate([p], SamplingParams(max_new_tokens=2), [sample_seed(1, i)])[0] for i, p in enumerate(asked)
    ]
    assert [c.tokens for c in drawn] == [c.tokens for c in alone]
    torch.testing.assert_close([c.logprobs for c in drawn], [c.logprobs for c in alone], atol=1e-5, rtol=0)


def _inner(layer: nn.Module) -> nn.Module:
    """A part of a state layer that sees its tokens."""
    return next(module for module in layer.modules() if isinstance(module, nn.Linear))


def test_a_phase_leaves_no_state_to_the_next_one():
    """Other weights, and room for more sequences than the phase before needed."""
    part, _ = built("lfm2")
    sampler = make_sampler(part)
    before = sampler.generate(prompts()[:1], GREEDY)
    tiny.perturb(part.model, 9)
    sampler.update_weights(iter(()))
    after = sampler.generate(prompts(), GREEDY)
    assert before[0].tokens != after[0].tokens
    assert [c.tokens for c in make_sampler(part).generate(prompts(), GREEDY)] == [c.tokens for c in after]


def test_the_states_of_a_sequence_are_measured():
    part, model = built("lfm2")
    config = model.config
    of_layer = config.hidden_size * config.conv_L_cache * 4  # the last tokens of a convolution, in float32
    assert make_sampler(part).state_bytes() == config.layer_types.count("conv") * of_layer


def test_an_error_in_the_middle_leaves_the_state_layers_to_the_trainer(falcon: ModelPart):
    sampler = make_sampler(falcon)
    batch = one_document(prompts()[4])
    want_BT = falcon(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT
    with pytest.raises(IndexError):
        sampler.generate([[tiny.VOCAB + 500]], GREEDY)
    assert torch.equal(falcon(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT, want_BT)
    assert len(sampler.generate([[4]], SamplingParams(max_new_tokens=3))) == 1


@pytest.mark.parametrize("family", UNCACHED)
def test_states_that_no_cache_of_the_library_holds_are_refused(family: str):
    with raises(ConfigError, "not_supported_by_model", keys=("rollout.engine",), fix="rollout=hf"):
        check_decoding(CONFIG_MAPPING[family](**HYBRIDS[family]))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_decode_pass_the_check(family: str):
    check_decoding(CONFIG_MAPPING[family](**HYBRIDS[family]))
