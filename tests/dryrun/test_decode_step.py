"""What a CUDA graph of the sampler's step would hold, on fake CUDA: kernels alone. Capture forbids the host to wait for
the device, and to make tensors there of what it has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from automodel_cli.dryrun.fake_device import fake_cuda, fake_tensor_compat
from automodel_cli.dryrun.fake_device.collectives import Collectives
from automodel_cli.dryrun.fake_device.dispatch_mode import TracedRank
from automodel_cli.dryrun.fake_device.fake_cuda import CUDA
from automodel_cli.dryrun.fake_device.memory import MemoryTracker
from automodel_cli.dryrun.trace_rank import _materialise
from automodel_cli.models.attention.packed import packed_attention, register_packed_attention
from automodel_cli.models.lm_head.detection import detect_head
from automodel_cli.models.model_part import ModelPart
from automodel_cli.planning.hardware import GPUS
from automodel_cli.planning.simulated_clock import Clock
from automodel_cli.rollout.engines.sampler import cuda_graphs
from automodel_cli.rollout.engines.sampler.decoder import Decoder
from automodel_cli.rollout.engines.sampler.sampler import Sampler
from automodel_cli.rollout.types import SamplingParams
from tests import tiny
from tests.dist.harness import launch

pytestmark = pytest.mark.slow

Counted = tuple[list[str], dict[str, int], list[str]]
"""Waits of a step, its launches by name, and the waits of a step that asks for a value."""


def _counted(rank: int, world: int, family: str, greedy: bool) -> Counted:
    register_packed_attention()
    model = tiny.build_hf(family, num_hidden_layers=2).bfloat16()
    if family != "llama":
        model.set_experts_implementation("grouped_mm")
    model.set_attn_implementation("packed")
    part = ModelPart(model, detect_head(model.config))
    clock = Clock()
    memory = MemoryTracker(lambda: "step", list)
    mode = TracedRank(GPUS["h100"], clock, memory, Collectives(clock, {}), "balanced")
    fake_cuda.pretend(GPUS["h100"], clock, mode.synchronised)
    fake = fake_tensor_compat.install_fake_cuda(CUDA)
    found: list[Counted] = []

    def watch(step: cuda_graphs.Step, inputs_B3: Tensor) -> Callable[[], Tensor]:
        step(inputs_B3)
        mode.counts.on = True
        step(inputs_B3)
        waits, launches = _waits(mode), dict(mode.counts.kernels)
        step(inputs_B3)[0].tolist()
        found.append((waits, launches, _waits(mode)))
        raise RuntimeError("enough is known")

    params = SamplingParams(max_new_tokens=12, temperature=0.0) if greedy else SamplingParams(12, 0.7, 0.9, 20, seed=1)
    with fake, mode:
        _materialise(part, CUDA)
        sampler = Sampler(
            Decoder.from_part(part, CUDA), packed_attention, stop_token_ids=[], max_num_seqs=4, capture=watch
        )
        sampler.generate([[5, 6, 7], [8, 9]], params)
    return found[0]


def _waits(mode: TracedRank) -> list[str]:
    return [f"{what} at {line}" for what, line in mode.counts.syncs]


@pytest.mark.parametrize(("family", "greedy"), [("qwen3_moe", False), ("llama", True)])
def test_the_host_waits_for_nothing_inside_a_step(family: str, greedy: bool) -> None:
    waits, launches, with_a_value = launch(_counted, 1, family, greedy, timeout=200, process_group=False)
    assert waits == []
    assert len(with_a_value) == 1, "a wait would be seen"
    assert not launches.keys() & {"_pin_memory", "lift_fresh"}
    assert launches["index_put_"] >= 4, "keys and values of two layers"
    assert ("searchsorted" in launches) != greedy and ("_grouped_mm" in launches) == (family == "qwen3_moe")
