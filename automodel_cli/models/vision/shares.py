"""Keywords of pictures on a rank that has a part of the tokens or of the layers.

The front end runs on full rows. Its results are of four kinds:

- positions: int `[3, B, T]`, needed by all layers
- by token: `[B, T, ...]`
- by placeholder: floats, a row for each image token, added to the hidden states after the first layers (deepstack)
- lists of these

Shapes: B rows of T tokens, t local tokens of a row, P image tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from automodel_cli.data.batch import Pictures
from automodel_cli.models.context_parallel_layout import Context
from automodel_cli.models.document_masking.document_bounds import tensors_in
from automodel_cli.models.vision.front import TYPE_IDS


class TokenShards(Protocol):
    """Ranks whose layers have equal shares of the tokens. Implemented by `distributed.tensor_parallel`."""

    def shard(self, x_BTD: Tensor) -> Tensor:
        """Return the local tokens `[B, t, D]`. Backward gathers the gradients of all tokens. Collective."""
        ...


def keywords_without_front(base: nn.Module, ids_BT: Tensor, pictures: Pictures) -> dict[str, object]:
    """Return what a later pipeline stage needs: positions, and types of tokens if the text model reads them."""
    takes = inspect.signature(base.forward).parameters
    found: dict[str, object] = {name: (ids_BT == pictures.placeholder).long() for name in TYPE_IDS if name in takes}
    if pictures.positions_3BT is not None:
        found["position_ids"] = pictures.positions_3BT.to(ids_BT.device)
    return found


def of_context(keywords: dict[str, object], is_shown_BT: Tensor, context: Context) -> tuple[dict[str, object], Tensor]:
    """Return the keywords of the local tokens of context parallelism, and which of these tokens show a picture.

    The gradient of the front end is that of the local tokens. Data parallelism sums it over the ranks.
    """
    local_Bt = context.local(is_shown_BT.long(), 0).bool()
    number_Bt = context.local(_numbers(is_shown_BT), 0)

    def local(value: object) -> object:
        match value:
            case list() | tuple():
                return [local(item) for item in value]
            case Tensor():
                return local_tensor(value)
            case _:
                return value

    def local_tensor(value: Tensor) -> Tensor:
        if value.ndim == is_shown_BT.ndim + 1 and not value.is_floating_point():
            return torch.stack([context.local_positions(positions_BT) for positions_BT in value])
        if value.shape[:2] == is_shown_BT.shape:
            return context.local(value.long(), 0).bool() if value.dtype == torch.bool else context.local(value, 0)
        return value[number_Bt[local_Bt]]

    return {name: local(value) for name, value in keywords.items()}, local_Bt


def of_layers(keywords: dict[str, object], is_shown_BT: Tensor, shards: TokenShards) -> dict[str, object]:
    """Return the keywords for layers that have a share of the tokens.

    Everything by token is unchanged, because the text model reads it before the first layer. Features by placeholder,
    and the mask of their tokens, are used between layers.
    """
    features = {name for name, value in keywords.items() if _is_by_placeholder(value, is_shown_BT)}
    if not features:
        return keywords
    local_Bt = shards.shard(is_shown_BT.float()[..., None])[..., 0].bool()

    def local(features_PD: Tensor) -> Tensor:
        dense_BTD = features_PD.new_zeros(*is_shown_BT.shape, features_PD.shape[-1])
        # [P, D] -> [B, T, D] with zeros at text -> local tokens [B, t, D] -> the local placeholders [p, D].
        dense_BTD = dense_BTD.masked_scatter(is_shown_BT[..., None], features_PD)
        return shards.shard(dense_BTD)[local_Bt]

    def of(name: str, value: object) -> object:
        match value:
            case Tensor() if name in features:
                return local(value)
            case list() | tuple() if name in features:
                return [local(item) for item in value]
            case Tensor(dtype=torch.bool, shape=is_shown_BT.shape):
                return local_Bt
            case _:
                return value

    return {name: of(name, value) for name, value in keywords.items()}


def num_feature_layers(keywords: Mapping[str, object], is_shown_BT: Tensor) -> int:
    """Return how many of the first layers read features by placeholder."""
    lists = [value for value in keywords.values() if _is_by_placeholder(value, is_shown_BT)]
    return max((len(list(tensors_in(value))) for value in lists), default=0)


def names_by_token(keywords: dict[str, object], is_shown_BT: Tensor) -> list[str]:
    """Return the names of floats by token besides `inputs_embeds`. All layers may read them."""
    return [
        name
        for name, value in keywords.items()
        if isinstance(value, Tensor)
        and name != "inputs_embeds"
        and value.is_floating_point()
        and value.shape[:2] == is_shown_BT.shape
    ]


def _is_by_placeholder(value: object, is_shown_BT: Tensor) -> bool:
    match value:
        case list() | tuple():
            return bool(value) and all(_is_by_placeholder(item, is_shown_BT) for item in value)
        case Tensor(ndim=2):
            return value.is_floating_point() and value.shape != is_shown_BT.shape
        case _:
            return False


def _numbers(is_shown_BT: Tensor) -> Tensor:
    """Return the number of each image token among all of them, in row-major order."""
    # 0 0 1 1 0 1 gives 0 0 0 1 1 2: tokens 2, 3 and 5 show features 0, 1 and 2. Values at other tokens are not used.
    return (is_shown_BT.flatten().cumsum(0) - 1).clamp(min=0).view_as(is_shown_BT)
