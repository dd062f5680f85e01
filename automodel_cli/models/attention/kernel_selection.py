"""Which kernel computes packed attention: chosen once in a process, by what the GPU and the installed packages can.

Flash kernels on CUDA are one operator, aten's variable-length flash attention, which torch lets a package implement:
FlashAttention-2 comes with torch, 3 and 4 are packages of their own. What a newer one computes on this GPU is compared
with the dense definition before it is trusted. What no flash kernel takes is FlexAttention's on CUDA, and dense where
that cannot run either, or on a CPU: never without a word. Never run on a GPU.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import logging
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import attention as torch_attention

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.attention import flex as attention_flex
from automodel_cli.models.attention import kernels as kernels

_logger = logging.getLogger(__name__)

Way = Literal["flash", "flex", "dense"]
_PROBE_ERROR = 2e-2  # of bfloat16 outputs and gradients, relative to float32
_LATENT_WIDTHS = (192, 128)  # of keys and of values in DeepSeek's models
_KERNEL_ERRORS = (AssertionError, RuntimeError, TypeError, ValueError)


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
class KernelChoice:
    """`kernel` is "flash", "fa3", "fa4", "flex" or "dense"; `forced` where the config named it."""

    kernel: str = "flash"
    reason: str = ""
    forced: bool = False
    pads: bool = True
    """Whether values narrower than keys (latent attention) must be padded for it."""
    device_type: str = "cpu"
    """What it was chosen for. A run on GPUs has small copies of its model probed on the CPU, by the CPU's kernels."""

    def __str__(self) -> str:
        return f"{self.kernel} ({self.reason})"


_ASKED = "asked_not_computed"
_chosen = KernelChoice()


def chosen_kernel() -> KernelChoice:
    """What packed attention runs on in this process."""
    return _chosen


def choose_kernel(wanted: str, device: torch.device) -> KernelChoice:
    """Settle `model.attention_kernel` for this process, before the first forward.

    "auto" takes a newer kernel than torch's own where the GPU, torch and an installed package have one that agrees with
    the definition. Raises ConfigError for a kernel by name that cannot run here.
    """
    global _chosen
    if _chosen.kernel in _PACKAGES:
        torch_attention.restore_flash_attention_impl()
    choice = _newest(device) if wanted == "auto" else _by_name(wanted, device)
    _chosen = replace(choice, device_type=device.type)
    return _chosen


def _by_name(wanted: str, device: torch.device) -> KernelChoice:
    reason, pads = "", True
    if wanted in _PACKAGES:
        reason, pads = _activate(wanted, device)
    elif wanted == "flex" and device.type != "cpu":
        reason = attention_flex.why_unavailable(device)
    if reason:
        raise ConfigError(
            f"attention_kernel={wanted} is not supported because {reason}",
            code="kernel_unavailable",
            keys=("model.attention_kernel",),
            fix="model.attention_kernel=auto",
        )
    said = ", on a CPU by its dense definition" if wanted == "flex" and device.type == "cpu" else _said_of_widths(pads)
    return KernelChoice(wanted, f"as configured{said}", forced=True, pads=pads)


def _newest(device: torch.device) -> KernelChoice:
    if device.type != "cuda":
        return KernelChoice("flash", f"torch's own for the {device.type.upper()}")
    reasons = []
    for name in _PACKAGES:
        reason, pads = _activate(name, device)
        if not reason:
            agrees = "the GPU and an installed package have it, and it agrees with the definition"
            return KernelChoice(name, agrees + _said_of_widths(pads), pads=pads)
        reasons.append(f"{name}: {reason}")
    return KernelChoice("flash", f"torch's own; {'; '.join(reasons)}")


def _said_of_widths(pads: bool) -> str:
    return "" if pads else ", also with values narrower than keys"


def way(query: Tensor, value: Tensor, softcap: float | None) -> tuple[Way, str]:
    """How packed attention of these tensors `[B, heads, T, width]` is computed, and where it is dense without having
    been asked to, why. Raises ConfigError where a kernel was asked for by name and cannot."""
    if _chosen.kernel == "dense":
        return "dense", ""
    on_cpu = query.device.type == "cpu"
    is_probe = on_cpu and _chosen.device_type != "cpu"
    if _chosen.kernel == "flex" and not is_probe:
        _reject_forced_kernel(attention_flex.why_flex_unsupported(query, value, softcap))
        return "flex", ""
    no_flash = kernels.why_not_flash_cpu(softcap) if on_cpu else kernels.why_not_flash_cuda(query, value, softcap)
    if not no_flash:
        return "flash", ""
    if _chosen.forced and _chosen.kernel != "flex":
        _reject_forced_kernel(f"flash kernels do not support {no_flash}")
    no_flex = "it requires a GPU" if on_cpu else attention_flex.why_flex_unsupported(query, value, softcap)
    if no_flex:
        return (
            "dense",
            ""
            if is_probe
            else f"flash kernels do not support {no_flash}, and FlexAttention is not available because {no_flex}",
        )
    _log_flex(no_flash)
    return "flex", ""


def _reject_forced_kernel(reason: str) -> None:
    if reason:
        raise ConfigError(
            f"attention_kernel={_chosen.kernel} is not supported because {reason}",
            code="kernel_unavailable",
            keys=("attention_kernel",),
            fix="model.attention_kernel=auto",
        )


@functools.cache
def _log_flex(no_flash: str) -> None:
    _logger.info("attention kernel: FlexAttention, because flash kernels do not support %s", no_flash)


def _activate(name: str, device: torch.device) -> tuple[str, bool]:
    """Let the package implement aten's operator. Returns why not, and then nothing has changed; and whether values
    narrower than keys must be padded for it."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    package = _PACKAGES[name]
    if reason := why_kernel_unsupported(package.label, package.capabilities, package.module, capability):
        return reason, True
    try:
        torch_attention.activate_flash_attention_impl(package.label)
    except (ImportError, OSError, RuntimeError) as failure:  # the package's own, while it loads
        return _first_line(failure), True
    try:
        error = kernel_error(device)
    except _KERNEL_ERRORS as failure:
        torch_attention.restore_flash_attention_impl()
        return _first_line(failure), True
    if error > _PROBE_ERROR:
        torch_attention.restore_flash_attention_impl()
        return f"it differs from the definition by {error:.1e}", True
    return "", pads_widths(device)


def pads_widths(device: torch.device) -> bool:
    """Whether the active kernel needs values as wide as keys: it refuses those of latent attention, or gets them
    wrong."""
    try:
        return not kernel_error(device, _LATENT_WIDTHS) <= _PROBE_ERROR
    except _KERNEL_ERRORS:
        return True


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}".splitlines()[0]


def why_kernel_unsupported(
    label: str, capabilities: tuple[int, ...], module: str, capability: tuple[int, int] | None
) -> str:
    """What keeps a package's kernels from a GPU of this compute capability (None: no GPU); empty where nothing does."""
    if capability is None:
        return "no CUDA device is available"
    if capability[0] not in capabilities:
        wanted = " or ".join(f"{major}.x" for major in capabilities)
        return f"it requires compute capability {wanted}, and the GPU has {capability[0]}.{capability[1]}"
    known: list[str] = getattr(torch_attention, "list_flash_attention_impls", list)()  # not in all versions of torch
    if label not in known:
        return f"torch {torch.__version__} does not support {label}"
    if not _is_installed(module):
        return f"the package that contains {module} is not installed"
    return ""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def kernel_error(device: torch.device, widths: tuple[int, int] = (64, 64)) -> float:
    """Largest relative error of the active kernel, forward and backward, against the definition in float32: two
    documents, grouped heads, with and without a window. `widths`: of keys and of values, which are not padded."""
    return max(_disagreement(device, window, *widths) for window in (None, 16))


def _disagreement(device: torch.device, window: int | None, width: int, value_width: int) -> float:
    lengths, scale = (48, 80), 0.125
    generator = torch.Generator().manual_seed(0)
    shapes = ((128, 4, width), (128, 2, width), (128, 2, value_width))
    flat = [torch.randn(shape, generator=generator).to(device, torch.bfloat16).requires_grad_() for shape in shapes]
    bounds = torch.tensor([0, 48, 128], dtype=torch.int32, device=device)
    plan = kernels.VarlenPlan(bounds, bounds, max(lengths), max(lengths), None)
    query, key, value = flat
    got = kernels.varlen_cuda(query, key, value, plan, None, scale, window, pads=False)
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


def why_no_flash_on_cuda(model: Any, dtype: torch.dtype) -> str:
    """What keeps CUDA's flash kernels from a model of the library that computes in `dtype`, for a sentence; empty where
    they take all of its layers. Runs its forward on the meta device; the model is not touched."""
    reasons: list[str] = []

    def asked(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, softcap: float | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        reasons.append(kernels.why_not_flash_cuda(query, value, softcap))
        rows, heads, tokens, _width = query.shape
        return query.new_empty(rows, tokens, heads, value.shape[-1]), None

    from transformers import AttentionInterface

    asked_of = copy.deepcopy(model).to(device="meta", dtype=dtype)
    AttentionInterface.register(_ASKED, asked)
    asked_of.set_attn_implementation(_ASKED)
    ids_BT = torch.zeros(1, 8, dtype=torch.long, device="meta")
    with torch.no_grad():
        asked_of.base_model(input_ids=ids_BT, attention_mask=ids_BT.new_zeros(1, 1, 8, 8).to(dtype), use_cache=False)
    return next((reason for reason in reasons if reason), "")
