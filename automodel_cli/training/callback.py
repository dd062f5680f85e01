"""What else happens in a run: the one list of callbacks of a session, ours and the user's.

    callbacks: [{_target_: mine.Watch}]        # and on the command line --trust-package mine

A callback of your own inherits from `Callback` and overrides what it wants to hear; see examples/own_callback.py.
Torch-free at import, like everything that a config names.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.fix_syntax import word

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from automodel_cli.distributed.mesh import Mesh

    Number = Tensor | float | int

_OF_THE_METER = ("step", "memory_gib", "tokens_per_second", "step_seconds", "mfu")


class TrainedModel(Protocol):
    """The model of a run on this rank."""

    @property
    def parts(self) -> Sequence[nn.Module]:
        """As they are trained: sharded, and only this rank's stages."""
        ...


class Run(Protocol):
    """What a callback sees of its run. Every rank has one."""

    run_dir: Path
    is_main: bool
    """Whether this rank (0) is the one that writes and prints."""
    first_step: int
    """Steps done before this process began: 0, or those of the checkpoint that it goes on from."""
    num_steps: int
    tokenizer: Any
    mesh: Mesh
    optimizer: torch.optim.Optimizer

    @property
    def model(self) -> TrainedModel: ...
    def print(self, text: str) -> None:
        """A line of the run's output, on rank 0."""
        ...


class Callback(Protocol):
    """Hears of a run on every rank, in the order of the list; all ranks call a hook at the same point, so that it may
    use collectives. A callback is constructed by every command that reads the config: open files in `on_start`.

    An exception ends the run and is reported with the callback's name; the checkpoints written before stay whole.
    """

    def on_start(self, run: Run, state: Any) -> None:
        """Before the first step, with the model as it is trained. `state` is what `on_checkpoint` returned for the
        checkpoint that the run goes on from; None where there is none."""
        return None

    def on_step(self, run: Run, step: int, values: Mapping[str, Number]) -> Mapping[str, Number] | None:
        """After optimizer step `step` (1-based). `values` are its row of metrics.jsonl so far (loss, grad_norm, lr,
        ...), of all ranks together; they may be tensors on the device, and to read one waits for it. Returns further
        columns of the row (rank 0's are written), or None."""
        return None

    def on_validation(self, run: Run, step: int, values: Mapping[str, float]) -> Mapping[str, float] | None:
        """When the held-out rows have been measured after `step` steps. `values` is what was measured so far. Returns
        further measurements, or None."""
        return None

    def on_checkpoint(self, run: Run, step: int) -> Any:
        """Before the checkpoint of `step` is written. What rank 0 returns (JSON values) becomes part of it, for
        `on_start`."""
        return None

    def on_end(self, run: Run, succeeded: bool) -> None:
        """When the run ends, also by a failure, and when it was told to stop: the place to close files."""
        return None


class Callbacks:
    """The callbacks of one run: first the recipe's own, whose errors are bugs and stay as they are, then the user's.

    `states`: what they returned for the checkpoint that the run goes on from, by name.
    """

    def __init__(self, run: Run, states: Mapping[str, Any]):
        self._run, self._states = run, states
        self._own: dict[str, Callback] = {}
        self._users: dict[str, Callback] = {}

    def start(self, users: Sequence[Callback]) -> None:
        """Begin with those of the config."""
        for callback in users:
            name = self._free_name(callback)
            with self._named(name, "on_start"):
                callback.on_start(self._run, self._states.get(name))
            self._users[name] = callback

    def add(self, callback: Callback) -> None:
        """One more of the recipe's own, which is heard before the user's."""
        name = self._free_name(callback)
        callback.on_start(self._run, self._states.get(name))
        self._own[name] = callback

    def step(self, step: int, values: Mapping[str, Number]) -> dict[str, Number]:
        """What all of them add to the row of a step."""
        return self._gathered("on_step", step, values)

    def validation(self, step: int) -> dict[str, float]:
        """What all of them measure."""
        return self._gathered("on_validation", step, {})

    def checkpoint(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps of them, by name."""
        states = {}
        for name, callback in (self._own | self._users).items():
            with self._named(name, "on_checkpoint", step):
                state = callback.on_checkpoint(self._run, step)
                if state is not None:
                    json.dumps(state)  # refused here, before anything is written
                    states[name] = state
        return states

    def unclaimed(self) -> list[str]:
        """Names of the callbacks whose state the checkpoint holds, and which this run does not have."""
        return [name for name in self._states if name not in self._own and name not in self._users]

    def end(self, *, succeeded: bool) -> Exception | None:
        """Tell all of them, whatever the others do. Of a run that succeeded the first failure is returned; all others
        are printed."""
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

    def _gathered(self, hook: str, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """What the hooks return, one after the other; each sees what was found before it."""
        found: dict[str, Any] = {}
        for name, callback in (self._own | self._users).items():
            known = {**values, **found}
            with self._named(name, hook, step):
                ask = callback.on_step if hook == "on_step" else callback.on_validation
                more = ask(self._run, step, known)
            if more is not None:
                self._check(name, hook, more, known)
                found |= more
        return found

    def _check(self, name: str, hook: str, more: Any, known: Mapping[str, Any]) -> None:
        """Refuse what no row of metrics.jsonl can hold."""
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
        """What a user's callback raises in here names it."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            if name in self._own:
                raise
            when = "" if step is None else f" at step {step}"
            raise RunError(
                f"callback {name} failed in {hook}{when}: {type(error).__name__}: {error} ({_place(error, name)})",
                code="callback_failed",
                keys=("callbacks",),
                fix=f"automodel resume {word(self._run.run_dir)}   (after you correct the callback)",
            ) from error


def _place(error: Exception, name: str) -> str:
    """File and line: the innermost of the callback's own module, else of all."""
    frames = traceback.extract_tb(error.__traceback__)
    module = sys.modules.get(name.partition(" ")[0].rpartition(".")[0])
    mine = [frame for frame in frames if module is not None and frame.filename == module.__file__]
    frame = (mine or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
