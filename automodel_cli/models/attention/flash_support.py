"""Whether the CUDA flash kernels support the attention of a model, measured on the meta device."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from automodel_cli.models.attention import kernels as kernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_RECORDING = "asked_not_computed"


def why_no_flash_on_cuda(model: PreTrainedModel, dtype: torch.dtype) -> str:
    """Return the reason why CUDA flash kernels do not support a transformers model in `dtype`, or an empty string.

    Runs the forward of a copy on the meta device. The model is not changed.
    """
    reasons: list[str] = []

    def record(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object,
        softcap: float | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        reasons.append(kernels.why_not_flash_cuda(query, value, softcap))
        rows, heads, tokens, _width = query.shape
        return query.new_empty(rows, tokens, heads, value.shape[-1]), None

    from transformers import AttentionInterface

    meta_model = copy.deepcopy(model)
    nn.Module.to(meta_model, device="meta", dtype=dtype)
    AttentionInterface.register(_RECORDING, record)
    meta_model.set_attn_implementation(_RECORDING)
    ids_BT = torch.zeros(1, 8, dtype=torch.long, device="meta")
    with torch.no_grad():
        meta_model.base_model(input_ids=ids_BT, attention_mask=ids_BT.new_zeros(1, 1, 8, 8).to(dtype), use_cache=False)
    return next((reason for reason in reasons if reason), "")
