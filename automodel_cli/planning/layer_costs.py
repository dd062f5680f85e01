"""Parameters of the layers of a model, of its embedding and of its head, on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from automodel_cli.distributed.layer_wrapping import transformer_layers
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.nf4 import num_packed
from automodel_cli.pipelining.cut.model_structure import ModelStructure
from automodel_cli.training.optimizers.param_groups import TrainableParam


@dataclass(frozen=True)
class Unit:
    """One decoder layer, or everything before or after the layers."""

    params: tuple[TrainableParam, ...]
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
    norm: Unit
    further: Unit
    num_depths: int = 0

    def of_stage(self, layers: range, *, is_first: bool, is_last: bool, depths: int = 0) -> list[Unit]:
        """What a stage holds. A tied table is on both ends, unless one stage is both.

        `depths` is 1 for the stage with the layers for multi-token prediction, which embed, and 2 for one that follows
        it: the last norm is before those layers.
        """
        held = [self.layers[i] for i in layers]
        if depths == 1 and self.further.params:
            held += [self.further, self.norm]
        if is_last and self.after.params:
            held.append(self.after)
        if is_first or (depths == 1 and self.further.params):
            held.insert(0, self.before)
        seen = {id(item.param) for item in self.norm.params} if depths == 2 else set[int]()
        return [_without(unit, seen) for unit in held]


def _without(unit: Unit, seen: set[int]) -> Unit:
    """A unit without the parameters that were seen before; its own are from now on."""
    params = tuple(item for item in unit.params if id(item.param) not in seen)
    seen |= {id(item.param) for item in params}
    return Unit(params, unit.num_packed)


_NOTHING = Unit(())


def read_units(part: ModelPart, anatomy: ModelStructure | None) -> Units:
    """`anatomy` is None for a model that is not cut: then all but the layers is in `before`."""
    names = {id(param): name for name, param in part.named_parameters()}

    def unit_of(modules: Sequence[nn.Module]) -> Unit:
        return Unit(tuple(_params(modules, names)), sum(num_packed(module) for module in modules))

    if anatomy is None:
        layers = transformer_layers(part.model)
        inside = {id(param) for layer in layers for param in layer.parameters()}
        rest = [item for item in _params([part], names) if id(item.param) not in inside]
        before, after = Unit(tuple(rest)), _NOTHING
    else:
        layers = list(part.model.get_submodule(anatomy.layers).children())
        first = [] if part.front is None else [part.front]  # the vision tower is on the first stage
        before = unit_of([*first, *(part.model.get_submodule(name) for name in anatomy.before)])
        after = unit_of([part.model.get_submodule(name) for name in anatomy.after])
    if anatomy is None or part.multi_token is None:
        num_depths = len(part.multi_token or ())
        return Units(before, tuple(unit_of([layer]) for layer in layers), after, _NOTHING, _NOTHING, num_depths)
    head = part.model.get_output_embeddings()
    norms = [module for name in anatomy.after if (module := part.model.get_submodule(name)) is not head]
    further = unit_of([part.multi_token])
    return Units(
        before, tuple(unit_of([layer]) for layer in layers), after, unit_of(norms), further, len(part.multi_token)
    )


def _params(modules: Iterable[nn.Module], names: Mapping[int, str]) -> Iterator[TrainableParam]:
    """Every parameter once, frozen ones too. `names`: name in the part by id, which rules of optimizers read."""
    seen: set[int] = set()
    for root in modules:
        for module in root.modules():
            for _, param in module.named_parameters(recurse=False):
                if id(param) not in seen:
                    seen.add(id(param))
                    yield TrainableParam(names[id(param)], param, module)
