"""Tools that the model calls by name with JSON arguments, with OpenAI's definitions. Torch-free."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from automodel_cli.config.value_checks import check_choice, check_minimums
from automodel_cli.rollout.environments.base import Environment, Turn
from automodel_cli.rollout.rewards.text import check_pattern
from automodel_cli.rollout.types import Message


class ToolError(Exception):
    """A mistake of the model in a tool call. The message is returned to the model."""


@dataclass(frozen=True)
class ToolCall:
    """One call in a message of the model."""

    name: str
    arguments: dict[str, object]


@dataclass(frozen=True, kw_only=True)
class ToolEnvironment(Environment):
    """Run the tools that the model calls. A message without a call is the answer and ends the episode.

    A subclass defines `definitions` and `call`.

    - A call is the first group of `pattern`: JSON `{"name": ..., "arguments": {...}}`, by default between
      `<tool_call>` and `</tool_call>` (Hermes, Qwen).
    - A message may contain up to `max_calls` calls, which run in order. Each result is a message of `role`, truncated
      to `max_result_chars` characters.
    - Mistakes of the model (invalid JSON, unknown tool, wrong arguments, rejected arguments) are returned as `error:
      ...`.
    - Other exceptions, for example an unreachable tool or a timeout, fail the step.
    - Each call with a result gets `tool_call_reward`, each other call `error_reward`.
    - With `show_tools` the chat template shows the definitions. Otherwise your `system` column must.
    """

    pattern: str = r"<tool_call>(.*?)</tool_call>"
    """Regular expression whose first group is a call: JSON `{"name": ..., "arguments": {...}}`."""
    role: Literal["tool", "user"] = "tool"
    """Role of the messages with results."""
    show_tools: bool = True
    """Insert the tool definitions into the prompt through the chat template."""
    max_calls: int = 8
    """Maximum number of calls per message."""
    max_result_chars: int = 4000
    """Maximum length of a result in characters. Longer results are truncated."""
    tool_call_reward: float = 0.0
    """Reward per call with a result."""
    error_reward: float = 0.0
    """Reward per failed call."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pattern("pattern", self.pattern, groups=1)
        check_choice("role", self.role, ("tool", "user"), fix="role=tool")
        check_minimums(self, max_calls=1, max_result_chars=1)

    @property
    def tools(self) -> Sequence[dict[str, object]]:
        """See `EnvironmentNode.tools`."""
        return self.definitions() if self.show_tools else ()

    @abstractmethod
    def definitions(self) -> list[dict[str, Any]]:
        """The tools: `{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}`."""
        raise NotImplementedError

    @abstractmethod
    async def call(self, name: str, arguments: dict[str, object]) -> str:
        """Return the result of a tool as text. Raises ToolError for mistakes of the model. Other exceptions fail the
        step."""
        raise NotImplementedError

    async def step(self, messages: Sequence[Message], row: Mapping[str, object], state: object) -> Turn:
        """See `EnvironmentNode.step`."""
        calls = list(self._calls(str(messages[-1]["content"])))
        if not calls:
            return Turn()
        replies: list[Message] = []
        reward = 0.0
        for number, call in enumerate(calls):
            try:
                if number >= self.max_calls:
                    raise ToolError(f"a message may call {self.max_calls} tools")
                text = await self._made(call)
                reward += self.tool_call_reward
            except ToolError as error:
                text = f"error: {error}"
                reward += self.error_reward
            replies.append({"role": self.role, "content": self._cut(text)})
        return Turn(tuple(replies), reward, done=False)

    def _calls(self, text: str) -> Iterator[ToolCall | ToolError]:
        return calls_in(self.pattern, text)

    async def _made(self, call: ToolCall | ToolError) -> str:
        if isinstance(call, ToolError):
            raise call
        known = [definition["function"]["name"] for definition in self.definitions()]
        if call.name not in known:
            raise ToolError(f"there is no tool {call.name!r}, only {', '.join(known)}")
        return await self.call(call.name, call.arguments)

    def _cut(self, text: str) -> str:
        if len(text) <= self.max_result_chars:
            return text
        return f"{text[: self.max_result_chars]} ... ({len(text) - self.max_result_chars} more characters)"


def calls_in(pattern: str, text: str) -> Iterator[ToolCall | ToolError]:
    """Return the captures of the first group of `pattern`, each as a call."""
    for match in re.finditer(pattern, text, re.DOTALL):
        yield read_call(match[1])


def read_call(text: str) -> ToolCall | ToolError:
    """Parse a call as JSON. `arguments` may be JSON in a text, as in OpenAI's API."""
    try:
        parsed = json.loads(text)
        arguments = parsed["arguments"]
        match json.loads(arguments) if isinstance(arguments, str) else arguments:
            case dict() as by_name:
                return ToolCall(str(parsed["name"]), by_name)
        reason = "arguments are no object"
    except KeyError as error:
        reason = f"lacks {error}"
    except (ValueError, TypeError, RecursionError) as error:
        reason = str(error)
    return ToolError(f'a call is {{"name": ..., "arguments": {{...}}}}: {reason}')
