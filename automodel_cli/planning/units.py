"""The pieces of a model that a plan moves around: its layers and what is before and after them, on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from automodel_cli.distributed.layers import transformer_layers
from automodel_cli.models.nf4 import num_packed
from automodel_cli.models.part import ModelPart
from automodel_cli.pipelining.cut.anatomy import Anatomy
from automodel_cli.pipelining.cut.stage_plan import used_weights
from automodel_cli.training.param_groups import TrainableParam


@dataclass(frozen=True)
class Unit:
    """One decoder layer, or everything before or after the layers. `cost` is the weights a token is multiplied with."""

    params: tuple[TrainableParam, ...]
    cost: float
    num_packed: int = 0
    """Weights in 4 bits, which are no parameters."""

    @property
    def num_parameters(self) -> int:
        return sum(item.param.numel() for item in self.params) + self.num_packed


@dataclass(frozen=True)
class Units:
    """A whole model in pieces. A table that is embedding and head is in `before` and in `after`."""

    before: Unit
    layers: tuple[Unit, ...]
    after: Unit

    def of_stage(self, layers: range, *, is_first: bool, is_last: bool) -> list[Unit]:
        """What a stage holds. A tied table is on both ends, unless one stage is both."""
        held = [self.layers[i] for i in layers]
        held = [self.before, *held] if is_first else held
        if not (is_last and self.after.params):
            return held
        own = {id(item.param) for item in self.before.params} if is_first else set()
        return [*held, Unit(tuple(item for item in self.after.params if id(item.param) not in own), self.after.cost)]


def read_units(part: ModelPart, anatomy: Anatomy | None) -> Units:
    """`anatomy` is None for a model that is not cut: then all but the layers is in `before`."""
    if anatomy is None:
        layers = transformer_layers(part.model)
        inside = {id(param) for layer in layers for param in layer.parameters()}
        rest = [item for item in _params([part]) if id(item.param) not in inside]
        head = part.model.get_output_embeddings()
        before, after = Unit(tuple(rest), used_weights(head) if head is not None else 0.0), Unit((), 0.0)
    else:
        layers = list(part.model.get_submodule(anatomy.layers).children())
        before, after = (_unit([part.model.get_submodule(n) for n in ns]) for ns in (anatomy.before, anatomy.after))
    return Units(before, tuple(_unit([layer]) for layer in layers), after)


def _unit(modules: Sequence[nn.Module]) -> Unit:
    cost = sum(used_weights(module) for module in modules)
    return Unit(tuple(_params(modules)), cost, sum(num_packed(module) for module in modules))


def _params(modules: Iterable[nn.Module]) -> Iterator[TrainableParam]:
    """Every parameter once, frozen ones too."""
    seen: set[int] = set()
    for root in modules:
        for module_name, module in root.named_modules():
            for leaf, param in module.named_parameters(recurse=False):
                if id(param) not in seen:
                    seen.add(id(param))
                    yield TrainableParam(f"{module_name}.{leaf}".lstrip("."), param, module)
