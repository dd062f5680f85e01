"""Warnings about slow failures of RL runs, each reported once. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from automodel_cli.training.metrics_file import read_metrics

_TRUNCATED = 0.5  # fraction of truncated responses
_EQUAL = 0.9  # fraction of groups without a gradient
_FAILED = 0.25  # share of episodes whose environment failed
_COLLAPSED = 0.1  # of the first steps' entropy
_STEPS = 5  # consecutive steps before a warning; their mean is the initial entropy
_ENOUGH = 8  # samples on which a reward that has never worked must have failed before it counts as broken


@dataclass
class HealthMonitor:
    """Inspect the metrics of each step and return warnings, each once."""

    max_new_tokens: int
    first_entropies: list[float] = field(default_factory=list)
    """Entropies of the first steps. A resumed run reads them from metrics.jsonl and adds missing ones."""
    _in_a_row: dict[str, int] = field(default_factory=dict)
    _asked: Counter[str] = field(default_factory=Counter)
    _worked: set[str] = field(default_factory=set)
    _without_any: int = 0
    _said: set[str] = field(default_factory=set)

    def of(self, values: Mapping[str, float], failures: Mapping[str, tuple[int, int]]) -> list[str]:
        """Return the warnings after a step. `failures`: per reward, the number of failures and of scored samples."""
        due = []
        for name, sentence in (*self._symptoms(values), *_failing(failures)):
            self._in_a_row[name] = self._in_a_row.get(name, 0) + 1 if sentence else 0
            if sentence and self._in_a_row[name] >= _STEPS and name not in self._said:
                self._said.add(name)
                due.append(f"WARNING: for {_STEPS} steps {sentence}")
        return due

    def broken(self, failures: Mapping[str, tuple[int, int]]) -> str | None:
        """Return the reward for which the run must stop: a reward that has failed on every sample since the start, or
        any reward if no reward returned a number for several steps. Otherwise None."""
        if not failures:
            return None
        for name, (failed, num_calls) in failures.items():
            self._asked[name] += num_calls
            if failed < num_calls:
                self._worked.add(name)
        for name, (failed, num_calls) in failures.items():
            if failed == num_calls and name not in self._worked and self._asked[name] >= _ENOUGH:
                return name
        none = all(failed == num_calls for failed, num_calls in failures.values())
        self._without_any = self._without_any + 1 if none else 0
        return next(iter(failures)) if self._without_any >= _STEPS else None

    def _symptoms(self, values: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Return a warning per symptom, empty if the symptom is absent."""
        truncated = values["truncation_rate"]
        yield (
            "truncation_rate",
            f"more than {_TRUNCATED:.0%} of the responses (now {truncated:.0%}) did not end within "
            f"rollout.max_new_tokens={self.max_new_tokens}. Raise it, or set rollout.overlong"
            if truncated > _TRUNCATED
            else "",
        )
        equal, groups = values["num_zero_std_groups"], values["num_groups"]
        mean = values.get("reward_zero_std_groups", 0.0)
        yield (
            "equal",
            f"more than {_EQUAL:.0%} of the groups (now {equal:g} of {groups:g}, mean reward {mean:.3g}) had equal "
            "rewards and no gradient. The prompts are too easy or too hard for this model, or all samples of a prompt "
            "are identical"
            if min(equal, values["num_unused_groups"]) > _EQUAL * groups
            else "",
        )
        lost = values.get("environment_failed", 0.0)
        yield (
            "environment",
            f"more than {_FAILED:.0%} of the episodes (now {lost:.0%}) failed in their environment. See the warnings "
            "above, and environment_* in metrics.jsonl"
            if lost > _FAILED
            else "",
        )
        if (entropy := values.get("entropy")) is not None:  # a step without an update has none
            yield "entropy", self._collapse(entropy)

    def _collapse(self, entropy: float) -> str:
        if len(self.first_entropies) < _STEPS:
            self.first_entropies.append(entropy)
            return ""
        first = sum(self.first_entropies[:_STEPS]) / _STEPS
        if entropy >= _COLLAPSED * first:
            return ""
        return (
            f"the entropy is below {_COLLAPSED:.0%} of its initial value ({first:.3g} nats, now {entropy:.3g}): "
            "samples of a prompt become identical. Set objective.entropy_coef, a higher objective.clip_high or a lower "
            "optimizer.lr"
        )


def measured_entropies(path: Path) -> list[float]:
    """Return the entropies of metrics.jsonl of a resumed run. Empty for a new run."""
    return [row["entropy"] for row in read_metrics(path) if row.get("entropy") is not None]


def _failing(failures: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, str]]:
    """Return whether a reward fails on all samples. A reward with a filter counts only steps with matching rows."""
    for name, (failed, num_calls) in failures.items():
        yield (
            f"reward {name}",
            f"reward {name} failed on every sample (now {failed} of {num_calls}). See the warnings above, and `errors` "
            "in rollouts.jsonl"
            if failed == num_calls
            else "",
        )
