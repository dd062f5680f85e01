"""Live memory by kind and by source line, on fake CUDA or on a real CPU."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

import torch
from torch import Tensor, nn

from automodel_cli.distributed.tensors import tensors_in
from automodel_cli.dryrun.fake_device import torch_compat

_LOOK_AGAIN = 1.002
"""How far the sum must have risen before it is looked at again what it is made of: a look costs."""
ROUNDED_TO = 512
"""Bytes: what the caching allocator rounds blocks to."""
_NAMED_FROM = 8 << 20
"""Bytes: smaller blocks are not attributed to a line of code."""
_OURS = ("automodel_cli/", "transformers/models/", "transformers/integrations/", "transformers/modeling")


@dataclass
class _Block:
    size: int
    phase: str
    operator: str
    line: str
    watch: weakref.ref[torch.UntypedStorage]


@dataclass(frozen=True)
class Snapshot:
    """The moment of the largest sum, or one at most 0.2% below it. `blocks`: bytes by (kind, operator, line)."""

    total: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    blocks: Counter[tuple[str, str, str]] = field(default_factory=Counter)


class MemoryTracker:
    """Told of every result of an operator (`add`) and of storages that change their size (`resized`).

    `phase()` names what is going on; `owned()` gives (kind, tensor) of what has an owner (parameters, gradients,
    states). A storage is counted once, from the first tensor that shows it until it dies.
    """

    def __init__(self, phase: Callable[[], str], owned: Callable[[], list[tuple[str, Tensor]]] = list):
        self._phase, self._owned = phase, owned
        self._live: dict[int, _Block] = {}
        self.now = 0
        self.peak = 0
        self._seen = Snapshot()

    def add(self, tensor: Tensor, operator: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size = _rounded(storage.nbytes())
        line = code_line(3) if size > _NAMED_FROM else ""
        # The callback runs when the storage dies, as a free of the caching allocator would.
        watch = weakref.ref(storage, functools.partial(self._gone, key))
        self._live[key] = _Block(size, self._phase(), operator, line, watch)
        self._grow(size)

    def resized(self, storage: torch.UntypedStorage) -> None:
        block = self._live.get(storage._cdata)
        if block is None:
            return
        size = _rounded(storage.nbytes())
        if size > block.size:
            block.phase = self._phase()
        grown, block.size = size - block.size, size
        self._grow(grown)

    def forget_peak(self) -> None:
        """Measure the largest sum from now on."""
        self.peak = self.now
        self._look()

    def result(self) -> Snapshot:
        """What the largest sum was made of. What came after the last look counts as temporaries."""
        rest = self.peak - self._seen.total
        kinds = self._seen.by_kind + Counter({"temporaries": rest} if rest > 0 else {})
        return Snapshot(self.peak, kinds, self._seen.blocks)

    def _grow(self, size: int) -> None:
        self.now += size
        if self.now > self.peak:
            self.peak = self.now
            # A look walks over all live blocks, so it waits until the peak has grown by 0.2%.
            if self.now > self._seen.total * _LOOK_AGAIN:
                self._look()

    def _gone(self, key: int, _: object) -> None:
        # Nothing may be looked at here: other tensors are dying too.
        block = self._live.pop(key, None)
        if block is not None:
            self.now -= block.size

    def _look(self) -> None:
        kinds: dict[int, str] = {}
        for kind, tensor in self._owned():
            kinds.setdefault(torch_compat.storage_key(tensor), kind)
        total: Counter[str] = Counter()
        blocks: Counter[tuple[str, str, str]] = Counter()
        for key, block in list(self._live.items()):
            kind = kinds.get(key, block.phase)
            total[kind] += block.size
            blocks[kind, block.operator, block.line] += block.size
        self._seen = Snapshot(sum(total.values()), total, blocks)


def owned_tensors(parts: list[nn.Module], optimizer: torch.optim.Optimizer | None) -> list[tuple[str, Tensor]]:
    """(kind, local tensor) of what a training rank keeps or gathers; the first kind of a storage holds."""
    found: list[tuple[str, Tensor]] = []
    for state in optimizer.state.values() if optimizer is not None else ():
        found += [("optimizer", tensor) for tensor in tensors_in(state)]
    for part in parts:
        found += torch_compat.fsdp_tensors(part)
        for param in part.parameters():
            found.append(("parameters", param))
            if param.grad is not None:
                found.append(("gradients", param.grad))
        found += [("buffers", buffer) for buffer in part.buffers()]
    return [(kind, torch_compat.local_part(tensor)) for kind, tensor in found]


def code_line(depth: int) -> str:
    """`file:line function` of the nearest frame of this program or the library, else of torch."""
    frame: FrameType | None = sys._getframe(depth)
    torchs = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if "automodel_cli/dryrun/" not in name:
            at = next((name.rfind(mark) for mark in _OURS if mark in name), -1)
            if at >= 0:
                return f"{name[at:]}:{frame.f_lineno} {frame.f_code.co_name}"
            if not torchs and "torch/" in name and not any(word in name for word in ("_ops", "_dispatch", "_subclass")):
                torchs = f"{name[name.rfind('torch/') :]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return torchs or "?"


def _rounded(size: int) -> int:
    return -(-size // ROUNDED_TO) * ROUNDED_TO
