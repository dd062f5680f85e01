"""The tools of a real MCP server, a program of its own: listed, called, refused, killed and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.security.trust import Trust
from automodel_cli.rollout.environments.mcp import MCPTools
from automodel_cli.rollout.environments.pool import EnvironmentPool, Failure
from automodel_cli.rollout.types import Account
from tests.errors import raises

SERVER = """
import asyncio, os, sys
try:
    from mcp.server.fastmcp import FastMCP as Server
except ImportError:
    from mcp.server import MCPServer as Server

server = Server("tools")

@server.tool()
def add(a: int, b: int) -> int:
    "Adds two numbers."
    return a + b

@server.tool()
async def whose(wait: float = 0.0) -> str:
    "The process, and a variable."
    await asyncio.sleep(wait)
    return f"{os.getpid()} {os.environ.get('SECRET')} {os.environ.get('TOKEN')}"

@server.tool()
def refuse() -> str:
    "Always refuses."
    raise ValueError("not today")

server.run()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mcp")
    path = tmp_path_factory.mktemp("server") / "server.py"
    path.write_text(SERVER)
    return path


@pytest.fixture(scope="module")
def tools(script: Path) -> Iterator[MCPTools]:
    found = MCPTools(
        servers={"one": [sys.executable, str(script)]}, variables={"TOKEN": "t"}, retries=1, turn_timeout=30
    )
    found.check()
    yield found
    found.close()


def message(name: str, **arguments: Any) -> list[dict[str, Any]]:
    call = json.dumps({"name": name, "arguments": arguments})
    return [{"role": "assistant", "content": f"<tool_call>{call}</tool_call>"}]


def told(tools: MCPTools, name: str, **arguments: Any) -> str:
    (observation,) = asyncio.run(tools.step(message(name, **arguments), {}, None)).observations
    return str(observation["content"])


def test_a_servers_tools_are_described_and_called(tools: MCPTools, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tools.tools[0]["function"]
    assert (first["name"], first["description"]) == ("add", "Adds two numbers.")
    assert first["parameters"]["required"] == ["a", "b"] and first["parameters"]["properties"]["a"]["type"] == "integer"
    assert told(tools, "add", a=2, b=3) == "5"
    assert told(tools, "add", a="two").startswith("error: ") and told(tools, "refuse").startswith("error: ")
    assert told(tools, "none") == "error: there is no tool 'none', only add, whose, refuse"


def test_conversations_share_a_server_and_call_it_at_once(tools: MCPTools) -> None:
    async def several() -> list[Any]:
        return await asyncio.gather(*(tools.call("whose", {"wait": 0.3}) for _ in range(6)))

    loop = asyncio.new_event_loop()
    began = loop.time()
    found = loop.run_until_complete(several())
    assert loop.time() - began < 1.2 and len(set(found)) == 1
    loop.close()


def test_a_server_has_no_variable_that_it_was_not_given(tools: MCPTools) -> None:
    assert "SECRET" not in os.environ
    assert told(tools, "whose").endswith(" None t")


def test_a_server_that_was_killed_is_started_again_by_the_next_try(tools: MCPTools) -> None:
    before = int(told(tools, "whose").split()[0])
    os.kill(before, signal.SIGKILL)
    account = Account()
    with EnvironmentPool({"environment": tools}) as pool:
        turn = pool.run(pool.turn("sample", message("whose"), {}, None, account))
        assert not isinstance(turn, Failure) and account.retries == 1
        assert int(turn.observations[0]["content"].split()[0]) != before


def test_what_is_no_server_is_refused(script: Path) -> None:
    for command in ([sys.executable, "-c", "raise SystemExit(3)"], ["/no/such/program"]):
        with raises(RunError, "server_failed", keys=("rollout.environment",), values=(command[-1],)):
            MCPTools(servers={"one": command}).check()
    two = MCPTools(servers={name: [sys.executable, str(script)] for name in ("one", "two")})
    with raises(ConfigError, "ambiguous", keys=("tools_of_server",), values=("servers.two", "servers.one", "add")):
        two.check()
    two.close()
    with raises(ConfigError, "unknown_name", keys=("tools_of_server.one",), values=("sub", "add, whose, refuse")):
        MCPTools(servers={"one": [sys.executable, str(script)]}, tools_of_server={"one": ["sub"]}).check()


def test_a_config_may_not_start_a_server_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/quickstart/export").mkdir(parents=True)
    node = "{_target_: automodel_cli.rollout.environments.mcp.MCPTools, servers: {one: python server.py}}"
    with raises(ConfigError, "untrusted_code"):
        check_config(compose("quickstart_grpo", [f"rollout.environment={node}"]), Trust())
    recipe = check_config(compose("quickstart_grpo", [f"rollout.environment={node}"]), Trust(frozenset({"command"})))
    assert recipe.rollout.environment.servers == {"one": "python server.py"}


@pytest.mark.parametrize(
    ("options", "code", "key"),
    [
        ({}, "empty_value", "servers"),
        ({"servers": {"one": "a | b"}}, "not_supported", "servers.one"),
        ({"servers": {"one": "a"}, "tools_of_server": {"two": []}}, "unknown_name", "tools_of_server.two"),
    ],
)
def test_servers_that_are_none_are_refused(options: dict[str, Any], code: str, key: str) -> None:
    with raises(ConfigError, code, keys=(key,)):
        MCPTools(**options)
