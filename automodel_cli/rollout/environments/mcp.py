"""Tools of MCP servers (Model Context Protocol), extra `mcp`. Torch-free.

A server is a program that communicates over standard input and output. It is started at first use and shared by all
conversations of this process. A server that ended is restarted by the next call.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.security import trust
from automodel_cli.config.value_checks import check_range, require_package
from automodel_cli.config.warn import warn
from automodel_cli.rollout.engines.config import program_arguments
from automodel_cli.rollout.environments.event_loop import LoopThread
from automodel_cli.rollout.environments.tools import ToolEnvironment, ToolError

if TYPE_CHECKING:
    from mcp import ClientSession
    from pydantic import BaseModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MCPTools(ToolEnvironment):
    """Tools of the MCP servers in `servers`.

    - A command is a list, or text that is split into arguments. No shell runs it.
    - A server has the permissions of this user. Of the environment it gets only the default variables of the package
      `mcp` (PATH, HOME, ...) and `variables`.
    - The command line must allow commands with `--trust command`.
    - Tool names must be unique over all servers. `tools_of_server` selects tools by server.
    - A server must respond within `start_timeout` seconds. Every process of the run starts its own servers.
    """

    servers: dict[str, str | list[str]] = field(
        default_factory=dict,
        metadata=trust.executes_code(trust.COMMAND, "names commands that the run starts on its machines"),
    )
    """Command of each server by name, as text or a list of arguments. No shell runs it."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the servers, by name."""
    tools_of_server: dict[str, list[str]] = field(default_factory=dict)
    """Offered tools by server. Servers without an entry offer all."""
    start_timeout: float = 60.0
    """Time limit in seconds for the first response of a server."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.servers:
            raise ConfigError("servers must contain at least one server", code="empty_value", keys=("servers",))
        for name, command in self.servers.items():
            program_arguments(command, f"servers.{name}")
        for name in self.tools_of_server:
            if name not in self.servers:
                raise ConfigError(
                    f"tools_of_server.{name} must be one of: {', '.join(self.servers)}",
                    code="unknown_name",
                    keys=(f"tools_of_server.{name}",),
                )
        check_range("start_timeout", self.start_timeout, above=0, unit="s", fix="start_timeout=60")

    def check(self) -> None:
        """Raise ConfigError if the package is not installed, and RunError if a server does not start."""
        require_package("mcp", "McpEnvironment", install="'automodel-cli[mcp]'", keys=("rollout.environment",))
        self.definitions()

    def close(self) -> None:
        """End the servers."""
        if "_sessions" in vars(self):
            self._sessions.close()

    def definitions(self) -> list[dict[str, object]]:
        """See `ToolEnvironment.definitions`. Raises RunError if a server does not start."""
        return [definition for definition, _ in self._tools.values()]

    async def call(self, name: str, arguments: dict[str, object]) -> str:
        """See `ToolEnvironment.call`. Raises ConnectionError if the server ended."""
        _, server = self._tools[name]
        result = await asyncio.wrap_future(self._sessions.begin_call(server, name, arguments))
        text = "\n".join(_text_of(part) for part in result["content"])
        if result.get("isError"):
            raise ToolError(text)
        return text

    @cached_property
    def _sessions(self) -> _Sessions:
        commands = {name: program_arguments(command) for name, command in self.servers.items()}
        return _Sessions(commands, self.variables, self.start_timeout)

    @cached_property
    def _tools(self) -> dict[str, tuple[dict[str, object], str]]:
        """Definition and server of each tool, by name."""
        tools: dict[str, tuple[dict[str, object], str]] = {}
        for server in self.servers:
            listed = self._sessions.tools(server)
            selected = self.tools_of_server.get(server, [tool["name"] for tool in listed])
            offered = {tool["name"]: tool for tool in listed}
            for name in selected:
                if name not in offered:
                    raise ConfigError(
                        f"tools_of_server.{server}: {name!r} must be one of: {', '.join(offered)}",
                        code="unknown_name",
                        keys=(f"tools_of_server.{server}",),
                    )
                if name in tools:
                    raise ConfigError(
                        f"servers.{server} and servers.{tools[name][1]} both have a tool {name!r}",
                        code="ambiguous",
                        keys=("tools_of_server",),
                        fix=f"tools_of_server.{server}={[n for n in selected if n != name]}",
                    )
                tools[name] = (_definition(offered[name]), server)
        return tools


class _Sessions:
    """Open servers in a separate event loop, which must outlive the calls from several loops."""

    def __init__(self, commands: dict[str, list[str]], variables: dict[str, str], start_timeout: float):
        self._commands, self._variables, self._timeout = commands, variables, start_timeout
        self._loop = LoopThread("mcp")
        self._open: dict[str, tuple[ClientSession, asyncio.Event, asyncio.Future[None]]] = {}
        self._starting: dict[str, asyncio.Lock] = {}
        self._once = threading.Lock()

    def tools(self, server: str) -> Sequence[dict[str, Any]]:
        """Tools that the server lists."""
        with self._once:
            return self._loop.run(self._listed(server))

    def begin_call(self, server: str, name: str, arguments: dict[str, object]) -> Future[dict[str, Any]]:
        """Return a future of the server's answer, in the form of the protocol."""
        return self._loop.begin(self._called(server, name, arguments))

    def close(self) -> None:
        """End all servers."""
        for server in list(self._open):
            self._loop.run(self._ended(server))
        self._loop.close()

    async def _listed(self, server: str) -> list[dict[str, object]]:
        session = await self._session(server)
        tools, cursor = [], None
        while True:
            answer = _wire(await session.list_tools(**({"cursor": cursor} if cursor else {})))
            tools += answer["tools"]
            cursor = answer.get("nextCursor")
            if not cursor:
                return tools

    async def _called(self, server: str, name: str, arguments: dict[str, object]) -> dict[str, object]:
        try:
            session = await self._session(server)
        except RunError as error:  # it has started before: a later try may find it
            raise ConnectionError(error.message) from error
        try:
            return _wire(await session.call_tool(name, arguments))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if _refused(error):
                raise ToolError(str(error)) from error
            warn("environment_failed", "lost the MCP server %s (%s: %s)", server, type(error).__name__, error)
            await self._ended(server)
            raise ConnectionError(f"the MCP server {server} is gone: {type(error).__name__}: {error}") from error

    async def _session(self, server: str) -> ClientSession:
        async with self._starting.setdefault(server, asyncio.Lock()):
            if server not in self._open:
                ready: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
                ending = asyncio.Event()
                task = asyncio.ensure_future(self._serve(server, ready, ending))
                try:
                    session = await asyncio.wait_for(ready, self._timeout)
                except Exception as error:
                    task.cancel()
                    words = f"did not answer within {self._timeout:g} s" if isinstance(error, TimeoutError) else error
                    raise RunError(
                        f"the MCP server {server} ({' '.join(self._commands[server])}) did not start: {words}",
                        code="server_failed",
                        keys=("rollout.environment",),
                        fix="try its command in a terminal",
                    ) from error
                self._open[server] = (session, ending, task)
            return self._open[server][0]

    async def _serve(self, server: str, ready: asyncio.Future[ClientSession], ending: asyncio.Event) -> None:
        """Run a session of the server. The package requires that one task enters and leaves it."""
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import get_default_environment, stdio_client

        program, *arguments = self._commands[server]
        variables = {**get_default_environment(), **self._variables}
        parameters = StdioServerParameters(command=program, args=arguments, env=variables)
        try:
            async with stdio_client(parameters) as (read, write), ClientSession(read, write) as session:
                await session.initialize()
                ready.set_result(session)
                await ending.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
            else:
                logger.debug("the MCP server %s ended with %r", server, error)

    async def _ended(self, server: str) -> None:
        if server not in self._open:
            return
        _, ending, task = self._open.pop(server)
        ending.set()
        await asyncio.wait([task], timeout=self._timeout)


def _wire(answer: BaseModel) -> dict[str, Any]:
    """Return an answer in the form of the protocol. Field names of the package differ between releases."""
    return dict(answer.model_dump(mode="json", by_alias=True))


def _refused(error: Exception) -> bool:
    """Return whether the server rejected the call (JSON-RPC error codes). Otherwise the connection is lost."""
    code = getattr(getattr(error, "error", None), "code", None)
    return code in (-32600, -32601, -32602)


def _definition(tool: dict[str, object]) -> dict[str, object]:
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["inputSchema"]}
    return {"type": "function", "function": function}


def _text_of(part: dict[str, Any]) -> str:
    """Return the text of a part of an answer, or its type if it is not text."""
    if part.get("type") == "text":
        return str(part["text"])
    resource = part.get("resource") or {}
    return str(resource.get("text") or f"[{part.get('type')}]")
