"""Distributed gated MLP experts: sort tokens once, all-to-all, grouped GEMMs, all-to-all, weighted sum.

Supports experts that compute, as the grouped path of transformers does::

    expert_e(x) = down_e gate(gate_up_e x + bias) + bias        `gate` is defined by the family

`GatedExperts.of` measures whether a module does. GEMMs, sums, dtypes and rounding are those of transformers.

One call is two autograd functions. Communication overlaps with the code between them::

    forward    Multiply: sort, all-to-all, GEMM, gate, GEMM, start all-to-all | beside() | Sum: wait, weighted sum
    backward   Sum: start all-to-all of gradients | backward of beside() | Multiply: wait, GEMMs, all-to-all

Saved for backward are the rows sorted by expert and the result of the first GEMM. The gate is recomputed. The gradient
of a routing weight w with y = w down h is computed where the expert is: <dy, down h> = <down^T dy, h>. So results are
neither saved nor sent for it. Token gradients return while weight gradients are computed.

Shapes: T tokens, K experts per token, P = T x K (token, expert) pairs, N received rows, L local experts, D hidden size,
F columns of the first GEMM (2 I if gate and up are one matrix), I columns after the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.distributed.expert_parallel import low_rank
from automodel_cli.distributed.expert_parallel.grouped_mlp_autograd import Call, Multiply, Sum
from automodel_cli.distributed.expert_parallel.grouped_mlp_check import equals_loop
from automodel_cli.distributed.expert_parallel.grouped_mlp_gemms import BIASES, ExpertGemms
from automodel_cli.distributed.float8.quantization import Arithmetic
from automodel_cli.distributed.fusion.compiled_regions import RegionCompiler
from automodel_cli.distributed.qat.settings import FakeQuantization
from automodel_cli.distributed.wgrad_fusion import linear as wgrad_fusion_linear
from automodel_cli.distributed.wgrad_fusion.linear import MainGrad

_DTYPES = {torch.bfloat16, torch.float16, torch.float32}  # Dtypes of torch's grouped GEMM.


class GatedExperts(ExpertGemms):
    """Computes the experts of one module for the tokens of all ranks."""

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
        known = names in ({*low_rank.WEIGHTS}, {*low_rank.WEIGHTS, *BIASES}) and dtypes <= _DTYPES
        if not known or not equals_loop(experts, lambda tiny, num_experts: cls(tiny, num_experts, None)):
            return None
        return cls(experts, num_local, group, fuser, fp8)

    def __call__(
        self,
        hidden_TD: Tensor,
        index_TK: Tensor,
        weight_TK: Tensor,
        parameters: Sequence[Tensor],
        main_grads: Sequence[MainGrad] = (),
        overlapped: Callable[[], None] | None = None,
        scale: float = 0.0,
        qat: FakeQuantization | None = None,
    ) -> Tensor:
        """Compute the experts of all tokens, `[T, D]`. Collective over the group, also in backward.

        Args:
            parameters: of the local experts: first weight, second weight, both biases if the family has them, and the
                adapters if there are any (`low_rank.ADAPTERS`).
            main_grads: main gradients of the two weights. Weight gradients may accumulate into them directly.
            overlapped: called while results are in transit.
            scale: of the adapters.
            qat: fake quantization of both weights.
        """
        call = Call(self, weight_TK.detach(), scale, qat if qat is not None and qat.active else None)
        with torch.autocast(hidden_TD.device.type, enabled=False):
            sent_ND = Multiply.apply(call, index_TK, main_grads, hidden_TD, weight_TK, *parameters)
        if overlapped is not None:
            overlapped()
        with torch.autocast(hidden_TD.device.type, enabled=False):
            result: Tensor = Sum.apply(call, sent_ND, hidden_TD.dtype)
        return result


def main_grads_of(experts: nn.Module) -> list[MainGrad]:
    """Return the main gradients of both weights, or an empty list if the strategy has set none."""
    known = wgrad_fusion_linear.main_grad_of(experts)
    return [known[name] for name in low_rank.WEIGHTS] if all(name in known for name in low_rank.WEIGHTS) else []
