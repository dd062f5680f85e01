"""Distributed gated MLP experts: sort tokens once, all-to-all, grouped GEMMs, all-to-all, weighted sum.

Supports experts that compute, as the grouped path of transformers does::

    expert_e(x) = down_e gate(gate_up_e x + bias) + bias        `gate` is defined by the family

`GatedExperts.of` measures whether a module does. GEMMs, sums, dtypes and rounding are those of transformers.

One call is two autograd functions. Communication overlaps with the code between them::

    forward    _Multiply: sort, all-to-all, GEMM, gate, GEMM, start all-to-all | beside() | _Sum: wait, weighted sum
    backward   _Sum: start all-to-all of gradients | backward of beside() | _Multiply: wait, GEMMs, all-to-all

Saved for backward are the rows sorted by expert and the result of the first GEMM. The gate is recomputed. The gradient
of a routing weight w with y = w down h is computed where the expert is: <dy, down h> = <down^T dy, h>. So results are
neither saved nor sent for it. Token gradients return while weight gradients are computed.

Shapes: T tokens, K experts per token, P = T x K (token, expert) pairs, N received rows, L local experts, D hidden size,
F columns of the first GEMM (2 I if gate and up are one matrix), I columns after the gate.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import embedding_bag, grouped_mm

from automodel_cli.distributed import empty_groups
from automodel_cli.distributed.activation_checkpointing.saved_results import (
    SaveLevel,
    is_keeping,
    is_repeating,
    save_or_replay,
)
from automodel_cli.distributed.expert_parallel import low_rank, permute
from automodel_cli.distributed.expert_parallel.grouped_mlp_regions import add_expert_bias, fusible_regions
from automodel_cli.distributed.expert_parallel.token_dispatcher import Arriving, Routes, find_routes
from automodel_cli.distributed.float8 import grouped_gemm
from automodel_cli.distributed.float8.quantization import Arithmetic
from automodel_cli.distributed.fusion.compiled_regions import RegionCompiler
from automodel_cli.distributed.torch_compat import wanted
from automodel_cli.distributed.typed_torch import Ctx, Function, set_attributes
from automodel_cli.distributed.wgrad_fusion import gemm_timings
from automodel_cli.distributed.wgrad_fusion import grouped as wgrad_fusion_grouped
from automodel_cli.distributed.wgrad_fusion import linear as wgrad_fusion_linear
from automodel_cli.distributed.wgrad_fusion.linear import MainGrad, of_local

_WEIGHTS = low_rank.WEIGHTS
_BIASES = tuple(f"{name}_bias" for name in _WEIGHTS)
_DTYPES = {torch.bfloat16, torch.float16, torch.float32}  # Dtypes of torch's grouped GEMM.
# float32, relative to the largest value. Another activation or memory layout differs by 1e-1 or more.
_TOLERANCE = 1e-5
_PROBE = {"experts": 3, "hidden": 8, "inner": 16, "tokens": 12}


class GatedExperts:
    """Arithmetic of one experts module with `num_local` experts on this rank. `fp8`: compute GEMMs in float8."""

    def __init__(
        self,
        experts: nn.Module,
        num_local: int,
        group: dist.ProcessGroup | None,
        fuser: RegionCompiler | None = None,
        fp8: Arithmetic | None = None,
    ):
        self.transposed, self.num_local, self.group = bool(experts.is_transposed), num_local, group
        self._fp8 = fp8
        self.biased = set(_BIASES) <= set(experts._parameters)
        self._family = copy.copy(experts)  # Attributes that the gate reads.
        self._family._parameters = {}
        # Each region runs uncompiled, or compiled by `fuser`.
        self._gate, self._through_gate, self.sum_of_pairs, *add_bias = (
            (None if fuser is None else fuser(region)) or region.function
            for region in fusible_regions(self._family, self.biased)
        )
        self.add_bias = add_bias[0] if self.biased else add_expert_bias

    @classmethod
    def of(
        cls,
        experts: nn.Module,
        num_local: int,
        group: dist.ProcessGroup | None,
        fuser: RegionCompiler | None = None,
        fp8: Arithmetic | None = None,
    ) -> GatedExperts | None:
        """Return the arithmetic of `experts`, or None if they compute anything else or have other parameters.

        Without a `group`, all experts are local.
        """
        names = {name for name, _ in experts.named_parameters()} - {*low_rank.ADAPTERS}
        dtypes = {param.dtype for _, param in experts.named_parameters()}
        if names not in ({*_WEIGHTS}, {*_WEIGHTS, *_BIASES}) or not dtypes <= _DTYPES or not _is_standard(experts):
            return None
        return cls(experts, num_local, group, fuser, fp8)

    def gate(self, inner_NF: Tensor, *bias: Tensor) -> Tensor:
        """Apply the gate, `[N, F]` -> `[N, I]`. `bias`: biases of the first GEMM `[L, F]` and the expert of each row
        `[N]`.
        """
        result: Tensor = self._gate(self._family, inner_NF, *bias)
        return result

    def through_gate(
        self, inner_NF: Tensor, grad_gated_NI: Tensor, weight_N1: Tensor, *bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Recompute the gate and return its backward.

        Args:
            inner_NF: result of the first GEMM, before the bias.
            grad_gated_NI: gradient of the unweighted result of the gate. Overwritten.
            weight_N1: routing weight of each row.

        Returns the weighted result of the gate `[N, I]`, the gradient of the routing weights `[N]` and the gradient of
        `inner_NF`.
        """
        result: tuple[Tensor, Tensor, Tensor]
        result = self._through_gate(self._family, inner_NF, grad_gated_NI, weight_N1, *bias)
        return result

    def __call__(
        self,
        hidden_TD: Tensor,
        index_TK: Tensor,
        weight_TK: Tensor,
        parameters: Sequence[Tensor],
        main_grads: Sequence[MainGrad] = (),
        overlapped: Callable[[], None] | None = None,
        scale: float = 0.0,
    ) -> Tensor:
        """Compute the experts of all tokens, `[T, D]`. Collective over the group, also in backward.

        Args:
            parameters: of the local experts: first weight, second weight, both biases if the family has them, and the
                adapters if there are any (`low_rank.ADAPTERS`).
            main_grads: main gradients of the two weights. Weight gradients may accumulate into them directly.
            overlapped: called while results are in transit.
            scale: of the adapters.
        """
        call = _Call(self, weight_TK.detach(), scale)
        with torch.autocast(hidden_TD.device.type, enabled=False):
            sent_ND = _Multiply.apply(call, index_TK, main_grads, hidden_TD, weight_TK, *parameters)
        if overlapped is not None:
            overlapped()
        with torch.autocast(hidden_TD.device.type, enabled=False):
            result: Tensor = _Sum.apply(call, sent_ND, hidden_TD.dtype)
        return result

    def product(self, rows_ND: Tensor, weight_LDF: Tensor, ends_L: Tensor, *, back: bool = False) -> Tensor:
        """Multiply every row by the weight of its expert. `back`: by the transposed weight, as backward needs."""
        if self._fp8 is not None and not self._fp8.paused:
            transposed = self.transposed is not back
            return grouped_gemm.grouped_gemm(
                self._fp8, rows_ND, weight_LDF, ends_L, transposed=transposed, fast=not back
            )
        weight = weight_LDF if self.transposed is not back else weight_LDF.transpose(-2, -1)
        return grouped_mm(rows_ND, weight, offs=ends_L)

    def weight_gradient(self, rows_NI: Tensor, grad_NO: Tensor, ends_L: Tensor) -> Tensor:
        first, second = (rows_NI, grad_NO) if self.transposed else (grad_NO, rows_NI)
        if self._fp8 is not None and not self._fp8.paused:
            return grouped_gemm.weight_gradient(self._fp8, first, second, ends_L)
        return empty_groups.weight_gradient(first, second, ends_L)

    def add_weight_gradient(self, rows_NI: Tensor, grad_NO: Tensor, count_L: list[int], main_grad: MainGrad) -> bool:
        """Accumulate the weight gradient into the main gradient, and return whether it was done.

        Done only if the main gradient supports it and one GEMM per expert is faster than a grouped one. Never with
        float8.
        """
        if self._fp8 is not None and not self._fp8.paused:
            return False
        weights = rows_NI.shape[1] * grad_NO.shape[1]
        if not gemm_timings.adds_faster(len(rows_NI) / len(count_L), weights):
            return False
        place = main_grad.place(rows_NI.dtype)
        if place is not None:
            first, second = (rows_NI, grad_NO) if self.transposed else (grad_NO, rows_NI)
            wgrad_fusion_grouped.add_grouped_(place[0], first, second, count_L, place[1])
        return place is not None


def main_grads_of(experts: nn.Module) -> list[MainGrad]:
    """Return the main gradients of both weights, or an empty list if the strategy has set none."""
    known = wgrad_fusion_linear.main_grad_of(experts)
    return [known[name] for name in _WEIGHTS] if all(name in known for name in _WEIGHTS) else []


def parameters_of(experts: nn.Module) -> list[Tensor]:
    """Return the parameters in the order that `GatedExperts` expects."""
    names = (*_WEIGHTS, *_BIASES, *low_rank.ADAPTERS)
    return [experts._parameters[name] for name in names if name in experts._parameters]  # type: ignore


@dataclass(frozen=True)
class _Sorted:
    """Received rows, sorted by local expert.

    Example: 2 ranks send rows for local experts [0, 1 | 0, 0, 1]. `order_N` is [0, 2, 3, 1, 4], `expert_N` is [0, 0, 0,
    1, 1] and `ends_L` is [3, 5]. `place_N` is the inverse of `order_N`. Both are None if the rows are sorted on
    arrival.
    """

    routes: Routes
    order_N: Tensor | None
    place_N: Tensor | None
    expert_N: Tensor
    ends_L: Tensor

    @classmethod
    def of(cls, routes: Routes) -> _Sorted:
        received_RL = routes.received_RL
        if not routes.num_arrivals:  # Grouped GEMMs reject empty input. Use one row of zeros for expert 0.
            ends_L = torch.ones(received_RL.shape[1], dtype=torch.int32, device=received_RL.device)
            return cls(routes, None, None, received_RL.new_zeros(1), ends_L)
        # Received rows are ordered by source rank, then by expert. A grouped GEMM needs them ordered by expert.
        order_N, place_N, expert_N, ends_L = permute.permute_arrivals(received_RL, routes.num_arrivals)
        # With one rank or one local expert, the rows arrive in the order of experts.
        if 1 in received_RL.shape:
            return cls(routes, None, None, expert_N, ends_L)
        return cls(routes, order_N, place_N, expert_N, ends_L)

    @property
    def count_L(self) -> list[int]:
        """Number of rows of each local expert."""
        return self.routes.arrivals_L if self.routes.num_arrivals else [1] + [0] * (len(self.routes.arrivals_L) - 1)

    def by_expert(self, rows_N: Tensor) -> Tensor:
        """Sort received rows by expert."""
        if not len(rows_N):
            return rows_N.new_zeros(1, *rows_N.shape[1:])
        return rows_N if self.order_N is None else rows_N.index_select(0, self.order_N)

    def back(self, rows_N: Tensor) -> Arriving:
        """Send rows sorted by expert back to the ranks of their tokens, as sorted pairs. Collective."""
        if self.place_N is not None:
            rows_N = rows_N.index_select(0, self.place_N)
        return self.routes.back(rows_N[: self.routes.num_arrivals])

    def bias(self, biases: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the bias arguments of the gate."""
        return (biases[0], self.expert_N) if biases else ()

    def is_of_expert_NL(self, dtype: torch.dtype) -> Tensor:
        """Return a one-hot matrix `[N, L]`. A GEMM with it sums rows by expert in a deterministic order."""
        experts = torch.arange(len(self.ends_L), device=self.expert_N.device)
        return (self.expert_N[:, None] == experts).to(dtype)


@dataclass
class _Call:
    """State that the two autograd functions of one call share. `results` and `gradients` are transfers, or None."""

    experts: GatedExperts
    weight_TK: Tensor
    scale: float = 0.0
    rows: _Sorted | None = None
    results: Arriving | None = None
    gradients: Arriving | None = None


# Example: 4 experts on 2 ranks (L = 2), K = 2. Rank 0 has token a with experts 0, 3 and token b with 1, 0. Rank 1 has
# token c with experts 2, 3.
#     rank 0 sorts its pairs   a0 b0 b1 a3    and sends 3 rows to rank 0, 1 row to rank 1
#     rank 1 sorts its pairs   c2 c3          and sends 0 rows to rank 0, 2 rows to rank 1
#     rank 0 receives          a0 b0 b1       received_RL [[2, 1], [0, 0]], ends_L [2, 3]
#     rank 1 receives          a3 c2 c3       received_RL [[0, 1], [1, 1]], by_expert: c2 a3 c3, ends_L [1, 3]
# After the GEMMs, each row returns to the place that it left. Token a is w_a0 E0(a) + w_a3 E3(a).
class _Multiply(Function):
    """Send pairs to their experts, compute them, and start to return the results.

    Returns `[N, D]` without values. It marks where results leave. `_Sum` passes it the gradients of the returned rows.
    """

    @staticmethod
    def forward(
        ctx: Ctx,
        call: _Call,
        index_TK: Tensor,
        main_grads: Sequence[MainGrad],
        hidden_TD: Tensor,
        weight_TK: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        experts = call.experts
        # FSDP gathers the parameters before this call. What remains of a DTensor is Shard(0) over ep, the experts of
        # this rank.
        local = [param.to_local() if isinstance(param, DTensor) else param for param in parameters]
        first, second, biases, matrices = _split(local, experts.biased)
        adapters = low_rank.aligned(matrices, first)

        def arrive() -> Tensor:
            # (T, D) tokens -> (P, D) rows sorted by expert -> all-to-all -> (N, D) received rows -> sorted by local
            # expert.
            routes = rows.routes
            return rows.by_expert(routes.there(hidden_TD.to(first.dtype).index_select(0, routes.token_P))())

        def multiply() -> Tensor:
            # First GEMM, one per expert in a single launch: (N, D) -> (N, F).
            product_NF = experts.product(rows_ND, first, rows.ends_L)
            if adapters:
                # In place: `product_NF` is new, and a sum would keep a second (N, F) tensor.
                product_NF += low_rank.update(rows_ND, adapters[:2], rows.ends_L, call.scale)
            return product_NF

        # Recomputation replays saved routes, so that tokens go to the same experts without another host
        # synchronization.
        rows = save_or_replay(
            lambda: _Sorted.of(find_routes(index_TK, experts.num_local, experts.group)), SaveLevel.ROUTES
        )
        rows_ND = save_or_replay(arrive)
        inner_NF = save_or_replay(multiply, SaveLevel.PRODUCTS)
        call.rows = rows

        def results() -> Tensor:
            # (N, F) -> (N, I) by the gate, (N, I) -> (N, D) by the second GEMM.
            gated_NI = experts.gate(inner_NF, *rows.bias(biases))
            result_ND = experts.product(gated_NI, second, rows.ends_L)
            if adapters:
                result_ND += low_rank.update(gated_NI, adapters[2:], rows.ends_L, call.scale)
            return experts.add_bias(result_ND, biases[1], rows.expert_N) if biases else result_ND

        # Backward needs only `rows_ND` and `inner_NF`. When the layer is recomputed, the second GEMM and the all-to-all
        # of results are skipped.
        if not is_repeating():
            call.results = rows.back(results())
        ctx.save_for_backward(rows_ND, inner_NF, weight_TK, *local)
        ctx.call, ctx.main_grads, ctx.parameters = call, main_grads, parameters
        # The values are in `call.results`. This tensor connects `_Sum` to this function in the graph. It stores one
        # element.
        return rows_ND.new_empty(()).expand(rows.routes.num_arrivals, rows_ND.shape[1])

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_ND, inner_NF, weight_TK, *local = ctx.saved_tensors
        call: _Call = ctx.call
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
            # 2. Gradients of the unweighted results: `_Sum.backward` has sent the gradient of each pair's token.
            grad_ND = rows.by_expert(grads[0])
            # (N, D) -> (N, I): gradient of the unweighted gate output. `through_gate` applies the routing weight.
            grad_gated_NI = experts.product(grad_ND, second, ends_L, back=True)
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
                token_grads_arriving = rows.back(_row_gradients(experts, grad_inner_NF, first, ends_L, inner_a))
            is_of_NL = rows.is_of_expert_NL(first.dtype) if biases else None
            if wants_weight:
                if is_of_NL is not None:
                    grad_weight_N += ((grad_ND @ biases[1].t()) * is_of_NL).sum(-1, dtype=weight_TK.dtype)
                weight_grads_arriving = rows.back(grad_weight_N)
            # 4. Weight gradients.
            pairs = (rows_ND, grad_inner_NF), (weighted_NI, grad_ND)
            # Per expert: dW1 = rows^T grad_inner (D, F), and dW2 = (w * gated)^T dy (I, D). The weight w is in
            # `weighted_NI`,
            # because `grad_ND` is the gradient of the weighted sum.
            param_grads = _weight_gradients(experts, rows, pairs, wants, ctx.main_grads)
            if is_of_NL is not None:
                param_grads.append(is_of_NL.t() @ grad_inner_NF if wants[2] else None)
                param_grads.append((is_of_NL * weight_N1).to(first.dtype).t() @ grad_ND if wants[3] else None)
            if adapters and any(wants[-len(adapters) :]):
                inner = (first_NR, second_NR)
                param_grads += _adapter_gradients(pairs, inner, adapters, ends_L, call.scale, matrices[0].shape[1])
            else:
                param_grads += [None] * len(adapters)
            grad_TD, grad_weight_TK = None, None
            if wants_tokens:
                # 5. A token's gradient is the sum over its K pairs. place_P has the row of each pair in the received
                # gradients. `embedding_bag` gathers and sums in one kernel.
                grad_TD = embedding_bag(routes.place_P.view_as(weight_TK), token_grads_arriving(), mode="sum")
            if wants_weight:
                grad_weight_TK = weight_grads_arriving().index_select(0, routes.place_P).view_as(weight_TK)
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
    experts: GatedExperts,
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
    experts: GatedExperts,
    rows: _Sorted,
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
    count = len(_BIASES) if biased else 0
    return first, second, others[:count], others[count:]


class _Sum(Function):
    """Wait for the results and sum them by token, with routing weights.

    `_Multiply` computes the gradient of the routing weights on the rank of the expert, so this function returns none.
    """

    @staticmethod
    def forward(ctx: Ctx, call: _Call, sent_ND: Tensor, dtype: torch.dtype) -> Tensor:
        def sum_up() -> Tensor:
            assert call.results is not None and call.rows is not None, "they were sent"
            # `place_P` turns sorted rows back into token order: rows a0 b0 b1 a3 have place_P [0, 3, 2, 1], so token a
            # reads rows 0 and 3, and token b reads rows 2 and 1.
            result: Tensor = call.experts.sum_of_pairs(call.results(), call.rows.routes.place_P, call.weight_TK, dtype)
            return result

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


def _is_standard(experts: nn.Module) -> bool:
    """Return whether results and gradients equal those of the family's own loop over experts, on a small copy."""
    # The original forward, below the dispatch to an experts implementation of transformers.
    # The reference must be the family's loop over experts. The dispatched forward could be the grouped path itself.
    loop = getattr(type(experts).forward, "__wrapped__", None)
    # transformers 5.17 has no norm after experts. This default can go when 5.23 is the oldest supported release.
    if loop is None or not experts.has_gate or getattr(experts, "has_post_expert_norm", False):
        return False
    tiny = _shrunk(experts)
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(_PROBE["tokens"], _PROBE["hidden"], generator=generator)
    index_TK = torch.stack([torch.randperm(_PROBE["experts"], generator=generator)[:2] for _ in hidden_TD])
    weight_TK = torch.rand(index_TK.shape, generator=generator)
    inputs = [hidden_TD, weight_TK, *parameters_of(tiny)]
    arithmetic = GatedExperts(tiny, _PROBE["experts"], None)
    try:
        want = _with_gradients(lambda: loop(tiny, hidden_TD, index_TK, weight_TK), inputs)
        got = _with_gradients(lambda: arithmetic(hidden_TD, index_TK, weight_TK, inputs[2:]), inputs)
    except Exception:  # The code of a family may fail with the sizes of the small copy.
        return False
    return all(bool((a - b).abs().max() <= _TOLERANCE * a.abs().max()) for a, b in zip(want, got, strict=True))


def _shrunk(experts: nn.Module) -> nn.Module:
    """Return a small copy of the module with random weights. The original is not changed."""
    tiny = copy.copy(experts)
    inner, hidden = _PROBE["inner"], _PROBE["hidden"]
    sizes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}  # Shapes are [out, in].
    generator = torch.Generator().manual_seed(1)
    tiny._parameters = {}
    for name in experts._parameters.keys() - {*low_rank.ADAPTERS}:
        size = sizes[name.removesuffix("_bias")]
        shape = size[:1] if name in _BIASES else size[::-1] if experts.is_transposed else size
        values = torch.randn(_PROBE["experts"], *shape, generator=generator)
        tiny._parameters[name] = nn.Parameter(values, requires_grad=True)
    set_attributes(tiny, num_experts=_PROBE["experts"])
    return tiny


def _with_gradients(compute: Callable[[], Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    with torch.enable_grad():
        for tensor in inputs:
            tensor.requires_grad_()
        result = compute()
        return [result.detach(), *torch.autograd.grad(result.square().sum(), inputs)]
