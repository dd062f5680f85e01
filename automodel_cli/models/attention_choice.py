"""Which kernel computes packed attention: chosen once in a process, by what the GPU and the installed packages can.

All of them on CUDA are one operator, aten's variable-length flash attention, which torch lets a package implement:
FlashAttention-2 comes with torch, 3 and 4 are packages of their own. What a newer one computes on this GPU is compared
with the dense definition before it is trusted. Never run on a GPU.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch.nn import attention as torch_attention

from automodel_cli.config.errors import ConfigError
from automodel_cli.models import attention_kernels as kernels

_PROBE_ERROR = 2e-2  # of bfloat16 outputs and gradients, relative to float32


@dataclass(frozen=True)
class _Package:
    """`label` in torch's registry; capabilities by their first number; the module that brings the kernels."""

    label: str
    capabilities: tuple[int, ...]
    module: str


_PACKAGES = {
    "fa3": _Package("FA3", (9,), "flash_attn_interface"),
    "fa4": _Package("FA4", (9, 10), "flash_attn.cute"),
}


@dataclass(frozen=True)
class Choice:
    """`kernel` is "flash", "fa3", "fa4" or "dense"; `forced` where the config named it."""

    kernel: str = "flash"
    reason: str = ""
    forced: bool = False

    def __str__(self) -> str:
        return f"{self.kernel} ({self.reason})"


_chosen = Choice()


def chosen() -> Choice:
    """What packed attention runs on in this process."""
    return _chosen


def choose(wanted: str, device: torch.device) -> Choice:
    """Settle `model.attention_kernel` for this process, before the first forward.

    "auto" takes a newer kernel than torch's own where the GPU, torch and an installed package have one that agrees with
    the definition. Raises ConfigError for a kernel by name that cannot run here.
    """
    global _chosen
    if _chosen.kernel in _PACKAGES:
        torch_attention.restore_flash_attention_impl()
    if wanted == "auto":
        _chosen = _newest(device)
    elif wanted in _PACKAGES:
        reason = _activate(wanted, device)
        if reason:
            raise ConfigError(
                f"attention_kernel={wanted} cannot run here: {reason}",
                keys=("model.attention_kernel",),
                fix="model.attention_kernel=auto",
            )
        _chosen = Choice(wanted, "as configured", forced=True)
    else:
        _chosen = Choice(wanted, "as configured", forced=True)
    return _chosen


def _newest(device: torch.device) -> Choice:
    if device.type != "cuda":
        return Choice("flash", f"torch's own for the {device.type.upper()}")
    reasons = []
    for name in _PACKAGES:
        reason = _activate(name, device)
        if not reason:
            return Choice(name, "the GPU and an installed package have it, and it agrees with the definition")
        reasons.append(f"{name}: {reason}")
    return Choice("flash", f"torch's own; {'; '.join(reasons)}")


def _activate(name: str, device: torch.device) -> str:
    """Let the package implement aten's operator. Returns why not, and then nothing has changed."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    package = _PACKAGES[name]
    if reason := why_not(package.label, package.capabilities, package.module, capability):
        return reason
    try:
        torch_attention.activate_flash_attention_impl(package.label)
    except (ImportError, OSError, RuntimeError) as failure:  # the package's own, while it loads
        return f"{type(failure).__name__}: {failure}".splitlines()[0]
    try:
        error = disagreement(device)
    except (AssertionError, RuntimeError, TypeError, ValueError) as failure:
        torch_attention.restore_flash_attention_impl()
        return f"{type(failure).__name__}: {failure}".splitlines()[0]
    if error > _PROBE_ERROR:
        torch_attention.restore_flash_attention_impl()
        return f"it differs from the definition by {error:.1e}"
    return ""


def why_not(label: str, capabilities: tuple[int, ...], module: str, capability: tuple[int, int] | None) -> str:
    """What keeps a package's kernels from a GPU of this compute capability (None: no GPU); empty where nothing does."""
    if capability is None:
        return "there is no CUDA device"
    if capability[0] not in capabilities:
        wanted = " or ".join(f"{major}.x" for major in capabilities)
        return f"it is for GPUs of compute capability {wanted}, this one has {capability[0]}.{capability[1]}"
    known: list[str] = getattr(torch_attention, "list_flash_attention_impls", list)()  # not in all versions of torch
    if label not in known:
        return f"torch {torch.__version__} does not know {label}"
    if not _is_installed(module):
        return f"the package of {module} is not installed"
    return ""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def disagreement(device: torch.device) -> float:
    """Largest relative error of the active kernel, forward and backward, against the definition in float32: two
    documents, grouped heads, with and without a window."""
    return max(_disagreement(device, window) for window in (None, 16))


def _disagreement(device: torch.device, window: int | None) -> float:
    lengths, scale = (48, 80), 0.125
    generator = torch.Generator().manual_seed(0)
    shapes = ((128, 4, 64), (128, 2, 64), (128, 2, 64))
    flat = [torch.randn(shape, generator=generator).to(device, torch.bfloat16).requires_grad_() for shape in shapes]
    bounds = torch.tensor([0, 48, 128], dtype=torch.int32, device=device)
    plan = kernels.VarlenPlan(bounds, bounds, max(lengths), max(lengths), None)
    query, key, value = flat
    got = kernels.varlen_cuda(query, key, value, plan, None, scale, window)
    rows = [x.detach().float().requires_grad_() for x in flat]
    parts = []
    for piece in zip(*(x.split(lengths) for x in rows), strict=True):
        q, k, v = (kernels.per_query_head(x.transpose(0, 1)[None], 4) for x in piece)
        mask = kernels.visible_mask(q.shape[2], (q.shape[2],), (0,), window, q.dtype, device)
        parts.append(kernels.dense(q, k, v, mask, scale=scale)[0].transpose(0, 1))
    want = torch.cat(parts)
    grads = torch.autograd.grad(got.float().square().sum(), flat)
    wanted = torch.autograd.grad(want.square().sum(), rows)
    pairs = [(got.detach(), want.detach()), *zip(grads, wanted, strict=True)]
    return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)
