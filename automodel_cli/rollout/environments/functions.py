"""Plain Python functions as the model's tools. Torch-free."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from automodel_cli.config.errors import ConfigError
from automodel_cli.rollout.environments.event_loop import in_thread
from automodel_cli.rollout.environments.tools import ToolEnvironment, ToolError

_AWAY = (OSError, TimeoutError)  # connections are OSErrors


@dataclass(frozen=True, kw_only=True)
class FunctionTools(ToolEnvironment):
    """Python functions that the model can call: `functions: {add: {_target_: my_tools.add, _partial_: true}}`.

    What the model is shown of one comes from its type hints and its docstring, which must describe every argument (a
    section `Args:`, as Google writes it). They run in the training process with your rights. What a function raises is
    told to the model, except OSError and TimeoutError, which fail the step. A function may be `async`; else each call
    has a thread.
    """

    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Your functions by tool name: `{add: {_target_: my_tools.add, _partial_: true}}`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.functions:
            raise ConfigError("functions must contain at least one function", code="empty_value", keys=("functions",))
        self.definitions()

    def definitions(self) -> list[dict[str, Any]]:
        """See `ToolEnvironment.definitions`. Raises ConfigError for a function that does not describe itself."""
        return [dict(definition_of(name, function)) for name, function in self.functions.items()]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """See `ToolEnvironment.call`."""
        function = self.functions[name]
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise ToolError(f"{name}: {error}") from error
        try:
            if inspect.iscoroutinefunction(_plain(function)):
                return str(await function(**arguments))
            return str(await in_thread(functools.partial(function, **arguments)))
        except _AWAY:
            raise
        except Exception as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that `_partial_` of a config stands for."""
    return function.func if isinstance(function, functools.partial) else function


@functools.cache
def definition_of(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """OpenAI's definition of a function, of its type hints and its docstring. Raises ConfigError where they say too
    little."""
    from transformers.utils import get_json_schema  # a second: only who has tools waits for it

    try:
        found = get_json_schema(_plain(function))
    except Exception as error:  # an exception of its own for each thing that may lack
        raise ConfigError(
            f"functions.{name} lacks a description of its arguments: {error}".rstrip(),
            code="invalid_value",
            keys=(f"functions.{name}",),
            fix="type hints, and a docstring that describes each argument below `Args:`",
        ) from error
    said = {key: value for key, value in found["function"].items() if key != "return"}  # not OpenAI's
    return {"type": "function", "function": {**said, "name": name}}
