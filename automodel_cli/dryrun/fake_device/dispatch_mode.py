"""Dispatch mode of a traced rank: intercept every operator, count it and advance the simulated clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from automodel_cli.distributed.expert_parallel import topk_router  # noqa: F401  # registers automodel::route
from automodel_cli.distributed.tensors import tensors_in
from automodel_cli.distributed.torch_compat import OpOverload
from automodel_cli.distributed.typed_torch import TorchDispatchMode, set_attributes
from automodel_cli.dryrun.fake_device import concrete_integers, torch_compat
from automodel_cli.dryrun.fake_device.collectives import Collectives
from automodel_cli.dryrun.fake_device.concrete_integers import Twins
from automodel_cli.dryrun.fake_device.counts import Counts
from automodel_cli.dryrun.fake_device.fake_cuda import CUDA
from automodel_cli.dryrun.fake_device.memory import MemoryTracker, code_line
from automodel_cli.dryrun.fake_device.torch_compat import FakeTensor, is_cuda, unset_fake_temporarily
from automodel_cli.planning import cost_model, hardware
from automodel_cli.planning.cost_model import OperatorCall
from automodel_cli.planning.hardware import Gpu
from automodel_cli.planning.kernel import Kernel, memory_seconds
from automodel_cli.planning.simulated_clock import Clock

_aten = torch.ops.aten
# Results whose size depends on data, and how often the operator's CUDA implementation waits for the device (bincount
# reads minimum and maximum, and copies).
_DYNAMIC = {
    _aten.nonzero.default: 1,
    _aten.bincount.default: 2,
    _aten.masked_select.default: 1,
    _aten._unique2.default: 1,
    _aten.unique_dim.default: 1,
    _aten.repeat_interleave.Tensor: 0,
}
_BOOLEAN = (torch.bool, torch.uint8)
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_CHOOSES = (_aten.topk.default, torch.ops.automodel.route.default)


class TracedRank(TorchDispatchMode):
    """Enter it inside the fake mode. `route`: see `Request`."""

    def __init__(
        self,
        gpu: Gpu,
        clock: Clock,
        memory: MemoryTracker,
        collectives: Collectives,
        route: str,
        to_host: float | None = None,
    ):
        """`to_host`: bytes/s to the machine's memory; None: the GPU's."""
        super().__init__()
        self.gpu, self.clock, self.memory, self.collectives, self.route = gpu, clock, memory, collectives, route
        self._to_host = to_host or gpu.host
        self.counts, self.twins, self._aside = Counts(), collectives.twins, False
        self.in_front: torch_compat.BackwardOf | None = None
        set_attributes(FakeTensor, tolist=self._tolist_of())

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What runs inside is not of the step."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def ran_as_one(self, name: str, read: Sequence[Tensor], written: Sequence[Tensor], work: float = 0.0) -> None:
        """One kernel of compiled code, which none of these operators launched. `work`: FLOPs of attention in it."""
        if not any(is_cuda(t) for t in written):
            return
        for t in written:
            self.memory.add(t, name)
        unique = {id(t): t for t in (*read, *written)}.values()
        moved = sum(t.numel() * t.element_size() for t in unique)
        bits = 8 * read[0].dtype.itemsize
        self._took(name, Kernel("attention" if work else "memory", work, moved, bits, is_compiled=True))

    def synchronised(self, what: str, until: float | None = None) -> None:
        """The host waits for the current stream, or until a moment, at the line that is running."""
        self.clock.host_waits(until)
        self.counts.sync(what, code_line(3))

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        call = OperatorCall(func, args, kwargs or {})
        if any(torch_compat.is_dtensor(kind) for kind in types):
            return NotImplemented
        if self._aside or not torch_compat.fake_mode_is_on():
            return call()
        if func in _SCALARS:
            return self._scalar(call)
        tensors = tensors_in((args, kwargs))
        known = all(self._real(t) is not None for t in tensors)
        if func in _DYNAMIC and known:
            if any(is_cuda(t) for t in tensors):
                for _ in range(_DYNAMIC[func]):
                    self.synchronised(call.label)
                self._launch(call, [])
            return self._wrapped(self._really(call), tensors)
        if func.namespace in ("c10d", "_c10d_functional"):
            return self._communicate(call)
        if func is _aten._pin_memory.default:
            return args[0]  # a fake has no memory that could be pinned
        if func is _aten.index.Tensor:
            call = OperatorCall(func, (args[0], self._positions(args[1], tensors)))
        if func is _aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # The shape function knows bf16 only. On a device the others go one by one, by offsets read on the host.
            out = func(*(t.bfloat16() for t in args[:2]), *args[2:], **call.kwargs).to(args[0].dtype)
            self.synchronised("grouped_mm in " + str(args[0].dtype))
        else:
            out = call()
        outs = tensors_in(out)
        for t in outs:
            if is_cuda(t):
                self.memory.add(t, call.label)
        self._keep_integers(call, outs, known)
        if func in _COPIES and self._crossed(call, outs):
            return out
        launches = cost_model.launches(call)
        if launches and any(is_cuda(t) for t in (*outs, *tensors)):
            self._launch(call, outs)
        elif launches and any(t.is_floating_point() for t in outs):
            moved = cost_model.num_bytes(call, outs, "cpu")
            self.clock.host_computes(moved / hardware.HOST_MEMORY)
        return out

    def _real(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor, if they are known."""
        return self.twins.get(tensor) if isinstance(tensor, FakeTensor) else tensor

    def _crossed(self, call: OperatorCall, outs: Sequence[Tensor]) -> bool:
        """Whether it copied between host and device; then that takes the link's time on the current stream, and the
        host waits for what comes to it, unless it said that it would not."""
        args, in_place = call.args, call.func is _aten.copy_.default
        copied, to = (args[1], args[0]) if in_place else (args[0], outs[0])
        if is_cuda(copied) is is_cuda(to):
            return False
        size = copied.numel() * copied.element_size()
        self.clock.copy("to device" if is_cuda(to) else "to host", size / (self._to_host * self.gpu.rates.copy))
        self._count(call.label, memory_seconds(self.gpu, size), 0.0, size)
        waits = not (call.kwargs.get("non_blocking") or (in_place and len(args) > 2 and args[2]))
        if is_cuda(copied) and waits:
            self.synchronised("copy to host")
        return True

    def _scalar(self, call: OperatorCall) -> object:
        tensor = call.args[0]
        if call.func is _aten._local_scalar_dense.default:
            if is_cuda(tensor):
                self.synchronised(".item()")
            real = self._real(tensor)
            with unset_fake_temporarily():
                return real.item() if real is not None else _plausible(tensor.dtype)
        self.synchronised(call.label)
        return True

    def _tolist_of(self) -> Callable[[Tensor], object]:
        def tolist(tensor: Tensor) -> object:
            if is_cuda(tensor):
                self.synchronised(".tolist()")
            real = self.twins.get(tensor)
            if real is None:
                with unset_fake_temporarily():
                    real = torch.full(tuple(tensor.shape), _plausible(tensor.dtype), dtype=tensor.dtype)
            with unset_fake_temporarily():
                return real.tolist()

        return tolist

    def _really(self, call: OperatorCall) -> object:
        """The operator on the real twins, on the CPU."""

        def on_host(value: object) -> object:
            match value:
                case FakeTensor():
                    return self.twins.get(value)
                case torch.device():
                    return torch.device("cpu")
            return value

        args, kwargs = tree_map(on_host, (call.args, call.kwargs))
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        with unset_fake_temporarily():
            return call.func(*args, **kwargs)

    def _wrapped(self, real: object, like: Sequence[Tensor]) -> object:
        """Fake tensors of the shape that the real result turned out to have."""
        device = CUDA if any(is_cuda(t) for t in like) else torch.device("cpu")

        def wrap(result: Tensor) -> Tensor:
            fake = torch.empty(result.shape, dtype=result.dtype, device=device)
            if result.dtype in concrete_integers.KINDS:
                self.twins.put(fake, result)
            return fake

        return tree_map_only(Tensor, wrap, real)

    def _positions(self, index: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor | None]:
        """Boolean masks of an indexing become the positions that they select, on a device after a wait."""
        found: list[Tensor | None] = []
        for i in index:
            real = self.twins.get(i) if i is not None and i.dtype in _BOOLEAN else None
            if real is None:
                found.append(i)
                continue
            if i is not None and i.device.type == "cuda":
                self.synchronised("index by mask")
            with unset_fake_temporarily():
                positions = real.nonzero(as_tuple=True)
            found += tensors_in(self._wrapped(positions, like))
        return found

    def _keep_integers(self, call: OperatorCall, outs: Sequence[Tensor], known: bool) -> None:
        func, args = call.func, call.args
        if func in _CHOOSES and len(outs) == 2 and is_cuda(outs[1]):
            along = args[2] if func is _aten.topk.default and len(args) > 2 else -1
            width, chosen = args[0].shape[along], outs[1].shape[-1]
            with unset_fake_temporarily():
                index = torch.arange(outs[1].numel()) % (width if self.route == "balanced" else chosen)
                self.twins.put(outs[1], index.view(outs[1].shape))
            return
        small = all(t.dtype in concrete_integers.KINDS and t.numel() <= concrete_integers.LARGEST for t in outs)
        if not (outs and small and known):
            return
        try:
            real = self._really(call)
        except (RuntimeError, NotImplementedError, TypeError):  # without a twin it is only a shape, as floats are
            return
        for fake, result in zip(outs, tensors_in(real), strict=True):
            if isinstance(fake, FakeTensor):
                self.twins.put(fake, result)

    def _launch(self, call: OperatorCall, outs: Sequence[Tensor]) -> None:
        self._took(call.label, cost_model.kernel(call, outs, self._ends))

    def _ends(self, tensor: Tensor) -> list[int] | None:
        real = self.twins.get(tensor)
        with unset_fake_temporarily():
            return None if real is None else real.tolist()

    def _took(self, name: str, kernel: Kernel) -> None:
        kind, took = kernel.seconds(self.gpu)
        self.clock.kernel(kind, took, kernel.number)
        self._count(name, took, kernel.flops, kernel.bytes, kernel.number)

    def _count(self, name: str, took: float, work: float, moved: float, number: int = 1) -> None:
        if self.counts.on:
            self.counts.kernels[name] += number
            self.counts.moved[name] += moved
            self.counts.seconds[name] += took
            self.counts.flops += work
            self.counts.front_seconds += took if self.in_front else 0.0
        elif name != "zeros_like":  # states of the optimizer, which are made once
            self.counts.warm.flops += work
            self.counts.warm.seconds += took

    def _communicate(self, call: OperatorCall) -> object:
        out = call()
        for t in tensors_in(out):
            if is_cuda(t):
                self.memory.add(t, call.name)
        self.collectives.ran(call, out, counting=self.counts.on)
        return out


_SCALARS = frozenset({_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default})


def _plausible(dtype: torch.dtype) -> bool | float | int:
    """A value of a tensor that has none: finite, and true where it is asked."""
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


__all__ = ["Counts", "TracedRank", "Twins"]
