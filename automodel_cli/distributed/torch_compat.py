"""Names of torch's compiler which are not public API (torch 2.11 to 2.13).

Relied on: that a backend is found by its name, that the sizes of marked dims are no constants of a graph, and the
number of graphs that one function may have. tests/unit/distributed/test_fused.py compiles real functions through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

CompilerError = torch._dynamo.exc.TorchDynamoException
"""Nothing has run where a call raises it."""
_MOST_GRAPHS = 64  # of one function: widths x dtypes x with and without gradients


def compiled(function: Callable[..., Any], backend: str, began: Callable[[], None]) -> Callable[..., Any]:
    """`function` by torch's compiler, in which only dims that are `mark_dynamic` may change without another graph;
    `began()` is called for every graph."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    return torch.compile(function, backend=counted_backend(backend, began), dynamic=False)


def counted_backend(backend: str, began: Callable[[], None]) -> Callable[..., Any]:
    """The compiler's backend of this name; `began()` is called for every graph."""
    make = torch._dynamo.lookup_backend(backend)  # type: ignore[attr-defined]

    def counted(graph: Any, inputs: Any, **options: Any) -> Any:
        began()
        return make(graph, inputs, **options)

    return counted


def mark_dynamic(tensor: Tensor, dims: Sequence[int]) -> None:
    torch._dynamo.maybe_mark_dynamic(tensor, list(dims))  # type: ignore[attr-defined, no-untyped-call]


def is_dtensor(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)
