"""Tensor-parallel plan of a model that publishes none, from the structure of its blocks and measured on a small copy.

A block of attention or of a gated MLP is split as usual: layers on its input by outputs, the layer on its output by
inputs. The plan is used only if the sum of the two halves of every block is the output of the block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from automodel_cli.models.document_masking.document_bounds import tensors_in
from automodel_cli.models.hub import composite_text
from automodel_cli.models.probes.small_sizes import VOCAB
from automodel_cli.models.probes.tiny_model import build_small, shrink

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_seen: set[type] = set()
Calls = dict[str, tuple[tuple[object, ...], dict[str, object], object]]
"""Arguments, keywords and output of each block, by name."""

_HALVES = 2
_TOLERANCE = 1e-5
_INPUTS, _OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")


def add_measured_plan(model: PreTrainedModel) -> None:
    """Give the text model of a composite a plan if its config has none for its layers. Measured once per family."""
    base = cast("PreTrainedModel", model.base_model)
    config = base.config
    published = config.base_model_tp_plan or {}
    if composite_text.is_made_here(config) and not any("." in name for name in published) and type(config) not in _seen:
        _seen.add(type(config))
        type(config).base_model_tp_plan = {**published, **block_plan(type(base), config)}


def block_plan(base: type[PreTrainedModel], config: PretrainedConfig) -> dict[str, str]:
    """Return style strings by module name below the base model, with `*` for the layer. Empty if a block differs."""
    small = shrink(config)
    small.pad_token_id = 0
    try:
        model = build_small(small, lambda c: base._from_config(c, attn_implementation="eager")).eval()
        return _measured_plan(model)
    except Exception:  # a small copy may fail in its own way, and the model then has no plan
        return {}


@torch.no_grad()
def _measured_plan(model: PreTrainedModel) -> dict[str, str]:
    calls: Calls = {}
    blocks = {name: block for name, block in model.named_modules() if _styles(block)}
    handles = [block.register_forward_hook(_keeper(calls, name), with_kwargs=True) for name, block in blocks.items()]
    ids_BT = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(0))
    try:
        model(input_ids=ids_BT, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    plan: dict[str, str] = {}
    for name, (args, kwargs, output) in calls.items():
        want = _first(output)
        # Two halves of a block whose outputs sum to the block's output: the definition of tensor parallelism, tested in
        # one process.
        got = sum(_first(_half(blocks[name], rank)(*args, **kwargs)) for rank in range(_HALVES))
        if not float((got - want).abs().max()) <= _TOLERANCE * float(want.abs().max()):
            return {}
        layer, _, rest = name.partition("layers.")
        path = f"{layer}layers.*.{rest.partition('.')[2]}"
        plan |= {f"{path}.{child}": style for child, style in _styles(blocks[name]).items()}
    return plan


def _styles(block: nn.Module) -> dict[str, str]:
    """Return the style of each child of a block. Empty for other modules, and for blocks with further parameters."""
    children = {name: child for name, child in block.named_children() if any(True for _ in child.parameters())}
    styles: dict[str, str] = {}
    for name, child in children.items():
        if type(child) is nn.Linear and name in _INPUTS:
            styles[name] = "colwise"
        elif type(child) is nn.Linear and name in _OUTPUTS and child.bias is None:
            styles[name] = "rowwise"
        elif name in _HEAD_NORMS:
            styles[name] = "replicated_with_grad_allreduce"
    complete = styles.keys() == children.keys() and not any(True for _ in block.parameters(recurse=False))
    return styles if complete and list(styles.values()).count("rowwise") == 1 else {}


def _half(block: nn.Module, rank: int) -> nn.Module:
    """Return a copy of the block with the weights of one of two ranks."""
    half = copy.deepcopy(block)
    for name, style in _styles(block).items():
        layer = half.get_submodule(name)
        dim = {"colwise": 0, "rowwise": 1}.get(style)
        if dim is not None:
            for leaf, param in list(layer.named_parameters()):
                setattr(layer, leaf, nn.Parameter(param.chunk(_HALVES, dim)[rank].clone()))
    for name in _HEAD_COUNTS:
        count = vars(half).get(name)
        if isinstance(count, int):
            setattr(half, name, count // _HALVES)
    return half


def _keeper(calls: Calls, name: str) -> Callable[..., None]:
    return lambda block, args, kwargs, output: calls.__setitem__(name, (args, kwargs, output))


def _first(output: object) -> Tensor:
    return next(tensors_in(output))
