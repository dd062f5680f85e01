"""`sweep --optuna N`: runs with values that Optuna selects from the results of earlier runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_cli.config.composition import hydra_adapter
from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.launch import signals

if TYPE_CHECKING:
    from optuna import Study

STUDY = "optuna.journal"
"""Study in the sweep's folder. `optuna-dashboard` reads it."""
_MOST_RANDOM = 10


def axes(overrides: Sequence[str]) -> tuple[list[hydra_adapter.SweepAxis], list[str]]:
    """Return the search space and the fixed overrides. Raises ConfigError."""
    try:
        found, fixed = hydra_adapter.sweep_axes(overrides)
    except ValueError as error:
        raise ConfigError(
            f"{error} must be one of: a list, choice(...), range(...), interval(low,high), or "
            "tag(log, interval(low,high)) with low > 0",
            code="invalid_override",
            keys=(str(error).partition("=")[0],),
            origin=f"{error} (command line)",
        ) from error
    except hydra_adapter.HydraException as error:
        message = f"the overrides cannot be parsed: {str(error).splitlines()[0]}"
        raise ConfigError(message, code="invalid_override") from error
    if not found:
        raise ConfigError(
            "the search has one point because each key has one value",
            code="empty_value",
            fix="automodel finetune llm, or 'optimizer.lr=tag(log, interval(1e-5, 1e-3))'",
        )
    return found, fixed


def corners(found: Sequence[hydra_adapter.SweepAxis]) -> list[list[str]]:
    """Points that reach every end: a config is checked with each before the first run."""
    most = max(len(axis.ends()) for axis in found)
    return [[f"{axis.key}={axis.ends()[min(i, len(axis.ends()) - 1)]}" for axis in found] for i in range(most)]


class Search:
    """The study of a sweep, stored in its folder. The same command continues it.

    Each trial is one run. The values of a trial depend only on its index and on earlier trials, so an interrupted
    search continues as if it had not been interrupted.
    """

    def __init__(self, folder: Path, found: Sequence[hydra_adapter.SweepAxis], num_trials: int, *, maximize: bool):
        self._optuna = optuna = _optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        backend = optuna.storages.journal.JournalFileBackend(str(folder / STUDY))
        self._axes, self.num_trials = {axis.key: axis for axis in found}, num_trials
        self._spaces = {axis.key: _distribution(optuna, axis) for axis in found}
        self._study: Study = optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            study_name=folder.name,
            direction="maximize" if maximize else "minimize",
            load_if_exists=True,
        )

    def run(self, start: Callable[[int, list[str]], int], value_of: Callable[[int, list[str]], float | None]) -> int:
        """Run trials until there are `number` of them. `start` runs one, given its index and overrides, and returns its
        exit code. `value_of` returns its result. Returns the worst exit code. A stop signal ends the search.

        Raises RunError if the first successful run has no such value.
        """
        worst = 0
        for number in range(self.num_trials):
            trials = self._study.get_trials(deepcopy=False)
            if number < len(trials) and trials[number].state.is_finished():
                continue
            trial = trials[number] if number < len(trials) else self._ask(number)
            words = self._overrides(trial)
            code = start(number, words)
            if code in signals.EXIT_CODES.values():
                return code
            worst = max(worst, code)
            value = value_of(number, words) if code == 0 else None
            if code == 0 and value is None:
                message = "the run did not log the metric of --metric"
                raise RunError(message, code="unknown_name", keys=("--metric",), fix="--metric loss")
            state = self._optuna.trial.TrialState.FAIL if value is None else None
            self._study.tell(number, value, state=state)
        return worst

    def trials(self) -> list[list[str]]:
        """Return the values selected in each trial so far."""
        return [self._overrides(trial) for trial in self._study.get_trials(deepcopy=False)]

    def _ask(self, number: int) -> Any:
        random = min(_MOST_RANDOM, max(1, self.num_trials // 3))
        self._study.sampler = self._optuna.samplers.TPESampler(seed=number, n_startup_trials=random)
        return self._study.ask(self._spaces)

    def _overrides(self, trial: Any) -> list[str]:
        chosen = [(axis, trial.params[key]) for key, axis in self._axes.items()]
        return [f"{axis.key}={v if isinstance(v, str) else axis.text(v)}" for axis, v in chosen]


def _distribution(optuna: Any, axis: hydra_adapter.SweepAxis) -> object:
    of = optuna.distributions
    if not axis.values:
        make = of.IntDistribution if axis.whole else of.FloatDistribution
        low, high = (round(axis.low), round(axis.high)) if axis.whole else (axis.low, axis.high)
        return make(low, high, log=axis.log)
    if not axis.ordered or len(axis.values) < 2:
        return of.CategoricalDistribution(axis.values)
    numbers = sorted(float(value) for value in axis.values)
    step = numbers[1] - numbers[0]
    if all(number.is_integer() for number in numbers):
        return of.IntDistribution(int(numbers[0]), int(numbers[-1]), step=int(step))
    return of.FloatDistribution(numbers[0], numbers[0] + step * (len(numbers) - 1), step=step)


def _optuna() -> Any:
    try:
        import optuna
        import optuna.storages.journal
    except ImportError as error:
        raise ConfigError(
            f"--optuna needs the package optuna: {error}",
            code="missing_package",
            keys=("--optuna",),
            fix="pip install 'automodel-cli[sweep]'",
        ) from error
    return optuna
