"""Memory of a vision tower for one microbatch whose tokens are all image tokens, the most that it can hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from automodel_cli.distributed.activation_checkpointing.mode import is_recomputed
from automodel_cli.models.vision.work import FrontWork
from automodel_cli.planning.activation_memory import Activations

_OF_WIDTH = 8
"""Tensors of the tower's width that a block keeps: inputs of two norms, of queries, keys and values and of the MLP;
queries, keys, values and the output of attention."""
_OF_INNER = 2
"""Tensors inside the MLP: inputs of the activation and of the last matrix."""
_RESULTS_OF_WIDTH = 6
"""Results of a block that `selective` keeps: of queries, keys and values, of attention, of its projection and of the
MLP. The first matrix of the MLP has one more, of the inner width."""


@dataclass(frozen=True)
class TowerMemory:
    """Bytes of one microbatch. `kept` stay until the backward of the tower. `recomputed` exist for one block at a
    time."""

    patches: float
    kept: float
    recomputed: float

    def beside(self, text: Activations) -> Activations:
        """Return the activations of the text model and the tower before it."""
        return replace(text, before=text.before + self.kept, recomputed=max(text.recomputed, self.recomputed))


def tower_memory(
    work: FrontWork,
    mode: bool | int | str,
    *,
    patches: float,
    image_tokens: float,
    text_width: int,
    item_bytes: int,
    is_trained: bool,
) -> TowerMemory:
    """Estimate the memory. A frozen front end keeps its outputs only.

    Args:
        mode: `activation_checkpointing`. It applies to the blocks of the tower too.
        item_bytes: bytes of a value in the compute dtype.
    """
    ends = item_bytes * (patches * work.patch_elements + image_tokens * text_width)
    block = item_bytes * patches * (_OF_WIDTH * work.width + _OF_INNER * work.inner)
    if not is_trained:
        return TowerMemory(patches, ends, block)
    again = [is_recomputed(number, mode) for number in range(work.blocks)]
    inputs = item_bytes * patches * work.width
    if mode == "selective":
        inputs += item_bytes * patches * (_RESULTS_OF_WIDTH * work.width + work.inner)
    kept = sum(inputs if recomputed else block for recomputed in again)
    return TowerMemory(patches, ends + kept, block if any(again) else 0.0)
