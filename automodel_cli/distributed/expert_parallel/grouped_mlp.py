"""A layer of distributed experts as two functions of autograd: tokens sorted once, exchanged, multiplied; then summed.

For experts that are gated MLPs as the library's own grouped path computes them, which `GatedExperts.of` measures:

    expert_e(x) = down_e gate(gate_up_e x + bias) + bias        `gate` is the family's

Kept for backward are the rows in the order of their experts and their first product; the gate is computed again. The
gradient of a routing weight is made where its expert is, <gradient, down h> = <down^T gradient, h>, so no result needs
to be kept or sent for it. Products, sums and dtypes are those of the family; forward rounds where the library rounds.

Rows travel while others work. What experts made is on its way back between the two functions, and so is its gradient
there in backward: `beside` runs in that time, and autograd takes its backward in that order too. Gradients of tokens go
back while those of the weights are made.

Shapes: T tokens, K experts of each, P = T x K pairs, N rows of pairs that arrived here, L local experts, D hidden size,
F columns of the first product, I of the gate's result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import embedding_bag, grouped_mm

from automodel_cli.distributed.activation_checkpointing.saved_results import (
    SaveLevel,
    is_keeping,
    is_repeating,
    save_or_replay,
)
from automodel_cli.distributed.expert_parallel import empty_groups, permute
from automodel_cli.distributed.expert_parallel.token_dispatcher import Arriving, Routes, find_routes
from automodel_cli.distributed.float8 import grouped_gemm
from automodel_cli.distributed.float8.quantization import Arithmetic
from automodel_cli.distributed.fusion.compiled_regions import FusibleRegion, RegionCompiler
from automodel_cli.distributed.torch_compat import wanted
from automodel_cli.distributed.wgrad_fusion import gemm_timings
from automodel_cli.distributed.wgrad_fusion import grouped as wgrad_fusion_grouped
from automodel_cli.distributed.wgrad_fusion import linear as wgrad_fusion_linear
from automodel_cli.distributed.wgrad_fusion.linear import MainGrad, of_local

_WEIGHTS = ("gate_up_proj", "down_proj")
_BIASES = tuple(f"{name}_bias" for name in _WEIGHTS)
_DTYPES = {torch.bfloat16, torch.float16, torch.float32}  # that torch's grouped product has
_TOLERANCE = 1e-5  # float32, relative to the largest; another activation or layout is wrong by 1e-1 and more
_PROBE = {"experts": 3, "hidden": 8, "inner": 16, "tokens": 12}


class GatedExperts:
    """The arithmetic of one module of experts, of which `num_local` are on this rank. With `fp8` they multiply so."""

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
        self._family = copy.copy(experts)  # what its gate reads
        self._family._parameters = {}
        # each as written, or as `fuser` runs it
        biased = set(_BIASES) <= set(experts._parameters)
        self._gate, self._through_gate, self.sum_of_pairs, *add_bias = (
            (None if fuser is None else fuser(glue)) or glue.function for glue in _glue(self._family, biased)
        )
        self.add_bias = add_bias[0] if biased else _biased

    @classmethod
    def of(
        cls,
        experts: nn.Module,
        num_local: int,
        group: dist.ProcessGroup | None,
        fuser: RegionCompiler | None = None,
        fp8: Arithmetic | None = None,
    ) -> GatedExperts | None:
        """None for experts that compute something else, or with parameters of their own. Without a `group` all experts
        are here."""
        names = {name for name, _ in experts.named_parameters()}
        dtypes = {param.dtype for _, param in experts.named_parameters()}
        if names not in ({*_WEIGHTS}, {*_WEIGHTS, *_BIASES}) or not dtypes <= _DTYPES or not _is_standard(experts):
            return None
        return cls(experts, num_local, group, fuser, fp8)

    def gate(self, inner_NF: Tensor, *bias: Tensor) -> Tensor:
        """[N, F] -> [N, I]. `bias`: first biases [L, F] and the expert of each row [N], where there are any."""
        result: Tensor = self._gate(self._family, inner_NF, *bias)
        return result

    def through_gate(
        self, inner_NF: Tensor, of_gated_NI: Tensor, weight_N1: Tensor, *bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the gate makes of `inner_NF` and the bias, times the weights; the gradients of the weights [N] and of
        `inner_NF`, given that of an unweighted result, which is overwritten."""
        result: tuple[Tensor, Tensor, Tensor]
        result = self._through_gate(self._family, inner_NF, of_gated_NI, weight_N1, *bias)
        return result

    def __call__(
        self,
        hidden_TD: Tensor,
        index_TK: Tensor,
        weight_TK: Tensor,
        parameters: Sequence[Tensor],
        sums: Sequence[MainGrad] = (),
        beside: Callable[[], None] | None = None,
    ) -> Tensor:
        """[T, D]. `parameters`: first weight, second weight, and both biases where there are any, of local experts.
        `sums` of the two weights, to which their gradients may be added instead. `beside`: what else there is to
        compute, called while results are on their way."""
        call = _Call(self, weight_TK.detach())
        with torch.autocast(hidden_TD.device.type, enabled=False):
            sent_ND = _Multiply.apply(call, index_TK, sums, hidden_TD, weight_TK, *parameters)
        if beside is not None:
            beside()
        with torch.autocast(hidden_TD.device.type, enabled=False):
            result: Tensor = _Sum.apply(call, sent_ND, hidden_TD.dtype)
        return result

    def product(self, rows_ND: Tensor, weight_LDF: Tensor, ends_L: Tensor, *, back: bool = False) -> Tensor:
        """Every row times the weight of its expert, or that weight turned around."""
        if self._fp8 is not None and not self._fp8.paused:
            turned = self.transposed is not back
            return grouped_gemm.grouped_gemm(self._fp8, rows_ND, weight_LDF, ends_L, turned=turned, fast=not back)
        weight = weight_LDF if self.transposed is not back else weight_LDF.transpose(-2, -1)
        return grouped_mm(rows_ND, weight, offs=ends_L)

    def weight_gradient(self, rows_NI: Tensor, grad_NO: Tensor, ends_L: Tensor) -> Tensor:
        first, second = (rows_NI, grad_NO) if self.transposed else (grad_NO, rows_NI)
        if self._fp8 is not None and not self._fp8.paused:
            return grouped_gemm.weight_gradient(self._fp8, first, second, ends_L)
        return empty_groups.weight_gradient(first, second, ends_L)

    def add_weight_gradient(self, rows_NI: Tensor, grad_NO: Tensor, count_L: list[int], weight_sum: MainGrad) -> bool:
        """Add it to the sum, where that takes it and a product for each expert is faster; none of 8 bits is one."""
        if self._fp8 is not None and not self._fp8.paused:
            return False
        weights = rows_NI.shape[1] * grad_NO.shape[1]
        if not gemm_timings.adds_faster(len(rows_NI) / len(count_L), weights):
            return False
        place = weight_sum.place(rows_NI.dtype)
        if place is not None:
            first, second = (rows_NI, grad_NO) if self.transposed else (grad_NO, rows_NI)
            wgrad_fusion_grouped.add_grouped_(place[0], first, second, count_L, place[1])
        return place is not None


def main_grads_of(experts: nn.Module) -> list[MainGrad]:
    """Those of both weights, where the strategy has told the module (`added.take_sums`) and microbatches have one
    backward each."""
    known = wgrad_fusion_linear.main_grad_of(experts)
    return [known[name] for name in _WEIGHTS] if all(name in known for name in _WEIGHTS) else []


def parameters_of(experts: nn.Module) -> list[Tensor]:
    """What `GatedExperts` computes with, in its order."""
    return [experts._parameters[name] for name in (*_WEIGHTS, *_BIASES) if name in experts._parameters]  # type: ignore


@dataclass(frozen=True)
class _Sorted:
    """Rows that arrived, in the order of the local experts. `order_N` is where each was when it arrived, `place_N` the
    inverse, both None where that changes nothing."""

    routes: Routes
    order_N: Tensor | None
    place_N: Tensor | None
    expert_N: Tensor
    ends_L: Tensor

    @classmethod
    def of(cls, routes: Routes) -> _Sorted:
        received_RL = routes.received_RL
        if not routes.num_arrivals:  # grouped products refuse empty input: a row of zeros for the first expert
            ends_L = torch.ones(received_RL.shape[1], dtype=torch.int32, device=received_RL.device)
            return cls(routes, None, None, received_RL.new_zeros(1), ends_L)
        order_N, place_N, expert_N, ends_L = permute.permute_arrivals(received_RL, routes.num_arrivals)
        if 1 in received_RL.shape:
            return cls(routes, None, None, expert_N, ends_L)
        return cls(routes, order_N, place_N, expert_N, ends_L)

    @property
    def count_L(self) -> list[int]:
        """Rows of each local expert."""
        return self.routes.arrivals_L if self.routes.num_arrivals else [1] + [0] * (len(self.routes.arrivals_L) - 1)

    def by_expert(self, rows_N: Tensor) -> Tensor:
        """Rows as they arrived, in the order of experts."""
        if not len(rows_N):
            return rows_N.new_zeros(1, *rows_N.shape[1:])
        return rows_N if self.order_N is None else rows_N.index_select(0, self.order_N)

    def back(self, rows_N: Tensor) -> Arriving:
        """From rows by expert to sorted pairs. Collective."""
        if self.place_N is not None:
            rows_N = rows_N.index_select(0, self.place_N)
        return self.routes.back(rows_N[: self.routes.num_arrivals])

    def bias(self, biases: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The first, as the gate takes it."""
        return (biases[0], self.expert_N) if biases else ()

    def is_of_expert_NL(self, dtype: torch.dtype) -> Tensor:
        """1 where a row is of an expert, else 0: a product with it sums rows by expert, always in the same order."""
        experts = torch.arange(len(self.ends_L), device=self.expert_N.device)
        return (self.expert_N[:, None] == experts).to(dtype)


@dataclass
class _Call:
    """What the two functions of one call know of each other. `results` and `gradients` are under way, or None."""

    experts: GatedExperts
    weight_TK: Tensor
    rows: _Sorted | None = None
    results: Arriving | None = None
    gradients: Arriving | None = None


class _Multiply(torch.autograd.Function):
    """Pairs to their experts and through them; the results are sent back. Returns [N, D] without values: where results
    left, to which `_Sum` answers with the gradients of what they are summed to, one row for each."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        index_TK: Tensor,
        sums: Sequence[MainGrad],
        hidden_TD: Tensor,
        weight_TK: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        experts = call.experts
        local = [param.to_local() if isinstance(param, DTensor) else param for param in parameters]
        first, second, *biases = local

        def arrive() -> Tensor:
            routes = rows.routes
            return rows.by_expert(routes.there(hidden_TD.to(first.dtype).index_select(0, routes.token_P))())

        def multiply() -> Tensor:
            return experts.product(rows_ND, first, rows.ends_L)

        rows = save_or_replay(
            lambda: _Sorted.of(find_routes(index_TK, experts.num_local, experts.group)), SaveLevel.ROUTES
        )
        rows_ND = save_or_replay(arrive)
        inner_NF = save_or_replay(multiply, SaveLevel.PRODUCTS)
        call.rows = rows
        if not is_repeating():
            result_ND = experts.product(experts.gate(inner_NF, *rows.bias(biases)), second, rows.ends_L)
            if biases:
                result_ND = experts.add_bias(result_ND, biases[1], rows.expert_N)
            call.results = rows.back(result_ND)
        ctx.save_for_backward(rows_ND, inner_NF, weight_TK, *local)
        ctx.call, ctx.sums, ctx.parameters = call, sums, parameters
        return rows_ND.new_empty(()).expand(rows.routes.num_arrivals, rows_ND.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_ND, inner_NF, weight_TK, first, second, *biases = ctx.saved_tensors
        call: _Call = ctx.call
        experts, rows = call.experts, call.rows
        assert rows is not None, "forward has found them"
        _, _, _, wants_tokens, wants_weight, *wants = wanted(ctx)
        routes, ends_L = rows.routes, rows.ends_L
        with torch.autocast(rows_ND.device.type, enabled=False):
            weights_arriving = routes.there(weight_TK.flatten().index_select(0, routes.order_P))
            if call.gradients is not None:  # else a schedule that splits the backward has had them arrive before
                call.gradients()
                call.gradients = None
            grad_ND = rows.by_expert(grads[0])
            of_gated_NI = experts.product(grad_ND, second, ends_L, back=True)
            weight_N1 = rows.by_expert(weights_arriving())[:, None]
            weighted_NI, grad_weight_N, of_inner_NF = experts.through_gate(
                inner_NF, of_gated_NI, weight_N1, *rows.bias(biases)
            )
            if wants_tokens:
                of_tokens_arriving = rows.back(experts.product(of_inner_NF, first, ends_L, back=True))
            is_of_NL = rows.is_of_expert_NL(first.dtype) if biases else None
            if wants_weight:
                if biases:
                    grad_weight_N += ((grad_ND @ biases[1].t()) * is_of_NL).sum(-1, dtype=weight_TK.dtype)
                of_weights_arriving = rows.back(grad_weight_N)
            found: list[Tensor | None] = []
            for i, factors in enumerate(((rows_ND, of_inner_NF), (weighted_NI, grad_ND))):
                is_added = wants[i] and ctx.sums and experts.add_weight_gradient(*factors, rows.count_L, ctx.sums[i])
                found.append(experts.weight_gradient(*factors, ends_L) if wants[i] and not is_added else None)
            if is_of_NL is not None:
                found.append(is_of_NL.t() @ of_inner_NF if wants[2] else None)
                found.append((is_of_NL * weight_N1).to(first.dtype).t() @ grad_ND if wants[3] else None)
            grad_TD, grad_weight_TK = None, None
            if wants_tokens:
                grad_TD = embedding_bag(routes.place_P.view_as(weight_TK), of_tokens_arriving(), mode="sum")
            if wants_weight:
                grad_weight_TK = of_weights_arriving().index_select(0, routes.place_P).view_as(weight_TK)
        of_parameters = [
            None if grad is None else of_local(grad, param) for grad, param in zip(found, ctx.parameters, strict=True)
        ]
        return None, None, None, grad_TD, grad_weight_TK, *of_parameters


class _Sum(torch.autograd.Function):
    """Results that have come back, weighted and added up by token. The gradient of a weight is made where its expert
    is, so none is returned here."""

    @staticmethod
    def forward(ctx: Any, call: _Call, sent_ND: Tensor, dtype: torch.dtype) -> Tensor:
        def sum_up() -> Tensor:
            assert call.results is not None and call.rows is not None, "they were sent"
            return call.experts.sum_of_pairs(call.results(), call.rows.routes.place_P, call.weight_TK, dtype)

        result_TD = save_or_replay(sum_up)
        call.results = None
        ctx.call, ctx.sent_dtype = call, sent_ND.dtype
        return result_TD.clone() if is_keeping() else result_TD  # families add to it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        routes = ctx.call.rows.routes
        ctx.call.gradients = routes.there(grads[0].to(ctx.sent_dtype).index_select(0, routes.token_P))
        return None, ctx.call.gradients.rows, None


def _biased(rows_NF: Tensor, bias_LF: Tensor, expert_N: Tensor) -> Tensor:
    return rows_NF + bias_LF.index_select(0, expert_N)


def _gate(family: Any, inner_NF: Tensor, *bias: Tensor) -> Tensor:
    gated_NI: Tensor = family._apply_gate(_biased(inner_NF, *bias) if bias else inner_NF)
    return gated_NI


def _through_gate(
    family: Any, inner_NF: Tensor, of_gated_NI: Tensor, weight_N1: Tensor, *bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if bias:
        inner_NF = _biased(inner_NF, *bias)
    gated_NI, back = torch.func.vjp(family._apply_gate, inner_NF)  # type: ignore[misc]  # two, without `has_aux`
    grad_weight_N = (of_gated_NI * gated_NI).sum(-1, dtype=weight_N1.dtype)
    weighted_NI = torch.mul(gated_NI, weight_N1, out=torch.empty_like(gated_NI))
    (of_inner_NF,) = back(of_gated_NI.mul_(weight_N1))
    return weighted_NI, grad_weight_N, of_inner_NF


def _sum_of_pairs(result_PD: Tensor, place_P: Tensor, weight_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, D]: results of sorted pairs, weighted and added up by token; rounded as the library does it."""
    result_TKD = result_PD.index_select(0, place_P).view(*weight_TK.shape, -1)
    return (result_TKD * weight_TK.unsqueeze(-1)).sum(1).to(dtype)


def _glue(family: Any, biased: bool) -> list[FusibleRegion]:
    """The gate, its backward, the sum and the bias above, for experts of this family."""
    kind, width, generator = type(family).__name__, 16, torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def bias(rows: int) -> tuple[Tensor, ...]:
        return numbers(3, width), torch.arange(rows) % 3

    def gate_sample(rows: int) -> tuple[Any, ...]:
        return family, numbers(rows, width), *(bias(rows) if biased else ())

    def through_sample(rows: int) -> tuple[Any, ...]:
        inner_NF = numbers(rows, width)
        of_gated_NI = numbers(*family._apply_gate(inner_NF).shape)
        return family, inner_NF, of_gated_NI, numbers(rows, 1).abs(), *(bias(rows) if biased else ())

    def sum_sample(rows: int) -> tuple[Any, ...]:
        place_P = torch.randperm(2 * rows, generator=generator)
        return numbers(2 * rows, width), place_P, numbers(rows, 2).abs(), torch.float32

    always = [
        FusibleRegion(f"gate {kind}", _gate, None, gate_sample),
        FusibleRegion(f"backward of gate {kind}", _through_gate, None, through_sample),
        FusibleRegion("sum over experts", _sum_of_pairs, None, sum_sample),
    ]
    of_bias = FusibleRegion("bias of experts", _biased, None, lambda rows: (numbers(rows, width), *bias(rows)))
    return [*always, of_bias] if biased else always


def _is_standard(experts: nn.Module) -> bool:
    """Whether the family's own loop over experts gives the same results and gradients, measured on a few numbers."""
    loop = getattr(type(experts).forward, "__wrapped__", None)  # under the library's choice of implementations
    if loop is None or not experts.has_gate or experts.has_post_expert_norm:
        return False
    tiny = _shrunk(experts)
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(_PROBE["tokens"], _PROBE["hidden"], generator=generator)
    index_TK = torch.stack([torch.randperm(_PROBE["experts"], generator=generator)[:2] for _ in hidden_TD])
    weight_TK = torch.rand(index_TK.shape, generator=generator)
    given = [hidden_TD, weight_TK, *parameters_of(tiny)]
    arithmetic = GatedExperts(tiny, _PROBE["experts"], None)
    try:
        want = _with_gradients(lambda: loop(tiny, hidden_TD, index_TK, weight_TK), given)
        got = _with_gradients(lambda: arithmetic(hidden_TD, index_TK, weight_TK, given[2:]), given)
    except Exception:  # a family's code may do anything with sizes that are not its own
        return False
    return all(bool((a - b).abs().max() <= _TOLERANCE * a.abs().max()) for a, b in zip(want, got, strict=True))


def _shrunk(experts: nn.Module) -> nn.Module:
    """The same code on a few small experts; the original is not touched."""
    tiny = copy.copy(experts)
    inner, hidden = _PROBE["inner"], _PROBE["hidden"]
    sizes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}  # [out, in]
    generator = torch.Generator().manual_seed(1)
    tiny._parameters = {}
    for name in experts._parameters:
        size = sizes[name.removesuffix("_bias")]
        shape = size[:1] if name in _BIASES else size[::-1] if experts.is_transposed else size
        values = torch.randn(_PROBE["experts"], *shape, generator=generator)
        tiny._parameters[name] = nn.Parameter(values, requires_grad=True)
    tiny.num_experts = _PROBE["experts"]  # type: ignore[assignment]
    return tiny


def _with_gradients(compute: Callable[[], Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    with torch.enable_grad():
        for tensor in given:
            tensor.requires_grad_()
        result = compute()
        return [result.detach(), *torch.autograd.grad(result.square().sum(), given)]
