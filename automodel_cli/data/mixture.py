"""How the datasets of a run are mixed: passes per epoch, or shares of the tokens by step; and their loss weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.source_config import SourceConfig

Phase = tuple[int, tuple[float, ...]]
"""(first step, share of the tokens of each dataset). Shares add up to 1."""


@dataclass(frozen=True)
class Mixture:
    """Mixture of datasets, by index of the dataset.

    Attributes:
        names: name of each dataset in metrics.
        epochs: passes over each dataset per epoch. Read without `phases`.
        loss_weights: factor of the loss of each dataset's tokens.
        phases: shares of the tokens, in the order of their first steps. Empty: `epochs` decides.
    """

    names: tuple[str, ...]
    epochs: tuple[float, ...]
    loss_weights: tuple[float, ...]
    phases: tuple[Phase, ...] = ()

    @classmethod
    def single(cls) -> Mixture:
        """One dataset, used once per epoch."""
        return cls(("data",), (1.0,), (1.0,))

    @classmethod
    def of(cls, sources: Sequence[SourceConfig]) -> Mixture:
        """Return the mixture of a config. Raises ConfigError if some weights are missing, all 0, or names repeat."""
        epochs, weights = tuple(s.epochs for s in sources), tuple(s.loss_weight for s in sources)
        if not any(weights):
            raise ConfigError(
                "loss_weight is 0 for all datasets",
                code="out_of_range",
                keys=("datasets",),
                fix="data.datasets.0.loss_weight=1.0",
            )
        return cls(_names(sources), epochs, weights, _phases(sources))

    @property
    def changes(self) -> bool:
        """Whether the shares depend on the step."""
        return len(self.phases) > 1

    def rows_per_epoch(self, num_rows: Sequence[int], num_tokens: Sequence[int]) -> list[float]:
        """Return the mean number of sequences of each dataset in an epoch.

        With shares, an epoch has as many tokens as all datasets together. The shares are those of the first step.

        Args:
            num_rows: sequences of each dataset.
            num_tokens: tokens of each dataset.
        """
        if self.phases:
            # Example: 100 rows and 300 rows with 100,000 tokens each, shares 0.75 and 0.25. An epoch has 200,000
            # tokens: 150,000 of the first dataset (1,000 tokens per row, 150 rows) and 50,000 of the second (333 per
            # row, 150 rows).
            means = [tokens / max(rows, 1) for rows, tokens in zip(num_rows, num_tokens, strict=True)]
            shares = self.phases[0][1]
            return [share * sum(num_tokens) / max(mean, 1) for share, mean in zip(shares, means, strict=True)]
        return [epochs * rows for epochs, rows in zip(self.epochs, num_rows, strict=True)]

    def describe(self, index: int) -> str:
        """Return the use of a dataset as text for the startup summary, or ""."""
        texts = [f"each seen {self.epochs[index]:g} times per epoch"] if self.epochs[index] != 1 else []
        for step, shares in self.phases:
            texts.append(f"{100 * shares[index]:.4g}% of the tokens" + (f" from step {step}" if self.changes else ""))
        if self.loss_weights[index] != 1:
            texts.append(f"loss weight {self.loss_weights[index]:g}")
        return ", ".join(texts)


def _names(sources: Sequence[SourceConfig]) -> tuple[str, ...]:
    """Return the labels. Names from paths are numbered if they repeat."""
    labels = [source.label for source in sources if source.label is not None]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        raise ConfigError(
            f"label={repeated[0]} is the label of several datasets",
            code="ambiguous",
            keys=("datasets",),
            fix=f"data.datasets.{[s.label for s in sources].index(repeated[0])}.label={repeated[0]}_1",
        )
    names: list[str] = []
    for source in sources:
        name = plain = source.label or _from_path(source)
        number = 2
        while source.label is None and name in (*names, *labels):
            name, number = f"{plain}_{number}", number + 1
        names.append(name)
    return tuple(names)


def _from_path(source: SourceConfig) -> str:
    parts = [part for part in re.split(r"[/\\]", source.path.rstrip("/*")) if part and "*" not in part]
    stem = re.sub(r"(?<=.)\.(jsonl?|csv|parquet|arrow|txt|bin|idx|gz|zst)(?=\.|$)", "", parts[-1]) if parts else "data"
    name = "-".join(part for part in (stem, source.name) if part)
    return re.sub(r"[^\w.-]+", "_", name)


def _phases(sources: Sequence[SourceConfig]) -> tuple[Phase, ...]:
    """Return the shares from each step on at which one of them changes."""
    given = [source.sampling_weight is not None for source in sources]
    if not any(given):
        return ()
    if not all(given):
        missing = given.index(False)
        raise ConfigError(
            f"sampling_weight is set for {sum(given)} of {len(given)} datasets: set it for all of them or for none",
            code="requires_setting",
            keys=("datasets",),
            fix=f"data.datasets.{missing}.sampling_weight=1.0",
        )
    by_step = [source.weights_by_step() for source in sources]
    phases: list[Phase] = []
    for step in sorted({0, *(step for weights in by_step for step in weights)}):
        now = [max(((at, w) for at, w in weights.items() if at <= step), default=(0, 0.0))[1] for weights in by_step]
        if not sum(now):
            raise ConfigError(
                f"sampling_weight is 0 for all datasets from step {step} on",
                code="out_of_range",
                keys=("datasets",),
                fix="data.datasets.0.sampling_weight=1.0",
            )
        shares = tuple(weight / sum(now) for weight in now)
        if not phases or phases[-1][1] != shares:
            phases.append((step, shares))
    return tuple(phases)
