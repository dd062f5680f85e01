"""Default validation: the loss on the held-out rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from automodel_cli.data.preparation.dataloader import eval_batches
from automodel_cli.training.callback import Callback, Run
from automodel_cli.training.validate import validate

if TYPE_CHECKING:
    from automodel_cli.run.trainer import Trainer


class HeldOutLoss(Callback):
    """The loss (`val_loss`), and the other metrics of the objective."""

    def __init__(self, session: Trainer):
        self._session = session

    def on_validation(self, run: Run, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Collective."""
        session = self._session
        if session.data.validation is None:
            return {}
        batches = eval_batches(
            session.data.validation,
            microbatch_size=session.recipe.train.microbatch_size,
            dp_rank=session.mesh.dp_rank,
            dp_size=session.mesh.dp_size,
            num_batches=session.recipe.validation.num_batches,
        )
        objective = session.recipe.validated_objective
        result = validate(session.model.stages, session.columns(batches), objective, session.mesh)
        measured = {f"val_{name}": value.item() for name, value in result.metrics.items()}
        # nan: of a dataset without validation rows
        return {"val_loss": result.loss.item(), **{name: v for name, v in measured.items() if not math.isnan(v)}}


class HeldOutBits(HeldOutLoss):
    """The same for an objective with bits per byte, which it prints."""

    def on_validation(self, run: Run, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Collective."""
        measured = super().on_validation(run, step, values)
        if "val_bits_per_byte" in measured:
            run.print(
                f"bits per byte {measured['val_bits_per_byte']:.3f} after step {step}, "
                f"of {measured['val_num_bytes']:,.0f} held-out bytes"
            )
        return measured


def print_accuracy(session: Trainer, when: str, step: int) -> None:
    """Print the accuracy on held-out pairs. Validate first if this step has no result. Collective."""
    if session.last_validation[0] != step:
        session.validate(step)
    measured = session.last_validation[1]
    if "val_accuracy" in measured:
        likelier = measured.get("val_likelier")
        more = "" if likelier is None else f" (chosen response likelier: {likelier:.1%})"
        session.meter.print(
            f"preference accuracy {when} training: {measured['val_accuracy']:.1%} of {measured['val_num_pairs']:.0f} "
            f"held-out pairs{more}"
        )
