"""Client of the package verifiers, whose responses the run generates."""

from __future__ import annotations

import functools
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from automodel_cli.rollout.environments.tools import ToolCall
from automodel_cli.rollout.types import Message

Ask = Callable[[Sequence[object]], Awaitable[object]]
"""Request the next message of the model for a conversation."""


@functools.cache
def client_class() -> Callable[[Ask], object]:
    """Return the client class. Its base class is imported at the first call."""
    from verifiers.clients import Client

    class Waiting(Client):  # type: ignore[misc]
        """Client that waits for messages of the engine."""

        def __init__(self, ask: Ask):
            super().__init__(ask)
            self._ask = ask

        async def get_response(
            self, prompt: Sequence[object], model: str, sampling_args: object, tools: object = None, **kwargs: object
        ) -> object:
            return await self._ask(prompt)

        async def close(self) -> None:
            pass

        def setup_client(self, config: object) -> object:
            raise NotImplementedError

        async def to_native_tool(self, tool: object) -> object:
            raise NotImplementedError

        async def to_native_prompt(self, messages: object) -> object:
            raise NotImplementedError

        async def get_native_response(self, *args: object, **kwargs: object) -> object:
            raise NotImplementedError

        async def raise_from_native_response(self, response: object) -> None:
            raise NotImplementedError

        async def from_native_response(self, response: object) -> object:
            raise NotImplementedError

    return Waiting


def to_response(text: str, calls: Sequence[ToolCall]) -> object:
    from verifiers.types import Response, ResponseMessage, ToolCall

    made = [ToolCall(id=uuid.uuid4().hex, name=call.name, arguments=json.dumps(call.arguments)) for call in calls]
    message = ResponseMessage(
        content=text, tool_calls=made or None, finish_reason="tool_calls" if made else "stop", is_truncated=False
    )
    return Response(id=uuid.uuid4().hex, created=int(time.time()), model="policy", message=message)


def to_message(message: Any) -> Message:
    """Return role and text. Content in parts is joined."""
    fields = message if isinstance(message, Mapping) else message.model_dump()
    content = fields.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)
    return {"role": str(fields["role"]), "content": str(content or "")}
