"""What a validation measures where a recipe says nothing else: the loss on the held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from automodel_cli.data.loader import eval_batches
from automodel_cli.training.callback import Callback, Run
from automodel_cli.training.evaluate import evaluate

if TYPE_CHECKING:
    from automodel_cli.run.session import Session


class HeldOutLoss(Callback):
    """The loss (`val_loss`), and what else the objective measures."""

    def __init__(self, session: Session):
        self._session = session

    def on_validation(self, run: Run, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Collective."""
        session = self._session
        batches = eval_batches(
            session.data.validation,
            microbatch_size=session.recipe.train.microbatch_size,
            dp_rank=session.mesh.dp_rank,
            dp_size=session.mesh.dp_size,
            num_batches=session.recipe.validation.num_batches,
        )
        result = evaluate(session.model.stages, session.columns(batches), session.recipe.objective, session.mesh)
        measured = {f"val_{name}": value.item() for name, value in result.metrics.items()}
        return {"val_loss": result.loss.item(), **measured}
