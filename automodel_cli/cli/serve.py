"""`serve RUN`: hands the export to a server with OpenAI's interface. Imports no torch."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import click

from automodel_cli.cli import common, complete
from automodel_cli.config.errors import ConfigError

_SERVERS = ("transformers", "vllm")


@click.command(
    short_help="Serve a run with OpenAI's interface, by transformers or vLLM.",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("run", metavar="RUN", shell_complete=complete.runs)
@common.checkpoint_option
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0 lets other machines in.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(1, 65535))
@click.option("--with", "server", type=click.Choice(_SERVERS), help="Default: vllm where it is installed.")
@click.option("--dry-run", is_flag=True, help="Print the commands; start nothing.")
@click.argument("more", nargs=-1, metavar="[-- OPTIONS]")
def serve(
    run: str,
    checkpoint: str | None,
    host: str,
    port: int,
    server: str | None,
    dry_run: bool,
    more: tuple[str, ...],
) -> None:
    """Start a server on RUN/export and say how to ask it. What follows goes to the server as it is.

    With --checkpoint the export of that checkpoint, RUN/exports/step-NNNNNN, is written first where it is missing.
    """
    folder = common.run_folder(run, "export", *common.with_checkpoints(checkpoint))
    export = common.export_that_talks(folder, checkpoint)
    chosen = server or ("vllm" if shutil.which("vllm") else "transformers")
    command = _command(chosen, export, host, port, more, dry_run=dry_run)
    click.echo(f"serving {export} with {chosen}; ask it, once it is up, from another terminal:\n")
    click.echo(_curl(export, host, port) + "\n")
    if dry_run:
        click.echo(shlex.join(command))
        return
    _become(command)


def _command(
    server: str, export: Path, host: str, port: int, more: tuple[str, ...], *, dry_run: bool = False
) -> list[str]:
    """Return the server's command. Raises ConfigError where it is not installed; a dry run prints it all the same."""
    where = ["--host", host, "--port", str(port), *more]
    if server == "vllm":
        program = shutil.which("vllm")
        if program is None and not dry_run:
            raise ConfigError("--with vllm: vllm is not installed", fix="--with transformers")
        return [program or "vllm", "serve", str(export), *where]
    if not dry_run and any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn")):
        raise ConfigError("transformers serve needs fastapi and uvicorn", fix="pip install 'transformers[serving]'")
    beside = Path(sys.executable).with_name("transformers")
    program = str(beside) if beside.exists() else shutil.which("transformers")
    if program is None and not dry_run:
        raise ConfigError("the command transformers is not on the path", fix="pip install 'transformers[serving]'")
    return [program or "transformers", "serve", str(export), *where]


def _curl(export: Path, host: str, port: int) -> str:
    body = {"model": str(export), "messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 64}
    url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}/v1/chat/completions"
    return f"curl -s {url} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"


def _become(command: list[str]) -> NoReturn:
    """The server takes this process's place, and with it signals and exit code."""
    sys.stdout.flush()
    os.execv(command[0], command)
