"""Token dispatch by the kernels of DeepEP, which send each token at most once to each rank.

Uses the interface of `deep_ep.Buffer` (normal kernels, docs/legacy.md of the project). The backward of a dispatch is a
combine, and the backward of a combine is a dispatch with the same handle. Tokens are bfloat16.

The package is built from source and needs CUDA devices with direct connections. Tests use a stand-in with the same
interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import require_package
from automodel_cli.distributed.expert_parallel.token_dispatcher import LocalExperts, at_least_one_row
from automodel_cli.distributed.typed_torch import Ctx, Function

if TYPE_CHECKING:
    from deep_ep import Buffer

_FIX = "parallelizer.expert_dispatch=all_to_all"
# Shared by all layers, because a buffer owns device memory and connections.
_buffers: dict[dist.ProcessGroup, Buffer] = {}


def require_deep_ep(device_type: str) -> None:
    """Raise ConfigError if DeepEP is not installed or the device is not CUDA."""
    require_package(
        "deep_ep",
        "expert_dispatch=deepep",
        install=f"git+https://github.com/deepseek-ai/DeepEP --no-build-isolation, or {_FIX}",
        keys=("parallelizer.expert_dispatch",),
    )
    if device_type != "cuda":
        raise ConfigError(
            f"expert_dispatch=deepep needs CUDA devices, but this run uses {device_type}",
            code="hardware_required",
            keys=("parallelizer.expert_dispatch",),
            fix=_FIX,
        )


class DeepEP:
    """`TokenDispatcher` that uses DeepEP. Routing weights are sent with the tokens, and weighted results return."""

    def __init__(self, num_local_experts: int, group: dist.ProcessGroup):
        self.group = group
        self.num_experts = num_local_experts * dist.get_world_size(group)

    def __call__(self, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor, experts: LocalExperts) -> Tensor:
        if hidden_TD.dtype != torch.bfloat16:
            raise ConfigError(
                f"expert_dispatch=deepep supports bfloat16 only, but the hidden states are {hidden_TD.dtype}",
                code="unsupported_combination",
                keys=("parallelizer.expert_dispatch", "parallelizer.mp_policy"),
                fix=_FIX,
            )
        buffer = _buffer(self.group, hidden_TD.shape[1] * hidden_TD.element_size())
        # R received tokens, each once, even if several of its experts are here. (T, D) -> (R, D), (T, K) -> (R, K).
        hidden_RD, weight_RK, index_RK, handle = _Dispatch.apply(
            buffer, self.num_experts, hidden_TD, index_TK, weight_TK.float()
        )
        row_N, choice_N = (index_RK >= 0).nonzero(as_tuple=True)  # Entries of remote experts are -1.
        # (R, K) local choices -> N rows, one per (token, local expert). Example: index_RK [[0, -1], [1, 0]] gives the
        # rows 0, 1, 1 with experts 0, 1, 0.
        result_ND = at_least_one_row(experts, hidden_RD[row_N], index_RK[row_N, choice_N])
        weighted_ND = result_ND * weight_RK[row_N, choice_N, None]
        # Sum the local experts of a token before it returns. `combine` adds the sums of the ranks.
        result_RD = torch.zeros_like(hidden_RD, dtype=weighted_ND.dtype).index_add(0, row_N, weighted_ND)
        combined_TD: Tensor = _Combine.apply(buffer, handle, result_RD.to(hidden_TD.dtype))
        return combined_TD


def _buffer(group: dist.ProcessGroup, hidden_bytes: int) -> Buffer:
    """Return a communication buffer for tokens of `hidden_bytes` bytes. Collective if the buffer has to grow."""
    from deep_ep import Buffer

    size = dist.get_world_size(group)
    configs = (Buffer.get_dispatch_config(size), Buffer.get_combine_config(size))
    nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, size) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, size) for config in configs)
    # All ranks compute the same sizes, so they decide together whether the buffer grows.
    held = _buffers.get(group)
    if held is None or held.num_nvl_bytes < nvl or held.num_rdma_bytes < rdma:
        _buffers[group] = held = Buffer(group, nvl, rdma)
    return held


class _Dispatch(Function):
    @staticmethod
    def forward(
        ctx: Ctx, buffer: Buffer, num_experts: int, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor
    ) -> tuple[object, ...]:
        per_rank, per_rdma_rank, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(index_TK, num_experts)
        hidden_RD, index_RK, weight_RK, _, handle, _ = buffer.dispatch(
            hidden_TD.contiguous(),
            topk_idx=index_TK,
            topk_weights=weight_TK,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(index_RK)
        return hidden_RD, weight_RK, index_RK, handle

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RD, weight_RK = grads[:2]
        hidden_TD, weight_TK, _ = ctx.buffer.combine(
            hidden_RD.contiguous(), ctx.handle, topk_weights=weight_RK.contiguous()
        )
        return None, None, hidden_TD, None, weight_TK


class _Combine(Function):
    @staticmethod
    def forward(ctx: Ctx, buffer: Buffer, handle: object, result_RD: Tensor) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        combined_TD: Tensor = buffer.combine(result_RD.contiguous(), handle)[0]
        return combined_TD

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, ctx.buffer.dispatch(grads[0].contiguous(), handle=ctx.handle)[0]
