"""`AutoPipeline`'s other runtime: Megatron-core's functions on the same stages, with the same losses and gradients.

It has 1F1B and Interleaved1F1B with any legal group of microbatches. Against the torch runtime it releases every output
once it is sent, may post receives early, and may recompute only the microbatches that would not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from automodel_cli.data.head_output import HeadOutput
from automodel_cli.distributed.activation_checkpointing import apply_activation_checkpointing
from automodel_cli.distributed.layers import transformer_layers
from automodel_cli.distributed.strategies.fsdp2.sharding import fsdp_modules
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.pipelining.megatron_core.config import ModelParallelConfig
from automodel_cli.pipelining.megatron_core.forward_backward import get_forward_backward_func
from automodel_cli.pipelining.megatron_core.p2p import P2PCommunicator
from automodel_cli.pipelining.schedule.program import Program
from automodel_cli.pipelining.torch_runtime.compat import Stage, set_sync


class EagerConnections:
    """What the eager runtimes of one pipeline share: the communicator and the layers to recompute. Collective."""

    def __init__(self, stages: list[Stage], config: PipelineConfig):
        stage, group = stages[0], stages[0].group
        assert group is not None, "AutoPipeline's stages have the group of the pipeline axis"
        partial = config.num_microbatches_with_partial_activation_checkpoints
        self.config = ModelParallelConfig(
            hidden_size=stage.hidden_size,
            pipeline_dtype=stage.boundary_dtype,
            device=stage.device,
            batch_p2p_comm=not config.overlap_p2p_comm,
            overlap_p2p_comm=config.overlap_p2p_comm,
            deallocate_pipeline_outputs=True,
            num_microbatches_with_partial_activation_checkpoints=partial,
            # Losses are sums over the global weight already. A sum with its token count stays as it is in this mode,
            # and nothing divides by the count afterwards.
            calculate_per_token_loss=True,
        )
        self.p2p = P2PCommunicator(group, self.config)
        self.checkpointed = [_checkpointed_layers(s.submod) if partial is not None else [] for s in stages]


class EagerRuntime:
    """Executes steps on this rank's stages. The interface of `torch_runtime.compat.Runtime`."""

    def __init__(
        self,
        stages: list[Stage],
        program: Program,
        connections: EagerConnections,
        *,
        train: bool,
        group_size: int | None,
        reduce_every_microbatch: bool = False,
    ):
        """`program` is what runs, for drawings. `group_size` microbatches per chunk and round, None for 1F1B; ignored
        by forward passes, which take the smallest legal one."""
        self.program = program
        self._stages, self._train, self._reduce_every_microbatch = stages, train, reduce_every_microbatch
        self._interleaved = len(stages) > 1
        self._p2p, self._checkpointed = connections.p2p, connections.checkpointed
        self._config = replace(
            connections.config,
            virtual_pipeline_model_parallel_size=len(stages) if self._interleaved else None,
            microbatch_group_size_per_vp_stage=group_size,
        )
        if not train:
            self._config.num_microbatches_with_partial_activation_checkpoints = None
        elif self._interleaved and not reduce_every_microbatch:
            self._config.grad_sync_func = [self._reducer(stage) for stage in stages]
        elif not reduce_every_microbatch:
            self._config.finalize_model_grads_func = self._reducer(stages[0])

    @staticmethod
    def _reducer(stage: Stage) -> Callable[..., None]:
        """FSDP's reduction of a stage; the arguments say whose parameters, which the stage knows."""
        return lambda *arguments: stage.perform_reduce_grad(1)

    def warm_up(self) -> None:
        """Open the connections of the group while every rank is here. Collective."""
        dist.barrier(self._p2p.pp_group)

    def run(
        self,
        shapes: Sequence[tuple[int, int]],
        keywords: list[dict[str, Any]],
        on_result: Callable[[HeadOutput, int], Tensor],
    ) -> dict[int, Tensor]:
        """One step; see `torch_runtime.compat.Runtime.run`."""
        count = len(shapes)
        if self._train:
            for root in (root for stage in self._stages for root in stage.fsdp_roots):
                set_sync(root, self._reduce_every_microbatch)
        config = self._config
        if not self._train and self._interleaved:
            # With fewer microbatches than ranks a rank would wait for its own output: the last one runs again.
            missing = max(0, self._p2p.size - count)
            shapes, keywords = [*shapes, *[shapes[-1]] * missing], [*keywords, *[keywords[-1]] * missing]
            config = replace(
                self._config, microbatch_group_size_per_vp_stage=_smallest_group(self._p2p.size, len(shapes))
            )
        else:
            config = self._config
        if len(set(shapes)) > 1:
            # Receives cannot be posted early, before the shape is known.
            config = replace(config, variable_seq_lengths=True, overlap_p2p_comm=False)
        self._p2p.config = config
        chunks = [
            _Chunk(stage, config, keywords, on_result, count, layers)
            for stage, layers in zip(self._stages, self._checkpointed, strict=True)
        ]
        self._call(chunks, shapes)
        if not self._train:
            for module in (module for stage in self._stages for module in fsdp_modules(stage.submod)):
                module.reshard()
        return chunks[-1].results

    def _call(self, chunks: list[_Chunk], shapes: Sequence[tuple[int, int]]) -> None:
        iterators: list[Iterator[int]] = [iter(range(len(shapes))) for _ in chunks]
        rows, tokens = shapes[0]
        virtual_size = len(chunks) if self._interleaved else None
        get_forward_backward_func(self._p2p.size, virtual_size)(
            forward_step_func=_forward_step,
            data_iterator=iterators if self._interleaved else iterators[0],
            model=chunks if self._interleaved else chunks[0],
            num_microbatches=len(shapes),
            # Ours are [rows, tokens, hidden]. The functions put the three numbers of a shape in this order, no more.
            seq_length=rows,
            micro_batch_size=tokens,
            forward_only=not self._train,
            p2p_communicator=self._p2p,
        )


class _Chunk:
    """A stage during one step, as the schedule functions see it (`PipelineModel`)."""

    def __init__(
        self,
        stage: Stage,
        config: ModelParallelConfig,
        keywords: list[dict[str, Any]],
        on_result: Callable[[HeadOutput, int], Tensor],
        num_results: int,
        checkpointed: list[nn.Module],
    ):
        self.stage, self.config, self.keywords, self.on_result = stage, config, keywords, on_result
        self.num_results, self.checkpointed = num_results, checkpointed
        self.results: dict[int, Tensor] = {}
        self._hidden: tuple[Tensor, ...] = ()

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.stage.submod.parameters()

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        self._hidden = tuple(tensor for tensor in input_tensor if tensor is not None)

    def forward(self, microbatch: int, recompute: bool | None) -> HeadOutput | Tensor:
        if recompute is not None:
            for layer in self.checkpointed:
                layer.gradient_checkpointing = recompute  # type: ignore[assignment]  # read when the layer is called
        hidden, self._hidden = self._hidden, ()
        output = self.stage.forward_maybe_with_nosync(*hidden, **self.keywords[microbatch])
        if isinstance(output, HeadOutput) or output._base is None:
            return output
        return output.clone()  # a view could not be released once it is sent: its base would stay

    def result(self, output: HeadOutput, microbatch: int) -> tuple[Tensor, int, Tensor]:
        """The loss and what is kept of it, as `loss_func` returns them: with its count of tokens, which is not used."""
        if microbatch >= self.num_results:  # a filler of a forward pass
            return output.logprobs_BT, 0, output.logprobs_BT
        value = self.on_result(output, microbatch)
        self.results[microbatch] = value.detach()
        return value, 0, value.detach()


def _forward_step(
    iterator: Iterator[int], chunk: _Chunk, recompute: bool | None = None
) -> tuple[HeadOutput | Tensor, Callable[[HeadOutput], tuple[Tensor, int, Tensor]]]:
    microbatch = next(iterator)
    return chunk.forward(microbatch, recompute), lambda output: chunk.result(output, microbatch)


def _smallest_group(pp_size: int, num_microbatches: int) -> int:
    """The smallest legal group: a rank then holds the fewest tensors that wait for their next chunk."""
    sizes = range(pp_size, num_microbatches + 1)
    return next(g for g in sizes if num_microbatches % g == 0 or num_microbatches % g >= pp_size)


def _checkpointed_layers(part: nn.Module) -> list[nn.Module]:
    """The layers that can be recomputed; those that the parallelizer has marked, if it has marked any."""
    layers = transformer_layers(part)
    marked: list[nn.Module] = [
        layer for layer in layers if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing
    ]
    if not marked:
        apply_activation_checkpointing(layers, True)
    return marked or layers
