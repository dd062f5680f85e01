"""Fused elementwise regions between GEMMs, compiled to one kernel each.

A `FusibleRegion` is detected in a model (`patterns`) or written in code (`grouped_mlp`). A `RegionCompiler` decides how
it runs:

- `Compiled` uses torch.compile with a dynamic number of tokens. A test first verifies values and gradients.
- `region_kernels.as_one` is for fake tensors. It records which tensors are saved and which kernels are launched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.warn import warn
from automodel_cli.distributed import kernel_report, torch_compat
from automodel_cli.distributed.compile_modes import AUTO, FUSED_OPS
from automodel_cli.distributed.tensors import tensors_in

R = TypeVar("R")

_FLOATS = {torch.float32: 1e-5, torch.float64: 1e-10}
# For lower precision: compiled code keeps intermediate results in float32, and the code of the family rounds them.
_REDUCED_ULPS = 4.0


@dataclass(frozen=True)
class FusibleRegion(Generic[R]):
    """A function that can be compiled to one kernel.

    Attributes:
        function: takes tensors whose leading dimensions count tokens, and constants of the compiler (modules,
            functions).
        kept: indices of the tensors that backward needs. Parameters of modules come after all arguments. None if the
            region has no backward.
        sample: returns arguments with so many rows, for a test.
    """

    name: str
    function: Callable[..., R]
    kept: tuple[int, ...] | None
    sample: Callable[[int], tuple[object, ...]]
    by_element: bool = False
    """Vectors have one element per token. Otherwise they are weights of fixed size."""


class RegionCompiler(Protocol):
    """Return a function that computes the region, or None to run `function` uncompiled."""

    def __call__(self, region: FusibleRegion[R]) -> Callable[..., R] | None: ...


def fused(region: FusibleRegion[R], fuser: RegionCompiler | None) -> Callable[..., R]:
    """Return the function of the region, compiled if `fuser` can."""
    return (fuser and fuser(region)) or region.function


class Compiled:
    """Compile with torch.compile.

    Regions that do not compile on `device`, or whose results differ, run uncompiled. `rejected` maps their names to
    reasons.
    """

    def __init__(self, backend: str, device: torch.device, dtype: torch.dtype):
        self.backend, self.device, self.dtype = backend, device, dtype
        self.compiled: Counter[str] = Counter()
        self.rejected: dict[str, str] = {}
        self._known: dict[tuple[str, object], Callable[..., Any] | None] = {}

    def __call__(self, region: FusibleRegion[R]) -> Callable[..., R] | None:
        key = (region.name, region.function)
        if key not in self._known:
            compiled = _function_of(region, self.backend)
            reason = region_difference(region, compiled, self.device, self.dtype)
            if reason:
                self.rejected[region.name] = reason
            self._known[key] = None if reason else _or_uncompiled(region, compiled)
        run = self._known[key]
        if run is not None:
            self.compiled[region.name] += 1
        return run

    def settle(self, *, by_name: bool) -> None:
        """Log the result after all regions of a part are known. Raises ConfigError if `by_name` and a region is not
        compiled.
        """
        global _report
        _report = str(self)
        kernel_report.record("fused ops", _report)
        if by_name and self.rejected:
            name, reason = next(iter(self.rejected.items()))
            raise ConfigError(
                f"enable_compile=fused_ops is not supported because {self.backend} cannot compile {name!r} on "
                f"{self.device.type}: {reason}",
                code="kernel_unavailable",
                keys=("parallelizer.enable_compile", "parallelizer.compile_backend"),
                fix="parallelizer.enable_compile=auto",
            )

    def __str__(self) -> str:
        compiled = ", ".join(f"{count} {name}" for name, count in self.compiled.items()) or "nothing"
        skipped = "".join(f"; not {name}: {reason}" for name, reason in self.rejected.items())
        return f"{compiled} by {self.backend}{skipped}"


_substitute: RegionCompiler | None = None
_report = ""
_functions: dict[tuple[str, object, str], Callable[..., Any]] = {}
compilations: list[str] = []
"""Names of the regions of all graphs compiled in this process, in order."""


def _function_of(region: FusibleRegion[R], backend: str) -> Callable[..., R]:
    key = (region.name, region.function, backend)
    if key not in _functions:
        compiled = torch_compat.compiled(region.function, backend, lambda: compilations.append(region.name))

        def run(*args: object) -> R:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
                return region.function(*args)  # Sharded by tensor parallelism.
            for tensor in tensors:
                torch_compat.mark_dynamic(tensor, _token_dims(tensor, region.by_element))
            return compiled(*args)

        _functions[key] = run
    return _functions[key]


def _or_uncompiled(region: FusibleRegion[R], run: Callable[..., R]) -> Callable[..., R]:
    """Call `run` until the compiler fails for other sizes than the sample's. Then warn once and call the function."""
    now = run

    def either(*args: object) -> R:
        nonlocal now
        try:
            return now(*args)
        except torch_compat.CompilerError as failure:
            warn("kernel_unavailable", "Fused ops %r run uncompiled from now on: %s", region.name, _summary(failure))
            now = region.function
            return now(*args)

    return either


def _token_dims(tensor: Tensor, by_element: bool) -> tuple[int, ...]:
    """Return the token dimensions: [rows], [rows, tokens] or [rows, heads, tokens].

    All of an index, none of a weight.
    """
    if tensor.ndim == 1:
        return () if tensor.is_floating_point() and not by_element else (0,)
    return {0: (), 2: (0,), 3: (0, 1)}.get(tensor.ndim, (0, 2))


def region_difference(region: FusibleRegion[R], run: Callable[..., R], device: torch.device, dtype: torch.dtype) -> str:
    """Return why `run` cannot replace `region.function`: its error, or its difference on two samples.

    Empty if it can.
    """
    try:
        # Two sizes, because a graph that was specialized to the first one would fail or differ at the second.
        for rows in (5, 12):
            args = [_to_device(arg, device, dtype, grad=region.kept is not None) for arg in region.sample(rows)]
            with torch.set_grad_enabled(region.kept is not None):
                want, got = _with_gradients(region.function, args), _with_gradients(run, args)
            for a, b in zip(want, got, strict=True):
                ulps = _REDUCED_ULPS if a.dtype.itemsize > 1 else 1.0  # 8-bit values are only cast, not computed with.
                a, b, relative = a.double(), b.double(), _FLOATS.get(a.dtype, ulps * torch.finfo(a.dtype).eps)
                # `not error <= limit` below is also true for nan.
                limit, error = relative * float(a.abs().max()), float((a - b).abs().max())
                if not error <= limit:
                    return f"compiled code differs by {error:.1e}, more than rounding ({limit:.1e})"
            with torch.no_grad():
                run(*_copies(args))
    except Exception as failure:  # Compiler errors have no common class.
        return _summary(failure)
    return ""


def _summary(failure: Exception) -> str:
    """Return class, message and first line of the cause of a compiler error."""
    return " ".join(f"{type(failure).__name__}: {failure}".split("\n")[:2])


def _to_device(arg: object, device: torch.device, dtype: torch.dtype, *, grad: bool) -> object:
    match arg:
        case nn.Module():
            return arg.to(device, dtype)
        case Tensor():
            return arg.to(device, dtype).requires_grad_(grad) if arg.is_floating_point() else arg.to(device)
    return arg


def _copies(args: Sequence[object]) -> list[object]:
    """Copy tensors, because some regions write into arguments. Copies are no leaves, as in a model."""
    return [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]


def _with_gradients(function: Callable[..., object], args: Sequence[object]) -> list[Tensor]:
    results = tensors_in(function(*_copies(args)))
    if not any(tensor.requires_grad for tensor in results):
        return results
    needed = [tensor for tensor in tensors_in(args) if tensor.requires_grad]
    needed += [param for module in modules_of(args) for param in module.parameters()]
    # A square sum has a different gradient at each element. A plain sum would hide errors that cancel.
    total = torch.stack([tensor.float().square().sum() for tensor in results]).sum()
    grads = torch.autograd.grad(total, needed, allow_unused=True)
    return [*(tensor.detach() for tensor in results), *(grad for grad in grads if grad is not None)]


def modules_of(args: Sequence[object]) -> list[nn.Module]:
    return [arg for arg in args if isinstance(arg, nn.Module)]


def region_compiler_for(
    mode: bool | str, backend: str, device: torch.device, dtype: torch.dtype
) -> RegionCompiler | None:
    """Return the region compiler of a run, or None if regions run uncompiled or whole layers are compiled.

    Regions are compiled for `fused_ops`, and for `auto` on CUDA.
    """
    global _report
    _report = ""
    if mode != FUSED_OPS and not (mode == AUTO and device.type == "cuda"):
        kernel_report.record("fused ops", _why_not(mode, backend))
        return None
    return by_compiler(backend, device, dtype)


def _why_not(mode: bool | str, backend: str) -> str:
    if mode is True:
        return f"whole layers compiled by {backend}"
    return f"none ({'auto compiles on CUDA only' if mode == AUTO else 'enable_compile=false'})"


def by_compiler(backend: str, device: torch.device, dtype: torch.dtype) -> RegionCompiler:
    """Return a compiler, or its substitute in a process with fake tensors."""
    return Compiled(backend, device, dtype) if _substitute is None else _substitute


def use_region_substitute(fuser: RegionCompiler) -> None:
    """Use `fuser` instead of torch.compile in this process, which computes with fake tensors."""
    global _substitute
    _substitute = fuser


def last() -> str:
    """Return the compiled regions of the latest part and the reasons for the others. Empty if none were requested."""
    return _report
