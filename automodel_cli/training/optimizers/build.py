"""Build the optimizer of an `optimizer` section: a node, or a `_partial_` of a class of `torch.optim`."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from automodel_cli.config.errors import ConfigError
from automodel_cli.training.optimizers.nodes import AdamW, AdamW8bit

if TYPE_CHECKING:
    import torch
    from torch import nn

_WHOLE_MATRICES = ("Muon", "AdamW8bit", "Adafactor")


class OptimizerNode(Protocol):
    """Interface of the `optimizer` section, unless it is a `_partial_` of `torch.optim`. Custom optimizers:
    examples/own_optimizer.py.

    A node may define `state_bytes(item, numel)`: the state of one parameter of which a rank holds `numel` elements.
    Otherwise `automodel plan` measures a step on a small matrix.
    """

    @abstractmethod
    def build(self, parts: Sequence[nn.Module]) -> torch.optim.Optimizer:
        """Over the trainable parameters of `parts`, this rank's modules, as `training.param_groups` groups them."""
        ...


@dataclass(frozen=True)
class FromTorch:
    """A `_partial_: true` target (any class of `torch.optim`) as a node."""

    make: Any

    def __post_init__(self) -> None:
        if not callable(self.make):
            raise ConfigError(
                f"optimizer={self.make!r} must be a class with `build(parts)`, or a target with `_partial_: true`",
                code="wrong_type",
                keys=("optimizer",),
                fix="optimizer._target_=automodel_cli.training.optimizers.nodes.AdamW",
            )

    @property
    def kind(self) -> Any:
        """Return the callable inside nested partials."""
        return getattr(self.make, "func", self.make)

    def build(self, parts: Sequence[nn.Module]) -> torch.optim.Optimizer:
        """Optimizers with a `weight_decay` argument get the same groups as the nodes. Their configured or default value
        applies to the matrices.
        """
        import torch

        from automodel_cli.training.optimizers.param_groups import decay_groups, require_trainable

        if self.kind is torch.optim.Muon:
            raise ConfigError(
                "torch.optim.Muon is not supported, because it optimizes only the hidden matrices of a model",
                code="not_supported",
                keys=("optimizer",),
                fix="optimizer._target_=automodel_cli.training.optimizers.nodes.Muon",
            )
        if self.kind is torch.optim.LBFGS:
            raise ConfigError(
                "torch.optim.LBFGS is not supported, because it evaluates the loss several times per step",
                code="not_supported",
                keys=("optimizer",),
                fix="optimizer._target_=automodel_cli.training.optimizers.nodes.AdamW",
            )
        accepted = inspect.signature(self.kind).parameters
        params = require_trainable(parts)
        if "weight_decay" not in accepted:
            groups = [{"params": g["params"]} for g in decay_groups(params, 0.0)]
        else:
            given = getattr(self.make, "keywords", {})
            groups = decay_groups(params, given.get("weight_decay", accepted["weight_decay"].default))
        try:
            optimizer: torch.optim.Optimizer = self.make(groups)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{_name(self)} rejects its arguments: {error}", code="invalid_arguments", keys=("optimizer",)
            ) from error
        return optimizer


def refuse_float16_moments(section: object) -> None:
    """Raise ConfigError for an `optimizer` section whose moments would be float16, like the parameters.

    Their range ends at 6e-8: squares of gradients become 0 and training diverges. A node of the user's own decides for
    itself, and SGD has no squares.
    """
    node = optimizer_node(section)
    name = _name(node)
    match node:
        case AdamW(implementation="fused" | "foreach" | "loop" as implementation):
            keys, what = ("optimizer.implementation", "model.dtype"), f"implementation={implementation}"
            fix = "optimizer.implementation=auto, or model.dtype=float32"
        case AdamW8bit(library="torchao") | FromTorch() if name != "SGD":
            keys, what, fix = ("optimizer", "model.dtype"), name, "model.dtype=float32"
        case _:
            return
    raise ConfigError(
        f"model.dtype=float16 is not supported with {what}, because its moments have the dtype of the parameters and "
        "squared gradients underflow in float16",
        code="unsupported_combination",
        keys=keys,
        fix=fix,
    )


def optimizer_node(section: object) -> OptimizerNode:
    """Return the node of an `optimizer` section, also if it is a partial."""
    return section if hasattr(section, "build") else FromTorch(section)


def build_optimizer(section: object, parts: Sequence[nn.Module]) -> torch.optim.Optimizer:
    """An optimizer over the trainable parameters of `parts`, from a node above or a `_partial_` of a torch class."""
    from automodel_cli.distributed.sharded_module import follow_optimizer

    node = optimizer_node(section)
    _refuse_uneven_shards(node, parts)
    optimizer = node.build(parts)
    follow_optimizer(optimizer, parts)
    return optimizer


def _refuse_uneven_shards(node: OptimizerNode, parts: Sequence[nn.Module]) -> None:
    """Raise for optimizers that do not treat every element alike, if shard borders split parameters anywhere. Their
    results would be wrong without an error."""
    from automodel_cli.models.uneven_dtensor import is_uneven

    name = _name(node)
    if name in _WHOLE_MATRICES and any(is_uneven(param) for part in parts for param in part.parameters()):
        raise ConfigError(
            f"{name} is not supported with this parallelizer, which shards matrices at arbitrary elements: the "
            "optimizer needs complete rows or blocks",
            code="unsupported_combination",
            keys=("optimizer", "parallelizer"),
            fix="parallelizer=fsdp2, or optimizer._target_=automodel_cli.training.optimizers.nodes.AdamW",
        )


def _name(node: OptimizerNode) -> str:
    kind = getattr(node, "kind", type(node))
    return str(getattr(kind, "__name__", kind))
