"""Names of torch's compiler and of autograd's engine which are not public API (torch 2.11 to 2.13).

Relied on: that a backend is found by its name, that the sizes of marked dims are no constants of a graph, and the
number of graphs that one function may have (tests/unit/distributed/fusion/test_compiled_regions.py compiles real
functions through it);
that the engine tells which nodes it will run (tests/unit/distributed/expert_parallel/test_grouped_mlp.py splits
backwards).
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


def wanted(ctx: Any) -> tuple[bool, ...]:
    """In the backward of a function: which inputs' gradients this run of the engine passes on. `needs_input_grad` says
    which any run may ask for; a schedule that splits the backward asks for inputs first, and for weights later."""
    nodes = (node for node, _ in ctx.next_functions if node is not None)
    return tuple(needs and _will_run(next(nodes)) for needs in ctx.needs_input_grad)


def _will_run(node: Any) -> bool:
    try:
        will: bool = torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined]
    except RuntimeError:  # a leaf whose gradient `autograd.grad` was asked for
        return True
    return will


def is_dtensor(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)
