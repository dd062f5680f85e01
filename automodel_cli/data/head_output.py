"""Output of the LM head for each token of a batch, the request for outputs other than log-probs, and shared columns.

Torch-free to import, because objectives are config nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SOURCES = "sources_B"
"""Column of `Batch.extra` with the dataset of each sequence: int64, index in `data.mixture.Mixture`, -1 for none.
Present if the run has several datasets."""
LOSS_WEIGHTS = "loss_weights_B"
"""Column of `Batch.extra` with the loss weight of each sequence: fp32. Present if a weight differs from 1."""


@dataclass(frozen=True)
class HeadRequest:
    """Requested fields of `HeadOutput`."""

    entropy: bool = False
    """`entropy_BT`."""
    values: bool = False
    """`values_BT`: the model gets a value head (`models/lm_head/value_head.py`), trained, checkpointed and exported
    with it."""
    scores: int = 0
    """Outputs per token of a classification head, `scores_BTL`. It takes the place of the value head."""
    hidden: bool = False
    """`hidden_BTD`."""
    logprobs: bool = True
    """Compute `logprobs_BT` and everything else that needs logits. false: they are 0 and cost nothing."""
    topk: int = 0
    """Number of tokens in `topk_logprobs_BTK` and `topk_ids_BTK`."""
    token_ids: str | None = None
    """Column of `Batch.extra` with the tokens of `token_logprobs_BTN`: int64 `[B, T, N]`, below 0 for none."""
    lse: bool = False
    """`lse_BT`."""
    further: bool = False
    """`further_logprobs_BTM`, of a model with layers for multi-token prediction (`models/mtp/layers.py`)."""


LOGPROBS = HeadRequest()
"""Log-probs of the labels only."""


class HeadOutput(NamedTuple):
    """Head output of one microbatch, from the full model or from the last pipeline stage.

    All fields are fp32 except the ids and hidden states. All except values, scores and hidden states are 0 where the
    label is ignored. All except the ids are differentiable. With a `SamplingTransform`, they refer to the distribution
    that responses were sampled from. Fields that were not requested are None.

    A named tuple, so that FSDP, DDP and torch's pipeline find the tensors in it.
    """

    logprobs_BT: Tensor
    """Log-prob of each label."""
    entropy_BT: Tensor | None = None
    """Entropy in nats of the distribution of the label: exact, over the full vocabulary."""
    values_BT: Tensor | None = None
    """Output of the value head on each token's last hidden state, also for ignored labels."""
    scores_BTL: Tensor | None = None
    """Output of the classification head on each token's last hidden state, also for ignored labels."""
    hidden_BTD: Tensor | None = None
    """Hidden state of each token after the last layer, in the compute dtype."""
    topk_logprobs_BTK: Tensor | None = None
    """Log-probs of the most likely tokens at the label's position, in descending order."""
    topk_ids_BTK: Tensor | None = None
    """Ids of these tokens, int64."""
    token_logprobs_BTN: Tensor | None = None
    """Log-probs of given tokens at the label's position, for example of a teacher's top tokens. 0 for an id below 0."""
    further_logprobs_BTM: Tensor | None = None
    """Multi-token prediction: log-prob of the label 1, 2, ... M tokens later (`Batch.further_labels`)."""

    lse_BT: Tensor | None = None
    """Log-sum-exp of the logits at the label's position, for z-loss."""

    def map(self, change: Callable[[Tensor], Tensor]) -> HeadOutput:
        """Apply `change` to every field that is not None."""
        return HeadOutput(*(None if field is None else change(field) for field in self))  # type: ignore[arg-type]

    def detach(self) -> HeadOutput:
        """Return the output without gradients."""
        return self.map(lambda field: field.detach())
