"""Tensor-parallel plans of Hugging Face models, translated to torch's parallel styles.

A plan maps module names to style strings. `*` in a name matches a layer index. Only the strings are used, not the hooks
of transformers. If a model publishes no plan (attention of GPT-OSS) or a partial one (attention of DeepSeek-V3),
entries are derived from the structure of the modules, never from the name of the family.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.expert_parallel.apply import is_experts
from automodel_cli.distributed.tensor_parallel.styles import (
    ExpertsOverTP,
    LocalParameters,
    MLAKeyProjection,
    PackedColwise,
    PackedRowwise,
    SumOutput,
    SumParameterGradients,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Plan = dict[str, ParallelStyle]
"""Module or parameter name, with `*` for a layer index -> style."""


def _gather_output() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


def _split_input() -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": _gather_output,
    "colwise_rep": _gather_output,
    "rowwise_split_input": _split_input,
    "rowwise_rep": _split_input,
    "embedding_rowwise": _split_input,
    "embedding_colwise": _gather_output,
    "sequence_parallel": SequenceParallel,
    "packed_colwise": PackedColwise,
    "packed_rowwise": PackedRowwise,
    "replicated_with_grad_allreduce": SumParameterGradients,
    "mla_kv_a_proj": MLAKeyProjection,
    "moe_tp_experts": ExpertsOverTP,
    "all_reduce": SumOutput,
    "local_params": LocalParameters,
}

# Styles without effect under tensor parallelism: replicated modules, styles of expert parallelism (of old and new
# plans), and identity experts, which need nothing because experts are sharded as a whole.
_NOT_TENSOR_PARALLEL = frozenset(
    {
        "replicate",
        "gather",
        "local_colwise",
        "local_rowwise",
        "local_packed_rowwise",
        "grouped_gemm",
        "ep_dispatch_experts",
        "ep_router",
        "megamoe_experts",
        "megamoe_router",
        "moe_identity_expert",
    }
)

PLAN_STRINGS = tuple(sorted([*_STYLES, *_NOT_TENSOR_PARALLEL]))


def translate_to_torch_parallel_style(style: str) -> ParallelStyle | None:
    """Translate a plan string of transformers to a torch style. None means replicated.

    Raises TypeError if `style` is not a string, and ValueError with the known strings if it is unknown.
    """
    if not isinstance(style, str):
        raise TypeError(f"a tensor-parallel style is named by a string, not by {style!r} ({type(style).__name__})")
    if style in _STYLES:
        return _STYLES[style]()
    if style in _NOT_TENSOR_PARALLEL:
        return None
    raise ValueError(f"unknown tensor-parallel style {style!r}; known: {', '.join(PLAN_STRINGS)}")


def get_hf_tp_shard_plan(model: PreTrainedModel) -> Plan:
    """Return the published plan of a model plus structural entries, translated to torch styles.

    Later plans override earlier ones: the class, the instance, the base model. The input embedding is sharded over the
    vocabulary unless the plan names it. Raises ConfigError for a model without a plan.
    """
    # For example {"model.layers.*.mlp.up_proj": "colwise"}.
    strings = published_plan(model)
    structural = structural_plan(model)
    outer = {name_of(model, model.get_input_embeddings()), name_of(model, model.get_output_embeddings())}
    has_layers = any(isinstance(module, nn.Linear) and name not in outer for name, module in model.named_modules())
    if has_layers and not structural and not strings.keys() - outer:
        raise ConfigError(
            f"{type(model).__name__} has no tensor-parallel plan: its class and config list no layers to shard",
            code="not_supported_by_model",
            keys=("parallelizer.tp_plan", "mesh.tp_size"),
            fix="mesh.tp_size=1, or parallelizer.tp_plan={module name: style, ...}",
        )
    strings = {**strings, **structural}  # Structural entries override published ones.
    strings = {**_head_norms(model, strings), **strings}
    if embedding := name_of(model, model.get_input_embeddings()):
        strings.setdefault(embedding, "embedding_rowwise")
    return translate_plan(_without_state_layers(model, strings))


def _head_norms(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return entries for norms of single heads behind column-parallel layers. Some published plans lack them.

    Each rank then has the gradient of its own heads.
    """
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        children = dict(module.named_children())
        for norm, layer in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
            key = wildcard(f"{name}.{layer}")
            weight = getattr(children.get(norm), "weight", None)
            is_of_head = weight is not None and weight.numel() == getattr(module, "head_dim", None)
            if is_of_head and plan.get(key, plan.get(f"{name}.{layer}")) == "colwise":
                found[wildcard(f"{name}.{norm}")] = "replicated_with_grad_allreduce"
    return found


def _without_state_layers(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Exclude state-space layers from the plan, which is for attention and MLP.

    Some families (Kimi) reuse module names in such layers. Their convolutions and gates do not support sharded heads.
    """
    names = [name for name, _ in model.named_modules()]
    states = [f"{name}." for name, module in model.named_modules() if getattr(module, "carries_state", False)]
    inside = {name for name in names if name.startswith(tuple(states))}
    shared = {wildcard(name) for name in inside} & plan.keys()
    # The wildcard covers layers of both kinds, so it is replaced by the full names of the layers that stay in the plan.
    own = {name: plan[wildcard(name)] for name in names if wildcard(name) in shared and name not in inside}
    return {name: style for name, style in plan.items() if name not in shared} | own


def published_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the style strings that transformers publishes, by full module name. Inner modules override outer ones."""
    plan: dict[str, str] = dict(getattr(type(model), "_tp_plan", None) or {})
    for prefix, module in model.named_modules():
        own = getattr(module, "_tp_plan", None) or {}  # Only model classes of transformers have it.
        is_base = getattr(module, "base_model", None) is module
        of_config = (module.config.base_model_tp_plan or {}) if is_base else {}
        plan |= {f"{prefix}.{name}".lstrip("."): style for name, style in {**own, **of_config}.items()}
    return plan


def structural_plan(model: nn.Module) -> dict[str, str]:
    """Return style strings for structures that published plans lack.

    - Attention with sinks (GPT-OSS): one sink per head, sharded with the heads.
    - Latent attention (DeepSeek): the `_b_` projections compute the heads.
    - Experts that use the experts interface.
    """
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        key = wildcard(name)
        children = dict(module.named_children())
        # colwise shards weights [out, in] over out, so that each rank has complete heads. rowwise shards over in,
        # followed by a sum.
        if "sinks" in module._parameters and {"q_proj", "k_proj", "v_proj", "o_proj"} <= children.keys():
            plan |= {key: "local_params", f"{key}.sinks": "colwise", f"{key}.o_proj": "rowwise"}
            plan |= {f"{key}.{child}": "colwise" for child in ("q_proj", "k_proj", "v_proj")}
        # Latent attention: the compressed keys [B, T, rank] are replicated. q_b and kv_b compute the heads from them.
        if {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} <= children.keys():
            plan |= {f"{key}.kv_a_proj_with_mqa": "mla_kv_a_proj", f"{key}.o_proj": "rowwise"}
            heads = [child for child in ("q_proj", "q_b_proj", "kv_b_proj") if children.get(child) is not None]
            plan |= {f"{key}.{child}": "colwise" for child in heads}
        if is_experts(module):
            plan[key] = "moe_tp_experts"
    return plan


def custom_plan(given: object, model: PreTrainedModel) -> Plan:
    """Return the `tp_plan` of the user, which replaces the published plan.

    Args:
        given: a mapping of module names to style strings or torch styles, a function of the model that returns such a
            mapping, or the import path of either.
    """
    plan = _import(given) if isinstance(given, str) else given
    if callable(plan):
        plan = plan(model)
    if not isinstance(plan, Mapping) or not plan:
        raise _bad_plan("wrong_type", f"tp_plan={plan!r} must be a mapping of module names to styles")
    try:
        return translate_plan(plan)
    except (TypeError, ValueError) as error:
        raise _bad_plan("invalid_choice", f"tp_plan: {error}") from error


def translate_plan(plan: Mapping[str, str | ParallelStyle]) -> Plan:
    """Translate strings to torch styles, and remove entries without effect."""
    styles = {
        name: style if isinstance(style, ParallelStyle) else translate_to_torch_parallel_style(style)
        for name, style in plan.items()
    }
    return {name: style for name, style in styles.items() if style is not None}


def wildcard(name: str) -> str:
    """Replace layer indices as plans do: "model.layers.3.mlp" -> "model.layers.*.mlp"."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def name_of(model: nn.Module, module: nn.Module | None) -> str | None:
    return next((name for name, child in model.named_modules() if child is module), None)


def _import(path: str) -> object:
    """Import an object from a package that is already loaded. A config must not decide which code is loaded."""
    module_name, _, attribute = path.rpartition(".")
    if not module_name or module_name.partition(".")[0] not in sys.modules:
        raise ConfigError(
            f"tp_plan={path!r} is in a package that this run has not loaded",
            code="untrusted_code",
            keys=("tp_plan",),
            fix=f"parallelizer.tp_plan._target_={path} --trust-package {path.partition('.')[0]}",
        )
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise _bad_plan("import_failed", f"tp_plan={path!r} cannot be imported: {error}") from error


def _bad_plan(code: str, message: str) -> ConfigError:
    return ConfigError(
        message, code=code, keys=("tp_plan",), fix="parallelizer.tp_plan=null   (uses the plan of the model)"
    )
