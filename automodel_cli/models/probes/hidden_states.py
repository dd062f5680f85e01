"""Hidden states after every layer of a small copy, and their differences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from automodel_cli.distributed.typed_torch import modules_of
from automodel_cli.models import transformers_compat
from automodel_cli.models.attention import packed as packed
from automodel_cli.models.document_masking import recurrent_layers
from automodel_cli.models.document_masking.document_bounds import tensors_in
from automodel_cli.models.model_inputs import accepted_by
from automodel_cli.models.probes.tiny_model import build_small

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Longer than every window, chunk and index size of a tiny copy, or leaks would be hidden. One is longer than `SWITCH`.
DOCUMENTS = (13, 9)
UNMEASURED = "a small copy of the model does not run"
TOLERANCE = 1e-4  # relative to the largest hidden value. Leaks are at least 1e-2.


def small_model(small: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """Build the causal LM of a small config in float32."""

    def build(config: PretrainedConfig) -> PreTrainedModel:
        return transformers_compat.causal_lm(config, dtype=torch.float32, trust_remote_code=trust_remote_code)

    return build_small(small, build)


def probe_row(model: PreTrainedModel) -> Tensor:
    """Return random tokens `[1, T]` for `DOCUMENTS`."""
    vocab = model.config.get_text_config().vocab_size
    ids_T = torch.randint(3, vocab, (sum(DOCUMENTS),), generator=torch.Generator().manual_seed(0))
    return ids_T[None]


def first_difference(got: list[Tensor], want: list[Tensor], names: list[str]) -> tuple[float, str]:
    """Return the first difference above the tolerance or the largest one, and the layer where it occurs."""
    where, worst = "the model", 0.0
    for index, name in enumerate(names):
        gap = ((got[index] - want[index]).abs().max() / want[index].abs().max()).item()
        worst = max(worst, gap if gap == gap else float("inf"))
        if worst > TOLERANCE:
            where = name
            break
    return worst, where


def layer_outputs(model: PreTrainedModel, inputs: dict[str, Any]) -> tuple[list[Tensor], list[str]]:
    """Return hidden states after every decoder layer and of the base model, with a name for each."""
    outputs: list[Tensor] = []
    names: list[str] = []
    lists = (entries for _, entries in modules_of(model.base_model, nn.ModuleList))
    layers = max(lists, key=len, default=nn.ModuleList())

    def keep(module: nn.Module, args: object, output: object) -> None:
        outputs.append(next(tensors_in(output)))

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        with recurrent_layers.documents_of(model, inputs):
            hidden = model.base_model(**accepted_by(model, inputs), use_cache=False)[0]
    finally:
        for handle in handles:
            handle.remove()
    names = [f"layer {i} ({type(layer).__name__})" for i, layer in enumerate(layers)]
    if [tuple(o.shape) for o in outputs] != [tuple(hidden.shape)] * len(layers):
        outputs, names = [], []  # layers with other outputs: compare only the end
    return [*outputs, hidden], [*names, f"a layer of {type(model.base_model).__name__}"]
