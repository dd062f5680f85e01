"""What a model gives an objective for every token of a batch, and how an objective asks for more than log-probs.

Torch-free to import: objectives are nodes of the config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True)
class HeadRequest:
    """The fields of `HeadOutput` that somebody wants."""

    entropy: bool = False
    """`entropy_BT`."""
    values: bool = False
    """`values_BT`: the model gets a value head (`models/lm_head/value_head.py`), trained, checkpointed and exported
    with it."""
    logprobs: bool = True
    """False: nobody reads `logprobs_BT` or what is made of logits; all of it is 0 and costs nothing."""
    topk: int = 0
    """`topk_logprobs_BTK` and `topk_ids_BTK` of so many tokens."""
    token_ids: str | None = None
    """`token_logprobs_BTN` of the tokens in this column of `Batch.extra`: int64 `[B, T, N]`, below 0 for none."""
    further: bool = False
    """`further_logprobs_BTM`, of a model with layers for multi-token prediction (`models/mtp/layers.py`)."""


LOGPROBS = HeadRequest()
"""Nothing but the log-probs of the labels."""


class HeadOutput(NamedTuple):
    """One microbatch through the model: what leaves its head, whole or the last stage of a pipeline.

    fp32, and all but the values 0 (also the ids) where the label is ignored. All but the ids are differentiable. Under
    a `SamplingTransform` they are of the distribution that completions were drawn from. Fields that nobody asked for
    are None.

    A named tuple, so that FSDP, DDP and torch's pipeline find the tensors in it.
    """

    logprobs_BT: Tensor
    """Log-prob of each label."""
    entropy_BT: Tensor | None = None
    """Entropy in nats of the distribution that the label is drawn from: exact, over the whole vocabulary."""
    values_BT: Tensor | None = None
    """What the value head makes of each token's last hidden state; of every token, ignored or not."""
    topk_logprobs_BTK: Tensor | None = None
    """Log-probs of the likeliest tokens in the label's place, largest first."""
    topk_ids_BTK: Tensor | None = None
    """Which tokens those are, int64."""
    token_logprobs_BTN: Tensor | None = None
    """Log-probs of given tokens in the label's place, as of a teacher's likeliest ones; 0 for an id below 0."""
    further_logprobs_BTM: Tensor | None = None
    """By multi-token prediction: log-prob of the label 1, 2, ... M tokens further on (`Batch.further_labels`)."""

    def map(self, change: Callable[[Tensor], Tensor]) -> HeadOutput:
        """Every field that is there changed alike."""
        return HeadOutput(*(None if field is None else change(field) for field in self))  # type: ignore[arg-type]

    def detach(self) -> HeadOutput:
        """The same without gradients."""
        return self.map(lambda field: field.detach())
