"""Pretraining on plain text: from random weights, or continued from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.objectives.next_token import NextToken
from automodel_cli.recipes.sft import SFTRecipe

if TYPE_CHECKING:
    from automodel_cli.data.batch import Batch, Columns
    from automodel_cli.run.trainer import Trainer
    from automodel_cli.run.validation_loss import HeldOutLoss


@dataclass(frozen=True, kw_only=True)
class PretrainRecipe(SFTRecipe):
    """`SFTRecipe` on plain text, every token of which is trained. Reports bits per byte."""

    objective: NextToken
    """Next-token loss with bits per byte and z-loss."""

    kind: ClassVar[str] = "pretrain"

    def columns(self, session: Trainer) -> Columns:
        """The number of bytes of each label. Raises ConfigError for a tokenizer that does not determine them."""
        import torch

        from automodel_cli.data.batch import unchanged
        from automodel_cli.data.token_bytes import token_bytes

        if not self.objective.bits_per_byte:
            return unchanged
        counts_V = torch.from_numpy(token_bytes(session.tokenizer, len(session.tokenizer)))

        def with_bytes(batches: Sequence[Batch]) -> list[Batch]:
            return [
                batch.with_columns(
                    label_bytes_BT=counts_V.to(batch.labels_BT.device)[batch.labels_BT.clamp(min=0)]
                    * (batch.labels_BT >= 0)
                )
                for batch in batches
            ]

        return with_bytes

    def held_out_loss(self, session: Trainer) -> HeldOutLoss:
        from automodel_cli.run.validation_loss import HeldOutBits

        return HeldOutBits(session)
