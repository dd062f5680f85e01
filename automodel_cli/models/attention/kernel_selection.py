"""Selection of the attention kernel, once per process, from the GPU and the installed packages.

All CUDA flash kernels implement one operator, aten's variable-length flash attention. torch contains FlashAttention-2.
Packages register FlashAttention-3 and -4 as other implementations. cuDNN has an operator of its own (`cudnn.py`). A
newer kernel is used only if its outputs and gradients on this GPU agree with the dense definition.

Order of preference on CUDA: FlashAttention-3 or -4, cuDNN, FlashAttention-2, then FlexAttention, then dense with a
warning. On a CPU: flash, then dense. Never run on a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import attention as torch_attention

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.attention import cudnn
from automodel_cli.models.attention import flex as attention_flex
from automodel_cli.models.attention import kernels as kernels
from automodel_cli.models.attention.kernel_probes import cudnn_error, kernel_error

if TYPE_CHECKING:
    pass

_logger = logging.getLogger(__name__)

Way = Literal["flash", "flex", "dense"]
_PROBE_ERROR = 2e-2  # relative error of bf16 outputs and gradients against fp32
_LATENT_WIDTHS = (192, 128)  # head widths of keys and values in DeepSeek models
_KERNEL_ERRORS = (AssertionError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class _Package:
    """A package with a flash kernel.

    label: name in torch's registry.
    capabilities: supported major compute capabilities.
    module: importable module that contains the kernel.
    """

    label: str
    capabilities: tuple[int, ...]
    module: str


_PACKAGES = {
    "fa3": _Package("FA3", (9,), "flash_attn_interface"),
    "fa4": _Package("FA4", (9, 10), "flash_attn.cute"),
}


@dataclass(frozen=True)
class KernelChoice:
    """The selected kernel.

    kernel: "flash", "fa3", "fa4", "cudnn", "flex" or "dense".
    reason: shown in the startup summary.
    forced: the config names the kernel, so there is no fallback.
    """

    kernel: str = "flash"
    reason: str = ""
    forced: bool = False
    pads: bool = True
    """Values narrower than keys (latent attention) must be padded."""
    device_type: str = "cpu"
    """Device type of the run. GPU runs probe small copies of the model on the CPU, with CPU kernels."""

    def __str__(self) -> str:
        return f"{self.kernel} ({self.reason})"


_CUDNN_REST = "; layers with windows or sinks, other keys than queries, or heads above 128: FlashAttention-2"
_chosen = KernelChoice()


def chosen_kernel() -> KernelChoice:
    """Return the kernel of packed attention in this process."""
    return _chosen


def choose_kernel(requested: str, device: torch.device) -> KernelChoice:
    """Select the kernel for `model.attention_kernel`. Call it before the first forward.

    `auto` selects a newer kernel than FlashAttention-2 if the GPU, torch and an installed package or cuDNN support it
    and it agrees with the definition. Raises ConfigError if a named kernel is not available.
    """
    global _chosen
    if _chosen.kernel in _PACKAGES:
        torch_attention.restore_flash_attention_impl()
    choice = _select_auto(device) if requested == "auto" else _select_named(requested, device)
    _chosen = replace(choice, device_type=device.type)
    return _chosen


def _select_named(requested: str, device: torch.device) -> KernelChoice:
    reason, pads = "", True
    if requested in _PACKAGES:
        reason, pads = _activate(requested, device)
    elif requested == "cudnn":
        reason = _why_not_cudnn(device)
    elif requested == "flex" and device.type != "cpu":
        reason = attention_flex.why_unavailable(device)
    if reason:
        raise ConfigError(
            f"attention_kernel={requested} is not supported because {reason}",
            code="kernel_unavailable",
            keys=("model.attention_kernel",),
            fix="model.attention_kernel=auto",
        )
    note = ", dense definition on a CPU" if requested == "flex" and device.type == "cpu" else _widths_note(pads)
    note = _CUDNN_REST if requested == "cudnn" else note
    return KernelChoice(requested, f"as configured{note}", forced=True, pads=pads)


def _select_auto(device: torch.device) -> KernelChoice:
    if device.type != "cuda":
        return KernelChoice("flash", f"torch's {device.type.upper()} kernel")
    reasons = []
    for name in _PACKAGES:
        reason, pads = _activate(name, device)
        if not reason:
            agrees = "supported by the GPU and an installed package; agrees with the definition"
            return KernelChoice(name, agrees + _widths_note(pads), pads=pads)
        reasons.append(f"{name}: {reason}")
    reason = _why_not_cudnn(device)
    if not reason:
        return KernelChoice("cudnn", f"cuDNN's, agrees with the definition{_CUDNN_REST}; {'; '.join(reasons)}")
    reasons.append(f"cudnn: {reason}")
    return KernelChoice("flash", f"torch's FlashAttention-2; {'; '.join(reasons)}")


def _why_not_cudnn(device: torch.device) -> str:
    """Return the reason why cuDNN's attention is not available or not trusted, or an empty string."""
    if reason := cudnn.why_unavailable(_capability(device)):
        return reason
    try:
        error = cudnn_error(device)
    except _KERNEL_ERRORS as failure:
        return _first_line(failure)
    return f"it differs from the definition by {error:.1e}" if error > _PROBE_ERROR else ""


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _widths_note(pads: bool) -> str:
    return "" if pads else ", values narrower than keys included"


def way(query: Tensor, value: Tensor, softcap: float | None) -> tuple[Way, str]:
    """Return how packed attention computes these tensors `[B, heads, T, width]`.

    The second value is the reason for an automatic fallback to dense, otherwise empty. Raises ConfigError if a kernel
    selected by name does not support the tensors.
    """
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
    """Register the package's kernel as the implementation of aten's operator.

    Returns the reason why it is not available (nothing is changed then), and whether values narrower than keys must be
    padded.
    """
    capability, package = _capability(device), _PACKAGES[name]
    if reason := why_kernel_unsupported(package.label, package.capabilities, package.module, capability):
        return reason, True
    try:
        torch_attention.activate_flash_attention_impl(package.label)
    except (ImportError, OSError, RuntimeError) as failure:  # raised while the package loads
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
    """Return whether the active kernel needs values as wide as keys.

    True if it rejects the widths of latent attention or computes wrong values for them.
    """
    try:
        return not kernel_error(device, _LATENT_WIDTHS) <= _PROBE_ERROR
    except _KERNEL_ERRORS:
        return True


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}".splitlines()[0]


def why_kernel_unsupported(
    label: str, capabilities: tuple[int, ...], module: str, capability: tuple[int, int] | None
) -> str:
    """Return the reason why the kernels of a package do not run on a GPU, or an empty string.

    `capability` is the compute capability, None without a GPU.
    """
    if capability is None:
        return "no CUDA device is available"
    if capability[0] not in capabilities:
        requested = " or ".join(f"{major}.x" for major in capabilities)
        return f"it requires compute capability {requested}, and the GPU has {capability[0]}.{capability[1]}"
    known: list[str] = getattr(
        torch_attention, "list_flash_attention_impls", list
    )()  # missing in older versions of torch
    if label not in known:
        return f"torch {torch.__version__} does not support {label}"
    if not _is_installed(module):
        return f"the package that contains {module} is not installed"
    return ""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
