"""Python functions as tools. Torch-free."""

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
    """Functions that the model may call: `functions: {add: {_target_: my_tools.add, _partial_: true}}`.

    Their definition comes from type hints and the docstring, which must describe every argument (a section `Args:` in
    Google style). They run in the training process with your permissions. Exceptions are returned to the model, except
    OSError and TimeoutError, which fail the step. A function may be `async`, else each call has a thread.
    """

    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Your functions by tool name: `{add: {_target_: my_tools.add, _partial_: true}}`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.functions:
            raise ConfigError("functions must contain at least one function", code="empty_value", keys=("functions",))
        self.definitions()

    def definitions(self) -> list[dict[str, object]]:
        """See `ToolEnvironment.definitions`. Raises ConfigError for a function that does not describe itself."""
        return [dict(definition_of(name, function)) for name, function in self.functions.items()]

    async def call(self, name: str, arguments: dict[str, object]) -> str:
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


def _plain(function: Callable[..., object]) -> Callable[..., object]:
    """Return the function of a `_partial_` node."""
    return function.func if isinstance(function, functools.partial) else function


@functools.cache
def definition_of(name: str, function: Callable[..., object]) -> dict[str, object]:
    """Return OpenAI's definition of a function from type hints and docstring. Raise ConfigError if they are
    incomplete."""
    from transformers.utils.chat_template_utils import (
        get_json_schema,
    )  # takes a second, so only users of tools import it

    try:
        schema = get_json_schema(_plain(function))
    except Exception as error:  # transformers has a separate exception for each missing part
        raise ConfigError(
            f"functions.{name} lacks a description of its arguments: {error}".rstrip(),
            code="invalid_value",
            keys=(f"functions.{name}",),
            fix="type hints, and a docstring that describes each argument below `Args:`",
        ) from error
    definition = {key: value for key, value in schema["function"].items() if key != "return"}  # not OpenAI's
    return {"type": "function", "function": {**definition, "name": name}}
