"""The head's pass over a chunk of logits on CUDA: each direction reads the product once, and the gradient takes its
place. Operators of their own, so that a dry run sees them; the kernels are in `head_triton.py`.

They are for the plain softmax, scaled, soft-capped or at a temperature, with any shard of the vocabulary. Filters
(top-k, top-p) and the likeliest tokens need the logits in memory and take the way of `head_fused.py`. Never run on a
GPU: the first use on one compares them with the definition, and says so where they are left out.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from automodel_cli.distributed import kernel_verification

MOST_COLUMNS = 16
"""Log-probs that a token may be asked for; each is a comparison for every logit."""
_PROBE_ERROR = 1e-4  # of float32 values, where errors of order come out as 1


@torch.library.custom_op("automodel::head_statistics", mutates_args=())
def statistics(
    logits_sV: Tensor, columns_sN: Tensor, multiplier: float, cap: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """float32 log-sum-exp `[s]`, z of the columns (0 for one below 0) `[s, N]`, entropy `[s]` if asked, else `[0]`, of
    z = multiplier x, or with a cap above 0 multiplier cap tanh(x / cap), where x are these logits."""
    from automodel_cli.models.lm_head import triton_kernels

    return triton_kernels.statistics(logits_sV, columns_sN, multiplier, cap, entropy)


@statistics.register_fake
def _(
    logits_sV: Tensor, columns_sN: Tensor, multiplier: float, cap: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    lse_s = logits_sV.new_empty(len(logits_sV), dtype=torch.float32)
    return (
        lse_s,
        logits_sV.new_empty(columns_sN.shape, dtype=torch.float32),
        lse_s.new_empty(len(lse_s) if entropy else 0),
    )


@torch.library.custom_op("automodel::head_gradient_", mutates_args=("logits_sV",))
def gradient_(
    logits_sV: Tensor,
    columns_sN: Tensor,
    grad_sN: Tensor,
    lse_s: Tensor,
    total_s: Tensor,
    entropy_s: Tensor,
    grad_entropy_s: Tensor,
    multiplier: float,
    cap: float,
) -> None:
    """Put the gradient of the logits in their place: of log-probs of the columns `grad_sN`, which add up to `total_s`
    with those of other ranks, and of entropies (both `[0]` for none)."""
    from automodel_cli.models.lm_head import triton_kernels

    triton_kernels.gradient_(
        logits_sV, columns_sN, grad_sN, lse_s, total_s, entropy_s, grad_entropy_s, multiplier, cap
    )  # fmt: skip


@gradient_.register_fake
def _(*args: Tensor | float) -> None:
    return None


@functools.cache
def has_head_kernels(device_type: str) -> bool:
    """Whether these kernels compute the head on devices of this type; once on CUDA with a sentence if not."""
    return kernel_verification.trusted(
        device_type,
        "the head runs without its Triton kernels",
        lambda device: kernel_verification.beyond(head_kernel_error(device), _PROBE_ERROR),
    )


@torch.no_grad()
def head_kernel_error(device: torch.device) -> float:
    """Largest error of both kernels against autograd through the definition, in float32 on numbers of order 1."""
    generator = torch.Generator().manual_seed(0)
    x_sV, grad_sN, grad_s = (
        torch.randn(shape, generator=generator).to(device) for shape in ((6, 5000), (6, 2), (6,))
    )  # fmt: skip
    columns_sN = torch.tensor([[0, 4999], [4096, -1], [7, 7], [-1, 3], [4095, 1], [2, 8]], device=device)
    grad_sN = grad_sN.where(columns_sN >= 0, 0)
    found = []
    for multiplier, cap in ((0.7, 0.0), (1.3, 2.0)):
        with torch.enable_grad():
            leaf_sV = x_sV.clone().requires_grad_()
            z_sV = multiplier * (cap * (leaf_sV / cap).tanh() if cap else leaf_sV)
            logp_sV = z_sV.log_softmax(-1)
            entropy_s = -(logp_sV.exp() * logp_sV).sum(-1)
            picked_sN = logp_sV.gather(-1, columns_sN.clamp(min=0))
            want = torch.autograd.grad((picked_sN * grad_sN).sum() + (entropy_s * grad_s).sum(), leaf_sV)[0]
        lse_s, z_sN, h_s = statistics(x_sV, columns_sN, multiplier, cap, True)
        got = x_sV.clone()
        gradient_(got, columns_sN, grad_sN, lse_s, grad_sN.sum(1), h_s, grad_s, multiplier, cap)
        off_sN = (z_sN - lse_s[:, None] - picked_sN).where(columns_sN >= 0, 0)
        found += [off_sN.abs().max(), (h_s - entropy_s).abs().max(), (got - want).abs().max()]
    return float(torch.stack(found).max())
