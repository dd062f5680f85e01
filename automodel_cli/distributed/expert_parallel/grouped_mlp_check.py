"""Measure whether an experts module computes what `GatedExperts` computes, on a small copy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from automodel_cli.distributed.expert_parallel import low_rank
from automodel_cli.distributed.expert_parallel.grouped_mlp_gemms import BIASES, parameters_of
from automodel_cli.distributed.typed_torch import set_attributes

# float32, relative to the largest value. Another activation or memory layout differs by 1e-1 or more.
_TOLERANCE = 1e-5
_PROBE = {"experts": 3, "hidden": 8, "inner": 16, "tokens": 12}


def equals_loop(experts: nn.Module, computation_of: Callable[[nn.Module, int], Callable[..., Tensor]]) -> bool:
    """Return whether results and gradients equal those of the family's own loop over experts, on a small copy.

    `computation_of(experts, num_experts)` takes hidden states, indices, weights and parameters.
    """
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
    arithmetic = computation_of(tiny, _PROBE["experts"])
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
        shape = size[:1] if name in BIASES else size[::-1] if experts.is_transposed else size
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
