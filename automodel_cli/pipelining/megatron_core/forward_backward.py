"""Pipeline schedules as functions, with Megatron-core's names and keyword arguments.

`forward_step_func(iterator, model[, recompute]) -> (output, loss_func)` runs one microbatch of one chunk, after
`model.set_input_tensor` with the output of the previous stage. On the last stage, `loss_func(output)` returns `(loss,
data)` or `(loss, num_tokens, data)`. `tensors.forward_step_calc_loss` describes the scaling. Every function returns the
list of `data` of all microbatches in order on the last stage, and an empty list on other ranks. `model.config` is a
`ModelParallelConfig`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from automodel_cli.pipelining.megatron_core.arithmetic import forward_backward_func_name
from automodel_cli.pipelining.megatron_core.config import (
    PipelineModel,
    ProcessGroupCollection,
    Tensors,
    get_model_config,
)
from automodel_cli.pipelining.megatron_core.interleaved import forward_backward_pipelining_with_interleaving
from automodel_cli.pipelining.megatron_core.p2p import P2PCommunicator, Shapes
from automodel_cli.pipelining.megatron_core.step import (
    DataIterator,
    ForwardStepFunc,
    StepRunner,
    alone,
    make_communicator,
    shapes_between_stages,
)
from automodel_cli.pipelining.megatron_core.tensors import deallocate_output_tensor
from automodel_cli.pipelining.schedule.one_f_one_b import get_pp_rank_microbatches

__all__ = [
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "get_forward_backward_func",
]


def get_forward_backward_func(pp_size: int, vp_size: int | None = None) -> Callable[..., list[object]]:
    """Return the function for a pipeline of `pp_size` ranks. Any `vp_size`, even 1, selects the interleaved one."""
    functions = (
        forward_backward_no_pipelining,
        forward_backward_pipelining_without_interleaving,
        forward_backward_pipelining_with_interleaving,
    )
    return {f.__name__: f for f in functions}[forward_backward_func_name(pp_size, vp_size)]


def forward_backward_no_pipelining(
    *,
    forward_step_func: ForwardStepFunc,
    data_iterator: DataIterator | list[DataIterator],
    model: PipelineModel | list[PipelineModel],
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
    """Run all microbatches on one rank. Only the last one runs outside no_sync, and reduces the gradients.

    The lengths and the communicator belong to the common signature and are not used.
    """
    if adjust_tensor_shapes_fn is not None:
        raise ValueError("adjust_tensor_shapes_fn: no tensors travel without a pipeline")
    runner = StepRunner(
        forward_step_func,
        [alone(data_iterator, "data_iterator")],
        [alone(model, "model")],
        num_microbatches,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
        pg_collection=pg_collection,
    )
    runner.defer_embedding(is_last_stage=True)
    runner.sync.disable()
    for microbatch in range(num_microbatches):
        if microbatch == num_microbatches - 1:
            runner.sync.enable()
        output = runner.forward(0, microbatch, None, is_last_stage=True)
        if not forward_only:
            runner.backward(None, output, None, is_last_stage=True)
    return runner.finish()


def forward_backward_pipelining_without_interleaving(
    *,
    forward_step_func: ForwardStepFunc,
    data_iterator: DataIterator | list[DataIterator],
    model: PipelineModel | list[PipelineModel],
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
    """Run 1F1B: `p - r - 1` forwards, then alternating forwards and backwards, then the remaining backwards.

    Gradients are reduced in the last backward. With `grad_sync_func`, ranks after the first call it at the end instead,
    while earlier ranks still run backwards. Collective over the pipeline.

    Args:
        adjust_tensor_shapes_fn: `(receive_shapes, send_shapes)` -> both, for stages that exchange different shapes.
    """
    chunk = alone(model, "model")
    config = get_model_config(chunk)
    if config.overlap_p2p_comm:
        raise ValueError("overlap-needs-interleaving: 1F1B waits for every tensor; set overlap_p2p_comm=False")
    runner = StepRunner(
        forward_step_func,
        [alone(data_iterator, "data_iterator")],
        [chunk],
        num_microbatches,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
        pg_collection=pg_collection,
    )
    shapes = shapes_between_stages(config, seq_length, micro_batch_size, decoder_seq_length)
    receive_shapes, send_shapes = (
        adjust_tensor_shapes_fn(shapes, shapes) if adjust_tensor_shapes_fn else (shapes, shapes)
    )
    communicator = p2p_communicator or make_communicator(pg_collection, config)
    runner.defer_embedding(is_last_stage=communicator.is_pp_last_stage)
    step = _OneForwardOneBackward(runner, communicator, receive_shapes, send_shapes)
    step.run()
    return runner.finish()


class _OneForwardOneBackward:
    """The loop of one rank. `held` contains (inputs, outputs) of microbatches whose backward has not run."""

    def __init__(self, runner: StepRunner, communicator: P2PCommunicator, receive_shapes: Shapes, send_shapes: Shapes):
        self.runner, self.p2p = runner, communicator
        self.receive_shapes, self.send_shapes = receive_shapes, send_shapes
        self.first, self.last = communicator.is_pp_first_stage, communicator.is_pp_last_stage
        self.warmup = get_pp_rank_microbatches(
            runner.num_microbatches,
            1,
            None,
            # Not runner.forward_only, because Megatron-core runs a forward pass through the same two loops.
            pipeline_parallel_size=communicator.size,
            pipeline_parallel_rank=communicator.rank,
        ).warmup
        self.held: list[tuple[Tensors, list[Tensor | None]]] = []

    def run(self) -> None:
        runner, p2p, m = self.runner, self.p2p, self.runner.num_microbatches
        runner.sync.disable()
        for k in range(self.warmup):
            inputs = p2p.recv_forward(self.receive_shapes, self.first)
            output = self._forward(k, inputs)
            p2p.send_forward(output, self.last)
            self._release(output)
        # The receive of each steady forward is combined with the send of the backward before it, except for the first
        # one.
        inputs = p2p.recv_forward(self.receive_shapes, self.first) if self.warmup < m else None
        for k in range(self.warmup, m):
            inputs = self._steady(k, inputs, is_last=k == m - 1)
        if not runner.forward_only:
            for k in range(m - self.warmup, m):
                self._sync_if_last(k)
                grads = p2p.recv_backward(self.send_shapes, self.last)
                p2p.send_backward(self._backward(grads), self.first)
        self._finish_sync()

    def _steady(self, k: int, inputs: Tensors, is_last: bool) -> Tensors:
        """Run one forward and one backward. Return the inputs of the next forward."""
        p2p = self.p2p
        output = self._forward(k, inputs)
        if self.runner.forward_only:
            p2p.send_forward(output, self.last)
            return None if is_last else p2p.recv_forward(self.receive_shapes, self.first)
        grads = p2p.send_forward_recv_backward(output, self.send_shapes, self.last)
        self._release(output)
        self._sync_if_last(k - self.warmup)
        input_grads = self._backward(grads)
        if is_last:
            p2p.send_backward(input_grads, self.first)
            return None
        return p2p.send_backward_recv_forward(input_grads, self.receive_shapes, self.first)

    def _forward(self, k: int, inputs: Tensors) -> list[Tensor | None]:
        recompute = self.runner.recompute(k, self.warmup)
        output = self.runner.forward(0, k, inputs, is_last_stage=self.last, recompute=recompute)
        if not self.runner.forward_only:
            self.held.append((inputs, output))
        return output

    def _backward(self, grads: Tensors) -> list[Tensor | None]:
        # First in, first out: backwards run in the order of the forwards.
        inputs, output = self.held.pop(0)
        return self.runner.backward(inputs, output, grads, is_last_stage=self.last)

    def _release(self, output: Tensors) -> None:
        if not self.last and not self.runner.forward_only:
            deallocate_output_tensor(output, self.runner.config.deallocate_pipeline_outputs)

    def _sync_if_last(self, backward: int) -> None:
        if backward == self.runner.num_microbatches - 1 and (self.runner.config.grad_sync_func is None or self.first):
            self.runner.sync.enable()

    def _finish_sync(self) -> None:
        runner, function = self.runner, self.runner.config.grad_sync_func
        runner.sync.enable()
        if function is not None and not runner.forward_only and not self.first:
            alone(function, "grad_sync_func")(runner.models[0].parameters())
