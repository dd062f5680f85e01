"""Client of the package verifiers, whose responses the run generates."""

from __future__ import annotations

import functools
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from automodel_cli.rollout.environments.tools import ToolCall
from automodel_cli.rollout.types import Message


@functools.cache
def client_class() -> Any:
    """Return the client class. Its base class is imported at the first call."""
    from verifiers.clients import Client

    class Waiting(Client):  # type: ignore[misc]
        """Client that waits for messages of the engine."""

        def __init__(self, ask: Any):
            super().__init__(ask)
            self._ask = ask

        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
        ) -> Any:
            return await self._ask(prompt)

        async def close(self) -> None:
            pass

        def setup_client(self, config: Any) -> Any:
            raise NotImplementedError

        async def to_native_tool(self, tool: Any) -> Any:
            raise NotImplementedError

        async def to_native_prompt(self, messages: Any) -> Any:
            raise NotImplementedError

        async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

        async def raise_from_native_response(self, response: Any) -> None:
            raise NotImplementedError

        async def from_native_response(self, response: Any) -> Any:
            raise NotImplementedError

    return Waiting


def to_response(text: str, calls: Sequence[ToolCall]) -> Any:
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
