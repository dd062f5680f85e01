"""Export of the trained model: write a Hugging Face folder, compare it with the trained model, publish it."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from automodel_cli.config.errors import RunError
from automodel_cli.config.fix_syntax import word
from automodel_cli.distributed import process_group
from automodel_cli.models.checkpoint_io.export import (
    LAST,
    MARK,
    discard_staged,
    export_hf,
    is_first_rank,
    publish,
    rounds_weights,
    staging,
    trained_values,
)
from automodel_cli.models.checkpoint_io.export_check import Agreement, Precision, measure_export_error
from automodel_cli.models.checkpoint_io.export_values import Unfinished
from automodel_cli.models.lora.adapters import adapters_off
from automodel_cli.models.lora.export import save_adapters
from automodel_cli.models.score_head import EmbeddingHead
from automodel_cli.models.tokenizer import tokenizer_node
from automodel_cli.run.compared_rows import ComparedRows
from automodel_cli.run.memory.host_memory import available_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from automodel_cli.data.preparation.dataset import PackedDataset
    from automodel_cli.run.model_builder import Model
    from automodel_cli.run.recipe import Recipe

NUM_PROMPTS = 8
_NUM_SCORES = 32  # a row has one score, but a log-prob for each token
_LOW_SHARE = 0.8
_LOAD_MINUTES = 60.0  # additional wait of other ranks while rank 0 reads the export


@dataclass(frozen=True)
class Checked:
    """Result of the comparison. If it was not completed, `agreement` is None and `reason` names the cause.

    `problem` describes a difference between export and trained model.
    """

    agreement: Agreement | None = None
    reason: str | None = None
    problem: str | None = None

    @property
    def verified(self) -> bool:
        return self.reason is None and self.problem is None


def export_and_verify(
    recipe: Recipe,
    model: Model,
    tokenizer: Tokenizer,
    rows: PackedDataset,
    folder: Path,
    summary: str,
    checkpoint: Path | None = None,
) -> str:
    """Write the export, reload it with transformers, compare both models, and publish the folder. Collective.

    Adapters are also saved separately in `adapter/`. An older export in `folder` remains until a complete new export
    replaces it. An export that differs from the model is kept as `<folder>-unverified`, with the figures in
    `unverified.json`.

    Args:
        checkpoint: the newest checkpoint, for error messages.

    Returns:
        The result of the comparison as text.

    Raises:
        RunError: the export differs from the trained model, or the disk is full or read-only.
    """
    folder = folder.resolve()
    written = folder
    try:
        written = staging(folder) if is_first_rank() else folder
        _write(recipe, model, tokenizer, written, _title(folder), summary, rows.taught_stops())
        checked = _compare(recipe, model, rows, written)
        if is_first_rank():
            if not checked.verified:
                _mark(written, checked)
            publish(written, folder if checked.problem is None else _unverified(folder))
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RunError(
            f"the export {folder} could not be written: {reason}; {_checkpoint_note(checkpoint)}",
            code="disk_full" if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else "unwritable_file",
            keys=("output_dir",),
            fix=f"automodel export {word(folder.parent)} --out another-disk/export" if checkpoint else None,
        ) from error
    except Exception:  # keep the complete export after any error
        if is_first_rank() and written != folder and (written / LAST).exists():
            publish(written, _unverified(folder))
        raise
    finally:
        if is_first_rank():
            discard_staged(folder)
    if checked.problem is not None:
        raise RunError(
            f"the exported model differs from the trained model: {checked.problem}. The export is kept in "
            f"{_unverified(folder)} with the file {MARK}; {_checkpoint_note(checkpoint)}",
            code="export_mismatch",
            fix="evaluate the export yourself, and report this with config.yaml and report.html of the run",
        )
    return _in_words(recipe, checked)


def _unverified(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-unverified")


def _checkpoint_note(checkpoint: Path | None) -> str:
    return "there is no checkpoint" if checkpoint is None else f"the checkpoint is complete: {checkpoint}"


def _title(folder: Path) -> str:
    return folder.parent.name if folder.name == "export" else folder.name


def _write(
    recipe: Recipe, model: Model, tokenizer: Tokenizer, folder: Path, title: str, summary: str, stop_ids: Sequence[int]
) -> None:
    export_hf(
        model.parts,
        recipe.model,
        tokenizer,
        folder,
        title=title,
        summary=summary,
        pp_group=model.pp_group,
        score_head=recipe.score_head,
        stop_ids=stop_ids,
        trained=True,
    )
    # Adapters without a head have no score. Those of a quantized export are trained as a part of its weights.
    is_quantized = recipe.model.qat is not None and recipe.model.qat.export != "plain"
    if recipe.model.lora is not None and recipe.score_head is None and not is_quantized:
        save_adapters(
            model.parts,
            recipe.model.lora,
            folder / "adapter",
            base_model=recipe.model.pretrained or recipe.model.gguf_file or "",
            write=is_first_rank(),
            pp_group=model.pp_group,
        )
        node = tokenizer_node(recipe.model)
        if node is not None and node.new_tokens and tokenizer is not None and is_first_rank():
            tokenizer.save_pretrained(folder / "adapter")  # with the ids of the trained rows


def _compare(recipe: Recipe, model: Model, rows: PackedDataset, folder: Path) -> Checked:
    """Run the trained model on some rows, then the export on rank 0. Collective. All ranks return the same."""
    minutes = recipe.checkpoint.export_check_minutes
    if not minutes:
        return Checked(reason="checkpoint.export_check_minutes=0")
    compared = ComparedRows.of(rows, _NUM_SCORES if recipe.score_head is not None else NUM_PROMPTS)
    prompts = compared.prompts
    score = partial(compared.score, model) if recipe.score_head is None else partial(model.values, recipe.score_head)
    with _most_exact(recipe, model) as arithmetic:
        ours = trained_values(model.parts, prompts, score)
        base = _without_adapters(recipe, model, prompts, score)
    precision = Precision(arithmetic, rounds_weights(model.parts))
    compare = partial(
        measure_export_error,
        folder,
        prompts,
        precision=precision,
        trust_remote_code=recipe.model.trust_remote_code,
        score_head=recipe.score_head,
        documents=compared.documents,
        device=model.mesh.device,
        available_bytes=available_bytes(),
        seconds=60 * minutes,
    )
    work = partial(_judged, compare, ours, base, _compared(recipe), precision)
    with _all_threads(model.mesh.device):
        return process_group.from_first_rank(work, timedelta(minutes=minutes + _LOAD_MINUTES))


def _judged(
    compare: Callable[..., Agreement],
    ours: list[torch.Tensor],
    base: list[torch.Tensor] | None,
    compared: str,
    precision: Precision,
) -> Checked:
    try:
        comparison = compare(ours, base=base)
        if comparison.passed:
            return Checked(comparison)
        problem = _described(comparison, compared, precision)
        if base is not None and compare(base).passed:
            problem = f"the export behaves like the model without its adapters: {problem}"
        return Checked(comparison, problem=problem)
    except Unfinished as error:
        return Checked(reason=str(error))
    except RunError as error:
        return Checked(problem=error.message)
    except Exception as error:  # the library's forward may fail in any way; the export is complete nevertheless
        return Checked(reason=f"the forward pass of the export failed: {type(error).__name__}: {error}")


def _without_adapters(
    recipe: Recipe, model: Model, prompts: list[list[int]], score: Callable[[list[list[int]]], list[torch.Tensor]]
) -> list[torch.Tensor] | None:
    """Return the values of the base model, to recognize an export without its adapters."""
    if recipe.model.lora is None or recipe.score_head is not None:
        return None
    with adapters_off(model.parts):
        return trained_values(model.parts, prompts, score)


def _described(found: Agreement, compared: str, precision: Precision) -> str:
    (prompt, token), (ours, theirs) = found.place, found.values
    share = "" if found.share is None else f"the export has {found.share:.0%} of the adapters' change; "
    return (
        f"{share}"
        f"mean |{compared} difference| {found.mean:.1e} over {found.num_values} values, allowed "
        f"{found.mean_allowed:.1e}; 99% of them below {found.tail:.1e}, allowed {found.tail_allowed:.1e}; the largest "
        f"is in row {prompt} of the training data at token {token + 1}: trained {ours:.4f}, export {theirs:.4f} "
        f"(trained side in {_name(precision.arithmetic)})"
    )


def _in_words(recipe: Recipe, checked: Checked) -> str:
    if checked.agreement is None:
        return f"not compared with the trained model: {checked.reason}"
    agreement = checked.agreement
    words = f"reloaded with transformers, max |{_compared(recipe)} difference| {agreement.worst:.1e}, "
    words += f"mean {agreement.mean:.1e}"
    if agreement.share is not None and agreement.share < _LOW_SHARE:
        removed = f"{1 - agreement.share:.0%} of the adapters' change"
        words += f"; rounding removed {removed} (the base model with adapter/ keeps it)"
    return words


def _compared(recipe: Recipe) -> str:
    if isinstance(recipe.score_head, EmbeddingHead):
        return "embedding"
    return "score" if recipe.score_head is not None else "log-prob"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mark(folder: Path, checked: Checked) -> None:
    agreement = None if checked.agreement is None else asdict(checked.agreement)
    content = {"reason": checked.problem or checked.reason, "found": agreement}
    (folder / MARK).write_text(json.dumps(content, indent=2) + "\n")


@contextmanager
def _most_exact(recipe: Recipe, model: Model) -> Iterator[torch.dtype]:
    """Compute the trained side in float32 inside, if the strategy supports it. Yield the dtype of its GEMMs.

    A GPU keeps its dtype: memory is short at the end of a run, and fast kernels support 16 bits only.
    """
    if recipe.compute_dtype == torch.float32 or model.mesh.device.type != "cpu":
        yield recipe.compute_dtype
        return
    if recipe.parallelizer.autocast_dtype is not None or recipe.model.transformer_engine is not None:
        yield recipe.compute_dtype
        return
    with model.stages.in_float32() as changed:
        yield torch.float32 if changed else recipe.compute_dtype


@contextmanager
def _all_threads(device: torch.device) -> Iterator[None]:
    """Let rank 0 use all cores of a GPU host, because the other ranks wait."""
    before = torch.get_num_threads()
    if device.type == "cuda" and is_first_rank():
        torch.set_num_threads(max(before, process_group.num_cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)
