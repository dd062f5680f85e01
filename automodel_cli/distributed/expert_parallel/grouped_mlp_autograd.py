"""The two autograd functions of distributed gated experts: `Multiply` and `Sum`.

Shapes as in `grouped_mlp`: T tokens, K experts per token, P = T x K (token, expert) pairs, N received rows, L local
experts, D hidden size, F columns of the first GEMM, I columns after the gate, R rank of adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from automodel_cli.distributed.activation_checkpointing.saved_results import (
    SaveLevel,
    is_keeping,
    is_repeating,
    save_or_replay,
)
from automodel_cli.distributed.expert_parallel import low_rank
from automodel_cli.distributed.expert_parallel.grouped_mlp_gemms import BIASES, ExpertGemms
from automodel_cli.distributed.expert_parallel.sorted_rows import SortedRows
from automodel_cli.distributed.expert_parallel.token_dispatcher import Arriving, find_routes
from automodel_cli.distributed.qat.experts import masked_gradient, quantized_weight
from automodel_cli.distributed.qat.settings import FakeQuantization
from automodel_cli.distributed.tensors import to_local
from automodel_cli.distributed.torch_compat import wanted
from automodel_cli.distributed.typed_torch import Ctx, Function
from automodel_cli.distributed.wgrad_fusion.linear import MainGrad, of_local


@dataclass
class Call:
    """State that the two autograd functions of one call share. `results` and `gradients` are transfers, or None."""

    experts: ExpertGemms
    weight_TK: Tensor
    scale: float = 0.0
    qat: FakeQuantization | None = None
    rows: SortedRows | None = None
    results: Arriving | None = None
    gradients: Arriving | None = None

    def read(self, weight: Tensor) -> Tensor:
        """Return a weight as rows are multiplied with it. Backward quantizes again, so no second copy is saved."""
        return weight if self.qat is None else quantized_weight(weight, self.qat, transposed=self.experts.transposed)

    def of_weight(self, gradient: Tensor | None, weight: Tensor) -> Tensor | None:
        """Return the gradient of a weight, given that of the weight that was read."""
        if gradient is None or self.qat is None:
            return gradient
        return masked_gradient(gradient, weight, self.qat, transposed=self.experts.transposed)


# Example: 4 experts on 2 ranks (L = 2), K = 2. Rank 0 has token a with experts 0, 3 and token b with 1, 0. Rank 1 has
# token c with experts 2, 3.
#     rank 0 sorts its pairs   a0 b0 b1 a3    and sends 3 rows to rank 0, 1 row to rank 1
#     rank 1 sorts its pairs   c2 c3          and sends 0 rows to rank 0, 2 rows to rank 1
#     rank 0 receives          a0 b0 b1       received_RL [[2, 1], [0, 0]], ends_L [2, 3]
#     rank 1 receives          a3 c2 c3       received_RL [[0, 1], [1, 1]], by_expert: c2 a3 c3, ends_L [1, 3]
# After the GEMMs, each row returns to the place that it left. Token a is w_a0 E0(a) + w_a3 E3(a).
class Multiply(Function):
    """Send pairs to their experts, compute them, and start to return the results.

    Returns `[N, D]` without values. It marks where results leave. `Sum` passes it the gradients of the returned rows.
    """

    @staticmethod
    def forward(
        ctx: Ctx,
        call: Call,
        index_TK: Tensor,
        main_grads: Sequence[MainGrad],
        hidden_TD: Tensor,
        weight_TK: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        experts = call.experts
        # FSDP gathers the parameters before this call. What remains of a DTensor is Shard(0) over ep, the experts of
        # this rank.
        local = [to_local(param) for param in parameters]
        first, second, biases, matrices = _split(local, experts.biased)
        adapters = low_rank.aligned(matrices, first)

        def arrive() -> Tensor:
            # (T, D) tokens -> (P, D) rows sorted by expert -> all-to-all -> (N, D) received rows -> sorted by local
            # expert.
            routes = rows.routes
            return rows.by_expert(routes.there(hidden_TD.to(first.dtype).index_select(0, routes.token_P))())

        def multiply() -> Tensor:
            # First GEMM, one per expert in a single launch: (N, D) -> (N, F).
            product_NF = experts.product(rows_ND, call.read(first), rows.ends_L)
            if adapters:
                # In place: `product_NF` is new, and a sum would keep a second (N, F) tensor.
                product_NF += low_rank.update(rows_ND, adapters[:2], rows.ends_L, call.scale)
            return product_NF

        # Recomputation replays saved routes, so that tokens go to the same experts without another host
        # synchronization.
        rows = save_or_replay(
            lambda: SortedRows.of(find_routes(index_TK, experts.num_local, experts.group)), SaveLevel.ROUTES
        )
        rows_ND = save_or_replay(arrive)
        inner_NF = save_or_replay(multiply, SaveLevel.PRODUCTS)
        call.rows = rows

        def results() -> Tensor:
            # (N, F) -> (N, I) by the gate, (N, I) -> (N, D) by the second GEMM.
            gated_NI = experts.gate(inner_NF, *rows.bias(biases))
            result_ND = experts.product(gated_NI, call.read(second), rows.ends_L)
            if adapters:
                result_ND += low_rank.update(gated_NI, adapters[2:], rows.ends_L, call.scale)
            return experts.add_bias(result_ND, biases[1], rows.expert_N) if biases else result_ND

        # Backward needs only `rows_ND` and `inner_NF`. When the layer is recomputed, the second GEMM and the all-to-all
        # of results are skipped.
        if not is_repeating():
            call.results = rows.back(results())
        ctx.save_for_backward(rows_ND, inner_NF, weight_TK, *local)
        ctx.call, ctx.main_grads, ctx.parameters = call, main_grads, parameters
        # The values are in `call.results`. This tensor connects `Sum` to this function in the graph. It stores one
        # element.
        return rows_ND.new_empty(()).expand(rows.routes.num_arrivals, rows_ND.shape[1])

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_ND, inner_NF, weight_TK, *local = ctx.saved_tensors
        call: Call = ctx.call
        experts, rows = call.experts, call.rows
        first, second, biases, matrices = _split(local, experts.biased)
        adapters = low_rank.aligned(matrices, first)
        assert rows is not None, "forward has found them"
        _, _, _, wants_tokens, wants_weight, *wants = wanted(ctx)
        routes, ends_L = rows.routes, rows.ends_L
        with torch.autocast(rows_ND.device.type, enabled=False):
            # 1. Send each pair's routing weight to the rank of its expert, while the gradients are still in transit.
            weights_arriving = routes.there(weight_TK.flatten().index_select(0, routes.order_P))
            if call.gradients is not None:  # A schedule that splits the backward may have waited for them already.
                call.gradients()
                call.gradients = None
            # 2. Gradients of the unweighted results: `Sum.backward` has sent the gradient of each pair's token.
            grad_ND = rows.by_expert(grads[0])
            # (N, D) -> (N, I): gradient of the unweighted gate output. `through_gate` applies the routing weight.
            grad_gated_NI = experts.product(grad_ND, call.read(second), ends_L, back=True)
            if adapters:
                second_NR = low_rank.inner_gradient(grad_ND, adapters[3], ends_L, call.scale)
                grad_gated_NI += low_rank.row_gradient(second_NR, adapters[2], ends_L)
            weight_N1 = rows.by_expert(weights_arriving())[:, None]
            weighted_NI, grad_weight_N, grad_inner_NF = experts.through_gate(
                inner_NF, grad_gated_NI, weight_N1, *rows.bias(biases)
            )
            if adapters:
                first_NR = low_rank.inner_gradient(grad_inner_NF, adapters[1], ends_L, call.scale)
            if wants_tokens:
                # 3. Token gradients travel back while weight gradients are computed.
                # No name keeps them in memory until the weight gradients are done.
                inner_a = (first_NR, adapters[0]) if adapters else None
                token_grads_arriving = rows.back(
                    _row_gradients(experts, grad_inner_NF, call.read(first), ends_L, inner_a)
                )
            is_of_NL = rows.is_of_expert_NL(first.dtype) if biases else None
            if wants_weight:
                if is_of_NL is not None:
                    grad_weight_N += ((grad_ND @ biases[1].t()) * is_of_NL).sum(-1, dtype=weight_TK.dtype)
                weight_grads_arriving = rows.back(grad_weight_N)
            # 4. Weight gradients.
            pairs = (rows_ND, grad_inner_NF), (weighted_NI, grad_ND)
            # Per expert: dW1 = rows^T grad_inner (D, F), and dW2 = (w * gated)^T dy (I, D). `weighted_NI` contains w.
            weight_grads = _weight_gradients(experts, rows, pairs, wants, ctx.main_grads)
            param_grads = [call.of_weight(*of) for of in zip(weight_grads, (first, second), strict=True)]
            if is_of_NL is not None:
                param_grads.append(is_of_NL.t() @ grad_inner_NF if wants[2] else None)
                param_grads.append((is_of_NL * weight_N1).to(first.dtype).t() @ grad_ND if wants[3] else None)
            if adapters and any(wants[-len(adapters) :]):
                inner = (first_NR, second_NR)
                param_grads += _adapter_gradients(pairs, inner, adapters, ends_L, call.scale, matrices[0].shape[1])
            else:
                param_grads += [None] * len(adapters)
            # 5. Sum over a token's K pairs. place_P has the row of each pair. `embedding_bag` gathers and sums at once.
            place_TK = routes.place_P.view_as(weight_TK)
            grad_TD = embedding_bag(place_TK, token_grads_arriving(), mode="sum") if wants_tokens else None
            grad_weight_TK = (
                weight_grads_arriving().index_select(0, routes.place_P).view_as(weight_TK) if wants_weight else None
            )
        return None, None, None, grad_TD, grad_weight_TK, *_of_parameters(param_grads, ctx.parameters)


def _of_parameters(grads: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor | None]:
    pairs = zip(grads, parameters, strict=True)
    return [None if grad is None else of_local(grad, parameter) for grad, parameter in pairs]


def _adapter_gradients(
    pairs: Sequence[tuple[Tensor, Tensor]],
    inner: tuple[Tensor, Tensor],
    adapters: Sequence[Tensor],
    ends_L: Tensor,
    scale: float,
    rank: int,
) -> list[Tensor]:
    """Return the gradients of A and B of both GEMMs. `inner`: gradients between A and B, (N, R)."""
    grads: list[Tensor] = []
    for pair, inner_NR, a_LRI in zip(pairs, inner, adapters[::2], strict=True):
        grads += low_rank.matrix_gradients(*pair, inner_NR, a_LRI, ends_L, scale, rank)
    return grads


def _row_gradients(
    experts: ExpertGemms,
    grad_inner_NF: Tensor,
    first: Tensor,
    ends_L: Tensor,
    inner_a: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return the gradients of the rows of tokens. `inner_a`: gradient of `x A^T` and A, with adapters."""
    grad_rows_ND = experts.product(grad_inner_NF, first, ends_L, back=True)
    if inner_a is not None:
        grad_rows_ND += low_rank.row_gradient(*inner_a, ends_L)
    return grad_rows_ND


def _weight_gradients(
    experts: ExpertGemms,
    rows: SortedRows,
    pairs: Sequence[tuple[Tensor, Tensor]],
    wants: Sequence[bool],
    main_grads: Sequence[MainGrad],
) -> list[Tensor | None]:
    """Return the gradients of both weights. None if it is not wanted, or was added to the main gradient.

    One GEMM per expert: (rows of the expert)^T x (gradients of its outputs), which are `pairs`.
    """
    grads: list[Tensor | None] = []
    for i, factors in enumerate(pairs):
        is_added = wants[i] and main_grads and experts.add_weight_gradient(*factors, rows.count_L, main_grads[i])
        grads.append(experts.weight_gradient(*factors, rows.ends_L) if wants[i] and not is_added else None)
    return grads


def _split(local: Sequence[Tensor], biased: bool) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Return first weight, second weight, biases and adapters."""
    first, second, *others = local
    count = len(BIASES) if biased else 0
    return first, second, others[:count], others[count:]


class Sum(Function):
    """Wait for the results and sum them by token, with routing weights.

    `Multiply` computes the gradient of the routing weights on the rank of the expert, so this function returns none.
    """

    @staticmethod
    def forward(ctx: Ctx, call: Call, sent_ND: Tensor, dtype: torch.dtype) -> Tensor:
        def sum_up() -> Tensor:
            assert call.results is not None and call.rows is not None, "they were sent"
            # `place_P` turns sorted rows back into token order: rows a0 b0 b1 a3 have place_P [0, 3, 2, 1], so token a
            # reads rows 0 and 3, and token b reads rows 2 and 1.
            return call.experts.sum_of_pairs(call.results(), call.rows.routes.place_P, call.weight_TK, dtype)

        # (P, D) results in sorted order -> weighted sum of the K results of each token -> (T, D).
        result_TD = save_or_replay(sum_up)
        call.results = None
        ctx.call, ctx.sent_dtype = call, sent_ND.dtype
        # Families add to the result in place, so a saved result must not be shared.
        return result_TD.clone() if is_keeping() else result_TD

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        routes = ctx.call.rows.routes
        # Each token's gradient goes to the K experts of the token. The routing weight is applied there.
        ctx.call.gradients = routes.there(grads[0].to(ctx.sent_dtype).index_select(0, routes.token_P))
        return None, ctx.call.gradients.rows, None
