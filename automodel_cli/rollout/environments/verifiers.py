"""Environments of the package `verifiers` (extra `verifiers`): rows, turns and rubric. Torch-free.

Such an environment runs its conversation and requests messages of the model from a client. Here the client waits for
the engine: each request is a turn of an episode, so tokens stay exactly those that the model generated. Each turn
verifies that the requested conversation is the conversation so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.config.security import trust
from automodel_cli.config.value_checks import require_package
from automodel_cli.rollout.environments.base import Environment, Turn
from automodel_cli.rollout.environments.tools import ToolCall, calls_in
from automodel_cli.rollout.environments.verifiers_client import client_class, to_message, to_response
from automodel_cli.rollout.rewards.text import check_pattern
from automodel_cli.rollout.types import Message

if TYPE_CHECKING:
    from verifiers import Environment as Theirs

_VERSION = 1  # part of every cache key


@dataclass(frozen=True, kw_only=True)
class VerifiersTasks:
    """Rows of an environment of `verifiers`, for `data.generator`.

    `environment` is the module with `load_environment` (a name with `_`, not `-`), `arguments` are its arguments. The
    command line must allow the module with `--trust-package`. `num_train` limits the training rows (null: all),
    `num_validation` the evaluation rows. The answer is not visible to the model.
    """

    environment: str = field(metadata=trust.imports())
    """Module with the `load_environment` function (a name with `_`, not `-`)."""
    arguments: dict[str, object] = field(default_factory=dict)
    """Arguments of `load_environment`."""
    num_train: int | None = None
    """Number of training rows, the first ones. null: all."""
    num_validation: int = 64
    """Number of evaluation rows, the first ones."""

    def rows(self, split: Literal["train", "validation"]) -> Iterator[dict[str, object]]:
        """Yield dicts with `messages`, `answer`, `kind` (the environment) and `entry` (data of the environment)."""
        loaded = load_environment(self.environment, self.arguments)
        count = self.num_train if split == "train" else self.num_validation
        if count == 0:
            return
        read = loaded.get_dataset if split == "train" else loaded.get_eval_dataset
        for entry in read(n=-1 if count is None else count):
            messages = [to_message(message) for message in entry["prompt"]]
            answer = str(entry.get("answer") or "")
            kept = {key: value for key, value in entry.items() if value is not None}
            yield {"messages": messages, "answer": answer, "kind": self.environment, "entry": kept}

    def cache_key(self) -> str:
        """Return a digest of all settings that determine the rows, including the version of the package."""
        from importlib.metadata import version

        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        text = json.dumps([_VERSION, version("verifiers"), fields], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class VerifiersEnvironment(Environment):
    """Environment of `verifiers` on the rows of `VerifiersTasks` with the same `environment` and `arguments`.

    The reward is that of its rubric. Rubrics that compare samples of a group are not supported. The episode ends after
    the environment's own limit of turns, at most `max_turns`. With `show_tools` the chat template shows its tools.
    Calls are parsed as in `ToolEnvironment` (`pattern`). `retries` must be 0, because a conversation cannot repeat a
    turn.
    """

    environment: str = field(metadata=trust.imports())
    """Module of the environment, as in `data.generator`."""
    arguments: dict[str, object] = field(default_factory=dict)
    """Arguments of its `load_environment`, as in `data.generator`."""
    pattern: str = r"<tool_call>(.*?)</tool_call>"
    """Regular expression whose first group is a tool call in JSON."""
    show_tools: bool = True
    """Insert the environment's tool definitions into the prompt through the chat template."""
    max_turns: int = 10
    """Maximum number of model messages. The environment's own limit may end an episode earlier."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pattern("pattern", self.pattern, groups=1)
        if self.retries:
            raise ConfigError(
                f"retries={self.retries} is not supported, because a conversation of verifiers cannot repeat a turn",
                code="not_supported",
                keys=("retries",),
                fix="retries=0",
            )

    def check(self) -> None:
        """Raise ConfigError if the package is not installed, or if the rubric compares samples of a group."""
        if self._loaded_environment.rubric.has_group_rewards:
            raise ConfigError(
                f"{self.environment} is not supported: its rubric scores the samples of a group together, "
                "but episodes end separately",
                code="not_supported",
                keys=("rollout.environment",),
            )

    @property
    def tools(self) -> Sequence[dict[str, object]]:
        """The environment's tools as OpenAI's definitions."""
        defined = (self._loaded_environment.tool_defs or []) if self.show_tools else []
        described = [dict(tool.model_dump(include={"name", "description", "parameters"})) for tool in defined]
        return [{"type": "function", "function": function} for function in described]

    async def step(self, messages: Sequence[Message], row: Mapping[str, Any], state: _Talk | None) -> Turn:
        """See `EnvironmentNode.step`. Raises DataError if the environment changed the conversation."""
        talk = state
        if talk is None:
            talk = _Talk(self._loaded_environment, row["entry"])
        try:
            if state is None:
                await talk.asked(messages[:-1])
            text = str(messages[-1]["content"])
            talk.answer(text, [call for call in calls_in(self.pattern, text) if isinstance(call, ToolCall)])
            message = await talk.asked(messages)
        except BaseException:
            talk.task.cancel()
            raise
        if message is None:
            output = talk.task.result()
            if output["error"] is not None:
                raise RuntimeError(f"{self.environment}: {output['error']}")
            return Turn(reward=float(output["reward"] or 0.0))
        return Turn(tuple(message), done=False, state=talk)

    async def ended(self, state: Any) -> float:
        """Return the rubric's reward of a conversation that has no tokens left for another message."""
        output = await state.broken_off()
        return float(output["reward"] or 0.0)

    @property
    def _loaded_environment(self) -> Theirs:
        return load_environment(self.environment, self.arguments)


class _Talk:
    """One conversation of an environment, running as a task."""

    def __init__(self, theirs: Theirs, entry: Mapping[str, object]):
        self._question: asyncio.Future[list[Message]] = asyncio.get_running_loop().create_future()
        self._reply: asyncio.Future[object] | None = None
        client = client_class()(self._ask)
        work = theirs.run_rollout(dict(entry), client, "policy", {})
        self.task = asyncio.ensure_future(work)

    async def asked(self, known: Sequence[Message]) -> list[Message] | None:
        """Return the messages after `known` in the next request of the environment. None if it has ended."""
        await asyncio.wait([self.task, self._question], return_when=asyncio.FIRST_COMPLETED)
        if not self._question.done():
            return None
        question = self._question.result()
        for number, (theirs, ours) in enumerate(zip(question, known, strict=False)):
            if theirs != to_message(ours):
                raise DataError(
                    f"message {number + 1}: the environment changed the conversation to {theirs}, but the model has "
                    f"{to_message(ours)}. Changed messages cannot be trained",
                    code="environment_failed",
                )
        if len(question) < len(known):
            raise DataError(
                f"the environment sent {len(question)} of the {len(known)} messages of the conversation. "
                "Missing messages cannot be trained",
                code="environment_failed",
            )
        return question[len(known) :]

    def answer(self, text: str, calls: Sequence[ToolCall]) -> None:
        """The model's message."""
        assert self._reply is not None
        self._question = asyncio.get_running_loop().create_future()
        self._reply.set_result(to_response(text, calls))

    async def broken_off(self) -> Any:
        """How it ends when it gets no further message."""
        from verifiers.errors import OverlongPromptError

        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(OverlongPromptError("no room for another message"))
        return await self.task

    async def _ask(self, messages: Sequence[object]) -> object:
        self._reply = asyncio.get_running_loop().create_future()
        self._question.set_result([to_message(message) for message in messages])
        return await self._reply


def load_environment(environment: str, arguments: Mapping[str, object]) -> Theirs:
    """Load the environment, once per process. Raise ConfigError if this fails."""
    return _loaded(environment, json.dumps(arguments, sort_keys=True))


@functools.cache
def _loaded(environment: str, arguments: str) -> Theirs:
    require_package("verifiers", "this environment", install="'automodel-cli[verifiers]'", keys=("environment",))
    import verifiers

    if not environment.replace(".", "_").isidentifier():
        raise ConfigError(
            f"environment={environment!r} must be the name of a Python module",
            code="invalid_value",
            keys=("environment",),
            fix=f"environment={environment.rpartition('/')[2].replace('-', '_')}",
        )
    with _handlers_kept():
        try:
            return verifiers.load_environment(environment, **json.loads(arguments))
        except Exception as error:  # whatever the module raises
            raise ConfigError(
                f"environment={environment!r} cannot be loaded: {error}",
                code="environment_failed",
                keys=("environment",),
            ) from error


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Their environments put handlers of SIGTERM and SIGINT in the place of the run's, which end it in good order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
