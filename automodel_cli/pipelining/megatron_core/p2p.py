"""Point-to-point communication between pipeline ranks, with the interface of Megatron-core's `P2PCommunicator`.

Several messages may be in flight between the same two ranks. With two ranks, "next" and "previous" are one peer.
Messages have no tags in NCCL or in this module, and match by order. Every call posts its operations in the order of
`_ORDER`, which is mirrored between even and odd ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.distributed.process_group import hold_timeout
from automodel_cli.pipelining.megatron_core.config import ModelParallelConfig, Tensors
from automodel_cli.pipelining.megatron_core.tensors import as_list, is_single_shape

Shape = Sequence[int]
Shapes = Shape | Sequence[Shape]
Name = Literal["send_next", "recv_prev", "send_prev", "recv_next"]
Handles = dict[str, dist.Work]

# Indexed by rank parity. A send has the same position as its receive on the other side, so rendezvous sends cannot
# deadlock.
_ORDER: tuple[tuple[Name, ...], tuple[Name, ...]] = (
    ("send_next", "recv_prev", "send_prev", "recv_next"),
    ("recv_prev", "send_next", "recv_next", "send_prev"),
)


class Exchange(NamedTuple):
    """Received tensors of one call, and operations in progress by name."""

    from_prev: Tensor | None
    from_next: Tensor | None
    handles: Handles


@dataclass(frozen=True)
class _Operation:
    sends: bool
    tensor: Tensor
    peer: int
    group: dist.ProcessGroup


class P2PCommunicator:
    """Sends and receives of one pipeline rank. The neighbor must make the matching call.

    A single shape gives a tensor, a list of shapes a list. Receives raise RuntimeError without `config.pipeline_dtype`
    or a shape. Buffers require grad.
    """

    def __init__(self, pp_group: dist.ProcessGroup, config: ModelParallelConfig):
        self.pp_group = pp_group
        self.config = config
        self.rank, self.size = pp_group.rank(), pp_group.size()
        self.next_rank = dist.get_global_rank(pp_group, (self.rank + 1) % self.size)
        self.prev_rank = dist.get_global_rank(pp_group, (self.rank - 1) % self.size)
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
        # One queue per direction if both directions are between the same two ranks. Otherwise a send waits behind a
        # receive.
        self._odd_group = pp_group
        if self.size == 2 and not config.batch_p2p_comm:
            self._odd_group = _same_ranks_again(pp_group)

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether this rank is the first of the pipeline. With several chunks, only its chunk 0 is the first stage."""
        return self.rank == 0

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether this rank is the last of the pipeline. With several chunks, only its last chunk is the last stage."""
        return self.rank == self.size - 1

    # One direction at a time, one operation per shape.

    def recv_forward(self, tensor_shapes: Shapes, is_first_stage: bool) -> Tensors:
        """Receive the input from the previous rank. None (per shape) on the first stage."""
        if is_first_stage:
            return _for_each(tensor_shapes, lambda shape: None)
        return _for_each(tensor_shapes, lambda shape: self.exchange(recv_prev=True, shape=shape).from_prev)

    def recv_backward(self, tensor_shapes: Shapes, is_last_stage: bool) -> Tensors:
        """Receive the output gradient from the next rank. None (per shape) on the last stage."""
        if is_last_stage:
            return _for_each(tensor_shapes, lambda shape: None)
        return _for_each(tensor_shapes, lambda shape: self.exchange(recv_next=True, shape=shape).from_next)

    def send_forward(self, output_tensors: Tensors, is_last_stage: bool) -> None:
        """Send the output to the next rank. No effect on the last stage."""
        for output in as_list(output_tensors) if not is_last_stage else ():
            self.exchange(send_next=output)

    def send_backward(self, input_tensor_grads: Tensors, is_first_stage: bool) -> None:
        """Send the input gradient to the previous rank. No effect on the first stage."""
        for grad in as_list(input_tensor_grads) if not is_first_stage else ():
            self.exchange(send_prev=grad)

    # Both directions with one neighbor.

    def send_forward_recv_backward(
        self, output_tensors: Tensors, tensor_shapes: Shapes, is_last_stage: bool
    ) -> Tensors:
        """Send the output to the next rank and receive its gradient. None on the last stage."""
        if is_last_stage:
            return _for_each(tensor_shapes, lambda shape: None)
        outputs = iter(as_list(output_tensors))
        return _for_each(
            tensor_shapes,
            lambda shape: self.exchange(send_next=next(outputs), recv_next=True, shape=shape).from_next,
        )

    def send_backward_recv_forward(
        self, input_tensor_grads: Tensors, tensor_shapes: Shapes, is_first_stage: bool
    ) -> Tensors:
        """Send the gradient to the previous rank and receive its output. None on the first stage."""
        if is_first_stage:
            return _for_each(tensor_shapes, lambda shape: None)
        grads = iter(as_list(input_tensor_grads))
        return _for_each(
            tensor_shapes,
            lambda shape: self.exchange(send_prev=next(grads), recv_prev=True, shape=shape).from_prev,
        )

    # One direction with both neighbors, and all four operations.

    def send_forward_recv_forward(
        self, output_tensor: Tensor | None, recv_prev: bool, tensor_shape: Shape, overlap_p2p_comm: bool = False
    ) -> object:
        """Send an output to the next rank if given, and receive an input from the previous rank if `recv_prev`.

        Returns the input. With `overlap_p2p_comm`, returns (input, handles) without waiting.
        """
        done = self.exchange(output_tensor, None, recv_prev, False, tensor_shape, wait=not overlap_p2p_comm)
        return (done.from_prev, done.handles) if overlap_p2p_comm else done.from_prev

    def send_backward_recv_backward(
        self, input_tensor_grad: Tensor | None, recv_next: bool, tensor_shape: Shape, overlap_p2p_comm: bool = False
    ) -> object:
        """Send a gradient to the previous rank if given, and receive a gradient from the next rank if `recv_next`.

        Returns the gradient. With `overlap_p2p_comm`, returns (gradient, handles) without waiting.
        """
        done = self.exchange(None, input_tensor_grad, False, recv_next, tensor_shape, wait=not overlap_p2p_comm)
        return (done.from_next, done.handles) if overlap_p2p_comm else done.from_next

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: Tensor | None,
        input_tensor_grad: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Shape,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send and receive in both directions. Returns (input, gradient of an output)."""
        done = self.exchange(output_tensor, input_tensor_grad, recv_prev, recv_next, tensor_shape)
        return done.from_prev, done.from_next

    def exchange(
        self,
        send_next: Tensor | None = None,
        send_prev: Tensor | None = None,
        recv_prev: bool = False,
        recv_next: bool = False,
        shape: Shape | None = None,
        *,
        wait: bool = True,
    ) -> Exchange:
        """Send the given tensors and receive from the selected sides. Waits unless `wait` is False."""
        if self.config.variable_seq_lengths:
            return self._communicate_variable(send_next, send_prev, recv_prev, recv_next)
        from_prev = self._buffer(shape, "recv_prev") if recv_prev else None
        from_next = self._buffer(shape, "recv_next") if recv_next else None
        handles = self._post(send_next, send_prev, from_prev, from_next)
        if wait:
            _wait(handles)
            handles = {}
        return Exchange(from_prev, from_next, handles)

    def _communicate_variable(
        self, send_next: Tensor | None, send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> Exchange:
        """Exchange shapes (three int64 per tensor), then tensors, for activations first, then gradients.

        One direction after the other, because a peer may use separate calls for them. If all shapes were exchanged
        first, the peer would wait for our tensor, and we for its second shape.
        """
        from_prev = self._exchange_described("recv_prev", send_next, recv_prev)
        from_next = self._exchange_described("recv_next", send_prev, recv_next)
        return Exchange(from_prev, from_next, {})

    def _exchange_described(self, side: Name, sent: Tensor | None, receives: bool) -> Tensor | None:
        """Run one direction: send a tensor with its shape, and receive one with its shape from `side`."""
        device, length = self.config.device, None
        if sent is not None:
            if sent.dim() != 3:
                raise RuntimeError(f"variable_seq_lengths sends 3-D tensors, not {tuple(sent.shape)}")
            length = torch.tensor(sent.shape, dtype=torch.int64, device=device)
        # The receiver needs the shape to allocate its buffer, so it travels first and is read on the host.
        shape = torch.empty(3, dtype=torch.int64, device=device) if receives else None
        self._post_direction(side, length, shape)
        received = self._buffer(shape.tolist(), side) if shape is not None else None
        self._post_direction(side, sent, received)
        return received

    def _post_direction(self, side: Name, sent: Tensor | None, received: Tensor | None) -> None:
        forward = side == "recv_prev"
        _wait(self._post(sent, None, received, None) if forward else self._post(None, sent, None, received))

    def _buffer(self, shape: Shape | None, side: Name) -> Tensor:
        dtype = self.config.pipeline_dtype
        if dtype is None:
            raise RuntimeError(f"{side}: pipeline_dtype must be set to receive between stages")
        if shape is None:
            raise RuntimeError(f"{side}: a tensor shape must be given to receive between stages")
        return torch.empty(tuple(shape), dtype=dtype, device=self.config.device, requires_grad=True)

    def _post(
        self, send_next: Tensor | None, send_prev: Tensor | None, from_prev: Tensor | None, from_next: Tensor | None
    ) -> Handles:
        even, odd = self.pp_group, self._odd_group
        own, other = (even, odd) if self.rank % 2 == 0 else (odd, even)  # By the parity of the sender.
        requested: dict[Name, tuple[bool, Tensor | None, int, dist.ProcessGroup]] = {
            "send_next": (True, send_next, self.next_rank, own),
            "recv_prev": (False, from_prev, self.prev_rank, other),
            "send_prev": (True, send_prev, self.prev_rank, own),
            "recv_next": (False, from_next, self.next_rank, other),
        }
        operations: dict[str, _Operation] = {}
        # Example: rank 0 posts send_next first, rank 1 posts recv_prev first. Each send meets its receive, also if a
        # send blocks until the receive is posted.
        for name in _ORDER[self.rank % 2]:
            sends, tensor, peer, group = requested[name]
            if tensor is not None:
                operations[name] = _Operation(sends, tensor.detach().contiguous(), peer, group)
        return self._post_batch(operations) if self.config.batch_p2p_comm else _post_each(operations)

    def _post_batch(self, operations: dict[str, _Operation]) -> Handles:
        if not operations:
            return {}
        ops = [
            dist.P2POp(dist.isend if o.sends else dist.irecv, o.tensor, o.peer, o.group) for o in operations.values()
        ]
        # NCCL returns one handle for the batch, gloo one per operation.
        return {f"batch_{i}": work for i, work in enumerate(dist.batch_isend_irecv(ops))}


def _same_ranks_again(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Create a second group of the same ranks. Collective over all ranks, each in one such group.

    If a device is bound to the default group, NCCL splits it, and ranks outside the new group must take part too.
    """
    ranks = dist.get_process_group_ranks(group)
    of_ranks: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, ranks)
    made = {pair: dist.new_group(list(pair)) for pair in sorted({tuple(pair_of_ranks) for pair_of_ranks in of_ranks})}
    hold_timeout()
    result: dist.ProcessGroup = made[tuple(ranks)]
    return result


def _post_each(operations: dict[str, _Operation]) -> Handles:
    handles: Handles = {}
    for name, o in operations.items():
        work = (dist.isend if o.sends else dist.irecv)(o.tensor, o.peer, group=o.group)
        assert work is not None, "this rank is not in its own pipeline group"
        handles[name] = work
    return handles


def _wait(handles: Handles) -> None:
    for handle in handles.values():
        handle.wait()


def _for_each(shapes: Shapes, receive: Callable[[Shape], Tensor | None]) -> Tensors:
    if is_single_shape(shapes):
        return receive(shapes)
    return [receive(shape) for shape in shapes]
