"""Build the trainer of a run, and clean up after it.

data (before any process group) -> process group and mesh -> run folder and record -> `Trainer`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.distributed import process_group
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.launch import cleanup_timeout, rank_errors, rank_process
from automodel_cli.models.tokenizer import load_tokenizer
from automodel_cli.run.checks import mixed_dtypes
from automodel_cli.run.checks.cross_section_checks import check_profile
from automodel_cli.run.memory import out_of_memory
from automodel_cli.run.recipe import Recipe
from automodel_cli.run.remote.remote_sync import mirrored
from automodel_cli.run.run_directory import copy_of, put_back, records_before, run_directory, take_away
from automodel_cli.run.shared_directory import require_shared
from automodel_cli.run.trainer import Trainer
from automodel_cli.runs.run_record import RunRecord, summary_of
from automodel_cli.training.checkpoint import rng

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from automodel_cli.config.composition.compose import Composed


@contextmanager
def build_trainer(recipe: Recipe, source: Composed) -> Iterator[Trainer]:
    """Yield a trainer with prepared data and a started process group. Both are cleaned up on exit."""
    if recipe.train.deterministic:
        rng.make_deterministic()
    if recipe.train.num_cpu_threads is not None:
        torch.set_num_threads(recipe.train.num_cpu_threads)
    with rank_errors.by_one_of_a_host():
        tokenizer = load_tokenizer(recipe.model)
        data = recipe.prepared(tokenizer)
    with cleanup_timeout.bounded() as failed, process_group.process_group(recipe.parallelizer.backend) as device:
        yield from _opened(recipe, source, data, tokenizer, device, failed)


def _opened(
    recipe: Recipe,
    source: Composed,
    data: object,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    failed: Callable[[BaseException], None],
) -> Iterator[Trainer]:
    """Yield the trainer of a run whose process group exists. `failed` is called before the clean-up of an error."""
    run_dir: Path | None = None
    session: Trainer | None = None
    earlier = records_before(source)
    try:
        with ExitStack() as held:
            check_profile(recipe.logging.profile, dist.get_world_size())
            mesh = build_mesh(recipe.mesh.resolve(dist.get_world_size()), device.type)
            run_dir = _agreed_run_folder(recipe, source, held)
            url = copy_of(recipe, run_dir)
            require_shared(run_dir, url)
            rank_process.redirect_output(run_dir / "logs")
            copied = mirrored(run_dir, url if dist.get_rank() == 0 else None, recipe.checkpoint.keep_latest_k)
            with copied as notify, _recorded(run_dir, source) as record:
                session = Trainer(recipe, source, data, tokenizer, mesh, run_dir, record)
                session.checkpointer.published = notify
                succeeded = False
                try:
                    session.callbacks.start(recipe.callbacks)
                    yield session
                    succeeded = True
                except BaseException as error:
                    failed(error)
                    _record_failure(record, error)  # the code below may wait for lost ranks
                    raise
                finally:
                    session.close(succeeded=succeeded)
                if session.stopped_by:
                    record.describe(numbers=summary_of(session.meter.summary()))
                record.end("interrupted" if session.stopped_by else "finished")
    except BaseException as error:
        refused = session is None or not session.has_begun
        if refused and run_dir is not None and earlier and dist.get_rank() == 0:
            put_back(run_dir, earlier)
        elif refused and run_dir is not None and _is_refusal(error) and dist.get_rank() == 0:
            take_away(run_dir, source)
        if mixed := mixed_dtypes.explain_mixed_dtypes(error, recipe.compute_dtype):
            raise mixed from error
        if not isinstance(error, Exception) or (cause := out_of_memory.find_oom_error(error)) is None:
            raise
        raise out_of_memory.explain_oom(cause, recipe, source, run_dir, dist.get_world_size()) from error


def _is_refusal(error: BaseException) -> bool:
    """Return whether the config or the data is invalid, so that the same command would fail again."""
    return isinstance(error, ConfigError) and not isinstance(error, RunError)


@contextmanager
def _recorded(run_dir: Path, source: Composed) -> Iterator[RunRecord]:
    """Yield the record of this run, and record an error. Only rank 0 writes it."""
    record = RunRecord(run_dir if dist.get_rank() == 0 else None, source)
    try:
        yield record
    except BaseException as error:
        _record_failure(record, error)
        raise


def _record_failure(record: RunRecord, error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        record.end("interrupted")
    else:
        record.end("failed", error)


def _agreed_run_folder(recipe: Recipe, source: Composed, held: ExitStack) -> Path:
    """Return the run folder, the same on all ranks, locked until `held` is closed. Collective."""
    chosen: list[Path | RunError] = [Path()]
    if dist.get_rank() == 0:
        try:
            folder = run_directory(recipe, source, held=held)
            rank_process.note_run_folder(folder)
            chosen = [folder]
        except RunError as error:
            chosen = [error]
    dist.broadcast_object_list(chosen, src=0, device=torch.device("cpu"))
    if isinstance(chosen[0], RunError):
        raise chosen[0]
    return chosen[0]
