"""The memory tracker against an allocator: real steps of a small model on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from automodel_cli.dryrun.fake_device import torch_compat
from automodel_cli.dryrun.fake_device.memory import MemoryTracker, owned_tensors
from automodel_cli.models.builder import build_part
from automodel_cli.models.config import ModelConfig
from tests.tiny import tiny_fields


class _Watch(TorchDispatchMode):
    def __init__(self, memory: MemoryTracker):
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for t in tree_flatten(out)[0]:
            if isinstance(t, Tensor) and t.device.type == "cpu":
                self.memory.add(t, func._schema.name)
        return out


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ids = torch.arange(512).remainder(90).view(2, 256)
    for _ in range(2):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_the_peak_of_a_real_step_is_that_of_the_allocator_within_ten_percent(family: str) -> None:
    torch.manual_seed(0)
    part = build_part(ModelConfig(config=tiny_fields(family), attn_implementation="sdpa"), device="cpu")
    model: nn.Module = part.model
    for p in model.parameters():
        nn.init.normal_(p, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    _steps(model, optimizer)  # whatever is allocated once
    optimizer.state.clear()
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        _steps(model, optimizer)
    live = peak = 0
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    optimizer.state.clear()
    memory = MemoryTracker(lambda: "temporaries", lambda: owned_tensors([model], optimizer))
    undo = torch_compat.on_resize(memory.resized)
    with _Watch(memory):
        _steps(model, optimizer)
    undo()
    assert memory.peak + held == pytest.approx(peak + held, rel=0.10)
    assert sum(memory.result().by_kind.values()) == memory.peak


def test_a_storage_is_counted_once_until_it_dies_and_when_it_changes_its_size() -> None:
    memory = MemoryTracker(lambda: "temporaries")
    undo = torch_compat.on_resize(memory.resized)
    a = torch.zeros(1024)
    memory.add(a, "zeros")
    memory.add(a.view(2, 512), "view")
    assert memory.now == 4096
    a.untyped_storage().resize_(100)
    assert memory.now == 512  # rounded
    del a
    undo()
    assert (memory.now, memory.peak) == (0, 4096)
