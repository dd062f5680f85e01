"""Frozen decoding steps draw what the eager sampler draws. What freezes them here is torch's tracer: its list of
operators has the shapes, the tensors and every Python number of the moment, as a CUDA graph has."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from automodel_cli.models.attention.packed import packed_attention, register_packed_attention
from automodel_cli.models.lm_head.detection import detect_head
from automodel_cli.models.model_part import ModelPart
from automodel_cli.rollout.engines.sampler import cuda_graphs
from automodel_cli.rollout.engines.sampler.decoder import Decoder
from automodel_cli.rollout.engines.sampler.sampler import Sampler
from automodel_cli.rollout.types import Completion, SamplingParams
from tests import tiny

pytestmark = pytest.mark.slow

STOP, NEW = [2, 5, 9], 14
GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0.0)
DRAWN = SamplingParams(max_new_tokens=NEW, seed=1)
FILTERED = SamplingParams(max_new_tokens=NEW, temperature=0.6, top_k=30, top_p=0.8, seed=2)


class Tracer:
    """A `Capture`: `captured` steps so far, and how often one of them ran again."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, step: cuda_graphs.Step, inputs_B3: Tensor) -> Callable[[], Tensor]:
        frozen, self.captured = make_fx(step)(inputs_B3), self.captured + 1

        def replay() -> Tensor:
            self.replayed += 1
            return frozen(inputs_B3)

        return replay


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Several of them in short generations: of 2 and 3 slots, of 16 and 32 tokens."""
    monkeypatch.setattr(cuda_graphs, "_FEWEST_SLOTS", 2)
    monkeypatch.setattr(cuda_graphs, "_SHORTEST", 16)
    monkeypatch.setattr(cuda_graphs, "_EAGER", 1)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(3, tiny.VOCAB, (n,), generator=generator).tolist() for n in (7, 2, 11, 1)]
    return [prompt for prompt in drawn for _ in range(2)]


def make_part(family: str) -> ModelPart:
    torch.set_num_threads(1)
    register_packed_attention()
    model = tiny.build_hf(family, num_hidden_layers=2)
    model.set_attn_implementation("packed")
    return ModelPart(model, detect_head(model.config))


@pytest.fixture(scope="module")
def llama() -> ModelPart:
    return make_part("llama")


def sampler(part: ModelPart, capture: cuda_graphs.Capture | None = None) -> Sampler:
    return Sampler(Decoder.from_part(part), packed_attention, stop_token_ids=STOP, max_num_seqs=3, capture=capture)


def assert_same(got: list[Completion], want: list[Completion]) -> None:
    assert [(c.tokens, c.finish_reason) for c in got] == [(c.tokens, c.finish_reason) for c in want]
    for one, other in zip(got, want, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-6, rel=0)


@pytest.mark.parametrize(
    "case",
    [
        ("llama", FILTERED),  # sequences end at different times, and others take their slots
        ("gpt_oss", DRAWN),  # sinks, windows, experts
        ("llama", DRAWN),
        ("gemma2", DRAWN),
        ("gemma3_text", DRAWN),
        ("deepseek_v3", GREEDY),
        ("qwen3_moe", DRAWN),
        ("mixtral", FILTERED),
        ("granite", GREEDY),
    ],
    ids=lambda case: case[0],
)
def test_frozen_steps_give_the_samples_of_eager_ones(case, prompts, caplog):
    family, params = case
    part, tracer = make_part(family), Tracer()
    want = sampler(part).generate(prompts, params)
    with caplog.at_level(logging.WARNING):
        assert_same(sampler(part, tracer).generate(prompts, params), want)
    assert not [record for record in caplog.records if "CUDA graphs" in record.message]
    assert tracer.captured >= 3, "several buckets of slots and tokens"
    assert tracer.replayed > 2 * tracer.captured, "a frozen step runs again and again"


def test_a_frozen_step_reads_the_weights_of_now(prompts):
    part, tracer, params = make_part("qwen3"), Tracer(), dataclasses.replace(GREEDY, max_new_tokens=8)
    frozen, eager = sampler(part, tracer), sampler(part)
    before = frozen.generate(prompts[:2], params)
    tiny.perturb(part.model, 9)  # in place: addresses stay
    assert_same(frozen.generate(prompts[:2], params), changed := eager.generate(prompts[:2], params))
    assert [c.tokens for c in before] != [c.tokens for c in changed]
    for module in part.model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach() * 0.7))  # others: as a strategy may gather them
    assert_same(frozen.generate(prompts[:2], params), replaced := eager.generate(prompts[:2], params))
    assert [c.tokens for c in replaced] != [c.tokens for c in changed] and tracer.replayed > 8


def frozen_column(column: int) -> cuda_graphs.Capture:
    """Tokens, positions or random numbers stay those of the capture."""

    def capture(step: cuda_graphs.Step, inputs_B3: Tensor) -> Callable[[], Tensor]:
        first_B3 = inputs_B3.clone()

        def replay() -> Tensor:
            now_B3 = inputs_B3.clone()
            now_B3[:, column] = first_B3[:, column]
            return step(now_B3)

        return replay

    return capture


def wrong_at(count: int) -> cuda_graphs.Capture:
    """Runs as it should until this one."""

    def capture(step: cuda_graphs.Step, inputs_B3: Tensor) -> Callable[[], Tensor]:
        runs = iter(range(1, 1000))
        return lambda: step(inputs_B3 + torch.tensor([float(next(runs) >= count), 0.0, 0.0], dtype=torch.float64))

    return capture


def asks_the_host(step: cuda_graphs.Step, inputs_B3: Tensor) -> Callable[[], Tensor]:
    return make_fx(lambda inputs: step(inputs[: int(inputs[0, 1] * 0) + 3]))(inputs_B3)


def stays_behind(step: cuda_graphs.Step, inputs_B3: Tensor) -> Callable[[], Tensor]:
    drawn_2B = step(inputs_B3)
    return lambda: drawn_2B


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (frozen_column(0), "something else in a graph"),
        (frozen_column(1), "something else in a graph"),
        (frozen_column(2), "something else in a graph"),
        (stays_behind, "something else in a graph"),
        (wrong_at(8), "something else in a graph"),
        (asks_the_host, "could not be captured"),
    ],
    ids=["tokens", "positions", "random numbers", "everything", "later", "a wait"],
)
def test_a_wrong_graph_is_found_and_the_samples_are_the_eager_ones(llama, prompts, capture, reason, caplog):
    params = dataclasses.replace(DRAWN, max_new_tokens=24)
    want, engine = sampler(llama).generate(prompts, params), sampler(llama, capture)
    with caplog.at_level(logging.WARNING):
        assert engine.generate(prompts, params) == want
        assert engine.generate(prompts, params) == want
    (said,) = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert reason in said
