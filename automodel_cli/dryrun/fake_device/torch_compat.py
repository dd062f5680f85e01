"""Private names of torch that a dry run needs (torch 2.11 to 2.14). `fake_tensor_compat` makes the fake tensors.

What these functions change is changed for the whole process. A traced rank has one of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from automodel_cli.distributed.strategies.fsdp2.gradient_reduction import fsdp_modules
from automodel_cli.distributed.strategies.fsdp2.torch_compat import fsdp_state, param_groups
from automodel_cli.distributed.typed_torch import set_attributes

__all__ = ["LIMITS_OF_FAKES", "FakeTensor", "FakeTensorMode", "unset_fake_temporarily"]

LIMITS_OF_FAKES = (
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.DataDependentOutputException,
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.UnsupportedMutationAliasingException,
    fake_tensor.MetadataMismatchError,
    torch.AcceleratorError,
)
"""What torch raises where a fake tensor cannot do what a real one can, and where a device is missing."""


def in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


class BackwardOf:
    """Whether an operator belongs to the forward or backward of a module, recomputation included. Nodes of a
    backward have the numbers of their forward."""

    def __init__(self, module: nn.Module):
        self._spans: list[tuple[int, int]] = []
        self._began: int | None = None
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    def _begin(self, *_: object) -> None:
        self._began = torch._C._autograd._get_sequence_nr()

    def _end(self, *_: object) -> None:
        assert self._began is not None, "hooks come in pairs"
        self._spans.append((self._began, torch._C._autograd._get_sequence_nr()))
        self._began = None

    def __bool__(self) -> bool:
        if not in_backward():
            return self._began is not None
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        return any(first <= number < end for first, end in self._spans)


@contextmanager
def modules_stay() -> Iterator[None]:
    """`module.to(device)` inside does nothing: torch moves the memory of fakes, and they have none."""
    move = nn.Module.to
    set_attributes(nn.Module, to=lambda self, *_, **__: self)
    try:
        yield
    finally:
        set_attributes(nn.Module, to=move)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call it when the backward that is running has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def fake_mode_is_on() -> bool:
    """False inside `unset_fake_temporarily`."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_of_cuda_build(name: str) -> bool:
    """Whether `torch._C` has this name only in builds for CUDA, where its call needs a device."""
    return name.startswith("_cuda_")


def start_group(rank: int, world_size: int) -> None:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


def on_resize(seen: Callable[[torch.UntypedStorage], None]) -> Callable[[], None]:
    """Call `seen(storage)` after a storage has changed its size (FSDP2 frees gathered parameters so); returns what
    undoes it."""
    resize = torch.UntypedStorage.resize_

    def watched(self: torch.UntypedStorage, size: int) -> object:
        result = resize(self, size)
        seen(self)
        return result

    set_attributes(torch.UntypedStorage, resize_=watched)

    def undo() -> None:
        set_attributes(torch.UntypedStorage, resize_=resize)

    return undo


def without_shape_inference(aside: Callable[[], AbstractContextManager[object]]) -> None:
    """Enter `aside()` while DTensor finds out an operator's shape, which it does on fake tensors of the global shape:
    on ours, as long as they are on."""
    for name in ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta"):
        method = vars(ShardingPropagator).get(name)
        if method is not None and not hasattr(method, "cache_info"):
            setattr(ShardingPropagator, name, _inside(method, aside))


def _inside(
    method: Callable[..., object], context: Callable[[], AbstractContextManager[object]]
) -> Callable[..., object]:
    @functools.wraps(method)
    def inside(*args: object, **kwargs: object) -> object:
        with context():
            return method(*args, **kwargs)

    return inside


def storage_key(tensor: Tensor) -> int:
    result: int = tensor.untyped_storage()._cdata
    return result


def local_part(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def with_local(like: Tensor, local: Tensor) -> Tensor:
    """`local` as `like` is: the local part of a DTensor of the same kind, or itself."""
    return DTensor(local, like._spec, requires_grad=False) if isinstance(like, DTensor) else local


def is_cuda(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def is_dtensor(kind: type) -> bool:
    return issubclass(kind, DTensor)


def group_of(arguments: list[object]) -> dist.ProcessGroup | None:
    """The group among the flat arguments of a collective operator."""
    for argument in arguments:
        try:
            if isinstance(argument, torch.ScriptObject):
                return dist.ProcessGroup.unbox(argument)
            if isinstance(argument, str):
                return dist.distributed_c10d._resolve_process_group(argument)  # type: ignore[arg-type]
        except (RuntimeError, ValueError, AttributeError):  # a ReduceOp, or another word
            continue
    return None


def group_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def fsdp_tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(kind, tensor) of what FSDP2 holds for the parameters of `part`."""
    for module in fsdp_modules(part):
        for param in (param for group in param_groups(fsdp_state(module)) for param in group.fsdp_params):
            yield "parameters", param._sharded_param_data
            if param.sharded_param.grad is not None:
                yield "gradients", param.sharded_param.grad
            for gathered in (*param.all_gather_outputs, *getattr(param, "_unsharded_inner_tensors", ())):
                yield "gathered parameters", gathered
            whole = getattr(param, "_unsharded_param", None)
            if whole is not None:
                yield "gathered parameters", whole
                if whole.grad is not None:
                    yield "unreduced gradients", whole.grad
            if param.unsharded_accumulated_grad is not None:
                yield "unreduced gradients", param.unsharded_accumulated_grad


def on_stage_actions(stage: type[PipelineStage], begin: Callable[[], None], end: Callable[[str, int], None]) -> None:
    """Call `begin()` before and `end(kind, index)` after every forward ("F") and backward ("B": whole, "I": of inputs,
    "W": of weights) of a `stage`."""

    def watched(method: Callable[..., object], kind_of: Callable[[dict[str, object]], str]) -> Callable[..., object]:
        @functools.wraps(method)
        def run(self: PipelineStage, *args: object, **kwargs: object) -> object:
            begin()
            result = method(self, *args, **kwargs)
            end(kind_of(kwargs), self.stage_index)
            return result

        return run

    kinds: dict[str, Callable[[dict[str, object]], str]] = {
        "forward_one_chunk": lambda _: "F",
        "backward_one_chunk": lambda given: "B" if given.get("full_backward", True) else "I",
        "backward_weight_one_chunk": lambda _: "W",
    }
    for name, kind_of in kinds.items():
        setattr(stage, name, watched(getattr(stage, name), kind_of))
