"""Value head: one or several numbers per token from the last hidden state, for critics, reward models and classifiers.

It is a child of the last part, so its parameter is `value_head.weight` in checkpoints, and every strategy shards it
with the part. It has no bias, like `score` of the sequence classifiers of transformers. Exports store it in a separate
file, which transformers ignores. Loading the folder restores it. Reward models and classifiers are exported by
`models/checkpoint_io/sequence_classifier.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel_cli.models import transformers_compat

FILE = "value_head.safetensors"


class ValueHead(nn.Linear):
    """Maps hidden states `[B, T, D]` to fp32 values `[B, T, L]`, in any compute dtype."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device | str, num_outputs: int = 1):
        super().__init__(hidden_size, num_outputs, bias=False, dtype=dtype, device=device)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return F.linear(hidden_BTD.float(), self.weight.float()).clone()  # FSDP2 warns about modules that return a view


def fill_value_head(head: ValueHead, weight_LD: Tensor | None) -> None:
    """Set the weight, which may be sharded. None: zeros, so all values are 0."""
    with torch.no_grad():
        value = torch.zeros(head.weight.shape) if weight_LD is None else weight_LD
        local = transformers_compat.local(head.weight)
        local.copy_(transformers_compat.local_part(head.weight, value.to(head.weight.dtype)))


def read_value_head(folder: Path | None) -> Tensor | None:
    """Return the weight `[L, D]` in the file of an export, None without a file."""
    from safetensors.torch import load_file

    return load_file(folder / FILE)["weight"] if folder is not None and (folder / FILE).exists() else None


def named_weights(heads: Sequence[ValueHead]) -> Iterator[tuple[str, Tensor]]:
    """Yield full parameters by their names in the file. Collective over the ranks that shard the part."""
    for head in heads:
        for name, param in head.named_parameters():
            yield name, transformers_compat.full_tensor(param).detach()


def write_value_head(folder: Path, weights: Sequence[tuple[str, Tensor]]) -> None:
    """Write the file. Does nothing without weights."""
    from safetensors.torch import save_file

    tensors = {name: tensor.cpu().float().contiguous() for name, tensor in weights}
    if tensors:
        save_file(tensors, folder / FILE, metadata={"format": "pt"})
