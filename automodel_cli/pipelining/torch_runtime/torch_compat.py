"""Stage of a running pipeline. With `runtime_compat`, it contains the private names of `torch.distributed.pipelining`.

One runtime executes all schedules. Differences to torch's own classes:

* Shapes are static and known on every rank per microbatch, so microbatches of a step may differ in length. No metadata
  is inferred. torch would run an extra microbatch at every switch between training and evaluation. The cleanup after
  inference is skipped too, because in torch 2.13 it sets gradients of FSDP parameters to None.
* Receive buffers live from the receive to the end of the microbatch, not for the whole run.
* Forward-only programs work for every placement and under no_grad. torch's `eval()` fails on V placements.
* Losses are stored by microbatch, so a program may run forwards in any order.

Supports torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining import stage as torch_stage
from torch.torch_version import TorchVersion

from automodel_cli.data.head_output import HeadOutput
from automodel_cli.distributed.strategies.fsdp2.gradient_reduction import late_units, reduce_in_backward
from automodel_cli.distributed.wgrad_fusion.linear import single_backward
from automodel_cli.pipelining.torch_runtime.fsdp_compat import (
    fsdp_roots,
    reduce_gradients,
    set_reduction_by_caller,
    sum_in_reduce_dtype,
)

# Receives have metadata (torch 2.12). Remove the other branches when torch >= 2.12 is the minimum.
HAS_STAGE_META = hasattr(PipelineStage, "_setup_forward_recv_info")
# Sends and reductions have waits, and receives allocate their buffers (torch 2.15). Remove the other branches when
# torch >= 2.15 is the minimum.
HAS_WAITS = hasattr(torch_schedules, "_add_wait_send")
# Older releases lose nodes of a split backward, or count weight gradients twice. Remove the other branch when
# torch >= 2.13 is the minimum.
SPLITS_BACKWARD = TorchVersion(torch.__version__) >= "2.13"


@dataclass(frozen=True)
class Reduction:
    """When FSDP reduces gradients.

    Attributes:
        in_backward: by its own hooks, in the last backward of the stage. Otherwise after the last backward of the step.
        every_microbatch: by its own hooks, in each backward.
    """

    in_backward: bool = False
    every_microbatch: bool = False


class Stage(PipelineStage):
    """One stage of a running pipeline around a `StagePart`. Call `begin` before every step."""

    def __init__(
        self,
        part: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        hidden_size: int,
        boundary_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        defer_nested_sync: bool,
        num_further: int = 0,
        further_arrives: bool = False,
        further_leaves: bool = False,
        sends_gradients: bool = True,
    ):
        """Create a stage.

        Args:
            hidden_size: width of the hidden states between stages.
            boundary_dtype: dtype of the tensors between ranks.
            compute_dtype: dtype of the residual stream of the part.
            defer_nested_sync: if FSDP wraps modules inside the part but not the part itself, reduce their gradients
                once per step.
            num_further: hidden states of multi-token prediction that arrive or leave in addition to the model's, in
                runs with `further` set.
            sends_gradients: whether an earlier stage needs gradients of the inputs. Otherwise it receives zeros.
        """
        self.shapes: list[tuple[int, int]] = [(1, 1)]
        self.hidden_size, self.boundary_dtype, self.compute_dtype = hidden_size, boundary_dtype, compute_dtype
        self.further, self._sends_gradients = False, sends_gradients
        self._more_in, self._more_out = num_further * further_arrives, num_further * further_leaves
        self.fsdp_roots = fsdp_roots(part) if defer_nested_sync or isinstance(part, FSDPModule) else []
        self._late = late_units(part)
        self.reduction = Reduction()
        is_first, is_last = stage_index == 0, stage_index == num_stages - 1
        # Placeholders on the meta device. torch wants example tensors, but every step replaces the shapes in `begin`.
        hidden = torch.empty(1, 1, hidden_size, dtype=boundary_dtype, device="meta", requires_grad=True)
        logprobs = torch.empty(1, 1, device="meta", requires_grad=True)
        super().__init__(
            part,
            stage_index,
            num_stages,
            device,
            input_args=() if is_first else (hidden,),
            output_args=(logprobs if is_last else hidden,),
            group=group,
        )

    def begin(self, shapes: Sequence[tuple[int, int]], train: bool) -> None:
        """Prepare a step of microbatches with these `(rows, tokens)`, the same list on every rank of the pipeline."""
        self.shapes, self.has_backward = list(shapes), train
        self.args_recv_info.clear()
        self.grad_recv_info.clear()
        for state in (self._forwards, self.bwd_cache, self.backward_state, self.dw_runner):
            state.clear()
        for root in self.fsdp_roots:
            set_reduction_by_caller(root, train and not self.reduction.in_backward)
        self.grad_send_info = None
        if HAS_STAGE_META:
            self._inference_mode = torch_stage.InferenceMode.STATIC
        self._prepare_forward_infra(len(shapes), (), {})
        if train:
            self._prepare_backward_infra(len(shapes))

    @property
    def _forwards(self) -> dict[int, Any]:
        """What the backward of each microbatch needs: outputs and inputs."""
        return cast("dict[int, Any]", getattr(self, "_forward_chunk_states" if HAS_WAITS else "fwd_cache"))

    def meta(self, microbatch: int, *, leaving: bool) -> Tensor:
        """Return the hidden states of one microbatch between stages, on the meta device."""
        shape = self._shape(microbatch, leaving=leaving)
        return torch.empty(*shape, dtype=self.boundary_dtype, device="meta", requires_grad=True)

    def _shape(self, microbatch: int, *, leaving: bool) -> tuple[int, int, int]:
        """Return the shape of the tensor that arrives at this stage, or leaves it."""
        more = self._more_out if leaving else self._more_in
        return *self.shapes[microbatch], self.hidden_size * (1 + (more if self.further else 0))

    # Receive buffers: described at the start of a step, allocated when the receive is posted, freed after use.

    def _infos(self, source: int, microbatch: int, *, gradient: bool) -> tuple[Any, ...]:
        name = f"{'gradient' if gradient else 'hidden'} {microbatch} from stage {source}"
        new: Callable[..., Any] = torch_stage._RecvInfo
        if not HAS_STAGE_META:
            return (new(name, source, None),)
        meta: Any = torch_stage.extract_tensor_metas((self.meta(microbatch, leaving=gradient),))
        if gradient:
            meta = torch_stage._derive_grad_metas(meta)
        return (new(name, source, *(() if HAS_WAITS else (None,)), tensor_meta=meta[0]),)

    def _describe_inputs(self, count: int) -> None:
        source = self.stage_index - 1
        for i in range(count):
            self.args_recv_info[i] = () if self.is_first else self._infos(source, i, gradient=False)

    def _describe_gradients(self, count: int) -> None:
        self.chunks = count
        source = self.stage_index + 1
        for i in range(count):
            self.grad_recv_info[i] = () if self.is_last else self._infos(source, i, gradient=True)

    def _allocate(self, infos: tuple[Any, ...], microbatch: int, requires_grad: bool, *, leaving: bool) -> None:
        for info in () if HAS_WAITS else infos:
            shape = self._shape(microbatch, leaving=leaving)
            info.buffer = torch.empty(shape, dtype=self.boundary_dtype, device=self.device)
            # torch 2.12 sets it on the received tensor itself.
            info.buffer.requires_grad_(requires_grad and not HAS_STAGE_META)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.args_recv_info[fwd_chunk_id], fwd_chunk_id, self.has_backward, leaving=False)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward:
            self._allocate(self.grad_recv_info[bwd_chunk_id], bwd_chunk_id, False, leaving=True)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        grads = tuple(self._zeros(mb_index, leaving=True) if grad is None else grad for grad in next_stage_bwd_outputs)
        super().set_local_bwd_input(grads, mb_index)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_first:
            # torch replaces a missing gradient by zeros with the shape of microbatch 0.
            self.bwd_cache[bwd_chunk_id] = tuple(
                self._zeros(bwd_chunk_id, leaving=False) if g is None else g for g in self.bwd_cache[bwd_chunk_id]
            )
        return super().get_bwd_send_ops(bwd_chunk_id)

    def _zeros(self, microbatch: int, *, leaving: bool) -> Tensor:
        return torch.zeros(self._shape(microbatch, leaving=leaving), dtype=self.boundary_dtype, device=self.device)

    # Compute

    def forward_maybe_with_nosync(self, *args: Tensor, **kwargs: object) -> HeadOutput | Tensor:
        hidden_BTD = args[0].to(self.compute_dtype) if args else None
        if hidden_BTD is not None and not self._sends_gradients:
            hidden_BTD = hidden_BTD.detach()  # Backward ends at the lowest trained layer.
        with single_backward(self.reduction.in_backward):
            output = self.submod(hidden_BTD, **kwargs)
        return cast("HeadOutput | Tensor", output if self.is_last else output.to(self.boundary_dtype))

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[object, ...],
        kwargs: dict[str, object] | None = None,
        *_: object,
        **__: object,
    ) -> HeadOutput | Tensor:
        inputs = args if self.is_first else self._retrieve_recv_activations(fwd_chunk_id)
        output = self.forward_maybe_with_nosync(*inputs, **(kwargs or {}))
        for info in self.args_recv_info[fwd_chunk_id]:
            info.buffer = None  # The forward cache keeps it until the backward.
        # Nothing to keep for a backward. The cache would hold activations until the next step.
        if self.is_last and not self.has_backward:
            return output
        if self.has_backward and isinstance(output, Tensor) and not output.requires_grad:
            # Nothing before or on this stage is trained. The backward ends at this leaf.
            output = output.detach().requires_grad_()
        # The loss keeps the graph of the last stage's output. torch would detach and keep every output tensor.
        leaving = () if self.is_last else (output,)
        if HAS_WAITS:
            self._forwards[fwd_chunk_id] = self._make_forward_chunk_state(leaving, list(inputs))  # type: ignore[attr-defined]
        else:
            self._forwards[fwd_chunk_id] = (leaving, list(inputs))
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        for info in self.grad_recv_info[bwd_chunk_id]:
            info.buffer = None

    # Gradient reduction: in the last backward of the stage, layer by layer, or in each backward. If a program computes
    # weight gradients separately, FSDP's hooks run too early. Reduction is then started after the last weight gradient.

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        in_backward = backward_type == "full" and self.reduction.in_backward
        for root in self.fsdp_roots:
            is_last, every = in_backward and last_backward, in_backward and self.reduction.every_microbatch
            root.set_reshard_after_backward(is_last)
            reduce_in_backward(root, self._late, is_last=is_last, every_microbatch=every)
        if backward_type == "full":  # torch's version would disable reduction.
            names = ("stage_output", "output_grads", "input_values")
            with single_backward(self.reduction.in_backward):  # Recomputed layers run again.
                return torch_stage.stage_backward(*(bwd_kwargs[name] for name in names)), None
        result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type == "weight":
            for root in self.fsdp_roots:
                sum_in_reduce_dtype(root)
        return result

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        assert grad_scale_factor == 1, "losses are divided by the global weight already; nothing here rescales"
        for root in self.fsdp_roots:
            reduce_gradients(root)

    def start_gradient_reduction(self) -> None:
        self.perform_reduce_grad(1)

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        """Do nothing, because the reduction has ended."""

    # Setup hooks of torch. 2.12 calls the first three, 2.11 the two after them.

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        self._describe_inputs(num_microbatches)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        self._describe_gradients(num_microbatches)

    def _post_metadata_inference_cleanup(self) -> None:
        """Skip the cleanup, because no metadata was inferred. torch's version drops gradients of FSDP parameters."""

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_forward_infra(num_microbatches, *args, **kwargs)
        if not HAS_STAGE_META:
            self._describe_inputs(num_microbatches)
        return result

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(num_microbatches, *args, **kwargs)
        if not HAS_STAGE_META:
            self._describe_gradients(num_microbatches)
        return result

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # The handshake of torch 2.11 sends to its own rank at the bend of a V, which aborts gloo.
        ops = super()._get_init_p2p_neighbors_ops()
        return ops if HAS_STAGE_META else [op for op in ops if op.group_peer != dist.get_rank(self.group)]
