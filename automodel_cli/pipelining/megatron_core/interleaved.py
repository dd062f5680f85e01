"""Interleaved 1F1B schedule with several chunks per rank, with Megatron-core's signature."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.pipelining.megatron_core.config import PipelineModel, ProcessGroupCollection, SyncFunc
from automodel_cli.pipelining.megatron_core.grad_sync import plan_sync
from automodel_cli.pipelining.megatron_core.p2p import P2PCommunicator, Shape, Shapes
from automodel_cli.pipelining.megatron_core.step import (
    DataIterator,
    ForwardStepFunc,
    StepRunner,
    make_communicator,
    shapes_between_stages,
)
from automodel_cli.pipelining.megatron_core.tensors import deallocate_output_tensor
from automodel_cli.pipelining.schedule.one_f_one_b import (
    check_microbatch_group_size,
    get_pp_rank_microbatches,
    get_schedule_table,
)


def forward_backward_pipelining_with_interleaving(
    *,
    forward_step_func: ForwardStepFunc,
    data_iterator: list[DataIterator],
    model: list[PipelineModel],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., tuple[Shapes, Shapes]] | None = None,
    p2p_communicator: P2PCommunicator | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> list[object]:
    """Run interleaved 1F1B over the chunks in the list `model`, each with its iterator in the list `data_iterator`.

    The order is that of `schedule.one_f_one_b`, the collectives those of `grad_sync.plan_sync`. Raises ValueError or
    RuntimeError for an invalid group of microbatches. Collective over the pipeline.
    """
    if not isinstance(model, list) or not isinstance(data_iterator, list) or len(model) != len(data_iterator):
        raise ValueError("interleaving takes a list of chunks and a list of as many iterators")
    if adjust_tensor_shapes_fn is not None:
        raise ValueError("adjust_tensor_shapes_fn: interleaved stages all exchange the same shape")
    runner = StepRunner(
        forward_step_func,
        data_iterator,
        model,
        num_microbatches,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
        pg_collection=pg_collection,
    )
    config = runner.config
    (shape,) = shapes_between_stages(config, seq_length, micro_batch_size, decoder_seq_length)
    communicator = p2p_communicator or make_communicator(pg_collection, config)
    runner.defer_embedding(is_last_stage=communicator.is_pp_last_stage)
    # As torch.Size, an unknown shape () is one shape and not an empty list of shapes.
    _Interleaved(runner, communicator, torch.Size(shape)).run()
    return runner.finish()


class _Arrival(NamedTuple):
    """A received tensor, or a receive in progress."""

    tensor: Tensor | None
    handle: dist.Work | None = None

    def take(self) -> Tensor | None:
        if self.handle is not None:
            self.handle.wait()
        return self.tensor


class _Interleaved:
    """The loop of one rank.

    Virtual microbatch k is the k-th forward (or backward) of the rank. Microbatches of a chunk are processed in order,
    so a queue per chunk assigns tensors to them.
    """

    def __init__(self, runner: StepRunner, p2p: P2PCommunicator, shape: Shape):
        self.runner, self.p2p, self.config, self.shape = runner, p2p, runner.config, shape
        m, self.v, p = runner.num_microbatches, len(runner.models), p2p.size
        group = self.config.microbatch_group_size_per_vp_stage or p
        check_microbatch_group_size(m, p, group)
        self.table = get_schedule_table(m, self.v, group)
        self.total, self.all_in_warmup, self.warmup, self.remaining = get_pp_rank_microbatches(
            m,
            self.v,
            group,
            runner.forward_only,
            pipeline_parallel_size=p,
            pipeline_parallel_rank=p2p.rank,
            virtual_pipeline_parallel_size=self.v,
        )
        self.plan = plan_sync(self.table, self.v, p2p.rank, grad_sync_func=self.config.grad_sync_func is not None)
        self.inputs: list[deque[_Arrival]] = [deque() for _ in range(self.v)]
        self.grads: list[deque[_Arrival]] = [deque() for _ in range(self.v)]
        self.held: list[deque[tuple[Tensor | None, Tensor | None]]] = [deque() for _ in range(self.v)]
        self.sending: dict[str, tuple[dist.Work, Tensor | None]] = {}

    # Location of a virtual microbatch.

    def _chunk(self, k: int, forward: bool) -> int:
        chunk = self.table[k][1]
        return chunk if forward else self.v - 1 - chunk

    def _is_first_stage(self, chunk: int) -> bool:
        return self.p2p.is_pp_first_stage and chunk == 0

    def _is_last_stage(self, chunk: int) -> bool:
        return self.p2p.is_pp_last_stage and chunk == self.v - 1

    def _next_arrival(self, k: int, forward: bool) -> int | None:
        """Return the chunk for which a tensor arrives while virtual microbatch k runs, or None.

        The first rank of a direction receives the tensor that the last rank of this direction computed `p - 1` virtual
        steps earlier, for the following chunk.
        """
        if k == self.total - 1:
            return None
        leads = self.p2p.is_pp_first_stage if forward else self.p2p.is_pp_last_stage
        # The previous rank works on the same chunk, one step ahead.
        if not leads:
            return self._chunk(k + 1, forward)
        if k < self.p2p.size - 1:
            return None
        # The last rank of the direction sends to this rank. Its chunk c feeds chunk c + 1 here (c - 1 in backwards).
        # Example: p = 2, v = 2, groups of 2, forwards of rank 0: (0,0) (1,0) (0,1) (1,1). While k = 1 runs, rank 1 has
        # computed k = 0 (chunk 0), so the input of chunk 1 arrives.
        made_by = self._chunk(k - (self.p2p.size - 1), forward)
        following = made_by + 1 if forward else made_by - 1
        return following if 0 <= following < self.v else None

    # Phases

    def run(self) -> None:
        runner, config = self.runner, self.config
        # 1. Before the first forward: disable gradient reduction, gather first parameters, receive first input.
        runner.sync.disable()
        for chunk in self.plan.params_at_start:
            self._launch(config.param_sync_func, chunk)
        if not self._is_first_stage(0):
            self.inputs[0].append(_Arrival(self.p2p.exchange(recv_prev=True, shape=self.shape).from_prev))
        # 2. Forwards fill the pipeline. 3. Each further forward is followed by a backward.
        for k in range(self.warmup):
            self._warmup_step(k)
        for k in range(self.remaining):
            self._steady_step(k)
        self._wait_for_send("send_next")  # The backward of that output starts from a released tensor.
        if not runner.forward_only:
            if self.all_in_warmup and not self._is_last_stage(self.v - 1):
                first = self.p2p.exchange(recv_next=True, shape=self.shape).from_next
                self.grads[self.v - 1].append(_Arrival(first))
            # 4. Backwards drain the pipeline.
            for k in range(self.remaining, self.total):
                self._cooldown_step(k)
        # 5. All transfers are complete. Reduce the gradients that no backward has reduced.
        self._wait_for_send("send_prev")
        runner.sync.enable()
        if not runner.forward_only:
            for chunk in self.plan.grads_at_end:
                self._launch(config.grad_sync_func, chunk)

    def _warmup_step(self, k: int) -> None:
        arriving = self._next_arrival(k, forward=True)
        prefetch = self.config.overlap_p2p_comm_warmup_flush and not self.p2p.is_pp_first_stage
        if prefetch:
            self._move_forward(None, arriving, overlap=True)
        output = self._forward(k)
        begins_backward = k == self.warmup - 1 and not self.runner.forward_only and not self.all_in_warmup
        first_grad = None if self.p2p.is_pp_last_stage or not begins_backward else self.v - 1
        if begins_backward and not self.config.overlap_p2p_comm:
            self._move_both(output, None, arriving, first_grad)
            return
        overlap = self.config.overlap_p2p_comm_warmup_flush
        self._move_forward(output, None if prefetch else arriving, overlap=overlap)
        if begins_backward:
            self._move_backward(None, first_grad, overlap=True)

    def _steady_step(self, k: int) -> None:
        forward_k = k + self.warmup
        input_for, grad_for = self._next_arrival(forward_k, forward=True), self._next_arrival(k, forward=False)
        output = self._forward(forward_k)
        if self.config.overlap_p2p_comm:
            self._move_forward(output, input_for, overlap=True)
            self._move_backward(self._backward(k), grad_for, overlap=True)
        else:
            self._move_both(output, self._backward(k), input_for, grad_for)

    def _cooldown_step(self, k: int) -> None:
        arriving = self._next_arrival(k, forward=False)
        flush = self.config.overlap_p2p_comm_warmup_flush
        prefetch = flush and not self.p2p.is_pp_last_stage
        if prefetch:
            self._move_backward(None, arriving, overlap=True)
        grad = self._backward(k)
        self._move_backward(grad, None if prefetch else arriving, overlap=flush)

    # Compute. Returns the tensor to send, or None at the ends of the pipeline.

    def _forward(self, k: int) -> Tensor | None:
        microbatch, chunk = self.table[k]
        if k in self.plan.params_before_forward:
            self._launch(self.config.param_sync_func, self.plan.params_before_forward[k])
        input_tensor = None if self._is_first_stage(chunk) else self.inputs[chunk].popleft().take()
        is_last = self._is_last_stage(chunk)
        recompute = self.runner.recompute(k, self.warmup)
        (output,) = self.runner.forward(chunk, microbatch, input_tensor, is_last_stage=is_last, recompute=recompute)
        if not self.runner.forward_only:
            self.held[chunk].append((input_tensor, output))
        return None if is_last else output

    def _backward(self, k: int) -> Tensor | None:
        chunk = self._chunk(k, forward=False)
        is_last = self._is_last_stage(chunk)
        input_tensor, output = self.held[chunk].popleft()
        grad = None if is_last else self.grads[chunk].popleft().take()
        reduces = k in self.plan.grads_in_backward
        if reduces:
            self.runner.sync.enable()
        (input_grad,) = self.runner.backward(input_tensor, output, grad, is_last_stage=is_last)
        if k in self.plan.grads_after_backward:
            self.runner.sync.enable()
            self._launch(self.config.grad_sync_func, self.plan.grads_after_backward[k])
            reduces = True
        if reduces:
            self.runner.sync.disable()
        return None if self._is_first_stage(chunk) else input_grad

    def _launch(self, functions: SyncFunc | Sequence[SyncFunc] | None, chunk: int) -> None:
        if functions is not None:
            function = functions[chunk] if isinstance(functions, Sequence) else functions
            function(self.runner.models[chunk].parameters())

    # Communication: send the given tensors, and queue the tensors that arrive for a chunk.

    def _move_forward(self, output: Tensor | None, arriving: int | None, overlap: bool) -> None:
        done = self.p2p.exchange(output, recv_prev=arriving is not None, shape=self.shape, wait=not overlap)
        self._sent("send_next", done.handles, output)
        if arriving is not None:
            # With overlap, the wait is in `take`, when the forward needs the tensor.
            self.inputs[arriving].append(_Arrival(done.from_prev, done.handles.get("recv_prev")))

    def _move_backward(self, grad: Tensor | None, arriving: int | None, overlap: bool) -> None:
        done = self.p2p.exchange(None, grad, recv_next=arriving is not None, shape=self.shape, wait=not overlap)
        self._sent("send_prev", done.handles, None)
        if arriving is not None:
            self.grads[arriving].append(_Arrival(done.from_next, done.handles.get("recv_next")))

    def _move_both(
        self, output: Tensor | None, grad: Tensor | None, input_for: int | None, grad_for: int | None
    ) -> None:
        tensor, output_grad = self.p2p.send_forward_backward_recv_forward_backward(
            output, grad, input_for is not None, grad_for is not None, self.shape
        )
        self._release(output)
        if input_for is not None:
            self.inputs[input_for].append(_Arrival(tensor))
        if grad_for is not None:
            self.grads[grad_for].append(_Arrival(output_grad))

    def _sent(self, name: str, handles: dict[str, dist.Work], output: Tensor | None) -> None:
        """Release an output after it was sent. If the transfer is in progress, the next send releases it."""
        if name not in handles:
            self._release(output)
            return
        self._wait_for_send(name)
        self.sending[name] = (handles[name], output)

    def _wait_for_send(self, name: str) -> None:
        if name in self.sending:
            handle, output = self.sending.pop(name)
            handle.wait()
            self._release(output)

    def _release(self, output: Tensor | None) -> None:
        if not self.runner.forward_only:
            deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)
