"""The end of a run: what it learnt, in the form that others load, checked; and the pictures and numbers for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from automodel_cli.config.errors import RunError
from automodel_cli.distributed import process_group
from automodel_cli.distributed.layout import Layout, MeshConfig
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.models.export import discard_staged, export_hf, is_first_rank, publish, staging, verify_export
from automodel_cli.models.lora import save_adapters
from automodel_cli.models.tokenizer import load_tokenizer
from automodel_cli.report.page import ShownSample
from automodel_cli.run.answers import Accuracy, Answer, before_and_after
from automodel_cli.run.best import ended_by, further
from automodel_cli.run.chosen_checkpoint import chosen_checkpoint
from automodel_cli.run.recomputation import decided
from automodel_cli.run_folders.page import write_own_page
from automodel_cli.run_folders.record import summary_of
from automodel_cli.training.checkpoint import Checkpointer

if TYPE_CHECKING:
    from automodel_cli.data.dataset import PackedDataset
    from automodel_cli.run.model import Model
    from automodel_cli.run.recipe import Recipe
    from automodel_cli.run.session import Session

# max |log-prob difference| between the trained model and its export under stock transformers. In fp32 what remains is
# the noise of another attention implementation; in bf16 every product rounds, and single tokens differ by tenths.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
_NUM_PROMPTS, _PROMPT_TOKENS = 8, 128


def finish(session: Session, accuracy: Mapping[str, Accuracy] = MappingProxyType({})) -> int:
    """Export and check, write the report, and say what to do next. `accuracy`: on held-out questions, `before` and
    `after`. Returns the exit code of the run.
    """
    session.checkpointer.wait()
    folder = session.run_dir / "export"
    with session.meter.pause():
        gap = export_and_verify(
            session.recipe, session.model, session.tokenizer, session.data.train, folder, _card(session)
        )
    compared = f"max |{_compared(session.recipe)} difference| {gap:.1e}"
    if session.best_restored is not None:
        compared += f"; step {session.best_restored}, the best"
    footer = [("ended", ended_by(session))]
    footer += [("export", f"{folder}   reloaded with transformers, {compared}")]
    _record(session, accuracy)
    if session.is_main and session.recipe.logging.report:
        footer.append(("report", str(write_own_page(session.run_dir, state="finished"))))
    footer += [("answer", _shown(after, before)) for after, before in before_and_after(accuracy, 3)]
    footer.append(("next", _next_commands(session)))
    session.meter.footer(footer)
    return 0


def export_run(recipe: Recipe, run_dir: Path, output: Path, choice: str | None = None) -> int:
    """What `automodel export RUN` does, in one process: a checkpoint as a Hugging Face folder, checked.

    `choice`: see `chosen_checkpoint`; None is the newest, and the best one of a run with early stopping.
    """
    from automodel_cli.run.model import Model

    whole, _ = decided(dataclasses.replace(recipe, mesh=MeshConfig(), pipeline=None), Layout(), None)
    tokenizer = load_tokenizer(recipe.model)
    data = recipe.prepared(tokenizer)
    with process_group.joined("gloo") as device:
        model = Model.build(whole, build_mesh(Layout(), device.type))
        checkpointer = Checkpointer(run_dir, recipe.checkpoint)
        path = chosen_checkpoint(run_dir, choice, prefers_best=recipe.validation.patience is not None)
        resumed = checkpointer.load(path, model.parts)
        gap = export_and_verify(whole, model, tokenizer, data.train, output, f"Exported after step {resumed.step}.")
    print(f"{path.name} -> {output}\nreloaded with transformers, max |{_compared(recipe)} difference| {gap:.1e}")
    return 0


def export_and_verify(
    recipe: Recipe, model: Model, tokenizer: Any, rows: PackedDataset, folder: Path, summary: str
) -> float:
    """Write the folder (adapters also apart, in `adapter/`), reload it with stock transformers, compare, put in place.

    Whatever happens before the end, an older export in `folder` stays as it is. Raises RunError when the two do not
    agree, or the disk is full or read-only. Collective. Returns the largest difference of a log-prob (or score).
    """
    folder = folder.resolve()
    try:
        written = staging(folder) if is_first_rank() else folder
        gap = _write_and_compare(recipe, model, tokenizer, rows, written, _title(folder), summary)
        if is_first_rank():
            publish(written, folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RunError(
            f"the export {folder} could not be written: {reason}; the checkpoint is whole",
            keys=("output_dir",),
            fix=f"automodel export {folder.parent} --out another-disk/export",
        ) from error
    finally:
        if is_first_rank():
            discard_staged(folder)
    return gap


def _title(folder: Path) -> str:
    return folder.parent.name if folder.name == "export" else folder.name


def _write_and_compare(
    recipe: Recipe, model: Model, tokenizer: Any, rows: PackedDataset, folder: Path, title: str, summary: str
) -> float:
    scores = recipe.as_classifier
    export_hf(
        model.parts,
        recipe.model,
        tokenizer,
        folder,
        title=title,
        summary=summary,
        pp_group=model.pp_group,
        as_classifier=scores,
        stop_ids=rows.taught_stops(),
    )
    if recipe.model.lora is not None and not scores:  # adapters alone have no score
        save_adapters(
            model.parts,
            recipe.model.lora,
            folder / "adapter",
            base_model=recipe.model.pretrained or recipe.model.gguf_file or "",
            write=is_first_rank(),
            pp_group=model.pp_group,
        )
    prompts = [rows.tokens(row)[0][:_PROMPT_TOKENS].tolist() for row in range(min(_NUM_PROMPTS, len(rows)))]
    trust = recipe.model.trust_remote_code
    score = model.values if scores else model.score
    gap = verify_export(folder, model.parts, prompts, score=score, trust_remote_code=trust, as_classifier=scores)
    tolerance = _TOLERANCE[recipe.compute_dtype]
    if not gap <= tolerance:
        raise RunError(
            f"the export does not compute what was trained: max |{_compared(recipe)} difference| {gap:.2e}, allowed "
            f"{tolerance:.0e}; it was removed again, the checkpoint is whole",
            fix=f"automodel export {folder.parent}, and report this with its config.yaml",
        )
    return gap


def _compared(recipe: Recipe) -> str:
    return "score" if recipe.as_classifier else "log-prob"


def _card(session: Session) -> str:
    summary = session.meter.summary()
    lines = [f"- {line.strip()}" for line in session.data.report.lines()[:-1]]
    lines.append(f"- {session.last_step} steps of {session.loader.global_batch_size} {session.recipe.row_name}")
    if session.best_restored is not None:
        lines.append(f"- weights of step {session.best_restored}, the best by {session.early_stop.goal.metric}")
        summary |= session.last_validation[1]
    for key, name in (("loss", "training loss"), ("val_loss", "validation loss")):
        if summary.get(key) is not None:
            lines.append(f"- {name}: {summary[key]:.4f}")
    return "\n".join(lines)


def _record(session: Session, accuracy: Mapping[str, Accuracy]) -> None:
    """Keep final figures and answers in the run's record."""
    numbers = summary_of(session.meter.summary())
    early = session.early_stop
    if early.patience is not None and early.best is not None:
        numbers[f"best {early.goal.metric}"] = f"{early.best:.4g} (step {early.best_step})"
    for when, found in accuracy.items():
        numbers[f"accuracy {when}"] = f"{found.share:.1%}"
    samples = [
        ShownSample(after.question, after.completion, before.completion if before else None, after.answer)
        for after, before in before_and_after(accuracy, 8)
    ]
    session.record.describe(numbers=numbers, samples=[dataclasses.asdict(sample) for sample in samples])


def _shown(after: Answer, before: Answer | None) -> str:
    mark = "right" if after.correct else f"wrong, it is {after.answer!r}"
    said = f"   (before training: {before.completion[:24]!r})" if before else ""
    return f"{after.question!r} -> {after.completion!r} {mark}{said}"


def _next_commands(session: Session) -> str:
    use = f"automodel chat {session.run_dir}    talks to it; serve, eval and push are others"
    if session.recipe.as_classifier:
        node = f"{{_target_: automodel_cli.rollout.rewards.model.RewardModel, folder: {session.run_dir / 'export'}}}"
        use = f"automodel grpo llm -c CONFIG 'rewards.model={node}'    rewards samples with it"
    return "\n".join(
        [
            use,
            f"automodel resume {session.run_dir} {further(session)}    trains on",
            "automodel recipes ls    more recipes; `automodel recipes cp` gives you one to edit",
        ]
    )
