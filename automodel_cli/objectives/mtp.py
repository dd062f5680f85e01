"""Multi-token prediction loss in addition to an objective (arXiv:2412.19437, eq. 24-25).

`loss = objective + loss_weight / M * sum_k sum_t(-log p_k(label of token t + k)) / weight` for M depths k. All terms
are divided by the objective's own weight (for SFT the label tokens of the step), as the paper divides each depth by the
text length. The step knows this denominator before its first forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from automodel_cli.objectives.base import Metric, Objective, metrics_of, request_of, term_weights_of
from automodel_cli.objectives.sources import weighted

if TYPE_CHECKING:
    from torch import Tensor

    from automodel_cli.data.batch import Batch
    from automodel_cli.data.head_output import HeadOutput, HeadRequest


@dataclass(frozen=True)
class WithMultiToken:
    """`objective` with the multi-token prediction loss.

    The value is that of `objective`, the gradient is that of both. `loss` therefore stays comparable with runs without
    multi-token prediction. `mtp_loss` is the mean per label token.
    """

    objective: Objective
    loss_weight: float

    @property
    def needs(self) -> HeadRequest:
        return replace(request_of(self.objective), further=True)

    @property
    def metrics(self) -> Mapping[str, Metric]:
        mtp_values = {"mtp_loss": Metric(per="num_mtp_tokens", shown=True), "num_mtp_tokens": Metric()}
        return {**metrics_of(self.objective), **mtp_values}

    def weight(self, batch: Batch) -> Tensor:
        return self.objective.weight(batch)

    def term_weights(self, batch: Batch) -> Mapping[str, Tensor]:
        return term_weights_of(self.objective, batch)

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        logprobs_BTM = _further(output)
        term = -self.loss_weight / logprobs_BTM.shape[-1] * weighted(logprobs_BTM, batch).sum()
        # The difference is 0 in value. Its gradient is that of `term`.
        return self.objective(output, batch) + (term - term.detach())

    def measure(self, output: HeadOutput, batch: Batch) -> dict[str, Tensor]:
        from automodel_cli.data.batch import IGNORE_INDEX

        logprobs_BTM = _further(output)
        counts = [(batch.further_labels(k + 1) != IGNORE_INDEX).sum() for k in range(logprobs_BTM.shape[-1])]
        mtp_values = {"mtp_loss": -logprobs_BTM.sum(), "num_mtp_tokens": sum(counts[1:], counts[0]).float()}
        measure = getattr(self.objective, "measure", None)
        return mtp_values if measure is None else {**measure(output, batch), **mtp_values}


def _further(output: HeadOutput) -> Tensor:
    assert output.further_logprobs_BTM is not None, "the part has no multi-token prediction layers"
    return output.further_logprobs_BTM
