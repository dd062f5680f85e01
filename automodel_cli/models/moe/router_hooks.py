"""Where a model selects experts, so that its choices can be recorded and replayed
(`distributed/expert_parallel/router_replay.py`).

Measured on a small copy of the family, not known: which call of topk, in which module, gives the indices that its
experts are then called with; and that other indices in its place reach the experts as they are.

Shapes: N tokens, K experts for each of them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.data.batch import Batch
from automodel_cli.distributed.expert_parallel.apply import experts_modules
from automodel_cli.distributed.expert_parallel.router_replay import (
    Replay,
    RouterMismatchCounter,
    choosing,
    recomputes_alike,
    selects_by,
)
from automodel_cli.models import transformers_compat
from automodel_cli.models.document_masking.recurrent_layers import class_name, decoder_slots
from automodel_cli.models.probes.tiny_model import VOCAB
from automodel_cli.models.probes.token_mixing import SmallConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from automodel_cli.models.model_part import ModelPart

_TOKENS = 12
Selectors = Mapping[str, int]
"""Class of the module that selects experts (`state_layers.class_name`) -> which of its calls of topk does, from 1."""


def selectors_of(hf_config: PretrainedConfig, *, trust_remote_code: bool = False) -> Selectors:
    """Raises ConfigError for a family without experts, or whose selection cannot be replaced."""
    found = _measured(SmallConfig(hf_config, trust_remote_code))
    if isinstance(found, str):
        raise _refusal(f"{hf_config.model_type} {found}")
    return found


@functools.lru_cache(maxsize=64)
@torch.no_grad()
def _measured(small: SmallConfig) -> Selectors | str:
    """The selectors, or why there are none."""
    try:
        with transformers_compat.quiet():
            model: Any = small.build("eager").eval()
        if not experts_modules(model):
            return "has no experts that use the experts interface of transformers"
        ids_BT = torch.randint(3, VOCAB, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
        watch = _Watch(model)
        with watch:
            before = model(input_ids=ids_BT, use_cache=False).logits
        if isinstance(watch.selectors, str):
            return watch.selectors
        layers = list(_selecting(model, watch.selectors))
        if len(layers) != len(experts_modules(model)):
            return "has layers whose experts are not selected by topk"
        mark_selections(model, watch.selectors)
        own = dict(enumerate(watch.chosen))
        if not torch.equal(_logits(model, ids_BT, own, own), before):
            return "computes something else where its own selection is replayed"
        other = {number: (chosen + 1) % _num_experts(model) for number, chosen in own.items()}
        _logits(model, ids_BT, other, other)
    except _Other as error:
        return str(error)
    except Exception as error:  # any class of the library may fail in its own way
        return f"fails on a small copy ({type(error).__name__}: {error})".splitlines()[0][:200]
    return watch.selectors


class _Other(Exception):
    """What the experts were called with is not what was selected."""


def _logits(model: Any, ids_BT: Tensor, choices: Mapping[int, Tensor], wanted: Mapping[int, Tensor]) -> Tensor:
    """The model's logits by these choices `[N, K]` of each layer. Raises _Other where experts are called with others
    than `wanted`."""
    expected = iter([wanted[number] for number in sorted(wanted)])

    def check(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.equal(_index_of(args, kwargs), next(expected)):
            raise _Other("calls its experts with others than those that are selected")

    handles = [experts.register_forward_pre_hook(check, with_kwargs=True) for experts in experts_modules(model)]
    try:
        with choosing(_Given(choices)):
            logits_BTV: Tensor = model(input_ids=ids_BT, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return logits_BTV


class _Given:
    """`RouterDecisions` of a probe."""

    def __init__(self, layers: Mapping[int, Tensor]):
        self._layers = layers

    def choose(self, layer: int, own_NK: Tensor) -> Tensor:
        return self._layers[layer].clone()

    def again(self) -> _Given:
        return self


class _Watch(TorchFunctionMode):
    """Around one forward: in which module, as which of its calls, topk gave what the next experts were called with."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.selectors: dict[str, int] | str = {}
        self.chosen: list[Tensor] = []
        self._calls: list[tuple[nn.Module, int, Tensor]] = []
        self._running: list[tuple[nn.Module, list[int]]] = []
        self._handles = [module.register_forward_pre_hook(self._enter) for module in model.modules()]
        self._handles += [module.register_forward_hook(self._leave) for module in model.modules()]
        self._handles += [
            experts.register_forward_pre_hook(self._experts, with_kwargs=True) for experts in experts_modules(model)
        ]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for handle in self._handles:
            handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk) and self._running:
            for _, count in self._running:
                count[0] += 1
            module, count = self._running[-1]
            self._calls.append((module, count[0], result.indices))
        return result

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append((module, [0]))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def _experts(self, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index_NK = _index_of(args, kwargs)
        found = [(module, nth) for module, nth, chosen in self._calls if torch.equal(chosen, index_NK)]
        self._calls.clear()
        self.chosen.append(index_NK)
        if not found:
            self.selectors = "does not call its experts with what topk selects"
        elif not isinstance(self.selectors, str):
            module, nth = found[-1]
            self.selectors[class_name(module)] = nth


def _index_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Of the library's experts, called with hidden states, indices and weights."""
    found: Tensor = args[1] if len(args) > 1 else next(x for x in kwargs.values() if not x.is_floating_point())
    return found


def _num_experts(model: nn.Module) -> int:
    return int(experts_modules(model)[0].num_experts)  # type: ignore[arg-type]


def _selecting(model: nn.Module, selectors: Selectors) -> Iterator[tuple[str, nn.Module, int]]:
    """`(name, module, which call of topk)` of every module that selects experts, in the model's order."""
    for name, module in model.named_modules():
        nth = selectors.get(class_name(module))
        if nth is not None:
            yield name, module, nth


@dataclass(frozen=True)
class Routing:
    """The layers with experts of the whole model, and how often its routers would have chosen otherwise.

    `slots`: where each of these layers stands among all of the model's. A `StepHook`: its metric is of the updates.
    """

    slots: tuple[int, ...]
    num_slots: int
    tally: RouterMismatchCounter

    def replay(self, experts_BTC: Tensor, *, counts: bool) -> Replay:
        """The choices of one microbatch; `counts`: what routers would have chosen is counted."""
        return Replay(experts_BTC, len(self.slots), self.tally if counts else None)

    def begin(self, batches: Sequence[Batch]) -> None:
        self.tally.counts_2.zero_()

    def finish(self) -> dict[str, Tensor]:
        """`routing_mismatch`: the share of tokens and layers for which the trainer's router would have chosen another
        set of experts than the sampler's did. Collective."""
        dist.all_reduce(self.tally.counts_2)
        differ, every = self.tally.counts_2.unbind()
        return {"routing_mismatch": differ / every}

    def of_layers(self, chosen_TLK: np.ndarray) -> np.ndarray:
        """What an engine tells of every layer, or of those with experts, for those with experts. Raises RunError."""
        count = chosen_TLK.shape[1]
        if count == len(self.slots):
            return chosen_TLK
        if count == self.num_slots:
            return chosen_TLK[:, list(self.slots)]
        raise RunError(
            f"the engine returned the experts of {count} layers, but {len(self.slots)} of the {self.num_slots} layers "
            "of the model have experts",
            code="invalid_response",
            keys=("rollout.replay_routing", "rollout.engine"),
            fix="rollout.replay_routing=false",
        )


def mark_selections(model: nn.Module, selectors: Selectors) -> None:
    """From now on the experts of this whole model are chosen as `chosen_experts.choosing` says."""
    for number, (_, module, nth) in enumerate(_selecting(model, selectors)):
        selects_by(module, number, nth)


def install_routing(
    parts: Sequence[ModelPart], selectors: Selectors, device: torch.device, pp_group: dist.ProcessGroup | None = None
) -> Routing:
    """From now on the experts of these parts are chosen as `chosen_experts.choosing` says, and by the column
    `ROUTED_EXPERTS` of a batch. Once for a model, before its first step. Collective over the pipeline."""
    mine = [entry for part in parts for entry in _selecting(part.model.base_model, selectors)]
    names = [name for name, _, _ in mine]
    if pp_group is not None:
        of_stages: list[list[str]] = [[] for _ in range(dist.get_world_size(pp_group))]
        dist.all_gather_object(of_stages, names, group=pp_group)
        # Stages of one rank need not follow each other.
        names = sorted((name for of_stage in of_stages for name in of_stage), key=_numbers_in)
    for name, module, nth in mine:
        selects_by(module, names.index(name), nth)
    num_slots = len(list(decoder_slots(parts[0].model.base_model)))
    routing = Routing(tuple(_numbers_in(name)[0] for name in names), num_slots, RouterMismatchCounter(device))
    selecting = {module for _, module, _ in mine}
    for part in parts:
        part.routing = routing
        for layer in part.model.base_model.modules():
            if selecting.intersection(layer.modules()):
                recomputes_alike(layer)
    return routing


def _numbers_in(name: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", name)))


def _refusal(reason: str) -> ConfigError:
    return ConfigError(
        f"rollout.replay_routing=true is not supported because {reason}",
        code="not_supported_by_model",
        keys=("rollout.replay_routing",),
        fix="rollout.replay_routing=false",
    )
