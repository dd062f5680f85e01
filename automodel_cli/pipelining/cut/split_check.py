"""Check on a tiny random copy whether a model can be split into stages exactly.

There is no list of supported families. The copy runs once unsplit and once as three uneven stages. Outputs and all
gradients must agree. Otherwise the error reports the first layer that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.models import transformers_compat
from automodel_cli.models.lm_head.head import HeadKind
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.probes.tiny_model import build_small, shrink
from automodel_cli.pipelining.cut.cut_stage import cut_stage
from automodel_cli.pipelining.cut.model_structure import (
    LayerOutput,
    ModelStructure,
    NotMeasuredError,
    SplitError,
    hidden_of,
    observe,
)
from automodel_cli.pipelining.cut.stage_module import PATCHED, Ready, StandIn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

TOLERANCE = 1e-5  # Relative to the largest value. A wrong split differs by 1e-2 or more.
_TOKENS = 24
_checked: dict[tuple[type, str, Ready], ModelStructure] = {}


def check_split(model: PreTrainedModel, ready: Ready = PATCHED) -> ModelStructure:
    """Return the structure of the model's family, after its split was verified on a small copy. Raises SplitError.

    Takes a second on a CPU, once per small copy and process. `model` itself is not run and may be on the meta device.
    """
    small = _small(type(model), model.config)
    key = (type(model), small.to_json_string(), ready)
    if key not in _checked:
        _checked[key] = _probe(type(model), small, ready)
    return _checked[key]


def probe(model_class: type[PreTrainedModel], config: PretrainedConfig) -> ModelStructure:
    """Run `check_split` for a class and its config, without the cache."""
    return _probe(model_class, _small(model_class, config))


def _small(model_class: type[PreTrainedModel], config: PretrainedConfig) -> PretrainedConfig:
    with _unknown_unless_refused(model_class):
        return shrink(config)


def _probe(model_class: type[PreTrainedModel], small: PretrainedConfig, ready: Ready = PATCHED) -> ModelStructure:
    def build(config: PretrainedConfig) -> PreTrainedModel:
        model: PreTrainedModel = model_class._from_config(
            config, attn_implementation="eager"
        )  # The constructor that all Auto classes use.
        transformers_compat.settle_names(model)
        return model

    with _unknown_unless_refused(model_class):
        model = build_small(small, build).eval()  # Without dropout and router noise.
    anatomy = observe(model)
    compare_split(ModelPart(model, HeadKind("generic")), anatomy, ready)
    return anatomy


@contextmanager
def _unknown_unless_refused(model_class: type[PreTrainedModel]) -> Iterator[None]:
    """Convert errors of a small copy: rejected models raise SplitError, copies that cannot be built raise
    NotMeasuredError.
    """
    try:
        yield
    except ConfigError as error:
        raise SplitError(model_class.__name__, error.message) from error
    except Exception as error:
        raise NotMeasuredError(
            model_class.__name__, f"no small copy of the model can be built to measure a split: {error!r}"
        ) from error


def compare_split(part: ModelPart, anatomy: ModelStructure, ready: Ready = PATCHED) -> None:
    """Run `part` unsplit and as three uneven stages. Raises SplitError if outputs or gradients differ."""
    count = len(list(part.model.get_submodule(anatomy.layers).children()))
    cuts = (0, max(count // 2, 1), max(count - 1, 1), count)
    try:
        stages = [  # Before any forward, because some layers store results.
            cut_stage(part, anatomy, layers=range(a, b), is_first=s == 0, is_last=s == 2, ready=ready)
            for s, (a, b) in enumerate(pairwise(cuts))
        ]
    except Exception as error:
        raise SplitError(part.model, f"its stages cannot be built: {error!r}") from error
    try:
        unsplit = _run([part], anatomy)
    except Exception as error:
        raise NotMeasuredError(part.model, f"a small copy of the model does not train: {error!r}") from error
    try:
        split = _run(stages, anatomy)
    except Exception as error:
        raise SplitError(part.model, f"its stages do not run: {_why(error)}") from error
    for name, want in unsplit.items():
        if not _agree(split.get(name), want):
            raise SplitError(part.model, f"{name} differs between its stages and the unsplit model")


def _why(error: Exception) -> str:
    if isinstance(error, AttributeError) and isinstance(error.obj, StandIn):
        return f"outside of its layers it reads their {error.name!r}, and another stage has them"
    return repr(error)


def _agree(got: Tensor | None, want: Tensor) -> bool:
    if got is None:
        return bool(want.abs().max() == 0)
    return got.shape == want.shape and bool((got - want).abs().max() <= TOLERANCE * want.abs().max())


def _run(parts: Sequence[ModelPart], anatomy: ModelStructure) -> dict[str, Tensor]:
    """Run one forward and backward through consecutive parts, and return the results by name.

    The order is that of reported differences: output of each layer, log-probs, gradients (summed over tied copies).
    """
    results: dict[str, Tensor] = {}
    handles = [
        layer.register_forward_hook(_keeper(results, f"the output of {anatomy.layers}.{i}"))
        for part in parts
        for i, layer in part.model.get_submodule(anatomy.layers).named_children()
        if not isinstance(layer, StandIn)
    ]
    try:
        results["the log-prob"] = forward_backward(parts, _fixed_inputs())
    finally:
        for handle in handles:
            handle.remove()
    return results | take_gradients(parts)


def _keeper(results: dict[str, Tensor], name: str) -> Callable[..., None]:
    def keep(module: nn.Module, args: object, output: LayerOutput) -> None:
        results[name] = hidden_of(output).detach()

    return keep


def _fixed_inputs() -> dict[str, Tensor]:
    """Return a fixed random sequence."""
    ids_BT = torch.randint(3, 100, (1, _TOKENS), generator=torch.Generator().manual_seed(7))
    return {"labels": ids_BT.roll(-1, 1), "input_ids": ids_BT, "position_ids": torch.arange(_TOKENS)[None]}


def forward_backward(parts: Sequence[ModelPart], inputs: Mapping[str, Any]) -> Tensor:
    """Run consecutive parts. Return the log-probs, and leave the gradients of their sum on the parts."""
    boundaries: list[tuple[Tensor, Tensor]] = []
    output = parts[0](None, **inputs)
    for part in parts[1:]:
        received = output.detach().requires_grad_()
        boundaries.append((output, received))
        output = part(received, **inputs)
    output.logprobs_BT.sum().backward()
    for sent, received in reversed(boundaries):
        sent.backward(received.grad)
    logprobs_BT: Tensor = output.logprobs_BT.detach()
    return logprobs_BT


def take_gradients(parts: Sequence[ModelPart]) -> dict[str, Tensor]:
    """Return the gradients by name (summed over tied copies), and remove them from the parts."""
    gradients: dict[str, Tensor] = {}
    for part in parts:
        for name, param in part.named_parameters():
            if param.grad is not None:
                key = f"the gradient of {part.hub_name(name)}"
                gradients[key] = gradients[key] + param.grad if key in gradients else param.grad
                param.grad = None
    return gradients
