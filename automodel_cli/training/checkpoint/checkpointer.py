"""Save and resume a run with `torch.distributed.checkpoint`. Checkpoint folders are published atomically."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from automodel_cli.config.errors import RunError
from automodel_cli.distributed.device_threads import threads_on_this_device
from automodel_cli.distributed.sharded_module import weights_changed
from automodel_cli.models.uneven_dtensor import compact_shard, cut_like, is_uneven
from automodel_cli.training.checkpoint import rng
from automodel_cli.training.checkpoint.directory import CheckpointMeta, read_meta
from automodel_cli.training.checkpoint.save_errors import find_cause, reason, save_failed
from automodel_cli.training.checkpoint.saved_checkpoints import SavedCheckpoints
from automodel_cli.training.checkpoint.state_dict import (
    check_same_frozen,
    check_same_model,
    load_optimizer_state,
    model_state,
    optimizer_state,
    optimizer_template,
)
from automodel_cli.training.checkpoint.writer import write_state
from automodel_cli.training.config import CheckpointConfig
from automodel_cli.training.early_stopping import Goal
from automodel_cli.training.optimizers.lr_scheduler import LRSchedule
from automodel_cli.training.torch_compat import CheckpointReader


@dataclass(frozen=True)
class Resumed:
    """Contents of a loaded checkpoint other than tensors. `extra` and `metrics` are the arguments of `save`."""

    path: Path
    step: int
    extra: dict[str, Any]
    metrics: dict[str, float]


class Checkpointer(SavedCheckpoints):
    """Writer and reader of `<run>/checkpoints/step-NNNNNN`. Keeps the newest checkpoints and the best one.

    The constructor and all methods are collective.
    """

    def __init__(self, run_dir: Path, config: CheckpointConfig, goal: Goal | None = None):
        super().__init__(run_dir, config, goal)
        self._stager: DefaultStager | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[Path] | None = None
        self._loaded: Path | None = None
        self._kept: dict[str, Tensor] = {}
        self._further: dict[str, Sequence[nn.Module]] = {}
        self.published: Callable[[], None] = lambda: None
        """Callback on rank 0 after a checkpoint is published. An asynchronous save calls it from its thread."""

    def save(
        self,
        step: int,
        parts: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        scheduler: LRSchedule,
        *,
        extra: Mapping[str, object] | None = None,
        metrics: dict[str, float] | None = None,
    ) -> Path:
        """Save the state after optimizer step `step`. Waits for the previous save.

        Random generator states of every rank are saved too.

        Args:
            step: number of completed optimizer steps.
            parts: model parts of this rank.
            optimizer: its state is saved, its hyperparameters are not.
            scheduler: learning-rate scheduler.
            extra: JSON values that are equal on all ranks, for example the data position.
            metrics: if they contain the metric of the goal, it determines the `best` link.

        Returns:
            The checkpoint folder. An asynchronous save publishes it later.

        Raises:
            RunError: the disk is full or not writable. Earlier checkpoints are unchanged.
        """
        self.wait()
        meta: CheckpointMeta = {
            "step": step,
            "world_size": self._ranks.world_size,
            "optimizer": type(optimizer).__name__,
            "scheduler": scheduler.state_dict(),
            "extra": dict(extra or {}),
            "metrics": metrics or {},
            "files": {},
        }
        json.dumps(meta)  # fail here instead of in the thread if a value is not JSON
        state: dict[str, Tensor] = {**model_state(parts), **optimizer_state(parts, optimizer), **self._kept}
        state[f"rng.{self._ranks.rank}"] = rng.capture()
        final = self._dir.path / f"step-{step:06d}"
        if not self._config.async_save:
            return self._write(state, meta, final)
        if self._stager is None or self._thread is None:
            self._stager = DefaultStager(StagingOptions(torch.cuda.is_available(), False, False, False))
            self._thread = threads_on_this_device(1, "checkpoint")
        # The stager of torch reads views into flat buffers at a wrong address, so uneven shards are copied first.
        state = {key: compact_shard(tensor) if is_uneven(tensor) else tensor for key, tensor in state.items()}
        staged = self._stager.stage(state)
        assert isinstance(staged, dict), "the stager was asked to copy before it returns"
        for key, tensor in state.items():
            if is_uneven(tensor):
                cut_like(staged[key], tensor)  # the staged copy lacks the shard bounds
        self._pending = self._thread.submit(self._write, staged, meta, final)
        return final

    def keep(self, name: str, tensors: Mapping[str, Tensor], parts: Sequence[nn.Module]) -> None:
        """Add tensors to all following checkpoints as `<name>.<key>`, and load them from the resumed checkpoint.

        Loading happens immediately if a checkpoint was loaded already, otherwise in `load`.

        Args:
            name: prefix, for example `reference`.
            tensors: live tensors.
            parts: model parts that own the tensors.

        Raises:
            RunError: the loaded checkpoint contains no tensors with this prefix.
        """
        added = {f"{name}.{key}": tensor for key, tensor in tensors.items()}
        self._kept |= added
        self._further[name] = parts
        if self._loaded is not None:
            self._load_kept(self._loaded)

    def dropped(self) -> list[str]:
        """Return the prefixes of the loaded checkpoint that this run does not save again."""
        if self._loaded is None:
            return []
        names = {key.partition(".")[0] for key in CheckpointReader(self._loaded).read_metadata().state_dict_metadata}
        return sorted(names - {"model", "optim", "rng", *self._further})

    def _load_kept(self, path: Path) -> None:
        reader = CheckpointReader(path)
        metadata = reader.read_metadata()
        for name, parts in self._further.items():
            state = {key: tensor for key, tensor in self._kept.items() if key.startswith(f"{name}.")}
            if not any(key.startswith(f"{name}.") for key in metadata.state_dict_metadata):
                raise RunError(
                    f"checkpoint {path} contains no {name}, because the run that wrote it did not update its {name}",
                    code="checkpoint_mismatch",
                    keys=(f"{name}_update", "checkpoint.resume"),
                    fix=f"{name}_update=null",
                )
            check_same_model(state, metadata)
            self._read(state, reader, path)
            weights_changed(parts)

    def add_metrics(self, path: Path, metrics: dict[str, float], extra: Mapping[str, object]) -> None:
        """Add metrics measured after loading the checkpoint `path`. Checkpoints of other runs are not changed."""
        if path.resolve().parent == self._dir.path.resolve():
            self._ranks.call(lambda: self._dir.amend(path, metrics, extra))

    def wait(self) -> None:
        """Wait for a pending asynchronous save, and raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for a pending save, then release the thread and the staging memory."""
        try:
            self.wait()
        finally:
            if self._thread is not None and self._stager is not None:
                self._thread.shutdown()
                self._stager.close()
                self._thread = self._stager = None

    def load(
        self,
        path: Path,
        parts: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: LRSchedule | None = None,
    ) -> Resumed:
        """Load a checkpoint into the model parts. Also restore optimizer, scheduler and generators if given.

        - Mesh and number of ranks may differ from those of the save.
        - Frozen parameters are not part of checkpoints and must be loaded before.
        - Each rank restores its generators. Ranks that the saved run did not have are seeded from (step, rank).

        Raises:
            RunError: `path` is incomplete or damaged, or belongs to another model or optimizer.
        """
        if path != self._verified:
            self.verify(path)
        meta = read_meta(path)
        reader = CheckpointReader(path)
        metadata = reader.read_metadata()
        state = model_state(parts)
        check_same_model(state, metadata)
        check_same_frozen(parts, metadata)
        states: dict[str, Tensor] = {}
        if optimizer is not None:
            _check_same_optimizer(meta, optimizer)
            states = optimizer_template(parts, metadata)
            state = {**state, **states}
            entry = metadata.state_dict_metadata.get(f"rng.{self._ranks.rank}")
            if isinstance(entry, TensorStorageMetadata):
                state[f"rng.{self._ranks.rank}"] = torch.empty(entry.size, dtype=torch.uint8)
        self._read(state, reader, path)
        weights_changed(parts)
        if optimizer is not None:
            load_optimizer_state(parts, optimizer, {key: state[key] for key in states})
            self._restore_generators(state, meta["step"])
        if scheduler is not None and optimizer is not None:
            scheduler.load_state_dict(meta["scheduler"])
            # Schedulers of torch expect the learning rate in the optimizer state, which has no hyperparameters here.
            for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = lr
        self._loaded = path
        self._load_kept(path)
        return Resumed(path, meta["step"], meta["extra"], meta["metrics"])

    def _read(self, state: dict[str, Tensor], reader: CheckpointReader, path: Path) -> None:
        try:
            dcp.load(state, storage_reader=reader, process_group=self._ranks.group, no_dist=self._ranks.group is None)
        except dcp.CheckpointException as error:  # a BaseException, which `except Exception` does not catch
            raise RunError(
                f"checkpoint {path} cannot be read: {reason(error)}",
                code="checkpoint_incomplete",
                keys=("checkpoint.resume",),
            ) from error

    def _restore_generators(self, state: dict[str, Tensor], step: int) -> None:
        saved = state.get(f"rng.{self._ranks.rank}")
        if saved is None:
            rng.seed(step, self._ranks.rank)
        else:
            rng.restore_rng(saved)

    def _write(self, state: dict[str, Tensor], meta: CheckpointMeta, final: Path) -> Path:
        """Write to a temporary folder and publish it. Either all ranks return or all ranks raise."""
        temporary = self._ranks.call(lambda: self._begin(final))
        try:
            files = write_state(state, temporary, self._ranks.group)
        except (dcp.CheckpointException, OSError, RuntimeError) as error:
            if self._ranks.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            if find_cause(error, KeyboardInterrupt) is not None:  # torch wraps the errors of ranks
                raise KeyboardInterrupt from error
            raise save_failed(final, error, self._dir.latest()) from error
        return self._ranks.call(lambda: self._finish(temporary, final, {**meta, "files": files or {}}))

    def _begin(self, final: Path) -> Path:
        try:
            self._dir.path.mkdir(parents=True, exist_ok=True)
            self._dir.clear_leftovers()
            temporary = final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex[:8]}")
            temporary.mkdir()
        except OSError as error:
            raise save_failed(final, error, self._dir.latest()) from error
        return temporary

    def _finish(self, temporary: Path, final: Path, meta: CheckpointMeta) -> Path:
        try:
            self._dir.publish(temporary, final, meta)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise save_failed(final, error, self._dir.latest()) from error
        self._dir.link_if_best(final, meta["metrics"].get(self._goal.metric))
        self._dir.prune(self._config.keep_latest_k)
        self.published()
        return final


def _check_same_optimizer(meta: CheckpointMeta, optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if meta["optimizer"] != name:
        raise RunError(
            f"the checkpoint was written with optimizer {meta['optimizer']}, but this run has {name}",
            code="checkpoint_mismatch",
            keys=("optimizer",),
            fix="use the optimizer section of the config.yaml of the run that wrote the checkpoint",
        )
