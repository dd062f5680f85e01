"""Optional experiment trackers behind one small protocol. Torch-free; a tracker's package is imported when it starts.

Nothing is sent anywhere unless the config names a tracker; metrics.jsonl is always written.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from automodel_cli.config.errors import ConfigError
from automodel_cli.training.metrics import Row


class Tracker(Protocol):
    """A running tracker. Only rank 0 has one."""

    def log(self, row: Row, step: int) -> None:
        """Record one row; None values are left out."""
        ...

    def finish(self, succeeded: bool) -> None:
        """Flush and close."""
        ...


class TrackerNode(Protocol):
    """A config node that starts a tracker."""

    def start(self, run_name: str, run_dir: Path, config: Mapping[str, Any]) -> Tracker: ...


def _require(module: str, package: str) -> None:
    """Refuse a tracker whose package is not installed, without importing it."""
    if find_spec(module) is None:
        raise ConfigError(
            f"tracker {package!r} needs the package {package!r}, which is not installed",
            keys=("trackers",),
            fix=f"pip install {package}",
        )


def _numbers(row: Row) -> dict[str, float]:
    return {key: float(value) for key, value in row.items() if value is not None and key != "step"}


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config as `section.key` -> value, for trackers that keep hyper-parameters flat."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


@dataclass(frozen=True)
class TensorBoard:
    """Event files in `<run>/tensorboard`, or in `log_dir`."""

    module: ClassVar[str] = "tensorboard"
    log_dir: str | None = None

    def __post_init__(self) -> None:
        _require(self.module, "tensorboard")

    def start(self, run_name: str, run_dir: Path, config: Mapping[str, Any]) -> Tracker:
        return _TensorBoardRun(Path(self.log_dir) / run_name if self.log_dir else run_dir / "tensorboard", config)


class _TensorBoardRun:
    def __init__(self, directory: Path, config: Mapping[str, Any]):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory))
        lines = [f"{key}: {value}" for key, value in flatten(config).items()]
        self._writer.add_text("config", "```\n" + "\n".join(lines) + "\n```")

    def log(self, row: Row, step: int) -> None:
        for key, value in _numbers(row).items():
            self._writer.add_scalar(key, value, step)

    def finish(self, succeeded: bool) -> None:
        self._writer.close()


@dataclass(frozen=True)
class WandB:
    """Weights & Biases. `mode="offline"` writes below the run directory and sends nothing."""

    module: ClassVar[str] = "wandb"
    project: str = "automodel"
    """The project that runs are listed in."""
    entity: str | None = None
    """User or team; null: the account's own."""
    group: str | None = None
    """Name under which several runs stand together."""
    mode: Literal["online", "offline"] = "online"

    def __post_init__(self) -> None:
        _require(self.module, "wandb")

    def start(self, run_name: str, run_dir: Path, config: Mapping[str, Any]) -> Tracker:
        return _WandBRun(self, run_name, run_dir, config)


class _WandBRun:
    def __init__(self, node: WandB, run_name: str, run_dir: Path, config: Mapping[str, Any]):
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
    """MLflow at `tracking_uri`; without one, a local SQLite store in `<run>/mlflow.db`."""

    module: ClassVar[str] = "mlflow"
    experiment: str = "automodel"
    """The experiment that runs are listed in."""
    tracking_uri: str | None = None

    def __post_init__(self) -> None:
        _require(self.module, "mlflow")

    def start(self, run_name: str, run_dir: Path, config: Mapping[str, Any]) -> Tracker:
        return _MLflowRun(self, run_name, run_dir, config)


class _MLflowRun:
    _params_at_once = 100  # the server's own limit for one request

    def __init__(self, node: MLflow, run_name: str, run_dir: Path, config: Mapping[str, Any]):
        self._mlflow = import_module(node.module)
        self._mlflow.set_tracking_uri(node.tracking_uri or f"sqlite:///{run_dir.resolve()}/mlflow.db")
        self._mlflow.set_experiment(node.experiment)
        self._mlflow.start_run(run_name=run_name)
        params = [(key, str(value)[:6000]) for key, value in flatten(config).items()]
        for start in range(0, len(params), self._params_at_once):
            self._mlflow.log_params(dict(params[start : start + self._params_at_once]))

    def log(self, row: Row, step: int) -> None:
        self._mlflow.log_metrics(_numbers(row), step=step)

    def finish(self, succeeded: bool) -> None:
        self._mlflow.end_run("FINISHED" if succeeded else "FAILED")


@dataclass(frozen=True)
class Trackio:
    """Trackio, local by default; `space_id` names a Hugging Face Space to show the run in."""

    module: ClassVar[str] = "trackio"
    project: str = "automodel"
    """The project that runs are listed in."""
    space_id: str | None = None

    def __post_init__(self) -> None:
        _require(self.module, "trackio")

    def start(self, run_name: str, run_dir: Path, config: Mapping[str, Any]) -> Tracker:
        return _TrackioRun(self, run_name, config)


class _TrackioRun:
    def __init__(self, node: Trackio, run_name: str, config: Mapping[str, Any]):
        self._trackio = import_module(node.module)
        self._trackio.init(
            project=node.project, name=run_name, space_id=node.space_id, config=flatten(config), resume="allow"
        )

    def log(self, row: Row, step: int) -> None:
        self._trackio.log(_numbers(row), step=step)

    def finish(self, succeeded: bool) -> None:
        self._trackio.finish()


BY_NAME: dict[str, type[TensorBoard] | type[WandB] | type[MLflow] | type[Trackio]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def check_trackers(trackers: Sequence[Any]) -> list[TrackerNode]:
    """Nodes for a list of names or nodes. Raises ConfigError for an unknown name or a package that is not installed."""
    nodes: list[TrackerNode] = []
    for item in trackers:
        if isinstance(item, str):
            if item not in BY_NAME:
                close = difflib.get_close_matches(item, BY_NAME, n=1)
                raise ConfigError(
                    f"unknown tracker {item!r}; known: {', '.join(BY_NAME)}",
                    keys=("trackers",),
                    fix=f"logging.trackers=[{close[0] if close else 'tensorboard'}]",
                )
            nodes.append(BY_NAME[item]())
        elif isinstance(item, (TensorBoard, WandB, MLflow, Trackio)):
            nodes.append(item)
        else:
            raise ConfigError(
                f"trackers holds {item!r}, which is neither a tracker's name nor its node",
                keys=("trackers",),
                fix="logging.trackers=[tensorboard]",
            )
    return nodes
