"""Custom operators for one chunk of logits on CUDA: statistics, and the gradient in place.

Each operator reads the logits once. They are custom operators so that a dry run can trace them. The Triton kernels are
in `triton_kernels.py`.

Supported: plain softmax with scale, soft cap or temperature, and any shard of the vocabulary. Filters (top-k, top-p)
and top-k outputs need the logits in memory and use `fused_linear_logprobs.py`. Never run on a GPU. The first use on a
GPU compares them with the definition and logs a warning if they are not used.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from automodel_cli.distributed import kernel_verification

MOST_COLUMNS = 16
"""Maximum log-probs per token. Each costs one comparison per logit."""
_PROBE_ERROR = 1e-4  # fp32. Wrong kernels have errors of order 1.


@torch.library.custom_op("automodel::head_statistics", mutates_args=())
def statistics(
    logits_sV: Tensor, columns_sN: Tensor, multiplier: float, cap: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return fp32 statistics of z = multiplier * x, or z = multiplier * cap * tanh(x / cap) if cap > 0, for logits x.

    Returns:
        log-sum-exp `[s]`; z of the columns `[s, N]`, 0 for a negative column; entropy `[s]`, or `[0]` if not requested.
    """
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
    """Replace the logits by their gradient.

    Args:
        grad_sN: gradients of the log-probs of the columns.
        total_s: sum of these gradients over the columns of all ranks, minus the gradient of the log-sum-exp.
        entropy_s, grad_entropy_s: entropies and their gradients, `[0]` for none.
    """
    from automodel_cli.models.lm_head import triton_kernels

    triton_kernels.gradient_(
        logits_sV, columns_sN, grad_sN, lse_s, total_s, entropy_s, grad_entropy_s, multiplier, cap
    )  # fmt: skip


@gradient_.register_fake
def _(*args: Tensor | float) -> None:
    return None


@functools.cache
def has_head_kernels(device_type: str) -> bool:
    """Return whether these kernels are used on this device type. Logs one warning on CUDA if not."""
    return kernel_verification.trusted(
        device_type,
        "LM head",
        lambda device: kernel_verification.beyond(head_kernel_error(device), _PROBE_ERROR),
    )


@torch.no_grad()
def head_kernel_error(device: torch.device) -> float:
    """Return the largest error of both kernels against autograd in fp32, for values of order 1."""
    generator = torch.Generator().manual_seed(0)
    x_sV, grad_sN, grad_s, grad_lse_s = (
        torch.randn(shape, generator=generator).to(device) for shape in ((6, 5000), (6, 2), (6,), (6,))
    )  # fmt: skip
    # First and last column, both sides of the block boundary at 4096, a repeated column, and -1.
    columns_sN = torch.tensor([[0, 4999], [4096, -1], [7, 7], [-1, 3], [4095, 1], [2, 8]], device=device)
    grad_sN = grad_sN.where(columns_sN >= 0, 0)
    errors = []
    for multiplier, cap in ((0.7, 0.0), (1.3, 2.0)):
        with torch.enable_grad():
            leaf_sV = x_sV.clone().requires_grad_()
            z_sV = multiplier * (cap * (leaf_sV / cap).tanh() if cap else leaf_sV)
            logp_sV = z_sV.log_softmax(-1)
            entropy_s = -(logp_sV.exp() * logp_sV).sum(-1)
            picked_sN = logp_sV.gather(-1, columns_sN.clamp(min=0))
            total = (picked_sN * grad_sN).sum() + (entropy_s * grad_s).sum() + (z_sV.logsumexp(-1) * grad_lse_s).sum()
            expected = torch.autograd.grad(total, leaf_sV)[0]
        lse_s, z_sN, h_s = statistics(x_sV, columns_sN, multiplier, cap, True)
        gradient_sV = x_sV.clone()
        total_s = grad_sN.sum(1) - grad_lse_s
        gradient_(gradient_sV, columns_sN, grad_sN, lse_s, total_s, h_s, grad_s, multiplier, cap)
        off_sN = (z_sN - lse_s[:, None] - picked_sN).where(columns_sN >= 0, 0)
        errors += [off_sN.abs().max(), (h_s - entropy_s).abs().max(), (gradient_sV - expected).abs().max()]
    return float(torch.stack(errors).max())
