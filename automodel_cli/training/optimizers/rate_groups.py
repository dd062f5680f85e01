"""Learning rate, weight decay and algorithm of selected parameters. Torch-free until an optimizer is built."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.parameter_patterns import any_matches, check_matched, check_syntax
from automodel_cli.config.value_checks import check_choice, check_range

if TYPE_CHECKING:
    import torch
    from torch import nn

Algorithm = Literal["muon", "adamw"]
_EMBEDDINGS = ("embed", "wte", "wpe")


class Item(Protocol):
    """A parameter to optimize (`param_groups.TrainableParam`)."""

    @property
    def hub_name(self) -> str: ...
    @property
    def param(self) -> nn.Parameter: ...
    @property
    def is_matrix(self) -> bool: ...
    @property
    def is_front(self) -> bool: ...


@dataclass(frozen=True)
class ParamGroup:
    """Parameters with an own learning rate, weight decay or algorithm: `{params: [lm_head], lr: 1e-5}`.

    A parameter belongs to the first group that selects it. All groups share the schedule of `lr_scheduler`.
    """

    params: list[str]
    """Patterns of parameter names, as in `train.freeze`. Each must match a trained parameter."""
    lr: float | None = None
    """Peak learning rate of the group. null: that of the optimizer."""
    lr_scale: float | None = None
    """Factor on the optimizer's peak learning rate. With `params: [lora_B]` this is LoRA+ (arXiv:2402.12354)."""
    weight_decay: float | None = None
    """Weight decay of the group's matrices, embeddings included. null: that of the optimizer."""
    algorithm: Algorithm | None = None
    """Algorithm of the group in `optimizer=muon`: `muon` or `adamw`. null: as the optimizer selects."""

    def __post_init__(self) -> None:
        check_syntax("params", self.params)
        check_range("lr", self.lr, above=0, fix="optimizer.groups=[]")
        check_range("lr_scale", self.lr_scale, above=0, fix="optimizer.groups=[]")
        check_range("weight_decay", self.weight_decay, at_least=0, fix="optimizer.groups=[]")
        check_choice("algorithm", self.algorithm, ("muon", "adamw", None), fix="optimizer.groups=[]")
        if not self.params:
            raise ConfigError(
                "params is empty, so the group selects no parameter",
                code="empty_value",
                keys=("params",),
                fix="optimizer.groups=[]",
            )
        if self.lr is not None and self.lr_scale is not None:
            raise ConfigError(
                f"lr={self.lr} and lr_scale={self.lr_scale} are mutually exclusive, because both set the rate",
                code="mutually_exclusive",
                keys=("lr", "lr_scale"),
                fix="optimizer.groups=[]",
            )


@dataclass(frozen=True, kw_only=True)
class HasGroups:
    """Keys of the optimizer nodes that support groups of parameters."""

    groups: list[ParamGroup] = field(default_factory=list)
    """Parameters with an own learning rate, weight decay or algorithm: `[{params: [lm_head], lr: 1e-5}]`."""
    layer_decay: float | None = None
    """Factor on the learning rate per layer below the head (layer-wise decay). Layer i of n has
    `layer_decay ** (n - i)`, counted from 0, embeddings one more. null: no decay."""

    def check_groups(self) -> None:
        """Raise ConfigError for an invalid value."""
        check_range("layer_decay", self.layer_decay, above=0, at_most=1, fix="optimizer.layer_decay=0.9")

    def refuse_algorithms(self) -> None:
        """Raise ConfigError if a group selects an algorithm, for optimizers with only one."""
        for group in self.groups:
            if group.algorithm is not None:
                raise ConfigError(
                    f"groups: algorithm={group.algorithm} is not supported with {type(self).__name__}, which has one "
                    "algorithm",
                    code="unsupported_combination",
                    keys=("groups",),
                    fix="optimizer=muon, or optimizer.groups=[]",
                )

    def rates(self, parts: Sequence[nn.Module]) -> Rates:
        """Return the rules of this node for the parts of a model."""
        return Rates(self.groups, self.layer_decay, num_layers(parts))


def shown_ratio(node: Any, optimizer: torch.optim.Optimizer) -> float:
    """Return the optimizer's peak learning rate over that of its first group. Runs log the rate of the config, which
    does not depend on the parameters of a pipeline stage. Call before a schedule changes the rates."""
    rules = getattr(node, "groups", None) or getattr(node, "layer_decay", None)
    return float(node.lr / optimizer.param_groups[0]["lr"]) if rules else 1.0


def num_layers(parts: Sequence[nn.Module]) -> int:
    """Return the number of decoder layers of the complete model, 0 if it is unknown."""
    config: Any = next((part.source_config for part in parts if hasattr(part, "source_config")), None)
    return 0 if config is None else int(config.get_text_config().num_hidden_layers)


@dataclass(frozen=True)
class Rates:
    """The rules of `optimizer.groups` and `optimizer.layer_decay` for a model with `num_layers`."""

    groups: Sequence[ParamGroup] = ()
    layer_decay: float | None = None
    num_layers: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.groups and self.layer_decay is None

    def group(self, item: Item) -> ParamGroup | None:
        """Return the first group that selects a parameter."""
        return next((group for group in self.groups if any_matches(group.params, item.hub_name)), None)

    def lr(self, item: Item, peak: float) -> float:
        """Return the peak learning rate of a parameter. `peak` is that of its algorithm."""
        group = self.group(item)
        if group is not None:
            peak = group.lr if group.lr is not None else peak * (group.lr_scale or 1.0)
        return peak if self.layer_decay is None else peak * self.layer_decay ** self._below_head(item)

    def weight_decay(self, item: Item, usual: float) -> float:
        """Return the weight decay of a parameter. `usual` is that without groups."""
        group = self.group(item)
        if group is None or group.weight_decay is None:
            return usual
        # Biases and norms are never decayed.
        return group.weight_decay if item.is_matrix else 0.0

    def algorithm(self, item: Item) -> Algorithm | None:
        """Return the algorithm that a group selects."""
        group = self.group(item)
        return None if group is None else group.algorithm

    def _below_head(self, item: Item) -> int:
        """Return the number of layers between a parameter and the head."""
        if item.is_front:
            return self.num_layers + 1
        layer = re.search(r"(?:^|\.)(\d+)\.", item.hub_name)
        if layer is not None and not item.hub_name.startswith("multi_token."):
            # 24 layers and layer_decay 0.9: the head has 0.9^0 = 1, layer 23 has 0.9^1, layer 0 has 0.9^24 = 0.08, the
            # embedding 0.9^25.
            return self.num_layers - int(layer[1])
        return self.num_layers + 1 if any(word in item.hub_name for word in _EMBEDDINGS) else 0


def _check_names(key: str, patterns: Sequence[str], names: set[str]) -> None:
    try:
        check_matched(key, patterns, names, what="trained parameter")
    except ConfigError as error:
        fix = "optimizer.groups=[]" if error.fix == f"{key}=[]" else error.fix  # a group needs a pattern
        raise ConfigError(error.message, code=error.code, keys=error.keys, fix=fix) from None


def check_groups(node: object, params: Sequence[Item]) -> None:
    """Raise ConfigError for a group of an optimizer node that does not fit the parameters of the complete model."""
    groups: Sequence[ParamGroup] = getattr(node, "groups", ())
    rates = Rates(groups)
    for i, group in enumerate(groups):
        names = {item.hub_name for item in params}
        _check_names(f"optimizer.groups.{i}.params", group.params, names)
        members = [item for item in params if rates.group(item) is group]
        if not members:
            raise ConfigError(
                f"optimizer.groups.{i}.params={group.params} has no effect, because earlier groups select the same "
                "parameters",
                code="no_effect",
                keys=(f"optimizer.groups.{i}.params",),
                fix="optimizer.groups=[]",
            )
        if group.weight_decay and not any(item.is_matrix for item in members):
            raise ConfigError(
                f"optimizer.groups.{i}.weight_decay={group.weight_decay} has no effect, because weight decay applies "
                "to matrices, and the group has none",
                code="no_effect",
                keys=(f"optimizer.groups.{i}.weight_decay",),
                fix=f"optimizer.groups.{i}.weight_decay=null",
            )
        other = next((item for item in members if group.algorithm == "muon" and item.param.ndim != 2), None)
        if other is not None:
            raise ConfigError(
                f"optimizer.groups.{i}.algorithm=muon is not supported for {other.hub_name}, which has "
                f"{other.param.ndim} dims. Muon orthogonalizes matrices",
                code="unsupported_combination",
                keys=(f"optimizer.groups.{i}.algorithm",),
                fix=f"optimizer.groups.{i}.algorithm=adamw",
            )
