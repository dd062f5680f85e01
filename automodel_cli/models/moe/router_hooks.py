"""Detects expert selection in a model, so that router decisions can be recorded and replayed (router replay).

Measured on a tiny copy: the `topk` call, and its module, whose indices the experts receive. The same run verifies that
replaced indices reach the experts unchanged. Recording and replay: `distributed/expert_parallel/router_replay.py`.

Shapes: N tokens, K experts per token.
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

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.data.batch import Batch
from automodel_cli.distributed.expert_parallel.apply import experts_modules, num_experts_of
from automodel_cli.distributed.expert_parallel.router_replay import (
    Replay,
    RouterMismatchCounter,
    choosing,
    recomputes_alike,
    selects_by,
)
from automodel_cli.distributed.typed_torch import TorchFunctionMode
from automodel_cli.models import transformers_compat
from automodel_cli.models.document_masking.recurrent_layers import class_name, decoder_slots
from automodel_cli.models.probes.small_sizes import VOCAB
from automodel_cli.models.probes.token_mixing import SmallConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from automodel_cli.models.model_part import ModelPart

_TOKENS = 12
Selectors = Mapping[str, int]
"""Class of a module that selects experts (`recurrent_layers.class_name`) -> index of its topk call, from 1."""


def selectors_of(hf_config: PretrainedConfig, *, trust_remote_code: bool = False) -> Selectors:
    """Return the modules that select experts. Raises ConfigError if there are none or selection is not replaceable."""
    found = _measured(SmallConfig(hf_config, trust_remote_code))
    if isinstance(found, str):
        raise _unsupported(f"{hf_config.model_type} {found}")
    return found


@functools.lru_cache(maxsize=64)
@torch.no_grad()
def _measured(small: SmallConfig) -> Selectors | str:
    """Return the selectors, or the reason why there are none."""
    try:
        with transformers_compat.quiet():
            model = small.build("eager").eval()
        if not experts_modules(model):
            return "has no experts that use the experts interface of transformers"
        ids_BT = torch.randint(3, VOCAB, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
        watch = _Watch(model)
        with watch:
            before = model(input_ids=ids_BT, use_cache=False).logits
        if watch.problem:
            return watch.problem
        layers = list(_selecting(model, watch.selectors))
        if len(layers) != len(experts_modules(model)):
            return "has layers whose experts are not selected by topk"
        mark_selections(model, watch.selectors)
        own = dict(enumerate(watch.chosen))
        if not torch.equal(_logits(model, ids_BT, own, own), before):
            return "computes other logits if its own selection is replayed"
        # Every token gets other experts. If the module computed its indices again, the check in `_logits` would fail.
        other = {number: (chosen + 1) % _num_experts(model) for number, chosen in own.items()}
        _logits(model, ids_BT, other, other)
    except _OtherExperts as error:
        return str(error)
    except Exception as error:  # model classes may fail in any way
        return f"fails on a small copy ({type(error).__name__}: {error})".splitlines()[0][:200]
    return watch.selectors


class _OtherExperts(Exception):
    """The experts received other indices than selected."""


def _logits(model: nn.Module, ids_BT: Tensor, choices: Mapping[int, Tensor], requested: Mapping[int, Tensor]) -> Tensor:
    """Return the logits for these choices `[N, K]` of each layer.

    Raises _OtherExperts if the experts receive other indices than `requested`.
    """
    expected = iter([requested[number] for number in sorted(requested)])

    def check(experts: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        if not torch.equal(_index_of(args, kwargs), next(expected)):
            raise _OtherExperts("calls its experts with other indices than selected")

    handles = [experts.register_forward_pre_hook(check, with_kwargs=True) for experts in experts_modules(model)]
    try:
        with choosing(_FixedChoices(choices)):
            logits_BTV: Tensor = model(input_ids=ids_BT, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return logits_BTV


class _FixedChoices:
    """`RouterDecisions` of a probe."""

    def __init__(self, layers: Mapping[int, Tensor]):
        self._layers = layers

    def choose(self, layer: int, own_NK: Tensor) -> Tensor:
        return self._layers[layer].clone()

    def again(self) -> _FixedChoices:
        return self


class _Watch(TorchFunctionMode):
    """Records during one forward which call of topk in which module returned the indices of the next experts."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.selectors: dict[str, int] = {}
        self.problem = ""
        self.chosen: list[Tensor] = []
        self._calls: list[tuple[nn.Module, int, Tensor]] = []
        self._running: list[tuple[nn.Module, list[int]]] = []
        self._handles = [module.register_forward_pre_hook(self._enter) for module in model.modules()]
        self._handles += [module.register_forward_hook(self._leave) for module in model.modules()]
        self._handles += [
            experts.register_forward_pre_hook(self._experts, with_kwargs=True) for experts in experts_modules(model)
        ]

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for handle in self._handles:
            handle.remove()

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk) and self._running:
            # A call also counts for the modules around it, as `_Selection` counts it when it wraps one of them.
            for _, count in self._running:
                count[0] += 1
            module, count = self._running[-1]
            self._calls.append((module, count[0], result.indices))
        return result

    def _enter(self, module: nn.Module, args: object) -> None:
        self._running.append((module, [0]))

    def _leave(self, module: nn.Module, args: object, output: Tensor) -> None:
        self._running.pop()

    def _experts(self, experts: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        index_NK = _index_of(args, kwargs)
        # Compared by value, because families pass the indices on through views, casts or copies.
        calls = [(module, nth) for module, nth, chosen in self._calls if torch.equal(chosen, index_NK)]
        self._calls.clear()
        self.chosen.append(index_NK)
        if not calls:
            self.problem = "does not call its experts with the indices of topk"
        elif not self.problem:
            module, nth = calls[-1]
            self.selectors[class_name(module)] = nth


def _index_of(args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> Tensor:
    """Return the indices from the arguments of experts: hidden states, indices and weights."""
    return args[1] if len(args) > 1 else next(x for x in kwargs.values() if not x.is_floating_point())


def _num_experts(model: nn.Module) -> int:
    return num_experts_of(experts_modules(model)[0])


def _selecting(model: nn.Module, selectors: Selectors) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield `(name, module, index of the topk call)` of every module that selects experts, in model order."""
    for name, module in model.named_modules():
        nth = selectors.get(class_name(module))
        if nth is not None:
            yield name, module, nth


@dataclass(frozen=True)
class Routing:
    """`StepHook` for router replay: the layers with experts of the full model, and how often its routers would select
    otherwise.

    slots: index of each of these layers among all layers of the model.
    """

    slots: tuple[int, ...]
    num_slots: int
    tally: RouterMismatchCounter

    def replay(self, experts_BTC: Tensor, *, counts: bool) -> Replay:
        """Return the decisions of one microbatch. `counts`: count differences to the decisions of the trainer's
        routers."""
        return Replay(experts_BTC, len(self.slots), self.tally if counts else None)

    def begin(self, batches: Sequence[Batch]) -> None:
        self.tally.counts_2.zero_()

    def finish(self) -> dict[str, Tensor]:
        """Return `routing_mismatch`. Collective.

        It is the fraction of tokens and layers for which the trainer's router would select another set of experts than
        the sampler's did.
        """
        dist.all_reduce(self.tally.counts_2)
        differ, every = self.tally.counts_2.unbind()
        return {"routing_mismatch": differ / every}

    def of_layers(self, chosen_TLK: np.ndarray) -> np.ndarray:
        """Return the decisions of layers with experts, from those of all layers or of layers with experts. Raises
        RunError."""
        count = chosen_TLK.shape[1]
        # Engines return either the layers with experts only, or a row for every layer with unused rows for dense
        # layers.
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
    """Let `router_replay.choosing` replace the expert selection of this full model."""
    for index, (_, module, nth) in enumerate(_selecting(model, selectors)):
        selects_by(module, index, nth)


def install_routing(
    parts: Sequence[ModelPart], selectors: Selectors, device: torch.device, pp_group: dist.ProcessGroup | None = None
) -> Routing:
    """Let `router_replay.choosing`, and the column `ROUTED_EXPERTS` of a batch, replace the expert selection of these
    parts.

    Call it once per model, before the first step. Collective over the pipeline.
    """
    local_selectors = [entry for part in parts for entry in _selecting(part.model.base_model, selectors)]
    names = [name for name, _, _ in local_selectors]
    if pp_group is not None:
        stage_names: list[list[str]] = [[] for _ in range(dist.get_world_size(pp_group))]
        dist.all_gather_object(stage_names, names, group=pp_group)
        # The stages of a rank need not be adjacent.
        names = sorted((name for names_of_stage in stage_names for name in names_of_stage), key=_numbers_in)
    for name, module, nth in local_selectors:
        selects_by(module, names.index(name), nth)
    num_slots = len(list(decoder_slots(parts[0].model.base_model)))
    routing = Routing(tuple(_numbers_in(name)[0] for name in names), num_slots, RouterMismatchCounter(device))
    selecting = {module for _, module, _ in local_selectors}
    for part in parts:
        part.routing = routing
        for layer in part.model.base_model.modules():
            if selecting.intersection(layer.modules()):
                recomputes_alike(layer)
    return routing


def _numbers_in(name: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", name)))


def _unsupported(reason: str) -> ConfigError:
    return ConfigError(
        f"rollout.replay_routing=true is not supported because {reason}",
        code="not_supported_by_model",
        keys=("rollout.replay_routing",),
        fix="rollout.replay_routing=false",
    )
