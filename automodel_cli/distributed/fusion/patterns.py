"""Find fusible regions in unmodified transformers models: norms, gates of MLPs and rotary embeddings.

Regions are found by structure and measurement, never by the name of a family:

- Norm: a module without children that scales by one vector and computes no GEMM.
- Gated MLP: computes down(act(gate(x)) * up(x)), bitwise equal on small numbers.
- Rotary embedding: a function of (q, k, cos, sin) that the forward of an attention calls.

Modules and parameters do not change, so tensor parallelism, adapters and FSDP2 can wrap them afterwards. Additions to
the residual are in the forward of each family's layer. Only compiling the whole layer fuses them.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import CellType, FunctionType, MethodType
from typing import cast

import torch
from torch import Tensor, nn

from automodel_cli.config.warn import warn
from automodel_cli.distributed.fusion.compiled_regions import FusibleRegion, RegionCompiler
from automodel_cli.distributed.torch_compat import OpOverload
from automodel_cli.distributed.typed_torch import TorchDispatchMode, set_attributes

_FEWEST = 3  # Minimum number of operators of a norm. torch's own norm is one kernel already.
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "_grouped_mm", "matmul", "linear")
_ROTARY = ["q", "k", "cos", "sin"]
_HEAD, _HEADS = 16, 2


def fuse_layers(part: nn.Module, fuser: RegionCompiler) -> None:
    """Compile the fusible regions in the layers of `part` and in its last norm, in place.

    Parameters may be on the meta device.
    """
    with torch.device("cpu"):  # Device of the measurement.
        for module in list(part.modules()):
            fuse_module(module, fuser)


def fuse_module(module: nn.Module, fuser: RegionCompiler) -> None:
    """Compile the region of one module, if it has one and no other feature has replaced its forward."""
    if "forward" not in vars(module):
        _fuse_norm(module, fuser)
        _fuse_mlp(module, fuser)
        _fuse_rotary(module, fuser)


def candidate_kinds(module: nn.Module) -> list[str]:
    """Return the kinds of regions that the structure of a module suggests, without running it."""
    arguments = inspect.signature(type(module).forward).parameters
    linear = [name for name, child in module._modules.items() if hasattr(child, "in_features")]
    others = [name for name in (*module._modules, *vars(module)) if name not in linear]
    kinds = []
    if _is_scale(module):
        kinds.append("norm")
    if len(linear) in (2, 3) and len(arguments) == 2 and any(is_activation(module, name) for name in others):
        kinds.append("gate")
    if linear and "position_embeddings" in arguments:
        kinds.append("rotary")
    return kinds


def _is_scale(module: nn.Module) -> bool:
    """Return whether a module has one vector only. torch's own norms are one kernel already."""
    weight = module._parameters.get("weight")
    is_vector = weight is not None and weight.ndim == 1 and len(module._parameters) == 1 and not module._modules
    return is_vector and not isinstance(module, (nn.LayerNorm, nn.RMSNorm))


def _fuse_norm(module: nn.Module, fuser: RegionCompiler) -> None:
    if not _is_scale(module) or not _is_norm(module):
        return
    name, width = f"norm {type(module).__name__}", len(cast(Tensor, module._parameters["weight"]))

    def sample(rows: int) -> tuple[object, ...]:
        return _small_norm(module, width), _numbers(rows, width)

    run = fuser(FusibleRegion[Tensor](name, type(module).forward, (0, 1), sample))
    if run is None:
        return
    own: Callable[..., Tensor] = module.forward

    def forward(*args: Tensor, **kwargs: object) -> Tensor:
        if kwargs or len(args) != 1 or args[0].shape[-1] != width:
            return own(*args, **kwargs)
        x = args[0]
        if x.ndim > 2 and x.is_contiguous():  # One graph for any leading dimensions.
            return run(module, x.flatten(0, -2)).view(x.shape)
        return run(module, x)

    module.forward = forward


def _is_norm(module: nn.Module) -> bool:
    with _Operators() as seen:
        try:
            tiny = _small_norm(module, 8)
            seen.names.clear()
            x = torch.ones(3, 8)
            result = type(tiny).forward(tiny, x)
        except Exception:  # The code of a module may fail on a small copy.
            return False
    is_like = isinstance(result, Tensor) and result.shape == x.shape
    return is_like and len(seen.names) >= _FEWEST and not any(name in _PRODUCTS for name in seen.names)


def _small_norm(module: nn.Module, width: int) -> nn.Module:
    tiny = copy.copy(module)
    tiny._parameters = {"weight": nn.Parameter(_numbers(1, width)[0])}
    return tiny


class _Operators(TorchDispatchMode):
    """Record the names of operators that allocate a result."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if not func.is_view:
            self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def _gated(act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return act(gate) * up


def _gated_halves(act: Callable[[Tensor], Tensor], both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return act(gate) * up


def _fuse_mlp(module: nn.Module, fuser: RegionCompiler) -> None:
    linear = {name: child for name, child in module._modules.items() if hasattr(child, "in_features")}
    if len(linear) not in (2, 3):
        return
    names = _as_gated_mlp(module, tuple(linear))
    if names is None:
        return
    *first, down, act_name = names
    act = getattr(module, act_name)
    region_function = _gated if len(first) == 2 else _gated_halves

    def sample(rows: int) -> tuple[object, ...]:
        return act, *(_numbers(rows, 32, seed) for seed in range(len(first)))

    run = fuser(FusibleRegion(f"gate {_name_of(act)}", region_function, tuple(range(len(first))), sample))
    if run is None:
        return

    def forward(x: Tensor) -> Tensor:
        parts = [getattr(module, name)(x) for name in first]
        if all(part.ndim > 2 and part.is_contiguous() for part in parts):
            flat = run(act, *(part.flatten(0, -2) for part in parts))
            inner = flat.view(*parts[0].shape[:-1], -1)
        else:
            inner = run(act, *parts)
        result: Tensor = getattr(module, down)(inner)
        return result

    module.forward = forward


def _as_gated_mlp(module: nn.Module, linear: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the names of the first GEMMs, the last GEMM and the activation, or None for other forwards."""
    own = type(module).forward
    if len(inspect.signature(own).parameters) != 2:
        return None
    acts = [name for name in (*module._modules, *vars(module)) if name not in linear and is_activation(module, name)]
    x = _numbers(5, 8)
    # Names differ between families (gate_proj, w1, wi_0), so each assignment of gate, up and down is tried. With random
    # weights, only the right one gives equal results.
    for order in itertools.permutations(linear):
        *first, down = order
        tiny = copy.copy(module)
        inner = 6 if len(first) == 2 else 12
        shapes = {**dict.fromkeys(first, (8, inner)), down: (6, 8)}
        tiny._modules = {
            name: _small_linear(*shapes[name], seed) if name in shapes else child
            for seed, (name, child) in enumerate(module._modules.items())
        }
        for act_name in acts:
            try:
                act = getattr(tiny, act_name)
                parts = [getattr(tiny, name)(x) for name in first]
                gated = _gated(act, *parts) if len(first) == 2 else _gated_halves(act, *parts)
                if torch.equal(own(tiny, x), getattr(tiny, down)(gated)):
                    return *first, down, act_name
            except Exception:  # The code of a family may fail with other sizes.
                continue
    return None


def is_activation(module: nn.Module, name: str) -> bool:
    value = module._modules.get(name, vars(module).get(name))
    is_bare = not isinstance(value, nn.Module) or not any(True for _ in value.parameters())
    return callable(value) and is_bare and not isinstance(value, type)


def _name_of(act: object) -> str:
    return str(getattr(act, "__name__", type(act).__name__))


def _fuse_rotary(module: nn.Module, fuser: RegionCompiler) -> None:
    forward = type(module).forward
    for name, function in _rotations(forward):
        run = fuser(FusibleRegion("rotary", function, (2, 3), _rotary_sample_of(function)))
        if run is not None:
            try:
                module.forward = MethodType(_calling(forward, name, run, function), module)
            except ValueError as error:
                warn("fusion_lost", "rotary embeddings run uncompiled: %s", error)
            return


@cache
def _rotations(forward: Callable[..., object]) -> list[tuple[str, FunctionType]]:
    inner = inspect.unwrap(forward)
    return list(_functions_of_positions(inner)) if isinstance(inner, FunctionType) else []


def _functions_of_positions(forward: FunctionType) -> Iterator[tuple[str, FunctionType]]:
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if isinstance(function, FunctionType) and list(inspect.signature(function).parameters)[:4] == _ROTARY:
            yield name, function


@cache
def _calling(forward: FunctionType, name: str, run: Callable[..., object], function: FunctionType) -> FunctionType:
    """Return the same code with `name` replaced by `run`. Calls with other arguments use the original function."""

    def rotated(*args: object, **kwargs: object) -> object:
        return run(*args) if len(args) == 4 and not kwargs else function(*args, **kwargs)

    return _with_global(forward, name, rotated)


def _with_global(forward: FunctionType, name: str, value: object) -> FunctionType:
    """Copy a function so that its code reads `value` as the global `name`. Decorators around it remain.

    Raises ValueError for a decorator that keeps the function elsewhere than in its closure.
    """
    wrapped, names, cells = getattr(forward, "__wrapped__", None), forward.__globals__, forward.__closure__
    if wrapped is None:
        names = {**names, name: value}
    else:
        inner = _with_global(wrapped, name, value)
        cells = tuple(CellType(inner) if cell.cell_contents is wrapped else cell for cell in cells or ())
        if cells == forward.__closure__:
            raise ValueError(f"a decorator of {forward.__qualname__} does not keep the function in its closure")
    # The code object is shared. Only the globals differ, so that other users of the module keep the original function.
    same = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, cells)
    same.__kwdefaults__ = forward.__kwdefaults__
    if wrapped is not None:
        set_attributes(same, __wrapped__=inner)
    return same


def _rotary_sample_of(function: FunctionType) -> Callable[[int], tuple[Tensor, ...]]:
    """Return a sample with one angle per dimension of a head, or (GPT-OSS) per pair of dimensions."""

    def sample(rows: int, repeat: int = 2) -> tuple[Tensor, ...]:
        angle = _numbers(rows, _HEAD // 2).repeat(1, repeat)
        q, k = (_numbers(rows, _HEADS * _HEAD, seed).view(1, rows, _HEADS, _HEAD).transpose(1, 2) for seed in (1, 2))
        return q, k, angle.cos()[None], angle.sin()[None]

    try:
        function(*sample(2))
    except RuntimeError:
        return partial(sample, repeat=1)
    return sample


def _small_linear(inputs: int, outputs: int, seed: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    linear.weight = nn.Parameter(_numbers(outputs, inputs, seed), requires_grad=False)
    return linear


def _numbers(rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
