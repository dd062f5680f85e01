"""The checkpoints of a run on disk: which is newest, best, undamaged, and the one to resume from."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist

from automodel_cli.config.errors import RunError
from automodel_cli.training.checkpoint.directory import CheckpointDir, damage, damaged, read_meta
from automodel_cli.training.checkpoint.rank_zero import RankZero
from automodel_cli.training.config import CheckpointConfig
from automodel_cli.training.early_stopping import Goal


class SavedCheckpoints:
    """Checkpoints in `<run>/checkpoints`. The constructor and all methods are collective."""

    def __init__(self, run_dir: Path, config: CheckpointConfig, goal: Goal | None = None):
        self._goal = goal or Goal()
        self._dir = CheckpointDir(Path(run_dir) / "checkpoints", self._goal)
        self._config = config
        self._ranks = RankZero()
        self._verified: Path | None = None

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint of this run, as seen by rank 0."""
        return self._ranks.call(self._dir.latest)

    def best(self) -> Path | None:
        """Return the checkpoint with the best validation metric, as seen by rank 0."""
        return self._ranks.call(self._dir.best)

    def resume_path(self) -> Path | None:
        """Return the checkpoint that `checkpoint.resume` selects, or None to start at step 0.

        With "auto", damaged checkpoints are renamed to `step-NNNNNN.damaged`, and the previous checkpoint is used.

        Raises:
            RunError: the folder is not a complete checkpoint, or a newer checkpoint of this run exists. Resuming would
                then mix metrics and checkpoints of both continuations.
        """
        resume = self._config.resume
        if resume is None:
            return None
        if resume == "auto":
            return self._newest_undamaged()
        latest = self.latest()
        path = Path(resume).resolve()
        read_meta(path)
        if latest is not None and path.parent == latest.resolve().parent and path != latest.resolve():
            raise RunError(
                f"checkpoint.resume={path} is not the newest checkpoint of this run: {latest.name} is newer",
                code="resume_conflict",
                keys=("checkpoint.resume",),
                fix=f"run_name=<another name> to start a new run from here, or checkpoint.resume={latest}",
            )
        return path

    def verify(self, path: Path) -> None:
        """Compare size and hash of every file with the metadata. Ranks share the files. Collective.

        Raises:
            RunError: on all ranks, if one rank finds a damaged, truncated or missing file.
        """
        files = self._ranks.call(lambda: read_meta(path))["files"]
        found: list[list[str]] = [[] for _ in range(self._ranks.world_size)]
        found[self._ranks.rank] = damage(path, files, sorted(files)[self._ranks.rank :: self._ranks.world_size])
        if self._ranks.group is not None:
            dist.all_gather_object(found, found[self._ranks.rank], group=self._ranks.group)
        if problems := [problem for of_rank in found for problem in of_rank]:
            more = f" (and {len(problems) - 3} more files)" if len(problems) > 3 else ""
            raise damaged(path, "; ".join(problems[:3]) + more)
        self._verified = path

    def _newest_undamaged(self) -> Path | None:
        """Return the newest checkpoint that passes verification. Damaged ones are renamed and no longer counted."""
        problem = None
        while (path := self.latest()) is not None:
            try:
                self.verify(path)
                return path
            except RunError as error:
                problem = error
            aside = self._ranks.call(partial(self._set_aside, path, problem))
            if self._ranks.rank == 0:
                print(
                    f"{problem.message}. Renamed it to {aside.name}. Trying the previous checkpoint.", file=sys.stderr
                )
        if problem is not None:
            raise RunError(
                f"every checkpoint of this run is damaged or incomplete. The oldest: {problem.message}",
                code="checkpoint_incomplete",
                keys=("checkpoint.resume",),
                fix=f"copy a checkpoint from a backup to {self._dir.path}, or repeat the command to start from step 0",
            )
        return None

    def _set_aside(self, path: Path, problem: RunError) -> Path:
        try:
            return self._dir.set_aside(path)
        except OSError as error:
            raise problem from error
