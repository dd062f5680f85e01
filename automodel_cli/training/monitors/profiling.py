"""A torch profiler trace of a few steps, one file per recording rank."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from automodel_cli.training.config import ProfileConfig


class StepProfiler:
    """Call `before(step)` and `after(step)` around every optimizer step (1-based); it records the steps of the config.

    The trace is `<run>/profile/rank-N.json`, for chrome://tracing or ui.perfetto.dev. With config None, or on a rank
    If config is None, or on a rank that does not record, both calls have no effect.
    """

    def __init__(self, config: ProfileConfig | None, run_dir: Path, rank: int):
        self._config = config if config is not None and rank in config.ranks else None
        self._path = Path(run_dir) / "profile" / f"rank-{rank}.json"
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        config = self._config
        if config is None or step != config.start_step:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities, profile_memory=config.memory, with_stack=config.stacks, record_shapes=True
        )
        self._profile.start()

    def after(self, step: int) -> None:
        config = self._config
        if config is not None and step >= config.start_step + config.num_steps - 1:
            self.close()

    def close(self) -> None:
        """Write the recorded trace. Also valid if the run ends inside the window."""
        if self._profile is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._path))
        self._profile = None
