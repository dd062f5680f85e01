"""Accuracy on held-out questions before and after training, for tasks with exact answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from automodel_cli.data.data_sources import answer_checker
from automodel_cli.models.checkpoint_io.weight_stream import iter_hf_weights

if TYPE_CHECKING:
    from automodel_cli.run.heldout_accuracy import Accuracy
    from automodel_cli.run.trainer import Trainer


class HeldOutQuestions:
    """Evaluates a replica of the model, loaded from the stream of unsharded weights. Rank 0 generates."""

    def __init__(self) -> None:
        self.accuracy: dict[str, Accuracy] = {}
        """Accuracy by `before` and `after`. Empty if the data has no such questions."""

    def ask(self, session: Trainer, when: str) -> None:
        """Measure and print the accuracy under the name `when`. No effect for data without a task that can check
        answers. Collective."""
        task = session.recipe.data.generator
        questions = [] if task is None else list(task.rows("validation"))
        check = answer_checker(task, questions)
        if check is None or not questions:
            return
        from automodel_cli.rollout.engines.policy_engine import build_replica, stop_token_ids
        from automodel_cli.rollout.monitoring.accuracy import (
            measure_accuracy,  # only runs with a task pay for generation
        )

        parts = session.model.parts
        weights = iter_hf_weights(parts, dtype=parts[0].dtype, hub_names=False, pp_group=session.model.pp_group)
        if not session.is_main:
            for _ in weights:  # the stream is collective: every rank must exhaust it
                pass
            return
        with session.meter.pause():
            engine = build_replica(session, stop_token_ids(session))
            engine.update_weights(weights)
            accuracy = measure_accuracy(engine, session.tokenizer, questions, check)
        self.accuracy[when] = accuracy
        kinds = "  ".join(f"{kind} {share:.0%}" for kind, share in accuracy.by_kind().items())
        session.meter.print(
            f"accuracy {when} training: {accuracy.share:.1%} of {len(accuracy.answers)} held-out questions ({kinds})"
        )
