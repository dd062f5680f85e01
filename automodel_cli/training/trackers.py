"""Optional experiment trackers behind one small protocol. Torch-free; a tracker's package is imported when it starts.

No data leaves the machine unless the config names a tracker. metrics.jsonl is always written.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.value_checks import require_package
from automodel_cli.training.metrics_file import Row


class Tracker(Protocol):
    """A running tracker, on rank 0 only. Its exceptions end the run."""

    def log(self, row: Row, step: int) -> None:
        """Record one row. None values are skipped."""
        ...

    def finish(self, succeeded: bool) -> None:
        """Flush and close."""
        ...


class TrackerNode(Protocol):
    """Interface of a node of `logging.trackers`. Custom trackers: examples/own_tracker.py."""

    @abstractmethod
    def start(self, run_name: str, run_dir: Path, config: Mapping[str, object]) -> Tracker:
        """Start to record a run, or continue an existing one with this name. `config` is the composed config with
        unresolved interpolations."""
        ...


def _require(module: str, package: str) -> None:
    """Raise for a tracker whose package is not installed, without importing it."""
    require_package(module, f"tracker {package!r}", install=package)


def _numbers(row: Row) -> dict[str, float]:
    return {key: float(value) for key, value in row.items() if value is not None and key != "step"}


def flatten_config(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """A nested config as `section.key` -> value, for trackers that keep hyper-parameters flat."""
    flat: dict[str, object] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten_config(value, f"{name}."))
        else:
            flat[name] = value
    return flat


@dataclass(frozen=True)
class TensorBoard:
    """Event files in `<run>/tensorboard`, or in `log_dir`."""

    module: ClassVar[str] = "tensorboard"
    log_dir: str | None = None
    """Folder of the event files. null: `tensorboard` in the run folder."""

    def __post_init__(self) -> None:
        _require(self.module, "tensorboard")

    def start(self, run_name: str, run_dir: Path, config: Mapping[str, object]) -> Tracker:
        return _TensorBoardRun(Path(self.log_dir) / run_name if self.log_dir else run_dir / "tensorboard", config)


class _TensorBoardRun:
    def __init__(self, directory: Path, config: Mapping[str, object]):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory))
        lines = [f"{key}: {value}" for key, value in flatten_config(config).items()]
        self._writer.add_text("config", "```\n" + "\n".join(lines) + "\n```")

    def log(self, row: Row, step: int) -> None:
        for key, value in _numbers(row).items():
            self._writer.add_scalar(key, value, step)

    def finish(self, succeeded: bool) -> None:
        self._writer.close()


@dataclass(frozen=True)
class WandB:
    """Weights & Biases. `mode="offline"` writes below the run folder and uploads nothing."""

    module: ClassVar[str] = "wandb"
    project: str = "automodel"
    """Project of the runs."""
    entity: str | None = None
    """User or team. null: the account's default."""
    group: str | None = None
    """Name of a group of runs."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes below the run folder and uploads nothing."""

    def __post_init__(self) -> None:
        _require(self.module, "wandb")

    def start(self, run_name: str, run_dir: Path, config: Mapping[str, object]) -> Tracker:
        return _WandBRun(self, run_name, run_dir, config)


class _WandBRun:
    def __init__(self, node: WandB, run_name: str, run_dir: Path, config: Mapping[str, object]):
        self._run = import_module(node.module).init(
            project=node.project,
            entity=node.entity,
            group=node.group,
            mode=node.mode,
            name=run_name,
            id=run_name,  # the same run continues when training resumes
            resume="allow",
            dir=str(run_dir),
            config=dict(config),
        )

    def log(self, row: Row, step: int) -> None:
        self._run.log(_numbers(row), step=step)

    def finish(self, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


@dataclass(frozen=True)
class MLflow:
    """MLflow at `tracking_uri`. Without one, a local SQLite store in `<run>/mlflow.db`."""

    module: ClassVar[str] = "mlflow"
    experiment: str = "automodel"
    """Experiment of the runs."""
    tracking_uri: str | None = None
    """Address of the MLflow server. null: a SQLite file `mlflow.db` in the run folder."""

    def __post_init__(self) -> None:
        _require(self.module, "mlflow")

    def start(self, run_name: str, run_dir: Path, config: Mapping[str, object]) -> Tracker:
        return _MLflowRun(self, run_name, run_dir, config)


class _MLflowRun:
    _params_at_once = 100  # the server's own limit for one request

    def __init__(self, node: MLflow, run_name: str, run_dir: Path, config: Mapping[str, object]):
        self._mlflow = import_module(node.module)
        self._mlflow.set_tracking_uri(node.tracking_uri or f"sqlite:///{run_dir.resolve()}/mlflow.db")
        self._mlflow.set_experiment(node.experiment)
        self._mlflow.start_run(run_name=run_name)
        params = [(key, str(value)[:6000]) for key, value in flatten_config(config).items()]
        for start in range(0, len(params), self._params_at_once):
            self._mlflow.log_params(dict(params[start : start + self._params_at_once]))

    def log(self, row: Row, step: int) -> None:
        self._mlflow.log_metrics(_numbers(row), step=step)

    def finish(self, succeeded: bool) -> None:
        self._mlflow.end_run("FINISHED" if succeeded else "FAILED")


@dataclass(frozen=True)
class Trackio:
    """Trackio, local by default. `space_id` names a Hugging Face Space that shows the run."""

    module: ClassVar[str] = "trackio"
    project: str = "automodel"
    """Project of the runs."""
    space_id: str | None = None
    """Hugging Face Space to show the run in. null: none."""

    def __post_init__(self) -> None:
        _require(self.module, "trackio")

    def start(self, run_name: str, run_dir: Path, config: Mapping[str, object]) -> Tracker:
        return _TrackioRun(self, run_name, config)


class _TrackioRun:
    def __init__(self, node: Trackio, run_name: str, config: Mapping[str, object]):
        self._trackio = import_module(node.module)
        self._trackio.init(
            project=node.project, name=run_name, space_id=node.space_id, config=flatten_config(config), resume="allow"
        )

    def log(self, row: Row, step: int) -> None:
        self._trackio.log(_numbers(row), step=step)

    def finish(self, succeeded: bool) -> None:
        self._trackio.finish()


@contextmanager
def tracker_errors(tracker: object, hook: str) -> Iterator[None]:
    """Convert exceptions of a tracker to a RunError that names it."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        kind = f"{type(tracker).__module__}.{type(tracker).__qualname__}"
        raise RunError(
            f"tracker {kind} failed in {hook}: {type(error).__name__}: {error}",
            code="callback_failed",
            keys=("logging.trackers",),
        ) from error


BY_NAME: dict[str, Callable[[], TrackerNode]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}
if TYPE_CHECKING:
    TrackerName = str
else:
    TrackerName = Literal[*BY_NAME]


def tracker_nodes(trackers: Sequence[TrackerName | TrackerNode]) -> list[TrackerNode]:
    """The node of each name, and the nodes as they are. Raises ConfigError for a package that is not installed."""
    try:
        return [BY_NAME[item]() if isinstance(item, str) else item for item in trackers]
    except ConfigError as error:
        raise ConfigError(error.message, code=error.code, keys=("trackers",), fix=error.fix) from error
