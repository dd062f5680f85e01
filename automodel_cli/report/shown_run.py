"""Contents of the report page: a run, its evaluations and its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from automodel_cli.report.chart_axes import Rows


@dataclass(frozen=True)
class ShownSample:
    """A prompt with the responses before and after training, and the expected answer. None if unknown."""

    prompt: str
    after: str
    before: str | None = None
    expected: str | None = None
    reward: str | None = None
    """Reward of a training sample, which has no response before training."""
    pictures: Sequence[str] = ()
    """Pictures of the prompt as `data:` URLs."""


@dataclass(frozen=True)
class Dataset:
    """Statistics of one dataset: document lengths in tokens, and fractions in 0..1 (None: unknown)."""

    name: str
    text: str
    edges: Sequence[float] = ()
    counts: Sequence[int] = ()
    trained: float | None = None
    fill: float | None = None


@dataclass(frozen=True)
class TaskScore:
    """One score of one task and model, with its confidence interval if there is one."""

    task: str
    model: str
    score: str
    interval: str = ""
    note: str = ""


@dataclass(frozen=True)
class ShownRun:
    """Content of the page for one run. `rows` come from metrics.jsonl, `numbers` are formatted final values, `layout`
    holds the mesh sizes, and `schedule` is the timeline of a step as SVG."""

    name: str
    rows: Rows
    numbers: Mapping[str, str] = field(default_factory=dict)
    state: str = ""
    why: str = ""
    command: str = ""
    about: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    config_yaml: str = ""
    samples: Sequence[ShownSample] = ()
    data: Sequence[Dataset] = ()
    layout: Mapping[str, int] = field(default_factory=dict)
    schedule: str = ""
    evaluations: Sequence[TaskScore] = ()
