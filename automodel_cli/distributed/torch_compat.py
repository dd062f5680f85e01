"""Private names of torch's compiler, autograd engine and meshes (torch 2.11 to 2.15).

Assumptions, with the tests that check them:

- A backend is found by its name, sizes of marked dimensions are no constants of a graph, and one function may have
  several graphs (tests/unit/distributed/fusion/test_compiled_regions.py).
- The engine reports which nodes it will run (tests/unit/distributed/expert_parallel/test_grouped_mlp.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from automodel_cli.distributed.typed_torch import Ctx

P = ParamSpec("P")
R = TypeVar("R")

OpOverload = torch._ops.OpOverload
"""An operator, as a dispatch mode receives it."""
CompilerError = torch._dynamo.exc.TorchDynamoException
"""Raised before any computation."""
_MOST_GRAPHS = 64  # Of one function: widths x dtypes x with and without gradients.


def compiled(function: Callable[P, R], backend: str, began: Callable[[], None]) -> Callable[P, R]:
    """Compile `function` so that only `mark_dynamic` dimensions may change without another graph.

    `began()` is called for every graph.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    # `dynamic=False` with marked dimensions: the number of tokens changes at each call and must not compile again,
    # while widths are constants that the compiler can unroll.
    return torch.compile(function, backend=counted_backend(backend, began), dynamic=False)


def counted_backend(backend: str, began: Callable[[], None]) -> Callable[..., object]:
    """Return the compiler backend of this name. `began()` is called for every graph."""
    make = torch._dynamo.lookup_backend(backend)

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor], **options: object) -> object:
        began()
        return make(graph, inputs, **options)

    return counted


def mark_dynamic(tensor: Tensor, dims: Sequence[int]) -> None:
    torch._dynamo.maybe_mark_dynamic(tensor, list(dims))


def wanted(ctx: Ctx) -> tuple[bool, ...]:
    """Return which input gradients this run of the engine needs, in the backward of a function.

    `needs_input_grad` covers all runs. A schedule that splits the backward runs it for inputs first, and for weights
    later.
    """
    # `next_functions` has entries for tensor inputs with a gradient only, `needs_input_grad` for all inputs: the nodes
    # are consumed in step with the True entries.
    nodes = (node for node, _ in ctx.next_functions if node is not None)
    return tuple(needs and _will_run(next(nodes)) for needs in ctx.needs_input_grad)


def _will_run(node: Node) -> bool:
    try:
        will: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # A leaf whose gradient `autograd.grad` returns.
        return True
    return will


def joined(*axes: DeviceMesh) -> DeviceMesh:
    """Return a mesh of these axes. Public slicing cannot combine a flattened axis with another."""
    return DeviceMesh._concatenate(list(axes))


def compile_whole_layers() -> None:
    """Keep DDP from splitting compiled graphs at its buckets."""
    torch._dynamo.config.optimize_ddp = False


def overlap_tensor_parallelism(group: ProcessGroup) -> None:
    """Let the compiler overlap GEMMs with the communication of a group, through symmetric memory."""
    from torch._inductor import config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Needed in torch 2.11. Automatic since torch 2.13.
        enable_symm_mem_for_group(group.group_name)


@contextmanager
def only_fakes() -> Iterator[None]:
    """Leave all dispatch modes except that of fake tensors, such as the one that counts recomputed operators."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    with _disable_current_modes(), fake or nullcontext():
        yield


def is_dtensor(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)
