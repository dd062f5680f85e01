"""Structure of a causal LM for a pipeline, observed in one run of a small copy.

A model can be split if its decoder is one list of layers, each executed once and in order, and all other modules with
parameters run before the first or after the last layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.probes.tiny_model import LAYER_COUNTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FIX = "mesh.pp_size=1"
_IDS_BT = torch.arange(3, 9)[None]


@dataclass(frozen=True)
class ModelStructure:
    """Module names, as in the `ForCausalLM` class of the hub.

    Attributes:
        layers: the decoder list.
        arity: length of the tuple that a layer returns. None: a tensor.
        before: modules with parameters that run before the first layer.
        after: modules with parameters that run after the last layer.
        streams: layers return hidden states `[B, T, *streams, D]`. Hyper-connections have several residual streams.
    """

    layers: str
    arity: int | None
    before: tuple[str, ...]
    after: tuple[str, ...]
    streams: tuple[int, ...] = ()


class SplitError(ConfigError):
    """The model cannot be split into pipeline stages."""

    code = "not_supported_by_model"

    def __init__(self, model: nn.Module | str, reason: str):
        name = model if isinstance(model, str) else type(model).__name__
        super().__init__(f"{name} cannot be split into pipeline stages: {reason}", keys=("pp_size",), fix=_FIX)
        self.reason = reason


class NotMeasuredError(SplitError):
    """The small copy of the model cannot be built or run, so it is unknown whether the model can be split."""

    code = "not_measured"


def find_decoder_layers(model: PreTrainedModel) -> str:
    """Return the name of the decoder list: the outermost ModuleList or ModuleDict with one entry per layer of the
    config.

    Some families have their own config field for the number of layers.
    """
    if model.config.is_encoder_decoder:
        raise SplitError(model, "encoder-decoder models would need two streams between stages")
    text = model.config.get_text_config()
    counts = {value for name in LAYER_COUNTS if (value := getattr(text, name, None))}
    lists = [
        name for name, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.ModuleDict)) and len(m) in counts
    ]
    outermost = [name for name in lists if not any(name.startswith(other + ".") for other in lists)]
    if len(outermost) != 1:
        names = ", ".join(outermost) or "none"
        expected = " or ".join(str(count) for count in sorted(counts)) or "unknown number of"
        raise SplitError(model, f"expected one module list with the {expected} layers of the config, found {names}")
    return str(outermost[0])


@torch.no_grad()
def observe(small: PreTrainedModel) -> ModelStructure:
    """Run `small` (a tiny copy with at least two layers) on a few tokens and record the order of its modules.

    Raises SplitError if the model does not run each layer once and in order.
    """
    path = find_decoder_layers(small)
    layers = list(small.get_submodule(path).children())
    watch = _Watch(len(layers))
    handles = [layer.register_forward_pre_hook(watch.layer_hook(i)) for i, layer in enumerate(layers)]
    handles += [layer.register_forward_hook(watch.output) for layer in layers]
    outside = {
        name: module
        for name, module in small.named_modules()
        if any(True for _ in module.parameters(recurse=False)) and not name.startswith(path + ".")
    }
    handles += [module.register_forward_pre_hook(watch.module_hook(name)) for name, module in outside.items()]
    try:
        small(input_ids=_IDS_BT, use_cache=False)
    except Exception as error:
        raise NotMeasuredError(small, f"a small copy of the model does not run: {error!r}") from error
    finally:
        for handle in handles:
            handle.remove()
    return _conclude(small, path, outside, watch)


LayerOutput = Tensor | tuple[Tensor, ...] | list[Tensor]


def hidden_of(output: LayerOutput) -> Tensor:
    """Return the hidden states in the output of a layer, which are its first entry in some families."""
    return output[0] if isinstance(output, (tuple, list)) else output


class _Watch:
    """Records after how many layers each module runs."""

    def __init__(self, count: int):
        self.count, self.order, self.arities = count, list[int](), set[int | None]()
        self.shapes = set[tuple[int, ...]]()
        self.started_at: dict[str, set[int]] = {}

    def layer_hook(self, index: int) -> Callable[[nn.Module, object], None]:
        return lambda module, args: self.order.append(index)

    def module_hook(self, name: str) -> object:
        return lambda module, args: self.started_at.setdefault(name, set()).add(len(self.order))

    def output(self, module: nn.Module, args: object, output: LayerOutput) -> None:
        hidden_BTD = hidden_of(output)
        self.arities.add(None if hidden_BTD is output else len(output))
        self.shapes.add(tuple(hidden_BTD.shape))


def _conclude(model: PreTrainedModel, path: str, outside: dict[str, nn.Module], watch: _Watch) -> ModelStructure:
    if watch.order != list(range(watch.count)):
        raise SplitError(model, f"{path} must run each layer once and in order, but runs them as {watch.order}")
    if len(watch.arities) != 1:
        raise SplitError(model, f"its layers return tuples of different lengths: {watch.arities}")
    shape = next(iter(watch.shapes))
    if len(watch.shapes) != 1 or shape[:2] != _IDS_BT.shape:
        raise SplitError(
            model, f"its layers must return hidden states [B, T, ...], but return the shapes {sorted(watch.shapes)}"
        )
    before, after = [], []
    for name in outside:
        times = watch.started_at.get(name, {0})  # A module that never runs stays with the embedding.
        if times == {0}:
            before.append(name)
        elif times == {watch.count}:
            after.append(name)
        else:
            raise SplitError(
                model, f"{name} runs between or around the layers (after {sorted(times)} of {watch.count})"
            )
    return ModelStructure(path, watch.arities.pop(), _outermost(before), _outermost(after), shape[2:-1])


def _outermost(names: list[str]) -> tuple[str, ...]:
    """Remove modules inside another module of the list."""
    return tuple(name for name in names if not any(name.startswith(other + ".") for other in names))


def tied_embedding(model: PreTrainedModel) -> str | None:
    """Return the name of the input embedding if it is tied to the head, else None."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not table.weight:
        return None
    name: str = next(name for name, module in model.named_modules() if module is table)
    return name
