"""Parameters of the layers of a model, of its embedding and of its head, on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from automodel_cli.distributed.layer_wrapping import transformer_layers
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.precision.nf4 import num_packed
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
    """A whole model in pieces. A table that is embedding and head is in `before` and in `after`.

    `tower` has the layers of a vision tower, which are on the first stage. `before` has the rest of the tower.
    """

    before: Unit
    layers: tuple[Unit, ...]
    after: Unit
    norm: Unit
    further: Unit
    num_depths: int = 0
    tower: tuple[Unit, ...] = ()

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
        if is_first:
            held = [self.before, *self.tower, *held]
        elif depths == 1 and self.further.params:
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

    def unit_of(modules: Sequence[nn.Module], inside: Sequence[nn.Module] = ()) -> Unit:
        packed = sum(num_packed(module) for module in modules) - sum(num_packed(module) for module in inside)
        return Unit(tuple(_params(modules, names, inside)), packed)

    def units_of(modules: Iterable[nn.Module]) -> tuple[Unit, ...]:
        return tuple(unit_of([module]) for module in modules)

    num_depths = len(part.multi_token or ())
    first, tower = [], []
    if part.front is not None:
        first, in_front = [part.front], set(part.front.modules())
        tower = [layer for layer in transformer_layers(part) if layer in in_front]
    if anatomy is None:
        layers = transformer_layers(part.model)
        before = unit_of([part], inside=[*tower, *layers])
        return Units(before, units_of(layers), _NOTHING, _NOTHING, _NOTHING, num_depths, units_of(tower))
    # A tied table is a parameter of `before` and of `after`: on two stages it exists twice.
    before = unit_of([*first, *(part.model.get_submodule(name) for name in anatomy.before)], inside=tower)
    layers = list(part.model.get_submodule(anatomy.layers).children())
    after = [part.model.get_submodule(name) for name in anatomy.after]
    norm = further = _NOTHING
    if part.multi_token is not None:
        head = part.model.get_output_embeddings()
        norm = unit_of([module for module in after if module is not head])
        further = unit_of([part.multi_token])
    return Units(before, units_of(layers), unit_of(after), norm, further, num_depths, units_of(tower))


def _params(
    modules: Iterable[nn.Module], names: Mapping[int, str], inside: Sequence[nn.Module]
) -> Iterator[TrainableParam]:
    """Yield every parameter once, frozen ones too, without those of the modules `inside`. `names`: name in the part by
    id, which rules of optimizers read.
    """
    seen = {id(param) for module in inside for param in module.parameters()}
    for root in modules:
        for module in root.modules():
            for _, param in module.named_parameters(recurse=False):
                if id(param) not in seen:
                    seen.add(id(param))
                    yield TrainableParam(names[id(param)], param, module)
