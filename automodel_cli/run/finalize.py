"""The end of a run: export, export check, report and final figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from automodel_cli.config.fix_syntax import word
from automodel_cli.distributed import process_group
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import Layout, MeshConfig
from automodel_cli.models.score_head import EmbeddingHead
from automodel_cli.models.tokenizer import load_tokenizer
from automodel_cli.report.shown_run import ShownSample
from automodel_cli.run.checkpoint_selection import chosen_checkpoint
from automodel_cli.run.export import export_and_verify
from automodel_cli.run.heldout_accuracy import Accuracy, Answer, before_and_after
from automodel_cli.run.memory.auto_activation_checkpointing import decided
from automodel_cli.run.resumed_schedule import needs_choice
from automodel_cli.run.startup_summary import step_size
from automodel_cli.runs.report_page import write_own_page
from automodel_cli.runs.run_record import summary_of
from automodel_cli.training.checkpoint.checkpointer import Checkpointer

if TYPE_CHECKING:
    from automodel_cli.run.recipe import Recipe
    from automodel_cli.run.trainer import Trainer


def finalize_run(
    session: Trainer,
    accuracy: Mapping[str, Accuracy] = MappingProxyType({}),
    numbers: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Export the model, check the export, write the report and print the next commands. Return the exit code.

    Args:
        accuracy: results on held-out questions, `before` and `after` training.
        numbers: further figures for the record.
    """
    session.checkpointer.wait()
    folder = session.run_dir / "export"
    with session.meter.pause():
        export = export_and_verify(
            session.recipe,
            session.model,
            session.tokenizer,
            session.data.train,
            folder,
            _card(session),
            session.checkpointer.latest(),
        )
    if session.best_restored is not None:
        export += f"; weights of the best step {session.best_restored}"
    footer = [("ended", _ended_by(session))]
    footer += [("export", f"{folder}   {export}")]
    _record(session, accuracy, numbers)
    if session.is_main and session.recipe.logging.report:
        footer.append(("report", str(write_own_page(session.run_dir, state="finished"))))
    footer += [("answer", _shown(after, before)) for after, before in before_and_after(accuracy, 3)]
    footer.append(("next", _next_commands(session)))
    session.meter.footer(footer)
    return 0


def export_run(recipe: Recipe, run_dir: Path, output: Path, choice: str | None = None) -> int:
    """Export a checkpoint as a Hugging Face folder and check it, in one process (`automodel export RUN`).

    Args:
        choice: see `chosen_checkpoint`. None is the newest checkpoint, or the best one of a run with early stopping.
    """
    from automodel_cli.run.model_builder import Model

    unsharded, _ = decided(dataclasses.replace(recipe, mesh=MeshConfig(), pipeline=None), Layout(), None)
    tokenizer = load_tokenizer(recipe.model)
    data = recipe.prepared(tokenizer)
    with process_group.process_group("gloo") as device:
        model = Model.build(unsharded, build_mesh(Layout(), device.type))
        checkpointer = Checkpointer(run_dir, recipe.checkpoint)
        path = chosen_checkpoint(run_dir, choice, prefers_best=recipe.validation.patience is not None)
        resumed = checkpointer.load(path, model.parts)
        summary = f"Exported after step {resumed.step}."
        export = export_and_verify(unsharded, model, tokenizer, data.train, output, summary, path)
    print(f"{path.name} -> {output}\n{export}")
    return 0


def _card(session: Trainer) -> str:
    summary = session.meter.summary()
    lines = [f"- {line.strip()}" for line in session.data.report.lines()[:-1]]
    lines.append(f"- {session.last_step} steps of {step_size(session)}")
    if session.best_restored is not None:
        lines.append(f"- weights of step {session.best_restored}, the best by {session.early_stop.goal.metric}")
        summary |= session.last_validation[1]
    for key, name in (("loss", "training loss"), ("val_loss", "validation loss")):
        if summary.get(key) is not None:
            lines.append(f"- {name}: {summary[key]:.4f}")
    return "\n".join(lines)


def _record(session: Trainer, accuracy: Mapping[str, Accuracy], further: Mapping[str, str]) -> None:
    """Keep final figures and answers in the run's record."""
    numbers = {**summary_of(session.meter.summary()), **further}
    early = session.early_stop
    if early.patience is not None and early.best is not None:
        numbers[f"best {early.goal.metric}"] = f"{early.best:.4g} (step {early.best_step})"
    for when, result in accuracy.items():
        if result.is_sample:
            continue
        numbers[f"accuracy {when}"] = f"{result.share:.1%}"
    samples = [
        ShownSample(
            after.question,
            after.completion,
            before.completion if before else None,
            after.answer,
            pictures=after.pictures,
        )
        for after, before in before_and_after(accuracy, 8)
    ]
    session.record.describe(numbers=numbers, samples=[dataclasses.asdict(sample) for sample in samples])


def _shown(after: Answer, before: Answer | None) -> str:
    mark = "right" if after.correct else f"wrong, expected {after.answer!r}"
    before_text = f"   (before training: {before.completion[:24]!r})" if before else ""
    return f"{after.question!r} -> {after.completion!r} {mark}{before_text}"


def _next_commands(session: Trainer) -> str:
    use = f"automodel chat {word(session.run_dir)}    chat with the model (also: serve, eval, push)"
    head = session.recipe.score_head
    if isinstance(head, EmbeddingHead):
        use = f"sentence_transformers.SentenceTransformer({str(session.run_dir / 'export')!r})    embed texts in Python"
    elif head is not None and head.labels:
        task = "token-classification" if head.of_tokens else "text-classification"
        use = f"transformers.pipeline({task!r}, {str(session.run_dir / 'export')!r})    classify texts in Python"
    elif head is not None:
        target = "automodel_cli.rollout.rewards.reward_model.RewardModel"
        node = f"{{_target_: {target}, folder: {session.run_dir / 'export'}}}"
        use = f"automodel grpo llm -c CONFIG 'rewards.model={node}'    use it as a reward"
    return "\n".join(
        [
            use,
            f"automodel resume {word(session.run_dir)} {_further(session)}    train longer",
            "automodel recipes ls    list recipes; `automodel recipes cp` copies one to edit",
        ]
    )


def _ended_by(session: Trainer) -> str:
    """Return the reason for which the run ended, as text."""
    if session.early_stop.is_over:
        key = f"validation.patience={session.early_stop.patience}"
        return f"by {key}, after step {session.last_step}: {session.early_stop}"
    limit = session.recipe.train.limit(session.loader.steps_per_epoch)
    return f"by {limit}, after step {session.last_step}"


def _further(session: Trainer) -> str:
    """Return the overrides with which a resumed run trains on."""
    if session.early_stop.is_over and session.last_step < session.num_steps:
        return "validation.patience=null"
    num_steps = 2 * session.num_steps
    choice = " train.extend_schedule=restart" if needs_choice(session.recipe, session.schedule, num_steps) else ""
    return f"train.max_steps={num_steps}{choice}" + (" validation.patience=null" if session.early_stop.is_over else "")
