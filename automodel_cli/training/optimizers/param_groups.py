"""Which parameters an optimizer gets, in which groups.

Weight decay applies to matrices only. Parameters with fewer than two dims, biases (also stacked ones of experts) and
norms are never decayed. Embeddings and heads tied to them are decayed only if the optimizer requests it. Frozen
parameters are in no group and so have no state.

Groups are also split by device mesh, because foreach and fused kernels reject a mix of plain tensors and DTensors, or
of meshes, within one group. With this split the fast kernels support every layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.model_part import ModelPart
from automodel_cli.training.optimizers.rate_groups import Rates

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


class TrainableParam(NamedTuple):
    """A parameter to optimize, with its name and module."""

    name: str
    param: nn.Parameter
    owner: nn.Module

    @property
    def hub_name(self) -> str:
        """The name in the transformers model, without the prefixes of wrappers."""
        return ModelPart.hub_name(bare_name(self.name))

    @property
    def is_front(self) -> bool:
        """Whether it is outside the text model of a vision-language model."""
        return self.name.startswith("front.")

    @property
    def is_matrix(self) -> bool:
        """Whether it is neither a vector nor a bias nor a norm."""
        is_norm = "norm" in type(self.owner).__name__.lower()
        is_bias = self.name.endswith("bias")
        return self.param.ndim >= 2 and not (is_bias or is_norm)

    @property
    def is_embedding(self) -> bool:
        """Whether it is an embedding's table, or a head tied to one."""
        return isinstance(self.owner, nn.Embedding)

    @property
    def mesh(self) -> DeviceMesh | None:
        return self.param.device_mesh if isinstance(self.param, DTensor) else None


def trainable(parts: Sequence[nn.Module]) -> Iterator[TrainableParam]:
    """Every parameter that requires a gradient, once, in the order of the modules.

    Tied ones come under their first name.
    """
    seen: set[nn.Parameter] = set()
    for part in parts:
        for module_name, module in part.named_modules():
            for leaf, param in module.named_parameters(recurse=False):
                if param.requires_grad and param not in seen:
                    seen.add(param)
                    yield TrainableParam(f"{module_name}.{leaf}" if module_name else leaf, param, module)


def decay_groups(
    params: Sequence[TrainableParam],
    weight_decay: float,
    *,
    embeddings: bool = False,
    rates: Rates | None = None,
    lr: float = 0.0,
) -> list[dict[str, object]]:
    """Return groups for `torch.optim`, split by weight decay, learning rate and mesh.

    Without parameters the result is one empty group, because torch rejects an empty list.

    Args:
        weight_decay: of matrices.
        embeddings: decay them too.
        rates: rules of selected parameters. With rules, groups have their `lr`.
        lr: peak learning rate of the optimizer.
    """
    rates = rates or Rates()
    groups: dict[tuple[float, float, DeviceMesh | None], list[nn.Parameter]] = {}
    for item in params:
        decays = item.is_matrix and (embeddings or not item.is_embedding)
        decay = rates.weight_decay(item, weight_decay if decays else 0.0)
        # One mesh per group: torch's `foreach` kernels reject DTensors of different meshes in one call.
        groups.setdefault((decay, rates.lr(item, lr), item.mesh), []).append(item.param)
    if not groups:
        return [{"params": [], "weight_decay": weight_decay}]
    return [
        {"params": members, "weight_decay": decay, **({} if rates.is_empty else {"lr": rate})}
        for (decay, rate, _), members in groups.items()
    ]


def bare_name(name: str) -> str:
    """Return the name of a parameter without the prefixes of checkpointing and compile wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def require_trainable(parts: Sequence[nn.Module]) -> list[TrainableParam]:
    """Return `trainable` as a list. Raises ConfigError if all parameters are frozen, unless another stage has some."""
    params = list(trainable(parts))
    if not params and not any(getattr(part, "may_train_nothing", False) for part in parts):
        raise ConfigError(
            "no parameter is trainable: every parameter has requires_grad=False",
            code="nothing_to_train",
            keys=("model",),
            fix="model.lora=null, or set model.lora.target_modules to modules of the model",
        )
    return params


def has_float16(groups: Sequence[dict[str, Any]]) -> bool:
    """Return whether a parameter of these groups is float16."""
    return any(param.dtype == torch.float16 for group in groups for param in group["params"])
