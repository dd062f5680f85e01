"""Trained rows of the embedding and the head beside adapters, in the file format of `peft` (`trainable_token_indices`).

The rows of the given tokens are one parameter `[N, D]` that replaces rows of the frozen table. `peft` copies the table
in every forward. Here the embedding replaces the outputs of these tokens, and the head their logits::

    embedding   y_t = rows[i] if token t is ids[i], else table[t]
    head        z = x W^T;  z[ids] = x rows^T

A tied head shares the rows. An untied head has its own. Rows are replicated under tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.adapter_layers import is_adapter
from automodel_cli.models import transformers_compat
from automodel_cli.models.lora.layer import ADAPTER, AdapterLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FILE_NAME = "token_adapter.trainable_tokens_delta"


class TokenRows(AdapterLayer):
    """An embedding or a head with trained rows. The wrapped layer is `base_layer`, as in the layers of `peft`.

    Attributes:
        token_ids: sorted ids of the rows.
        is_tied: the rows are those of the embedding.
        scaling: 0 computes with the frozen table (`lora.adapters_off`).
    """

    lora_A: dict[str, nn.Linear] = {}  # noqa: RUF012  # no matrices; the name marks a wrapper
    lora_B: dict[str, nn.Linear] = {}  # noqa: RUF012

    def __init__(self, base_layer: nn.Module, token_ids: Sequence[int], rows: nn.Parameter | None = None):
        super().__init__()
        self.base_layer = base_layer
        self.token_ids, self.is_tied = tuple(token_ids), rows is not None
        table = cast(Tensor, base_layer.weight)  # of an embedding or a linear layer
        empty = torch.empty(len(self.token_ids), table.shape[1], dtype=table.dtype, device=table.device)
        self.trainable_tokens_delta = nn.Parameter(empty) if rows is None else rows
        self.scaling = {ADAPTER: 1.0}

    @property
    def weight(self) -> Tensor:
        """The frozen table `[V, D]`."""
        return cast(Tensor, self.base_layer.weight)

    def get_base_layer(self) -> nn.Module:
        return self.base_layer

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        y: Tensor = self.base_layer(x, *args, **kwargs)
        if not self.scaling[ADAPTER]:
            return y
        ids_N = torch.tensor(self.token_ids, device=y.device)
        rows_ND = self.trainable_tokens_delta
        if not isinstance(self.base_layer, nn.Embedding):
            return y.index_copy(-1, ids_N, F.linear(x, rows_ND).to(y.dtype))
        at = torch.searchsorted(ids_N, x).clamp(max=len(self.token_ids) - 1)
        new = F.embedding(at, rows_ND)
        scale = getattr(self.base_layer, "embed_scale", None)  # Gemma
        new = new if scale is None else new * scale.to(new.dtype)
        return torch.where((ids_N[at] == x)[..., None], new.to(y.dtype), y)


def add_rows(model: PreTrainedModel, token_ids: Sequence[int]) -> dict[str, list[int]]:
    """Wrap the embedding and the head in place, unless they are trained completely. Works on the meta device.

    Returns the ids by module name, as `peft` stores them. Raises ConfigError for an id outside of the table, and for a
    table with an adapter.
    """
    ids = sorted(set(token_ids))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    found: dict[str, list[int]] = {}
    wrapped: TokenRows | None = None
    for table in (embedding, head):
        if table is None or not ids or table.weight.requires_grad:
            continue
        name = next(name for name, module in model.named_modules() if module is table)
        _check(name, table, ids)
        rows = wrapped.trainable_tokens_delta if tied and wrapped is not None else None
        layer = TokenRows(table, ids, rows)
        wrapped = wrapped or layer
        model.get_submodule(name.rpartition(".")[0])._modules[name.rpartition(".")[2]] = layer
        if not layer.is_tied:
            found[name.rpartition(".")[2]] = ids
    return found


def _check(name: str, table: nn.Module, ids: list[int]) -> None:
    size = len(cast(Tensor, table.weight))
    if ids[-1] >= size or ids[0] < 0:
        raise ConfigError(
            f"lora.trainable_token_indices has {ids[-1] if ids[-1] >= size else ids[0]}, but the table has {size} rows",
            code="out_of_range",
            keys=("lora.trainable_token_indices",),
            fix="model.lora.trainable_token_indices=[]",
        )
    if is_adapter(table):
        raise ConfigError(
            f"lora.target_modules matches {name}, whose new rows are trained. A table is trained by one of them",
            code="unsupported_combination",
            keys=("lora.target_modules", "lora.trainable_token_indices", "tokenizer.add_tokens"),
            fix="model.lora.target_modules=all-linear",
        )


def file_name(name: str) -> str:
    """Return the name of a layer's rows in files of `peft`."""
    return f"{name}.{_FILE_NAME}"


@torch.no_grad()
def start(layer: TokenRows) -> None:
    """Fill the rows with those of the table. Collective if the table is sharded."""
    rows = layer.trainable_tokens_delta
    full = transformers_compat.full_tensor(layer.weight)[list(layer.token_ids)]
    local = transformers_compat.local(rows)
    local.copy_(transformers_compat.local_part(rows, full.to(local.device)))


def merged(table: Tensor, layer: TokenRows) -> Tensor:
    """Return the full table with the trained rows, in float32. Collective if they are sharded."""
    rows = transformers_compat.full_tensor(layer.trainable_tokens_delta).to(table.device, torch.float32)
    return table.float().index_copy(0, torch.tensor(layer.token_ids, device=table.device), rows)
