"""CUDA graphs of the sampler's decoding step: they are captured, replayed, and draw what the eager sampler draws."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from automodel_cli.models.attention.packed import packed_attention, register_packed_attention
from automodel_cli.models.lm_head.detection import detect_head
from automodel_cli.models.model_part import ModelPart
from automodel_cli.rollout.engines.sampler.cuda_graphs import Capture, Step, cuda_capture
from automodel_cli.rollout.engines.sampler.decoder import Decoder
from automodel_cli.rollout.engines.sampler.sampler import Sampler
from automodel_cli.rollout.types import SamplingParams
from tests import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_part(family: str, dtype: torch.dtype, **extra: int) -> ModelPart:
    register_packed_attention()
    model = tiny.build_hf(family, **extra).to("cuda", dtype)
    model.set_attn_implementation("packed")
    return ModelPart(model, detect_head(model.config)).cuda()


def sampler(part: ModelPart, capture: Capture | None, max_num_seqs: int = 12) -> Sampler:
    decoder = Decoder.from_part(part, torch.device("cuda"))
    return Sampler(decoder, packed_attention, stop_token_ids=[2, 5, 9], max_num_seqs=max_num_seqs, capture=capture)


class Counted:
    """`cuda_capture`, and how often a graph was made and run."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0
        self._capture = cuda_capture()

    def __call__(self, step: Step, inputs_B3: Tensor) -> Callable[[], Tensor]:
        graph, self.captured = self._capture(step, inputs_B3), self.captured + 1

        def replay() -> Tensor:
            self.replayed += 1
            return graph()

        return replay


PROMPTS = [prompt for n in range(1, 41, 5) for prompt in [[3 + (7 * n + i) % 150 for i in range(n)]] * 4]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3_dense"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graphs_draw_the_samples_of_the_eager_step(family, temperature, caplog):
    """In float32 tokens are the same; the cache grows over 256 tokens, slots are refilled, weights change in place."""
    dense = {"first_k_dense_replace": tiny.NUM_LAYERS} if family == "deepseek_v3_dense" else {}
    part, capture = make_part(family.removesuffix("_dense"), torch.float32, **dense), Counted()
    params = SamplingParams(max_new_tokens=300, temperature=temperature, seed=1)
    with_graphs, eager = sampler(part, capture), sampler(part, None)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            got, want = with_graphs.generate(PROMPTS, params), eager.generate(PROMPTS, params)
            assert [c.tokens for c in got] == [c.tokens for c in want]
            for one, other in zip(got, want, strict=True):
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            with torch.no_grad():
                for parameter in part.parameters():
                    parameter.mul_(0.9)
    assert not said(caplog)
    assert capture.captured >= 2 and capture.replayed > 4 * capture.captured


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma2"])
def test_experts_sinks_and_windows_are_captured_in_bfloat16(family, caplog):
    """Products of experts are one kernel in bfloat16 only. What is compared is in `DecodeGraphs`."""
    part, capture = make_part(family, torch.bfloat16), Counted()
    with caplog.at_level(logging.WARNING):
        sampler(part, capture).generate(PROMPTS, SamplingParams(max_new_tokens=300, top_p=0.9, top_k=40, seed=1))
    assert not said(caplog)
    assert capture.captured >= 2 and capture.replayed > 4 * capture.captured


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "CUDA graphs" in record.message]


def test_a_step_that_waits_for_the_device_is_left_eager(caplog):
    part = make_part("llama", torch.float32)
    params = SamplingParams(max_new_tokens=24, temperature=0.0)
    want = sampler(part, None).generate(PROMPTS, params)
    embed = part.model.get_input_embeddings()
    embed.register_forward_hook(lambda module, args, out: out * int(args[0].max() >= 0))
    with caplog.at_level(logging.WARNING):
        got = sampler(part, cuda_capture()).generate(PROMPTS, params)
    assert [c.tokens for c in got] == [c.tokens for c in want]
    assert "could not be captured" in said(caplog)[0]
    assert torch.ones(4, device="cuda").sum().item() == 4, "the device goes on"


def test_a_small_model_decodes_faster_in_bfloat16(caplog):
    """A step of so small a model is mostly launches. The first phase warms up both."""
    part = make_part("llama", torch.bfloat16, num_hidden_layers=12)
    params = SamplingParams(max_new_tokens=200, seed=1)
    seconds = {}
    for name, capture in (("eager", None), ("graphs", cuda_capture())):
        engine = sampler(part, capture, max_num_seqs=32)
        for _ in range(2):
            began = time.perf_counter()
            engine.generate(PROMPTS, params)
            torch.cuda.synchronize()
            seconds[name] = time.perf_counter() - began
    assert not said(caplog)
    assert seconds["graphs"] < 0.7 * seconds["eager"], seconds
