"""Which layers get adapters: `all-linear` as names that mean the same to `peft`, and entries that name no layer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from automodel_cli.config.name_patterns import NameList, check_entries, endings, ends_in
from automodel_cli.models import transformers_compat

if TYPE_CHECKING:
    import peft
    from transformers import PreTrainedModel

# Before transformers 5, experts were linear layers of these names. peft reads them as the fused parameters of today.
_EXPERT_NAMES = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


def all_linear(model: PreTrainedModel) -> list[str]:
    """Endings of names that `peft` matches with the model's linear layers and with no other module.

    Excluded are the head, layers that compute more than a matmul, layers whose weight their parent reads itself or
    another layer shares, and in families with fused experts the names that peft reads as the experts.
    """
    modules = dict(model.named_modules())
    chosen = {name for name, module in modules.items() if is_linear(module)}
    head = model.get_output_embeddings()
    chosen -= {name for name, module in modules.items() if module is head}
    chosen -= bypassed(model) | shared(model)
    if _has_fused_experts(model):
        chosen = {name for name in chosen if name.rpartition(".")[2] not in _EXPERT_NAMES}
    return sorted({_shortest_ending(name, modules.keys() - chosen) for name in chosen})


def check_targets(model: nn.Module, targets: list[str], only: Collection[str] | None = None) -> None:
    """Raise ConfigError for an entry that is not the ending of any module name. `only`: the names, None for all."""
    modules = {name: module for name, module in model.named_modules() if name and (only is None or name in only)}
    names, linear = modules.keys(), endings(name for name, module in modules.items() if is_linear(module))
    listed = NameList("model.lora.target_modules", targets, "no layer's name ends in", empty="all-linear")
    check_entries(listed, lambda entry: any(ends_in(name, entry) for name in names), linear)


def selected(names: Collection[str], settings: peft.LoraConfig) -> list[str]:
    """Return the names of modules that peft adapts: `target_modules`, without excluded ones and other layers."""
    from peft.tuners.tuners_utils import check_target_module_exists

    return [name for name in names if check_target_module_exists(settings, name)]


def is_linear(module: nn.Module) -> bool:
    """Return whether the layer computes exactly `x W^T + b`, or GPT-2's `x W + b`."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, Conv1D):
        return True
    if not isinstance(module, nn.Linear):
        return False
    kind: Any = type(module)
    of_a_family = kind.__module__.startswith("transformers")  # or of a model's own code
    return not of_a_family or _is_matrix_product(kind)


@cache
def _is_matrix_product(kind: Any) -> bool:
    """Measured on a small layer: a family's own class may group its outputs, or route."""
    small = nn.Linear(4, 6)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    copy = kind.__new__(kind)
    copy.__dict__.update(small.__dict__)
    try:
        found = copy(x)
    except Exception:  # it needs more than weights: no plain layer
        return False
    want = F.linear(x, small.weight, small.bias)
    return isinstance(found, torch.Tensor) and found.shape == want.shape and bool(torch.allclose(found, want))


def shared(model: PreTrainedModel) -> set[str]:
    """Names of linear layers inside the decoder whose weight another layer has too (Zamba's blocks): their adapters
    differ, so no one weight could be both layers' sum."""
    owners: dict[int, list[str]] = {}
    outer = {id(table.weight) for table in _tables(model)}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_linear(module) and id(module.weight) not in outer:
            owners.setdefault(id(module.weight), []).append(name)
    return {name for names in owners.values() if len(names) > 1 for name in names}


def _tables(model: PreTrainedModel) -> list[nn.Module]:
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    return [table for table in tables if getattr(table, "weight", None) is not None]


def bypassed(model: nn.Module, *, always: bool = False) -> set[str]:
    """Return the layers whose weight their parent reads. An adapter around them has no effect.

    These are layers that the parent's class never calls, and layers in state-space models (`A_log`), whose fused kernel
    reads weights while other implementations call the layers. `always`: only the former.
    """
    names = set()
    for name, parent in model.named_modules():
        for child, module in parent.named_children():
            if not isinstance(module, nn.Linear):
                continue
            kind: Any = type(parent)
            reads, calls = _uses(kind, child)
            if reads and (not calls or ("A_log" in parent._parameters and not always)):
                names.add(f"{name}.{child}".lstrip("."))
    return names


@cache
def _uses(kind: Any, child: str) -> tuple[bool, bool]:
    """(reads the weight of this child, calls it), by the text of the class."""
    try:
        text = inspect.getsource(kind)
    except (OSError, TypeError):
        return False, True
    word = re.escape(child)
    reads = re.search(rf"self\.{word}\.weight\b(?!\.(dtype|device|shape|size|data|ndim))", text) is not None
    return reads, re.search(rf"self\.{word}\(", text) is not None


def _has_fused_experts(model: PreTrainedModel) -> bool:
    decorated = any(hasattr(m, "num_experts") and hasattr(m, "has_gate") for m in model.modules())
    return decorated or transformers_compat.peft_renames_experts(model)


def _shortest_ending(name: str, others: Collection[str]) -> str:
    """Return the shortest suffix of `name` that distinguishes it from all `others`."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        ending = ".".join(parts[-count:])
        if not any(ends_in(other, ending) for other in others):
            return ending
    return name


def is_transposed(layer: object) -> bool:
    """Whether an adapter's base has its weight as `[inputs, outputs]`, like an embedding `[V, D]`."""
    return bool(getattr(layer, "fan_in_fan_out", False)) or is_embedding(layer)


def is_embedding(layer: object) -> bool:
    """Return whether a wrapped layer is an embedding, whose adapter adds `scale * A[:, id] @ B^T`."""
    return len(getattr(layer, "lora_embedding_A", ())) > 0
