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

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from automodel_cli.config.errors import ConfigError


class TrainableParam(NamedTuple):
    """A parameter to optimize, with its name and module."""

    name: str
    param: nn.Parameter
    owner: nn.Module

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
    params: Sequence[TrainableParam], weight_decay: float, *, embeddings: bool = False
) -> list[dict[str, Any]]:
    """Return groups for `torch.optim`, split by weight decay and by mesh. No group is empty. `embeddings`: decay them
    too."""
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for item in params:
        decays = item.is_matrix and (embeddings or not item.is_embedding)
        groups.setdefault((decays, item.mesh), []).append(item.param)
    return [
        {"params": members, "weight_decay": weight_decay if decays else 0.0} for (decays, _), members in groups.items()
    ]


def require_trainable(parts: Sequence[nn.Module]) -> list[TrainableParam]:
    """Return `trainable` as a list. Raises ConfigError if all parameters are frozen."""
    params = list(trainable(parts))
    if not params:
        raise ConfigError(
            "no parameter is trainable: every parameter has requires_grad=False",
            code="nothing_to_train",
            keys=("model",),
            fix="model.lora=null, or set model.lora.target_modules to modules of the model",
        )
    return params
