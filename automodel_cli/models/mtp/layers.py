"""Multi-token prediction layers, built from the classes of the model family, for packed sequences.

Depth k has two inputs: the hidden states of depth k - 1 (k = 1: those of the model after its last norm) and the
embeddings of the tokens k positions later. From its output, the model's head predicts the label k positions later.
Example: at position t with tokens a b c d, the model predicts b from a; depth 1 adds the embedding of b and predicts c
(arXiv:2412.19437, section 2.2; transformers' `MtpLayer` computes the same):

    hidden_k = norm(layer(eh_proj([enorm(embed(token t + k)), hnorm(hidden_k-1)])))

A depth is the family's own causal LM, cut to its last layer and its last norm, with the three modules in front of them
added as children. So rotary tables, masks, document boundaries, experts and states in it are whatever the family makes
of them, and everything that treats a library model (sharding, loading, export) treats a depth. Embedding and head are
the model's.

Shapes: B rows, T tokens, D hidden, M depths.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import IGNORE_INDEX, further
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.distributed.typed_torch import modules_of
from automodel_cli.models.context_parallel_layout import Context
from automodel_cli.models.document_masking import recurrent_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_DEPTH_FIELDS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
ADDED = ("enorm", "hnorm", "eh_proj")
"""Norm of the embeddings, norm of the hidden states, and the projection of both."""


def depths_in_config(hf_config: PretrainedConfig) -> int:
    """Return the number of depths in a library config, or 0."""
    text = hf_config.get_text_config()
    return next((int(n) for field in _DEPTH_FIELDS if (n := getattr(text, field, None))), 0)


class Depth(nn.Module):
    """One depth. `model` is the family's causal LM with one layer, without embedding and head."""

    def __init__(self, model: PreTrainedModel, *, hidden_first: bool = False):
        super().__init__()
        self.model = model
        self.hidden_first = hidden_first

    def forward(self, embedded_BTD: Tensor, hidden_BTD: Tensor, inputs: Mapping[str, object]) -> Tensor:
        """Return normed hidden states `[B, T, D]`. `inputs` are the keywords of the model's layers, without the
        tokens."""
        model = self.model
        # Depth k at position t sees the hidden state of depth k - 1 at t and the embedding of token t + k. It predicts
        # token t + k + 1. (B, T, 2 D) -> projection -> (B, T, D).
        both = [model.get_submodule("enorm")(embedded_BTD), model.get_submodule("hnorm")(hidden_BTD)]
        x_BTD = model.get_submodule("eh_proj")(torch.cat(both[::-1] if self.hidden_first else both, -1))
        output_BTD: Tensor = model.base_model(inputs_embeds=x_BTD, **inputs, use_cache=False)[0]
        return output_BTD


class MultiToken(nn.ModuleList):
    """All depths of a model, in order."""

    def hidden(
        self,
        embed: Callable[[Tensor], Tensor],
        hidden_BTD: Tensor,
        ids: Iterator[Tensor],
        inputs: Mapping[str, object],
    ) -> Iterator[Tensor]:
        """Return the hidden states of each depth. `ids`: this rank's tokens `[B, T]` 1, 2, ... positions later.
        `inputs`: keywords of the base model."""
        rest = {name: value for name, value in inputs.items() if name != "input_ids"}
        for depth, ids_BT in zip(self, ids, strict=False):
            with recurrent_layers.documents_of(cast(nn.Module, depth.model), {**inputs, "input_ids": ids_BT}):
                hidden_BTD = depth(embed(ids_BT), hidden_BTD, rest)
            yield hidden_BTD


def tokens_further(input_ids_BT: Tensor, cu_seqlens: Tensor) -> Iterator[Tensor]:
    """Return the tokens 1, 2, ... positions later in their documents. After the end of a document, token 0 is used:
    attention is causal, so no position with a label attends to it."""
    by = 0
    while True:
        by += 1
        yield further(input_ids_BT, by, cu_seqlens, 0)


def further_logprobs(
    head: Callable[[Tensor, Tensor], HeadOutput],
    depths: Sequence[Tensor],
    labels_BT: Tensor,
    cu_seqlens: Tensor,
    context: Context | None,
) -> Tensor:
    """Return log-probs of the labels 1, 2, ... tokens further on from the hidden states of each depth, `[B, T, M]`."""
    logprobs = []
    for by, hidden_BTD in enumerate(depths, start=1):
        # Shifted on full rows, before the local tokens are selected: the next token may be on another rank.
        labels = further(labels_BT, by, cu_seqlens, IGNORE_INDEX)
        labels = labels if context is None else context.local(labels, IGNORE_INDEX)
        logprobs.append(head(hidden_BTD, labels).logprobs_BT)
    return torch.stack(logprobs, -1)


def cut_to_depth(model: PreTrainedModel) -> None:
    """Reduce a model of all layers (best on meta) to one depth, in place, and add `ADDED`.

    Raises ConfigError for a model with modules other than layers, embedding, norm and head.
    """
    path, layers = decoder_list(model)
    norm = _last_norm(model, path)
    _drop_tables(model)
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, nn.ModuleList([layers[-1]]))
    _keep_last_layer_in(model.config.get_text_config(), len(layers))
    model.all_tied_weights_keys = {}
    weight = cast(Tensor, norm.weight)
    width = len(weight)
    for name in ADDED[:2]:
        model.add_module(name, copy.deepcopy(norm))
    projection = nn.Linear(2 * width, width, bias=False, device=weight.device, dtype=model.dtype)
    model.add_module(ADDED[2], projection)


def decoder_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Name and entries of the outermost list with one entry per layer of the config."""
    count = model.config.get_text_config().num_hidden_layers
    for name, module in modules_of(model, nn.ModuleList):
        if len(module) == count:
            return name, module
    raise _cannot(model, f"it has no module list with the config's {count} layers")


def last_norm_name(model: PreTrainedModel) -> str:
    """Name of the norm between the layers and the head."""
    norm = _last_norm(model, decoder_list(model)[0])
    return str(next(name for name, module in model.named_modules() if module is norm))


def _drop_tables(model: PreTrainedModel) -> None:
    tables = {model.get_input_embeddings(), model.get_output_embeddings()}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child in tables:
                setattr(module, name, None)


def _last_norm(model: PreTrainedModel, layers: str) -> nn.Module:
    width = model.config.get_text_config().hidden_size
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    norms = [
        (name, module)
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
        and not f"{name}.".startswith(f"{layers}.")
        and module not in tables
    ]
    if len(norms) != 1 or [tuple(p.shape) for p in norms[0][1].parameters()] != [(width,)]:
        names = ", ".join(name for name, _ in norms) or "nothing"
        raise _cannot(model, f"it must have one norm in addition to embedding, layers and head, but has {names}")
    result: nn.Module = norms[0][1]
    return result


def _keep_last_layer_in(text: PretrainedConfig, num_layers: int) -> None:
    """A config with one layer, whose lists by layer have the last one's entry."""
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == num_layers and not name.startswith("_"):
            setattr(text, name, value[-1:])
    text.num_hidden_layers = 1


def _cannot(model: nn.Module, reason: str) -> ConfigError:
    return ConfigError(
        f"mtp is not supported with {type(model).__name__} because {reason}",
        code="not_supported_by_model",
        keys=("mtp",),
        fix="model.mtp=null",
    )
