"""The one place in `models` that touches names of torch which are not its public API. Works for 2.11 to 2.14.

Relies on the operator behind `flex_attention`, whose arguments the public function fills in, but which it does not call
on a CPU with gradients. Also on `torch._dynamo.config.recompile_limit` and the compiler's stance. Tested by
tests/unit/models/attention/test_flex.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch._dynamo import eval_frame
from torch._higher_order_ops.flex_attention import flex_attention as _operator
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from automodel_cli.distributed.torch_compat import counted_backend

T = TypeVar("T")
_MOST_GRAPHS = 64
_CPU_OPTIONS = {
    "BACKEND": "AUTO",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}
"""Arguments that the public function passes and the operator's dense CPU definition does not read."""


def flex(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor] | None, mask: BlockMask, scale: float
) -> tuple[Tensor, Tensor]:
    """`flex_attention` of `(1, H, N, D)`, `(1, K, M, D)` and `(1, K, M, V)`: output and log-sum-exp `(1, H, N)`.

    On a CPU the operator itself: densely by the mask's function, with gradients.
    """
    if query.device.type == "cpu":
        out, lse, _ = _operator(query, key, value, score_mod or _as_it_is, mask.as_tuple(), scale, _CPU_OPTIONS)
        return out, lse * math.log(2)
    if not torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            "flex_attention would run without its compiler, tokens x tokens: a dispatch mode is on, or torch.compile "
            "is switched off (TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE)"
        )
    out, aux = flex_attention(
        query, key, value, score_mod, mask, scale, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    assert aux.lse is not None, "it was requested"
    return out, aux.lse


def _as_it_is(score: Tensor, *_: Tensor) -> Tensor:
    return score


def compiled(function: Callable[..., T], backend: str, began: Callable[[], None]) -> Callable[..., T]:
    """Compile `function` as one graph. Sizes that change become symbolic. `began()` is called for every graph. It is
    compiled under an eager stance too, which the sampler uses for layers.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    run = torch.compile(function, backend=counted_backend(backend, began), fullgraph=True)

    def always(*args: object) -> T:
        if eval_frame._stance.stance == "default":
            return run(*args)
        with torch.compiler.set_stance("default"):
            return run(*args)

    return always
