"""Ring attention: keys and values travel around the context-parallel ranks, so no rank holds all keys.

Each rank computes its queries against the current block of keys while it sends the block to the next rank. Partial
results are merged exactly by log-sum-exp: for partial outputs O1, O2 and log-sum-exps L1, L2, the result is L =
logaddexp(L1, L2) and O = O1 exp(L1 - L) + O2 exp(L2 - L). A sink is one more term of L.

With 3 ranks, rank 0 computes with the keys of rank 0, then 2, then 1.

Backward goes around once more. Given the final (O, L), the ordinary flash backward of each part recomputes P = exp(S -
L), which is the exact share of that part. The gradients of keys and values travel one turn behind their block, also
during computation, and reach its owner after a full turn.

The CUDA path has NEVER been run on a GPU.

Shapes: N local queries and N keys of each rank, H heads, K KV heads, D one head width for queries, keys and values, n
and m queries and keys of a call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from automodel_cli.distributed.typed_torch import Ctx, Function
from automodel_cli.models.attention import kernels as kernels
from automodel_cli.models.attention.ring_calls import Setting, calls, merge
from automodel_cli.models.context_parallel_layout import Context


def ring_attention(
    query_NHD: Tensor, key_NKD: Tensor, value_NKV: Tensor, sink_H: Tensor | None, context: Context, setting: Setting
) -> Tensor:
    """Return the output `[N, H, V]` of the local queries over the keys of all ranks. Collective."""
    q, k, v = kernels.pad_to_one_width(query_NHD, key_NKD, value_NKV)
    out: Tensor = _Ring.apply(q, k, v, sink_H, context, setting)
    return out[..., : value_NKV.shape[-1]]


# Example of one merge: a query has scores 0, 0 for the keys of its own rank with values 1, 3, and score ln 2 for a key
# of the next rank with value 6. Part 1 has O = 2, L = ln 2. Part 2 has O = 6, L = ln 2. L = ln 4, so both parts have
# the share 1/2, and O = 4. The softmax over all three keys has probabilities 1/4, 1/4, 1/2 and gives the same. A sink
# with logit ln 4 halves it: L = ln 8 and O = 2.
class _Ring(Function):
    """Ring attention over one block `(2, M, K, D)` of keys and values per rank."""

    @staticmethod
    def forward(
        ctx: Ctx, q: Tensor, k: Tensor, v: Tensor, sink_H: Tensor | None, context: Context, setting: Setting
    ) -> Tensor:
        group = context.group
        exact = torch.promote_types(q.dtype, torch.float32)
        # Partial results are merged in fp32, because each merge would otherwise round the output once more.
        out = torch.zeros_like(q, dtype=exact)
        # -inf is the log-sum-exp of no keys. `logaddexp` with it returns the other part.
        lse_NH = torch.full(q.shape[:2], float("-inf"), dtype=exact, device=q.device)
        block = torch.stack([k, v])  # (2, M, K, D), sent around the ring
        for turn in range(group.size):
            # Send the current block while computing with it. In turn t it is the block of rank - t.
            arriving = group.pass_on(block) if turn < group.size - 1 else None
            # No call if all keys of the block are masked. The rank still passes the block on, because later ranks need
            # it.
            for call in calls(context, (group.rank - turn) % group.size, setting):
                merge(out, lse_NH, *call.forward(q, block[0], block[1], setting))
            block = block if arriving is None else arriving()
        # A sink is one more key without a value. It only reduces the weight of the other keys.
        if sink_H is not None:
            with_sink = torch.logaddexp(lse_NH, sink_H.to(exact))
            # [N, H] -> [N, H, 1], the factor of each query and head.
            out *= torch.exp(lse_NH - with_sink).unsqueeze(-1)
            lse_NH = with_sink
        out = out.to(q.dtype)
        # Own keys only: O(N) memory. Keys of other ranks travel again in backward.
        ctx.save_for_backward(q, k, v, out, lse_NH, sink_H)
        ctx.context, ctx.setting = context, setting
        return out

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse_NH, sink_H = ctx.saved_tensors
        group, setting = ctx.context.group, ctx.setting
        grad = grad.contiguous()
        dq = torch.zeros_like(q, dtype=lse_NH.dtype)
        block = torch.stack([k, v])
        travelling: Callable[[], Tensor] | None = None  # gradient of the next block by the ranks before this one
        for turn in range(group.size):
            # Both travel while this turn computes: the block of the next turn, and the gradient of this one.
            arriving = group.pass_on(block) if turn < group.size - 1 else None
            grads = torch.zeros_like(block, dtype=lse_NH.dtype)
            for call in calls(ctx.context, (group.rank - turn) % group.size, setting):
                grad_q, grad_k, grad_v = call.backward(grad, q, block[0], block[1], out, lse_NH, setting)
                # Add and not assign: a query sees keys in several calls, and padding repeats indices.
                dq.index_add_(0, call.query_index, grad_q.to(dq.dtype))
                grads[0].index_add_(0, call.key_index, grad_k.to(dq.dtype))
                grads[1].index_add_(0, call.key_index, grad_v.to(dq.dtype))
            if travelling is not None:
                # The sum so far arrives from the previous rank, which had this block one turn earlier.
                grads += travelling()
            travelling = group.pass_on(grads)  # also in the last turn, so that each gradient reaches its owner
            block = block if arriving is None else arriving()
        assert travelling is not None, "a ring has a rank"
        dk, dv = travelling().to(k.dtype)
        grad_sink = None
        if sink_H is not None:
            prob_NH = torch.exp(sink_H.to(lse_NH.dtype) - lse_NH)
            # dL/dsink = p_sink (dO . v_sink - dO . O) with v_sink = 0, summed over the queries: [N, H] -> [H].
            grad_sink = -(prob_NH * (grad * out).sum(-1)).sum(0).to(sink_H.dtype)
        return dq.to(q.dtype), dk, dv, grad_sink, None, None
