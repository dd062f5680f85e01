"""What a model gives an objective for every token of a batch, and how an objective asks for more than log-probs.

Torch-free to import: objectives are nodes of the config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class HeadOutput(NamedTuple):
    """One microbatch through the model: what leaves its head, whole or the last stage of a pipeline.

    `logprobs_BT` fp32: log-prob of each label, 0 where it is ignored.

    A named tuple, so that FSDP, DDP and torch's pipeline find the tensors in it.
    """

    logprobs_BT: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> HeadOutput:
        """Every field changed alike."""
        return HeadOutput(*(change(field) for field in self))

    def detach(self) -> HeadOutput:
        """The same without gradients."""
        return self.map(lambda field: field.detach())
