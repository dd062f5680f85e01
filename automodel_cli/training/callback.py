"""Callbacks of a run: the protocol, and the list that calls those of the recipe and of the config.

    callbacks: [{_target_: my_package.Watch}]        # and on the command line --trust-package my_package

A custom callback inherits from `Callback` and overrides the hooks that it needs (examples/own_callback.py). Importing
this module does not import torch.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.fix_syntax import word

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from automodel_cli.distributed.mesh import Mesh

    Number = Tensor | float | int
    N = TypeVar("N")
    _Measure = Callable[["Run", int, Mapping[str, N]], Mapping[str, N] | None]

_OF_THE_METER = ("step", "memory_gib", "tokens_per_second", "step_seconds", "mfu")


class TrainedModel(Protocol):
    """The model of a run on this rank."""

    @property
    def parts(self) -> Sequence[nn.Module]:
        """Sharded model parts: the pipeline stages of this rank."""
        ...


class Run(Protocol):
    """Interface of a run for callbacks. Exists on every rank."""

    run_dir: Path
    is_main: bool
    """Whether this is rank 0, which writes and prints."""
    first_step: int
    """Number of completed steps at the start of this process: 0, or the step of the resumed checkpoint."""
    num_steps: int
    tokenizer: PreTrainedTokenizerBase
    mesh: Mesh
    optimizer: torch.optim.Optimizer

    @property
    def model(self) -> TrainedModel: ...
    def print(self, text: str) -> None:
        """Print a line of the run's output on rank 0."""
        ...


class Callback(Protocol):
    """Hooks that run on every rank, in the order of the list.

    - All ranks call a hook at the same point, so it may use collectives.
    - Every command that reads the config constructs the callback. Open files in `on_start`.
    - An exception ends the run with an error that names the callback. Existing checkpoints stay complete.
    """

    def on_start(self, run: Run, state: object) -> None:
        """Run before the first step, after the model was sharded.

        `state` is the result of `on_checkpoint` in the resumed checkpoint, or None.
        """
        return None

    def on_step(self, run: Run, step: int, values: Mapping[str, Number]) -> Mapping[str, Number] | None:
        """Run after optimizer step `step` (1-based).

        Args:
            run: the run.
            step: number of completed steps.
            values: metrics of the step over all ranks (loss, grad_norm, lr, ...). They may be tensors on the device,
                and reading one synchronizes with the device.

        Returns:
            Further columns for metrics.jsonl, of which those of rank 0 are written, or None.
        """
        return None

    def on_validation(self, run: Run, step: int, values: Mapping[str, float]) -> Mapping[str, float] | None:
        """Run after a validation at `step`. `values` are its metrics so far. Return further metrics, or None."""
        return None

    def on_checkpoint(self, run: Run, step: int) -> object:
        """Run before the checkpoint of `step` is written. Return JSON values to store in it, for `on_start`.

        The values of rank 0 are stored.
        """
        return None

    def on_end(self, run: Run, succeeded: bool) -> None:
        """Run at the end, also after a failure or a stop signal. Close files here."""
        return None


class Callbacks:
    """The callbacks of one run: those of the recipe first, then those of the config.

    Errors in callbacks of the recipe are bugs and keep their traceback. Errors in callbacks of the config become a
    RunError that names the callback. `states` are the results of `on_checkpoint` in the resumed checkpoint, by name.
    """

    def __init__(self, run: Run, states: Mapping[str, object]):
        self._run, self._states = run, states
        self._own: dict[str, Callback] = {}
        self._users: dict[str, Callback] = {}

    def start(self, users: Sequence[Callback]) -> None:
        """Add and start the callbacks of the config."""
        for callback in users:
            name = self._free_name(callback)
            with self._named(name, "on_start"):
                callback.on_start(self._run, self._states.get(name))
            self._users[name] = callback

    def add(self, callback: Callback) -> None:
        """Add and start a callback of the recipe. It is called before those of the config."""
        name = self._free_name(callback)
        callback.on_start(self._run, self._states.get(name))
        self._own[name] = callback

    def step(self, step: int, values: Mapping[str, Number]) -> dict[str, Number]:
        """Return the columns that all callbacks add to the metrics of a step."""
        return self._gathered("on_step", step, values, lambda callback: callback.on_step)

    def validation(self, step: int) -> dict[str, float]:
        """Return the metrics that all callbacks add to a validation."""
        return self._gathered("on_validation", step, {}, lambda callback: callback.on_validation)

    def checkpoint(self, step: int) -> dict[str, object]:
        """Return the states to store in a checkpoint, by name of the callback."""
        states = {}
        for name, callback in (self._own | self._users).items():
            with self._named(name, "on_checkpoint", step):
                state = callback.on_checkpoint(self._run, step)
                if state is not None:
                    json.dumps(state)  # raise TypeError before anything is written
                    states[name] = state
        return states

    def unclaimed(self) -> list[str]:
        """Return the names of callbacks that have a state in the checkpoint but are not part of this run."""
        return [name for name in self._states if name not in self._own and name not in self._users]

    def end(self, *, succeeded: bool) -> Exception | None:
        """Call `on_end` of all callbacks, even if some fail.

        If the run succeeded, the first failure is returned. All other failures are printed.
        """
        failures: list[Exception] = []
        for name, callback in (self._users | self._own).items():
            try:
                with self._named(name, "on_end"):
                    callback.on_end(self._run, succeeded)
            except Exception as error:
                failures.append(error)
        for failure in failures[1 if succeeded else 0 :]:
            self._run.print(str(failure))
        return failures[0] if failures and succeeded else None

    def _free_name(self, callback: Callback) -> str:
        base = f"{type(callback).__module__}.{type(callback).__qualname__}"
        number = sum(name.partition(" #")[0] == base for name in (*self._own, *self._users))
        return f"{base} #{number + 1}" if number else base

    def _gathered(
        self, hook: str, step: int, values: Mapping[str, N], method_of: Callable[[Callback], _Measure[N]]
    ) -> dict[str, N]:
        """Collect the results of a hook. Each callback receives the values of the previous ones."""
        found: dict[str, N] = {}
        for name, callback in (self._own | self._users).items():
            known = {**values, **found}
            with self._named(name, hook, step):
                more = method_of(callback)(self._run, step, known)
            if more is not None:
                self._check(name, hook, more, known)
                found |= more
        return found

    def _check(self, name: str, hook: str, more: object, known: Mapping[str, object]) -> None:
        """Raise RunError unless `more` is a mapping of new names to scalars."""
        if not isinstance(more, Mapping):
            raise RunError(
                f"callback {name}.{hook} returned {more!r}, but must return a mapping of names to numbers",
                code="callback_failed",
                keys=("callbacks",),
            )
        for key, value in more.items():
            is_number = isinstance(value, (int, float)) or getattr(value, "ndim", None) == 0
            if not isinstance(key, str) or not is_number:
                raise RunError(
                    f"callback {name}.{hook} returned {key!r}: {value!r}, but each entry must map a name to one number",
                    code="callback_failed",
                    keys=("callbacks",),
                )
            if key in known or key in _OF_THE_METER:
                raise RunError(
                    f"callback {name}.{hook} returned {key!r}, but metrics.jsonl already has a column of this name",
                    code="callback_failed",
                    keys=("callbacks",),
                )

    @contextmanager
    def _named(self, name: str, hook: str, step: int | None = None) -> Iterator[None]:
        """Convert exceptions of a callback of the config to a RunError that names it."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            if name in self._own:
                raise
            when = "" if step is None else f" at step {step}"
            raise RunError(
                f"callback {name} failed in {hook}{when}: {type(error).__name__}: {error} ({_location(error, name)})",
                code="callback_failed",
                keys=("callbacks",),
                fix=f"automodel resume {word(self._run.run_dir)}   (after you correct the callback)",
            ) from error


def _location(error: Exception, name: str) -> str:
    """Return file and line of the innermost frame in the module of the callback, or of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    module = sys.modules.get(name.partition(" ")[0].rpartition(".")[0])
    own_frames = [frame for frame in frames if module is not None and frame.filename == module.__file__]
    frame = (own_frames or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
