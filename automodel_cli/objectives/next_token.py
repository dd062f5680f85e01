"""Pretraining: the negative log-likelihood of the next token, bits per byte, and z-loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.config.value_checks import check_range
from automodel_cli.data.head_output import LOGPROBS, HeadRequest
from automodel_cli.objectives.base import Metric
from automodel_cli.objectives.sources import label_weight, weighted

if TYPE_CHECKING:
    from torch import Tensor

    from automodel_cli.data.batch import Batch
    from automodel_cli.data.head_output import HeadOutput


@dataclass(frozen=True)
class NextToken:
    """Loss = -sum of label log-probs / label tokens of the step, weighted as in `SFT`, plus z-loss.

    Z-loss is `z_loss_coef` times the mean of log(Z)^2 of the label tokens. Z is the sum of the exponentiated logits
    (z-loss: Chowdhery et al. 2022, arXiv:2204.02311, section 5). The value of the loss is that of the log-probs
    alone, so that runs with and without z-loss are comparable. `z_loss` is the mean of log(Z)^2.

    Bits per byte = -sum of label log-probs / ln 2 / UTF-8 bytes of the label tokens. Unlike the loss, it does not
    depend on the tokenizer. The end of a document has no bytes, but its log-prob counts.

    Example: two label tokens with log-probs -1 and -3 that stand for 5 bytes: the loss is 2, and 4 / 0.693 / 5 = 1.15
    bits per byte.
    """

    z_loss_coef: float = 0.0
    """Weight of the z-loss, which keeps the logits small. PaLM: 1e-4. 0: none."""
    bits_per_byte: bool = True
    """Report bits per byte. Requires a tokenizer whose tokens have a known number of bytes."""

    uses_loss_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("z_loss_coef", self.z_loss_coef, at_least=0, fix="objective.z_loss_coef=0")

    @property
    def columns(self) -> frozenset[str]:
        """Columns of `Batch.extra` that the metrics read."""
        return frozenset({"label_bytes_BT"} if self.bits_per_byte else ())

    @property
    def needs(self) -> HeadRequest:
        return HeadRequest(lse=True) if self.z_loss_coef else LOGPROBS

    @property
    def metrics(self) -> Mapping[str, Metric]:
        per_byte = {"bits_per_byte": Metric(per="num_bytes"), "num_bytes": Metric()} if self.bits_per_byte else {}
        z_loss = {"z_loss": Metric(per="num_z_tokens"), "num_z_tokens": Metric()} if self.z_loss_coef else {}
        return {**per_byte, **z_loss}

    def weight(self, batch: Batch) -> Tensor:
        return label_weight(batch)

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        loss = -weighted(output.logprobs_BT, batch).sum()
        if not self.z_loss_coef:
            return loss
        assert output.lse_BT is not None
        term = self.z_loss_coef * weighted(output.lse_BT.square(), batch).sum()  # 0 where the label is ignored
        return loss + (term - term.detach())

    def measure(self, output: HeadOutput, batch: Batch) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        if self.bits_per_byte:
            values["bits_per_byte"] = -output.logprobs_BT.sum() / math.log(2)
            values["num_bytes"] = batch.extra["label_bytes_BT"].sum().float()
        if self.z_loss_coef:
            assert output.lse_BT is not None
            values |= {"z_loss": output.lse_BT.square().sum(), "num_z_tokens": batch.num_label_tokens.float()}
        return values
