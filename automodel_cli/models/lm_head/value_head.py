"""One number per token from the last hidden state: what a critic or a reward model trains beside the language model.

A child of the part (of the last stage), so its parameter is `value_head.weight` in checkpoints, and every strategy
shards it with the rest of the part. It has no bias, as the `score` of the library's sequence classifiers. An export
stores it beside the model, in a file of its own that `transformers` does not look at; loading such a folder finds it
again. What a reward model is exported as: `models/checkpoint_io/sequence_classifier.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel_cli.models import transformers_compat

FILE = "value_head.safetensors"


class ValueHead(nn.Linear):
    """fp32 values `[B, T]` of hidden states `[B, T, D]`, whatever dtype the parameters are computed with."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device | str):
        super().__init__(hidden_size, 1, bias=False, dtype=dtype, device=device)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        values_BT1 = F.linear(hidden_BTD.float(), self.weight.float())
        return values_BT1.squeeze(-1).clone()  # FSDP2 warns of wrong gradients where a module returns a view


def fill_value_head(head: ValueHead, folder: Path | None) -> None:
    """With what an export in `folder` holds; else zeros: no token is worth anything yet, in any layout."""
    stored = _read(folder)
    with torch.no_grad():
        for name, param in head.named_parameters():
            value = stored[name] if name in stored else torch.zeros(param.shape)
            local = transformers_compat.local(param)
            local.copy_(transformers_compat.local_part(param, value.to(param.dtype)))


def _read(folder: Path | None) -> Mapping[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / FILE) if folder is not None and (folder / FILE).exists() else {}


def named_weights(heads: Sequence[ValueHead]) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters by their names in the file. Collective over the ranks that share the head's part."""
    for head in heads:
        for name, param in head.named_parameters():
            yield name, transformers_compat.full_tensor(param).detach()


def write_value_head(folder: Path, weights: Sequence[tuple[str, Tensor]]) -> None:
    """Nothing where there are no weights."""
    from safetensors.torch import save_file

    tensors = {name: tensor.cpu().float().contiguous() for name, tensor in weights}
    if tensors:
        save_file(tensors, folder / FILE, metadata={"format": "pt"})
