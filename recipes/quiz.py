"""Held-out questions with exact answers, asked before and after training, where the data is a task that has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from automodel_cli.data.config import AnswerChecker
from automodel_cli.models.weights import iter_hf_weights

if TYPE_CHECKING:
    from automodel_cli.rollout.accuracy import Accuracy, Sample
    from recipes.session import Session


class Quiz:
    """Asks a replica of the model, fed by the stream of full weights: the same under every layout. Rank 0 generates."""

    def __init__(self) -> None:
        self.scores: dict[str, Accuracy] = {}

    def ask(self, session: Session, when: str) -> None:
        """Measure and print the accuracy under the name `when`; nothing to do for data without a task
        that knows right answers. Collective.
        """
        task = session.recipe.data.task
        questions = [] if task is None else list(task.rows("validation"))
        if not (isinstance(task, AnswerChecker) and questions and all("answer" in row for row in questions)):
            return
        from automodel_cli.rollout.accuracy import measure_accuracy  # only runs with a task pay for generation
        from recipes.engines import build_replica

        parts = session.model.parts
        weights = iter_hf_weights(parts, dtype=parts[0].model.dtype, hub_names=False, pp_group=session.model.pp_group)
        if not session.is_main:
            for _ in weights:  # the stream is collective: every rank must exhaust it
                pass
            return
        with session.meter.pause():
            engine = build_replica(session, [session.tokenizer.eos_token_id])
            engine.update_weights(weights)
            score = measure_accuracy(engine, session.tokenizer, questions, task.check_answer)
        self.scores[when] = score
        kinds = "  ".join(f"{kind} {share:.0%}" for kind, share in score.by_kind().items())
        session.meter.print(
            f"accuracy {when} training: {score.share:.1%} of {len(score.samples)} held-out questions ({kinds})"
        )

    def samples(self, count: int) -> list[tuple[Sample, Sample | None]]:
        """Questions with the answer after training and, where it was asked then, before."""
        if "after" not in self.scores:
            return []
        before = (
            {sample.question: sample for sample in self.scores["before"].samples} if "before" in self.scores else {}
        )
        return [(sample, before.get(sample.question)) for sample in self.scores["after"].examples(count)]
