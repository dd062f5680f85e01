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

from automodel_cli.cli import common, completion_values
from automodel_cli.config.errors import ConfigError

_SERVERS = ("transformers", "vllm")
_NAME_OPTION = "--served-model-name"
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_VIDEO_FILE = "video_preprocessor_config.json"
_PHOTO = "PHOTO"


@click.command(
    context_settings={"ignore_unknown_options": True},
)
@click.argument("run", metavar="RUN", shell_complete=completion_values.runs)
@common.checkpoint_option
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="HOST",
    help="Address to listen on. 0.0.0.0 accepts other machines.",
)
@click.option(
    "--port", metavar="PORT", default=8000, show_default=True, type=click.IntRange(1, 65535), help="Port to listen on."
)
@click.option(
    "--with",
    "server",
    type=click.Choice(_SERVERS),
    help="Server to start.  [default: vllm if installed, else transformers]",
)
@click.option("--dry-run", is_flag=True, help="Print the commands. Start nothing.")
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
    """Serve a run with an OpenAI-compatible server.

    Prints an example request. Arguments after -- are passed to the server.

    With --checkpoint, RUN/exports/step-NNNNNN is written first if it is missing.
    """
    folder = common.run_folder(run, "export", *common.with_checkpoints(checkpoint))
    export = common.export_that_talks(folder, checkpoint)
    chosen = server or ("vllm" if shutil.which("vllm") else "transformers")
    asked_as = _served_name(chosen, folder.name, export, more)
    command = _command(chosen, export, asked_as, (host, port, more), dry_run=dry_run)
    click.echo(f"serving {export} with {chosen}; ask it, once it is up, from another terminal:\n")
    click.echo(_curl(asked_as, host, port, picture=_reads_pictures(export)) + "\n")
    if dry_run:
        click.echo(shlex.join(command))
        return
    _become(command)


def _served_name(server: str, run: str, export: Path, more: tuple[str, ...]) -> str:
    """Return the model name for requests: an option in `more`, or the name of the run (and of its checkpoint).

    `transformers serve` has no such option and uses its argument as the name: a path relative to the working directory.
    """
    if server != "vllm":
        return str(export.relative_to(Path.cwd()) if export.is_relative_to(Path.cwd()) else export)
    for number, text in enumerate(more):
        option, equals, value = text.partition("=")
        if option == _NAME_OPTION and (equals or more[number + 1 : number + 2]):
            return value if equals else more[number + 1]
    return run if export.name == "export" else f"{run}-{export.name}"


def _command(
    server: str, export: Path, asked_as: str, where_to: tuple[str, int, tuple[str, ...]], *, dry_run: bool = False
) -> list[str]:
    """Return the server's command. Raises ConfigError if it is not installed. A dry run prints it in any case."""
    host, port, more = where_to
    where = ["--host", host, "--port", str(port), *more]
    if server == "vllm":
        program = shutil.which("vllm")
        if program is None and not dry_run:
            message = "--with vllm needs the package vllm, which is not installed"
            raise ConfigError(message, code="missing_package", keys=("--with",), fix="--with transformers")
        is_named = any(text.partition("=")[0] == _NAME_OPTION for text in more)
        name = [] if is_named else [_NAME_OPTION, asked_as]
        return [program or "vllm", "serve", str(export), *name, *where]
    if not dry_run and any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn")):
        message, fix = (
            "--with transformers needs the packages fastapi and uvicorn",
            "pip install 'transformers[serving]'",
        )
        raise ConfigError(message, code="missing_package", keys=("--with",), fix=fix)
    if not dry_run and (export / _VIDEO_FILE).is_file() and importlib.util.find_spec("torchvision") is None:
        message, fix = (
            f"--with transformers loads {_VIDEO_FILE} of the export, which needs the package torchvision",
            "pip install torchvision",
        )
        raise ConfigError(message, code="missing_package", keys=("--with",), fix=fix)
    executable = Path(sys.executable).with_name("transformers")
    program = str(executable) if executable.exists() else shutil.which("transformers")
    if program is None and not dry_run:
        message, fix = "the command transformers is not on PATH", "pip install 'transformers[serving]'"
        raise ConfigError(message, code="missing_package", keys=("--with",), fix=fix)
    return [program or "transformers", "serve", asked_as, *where]


def _reads_pictures(export: Path) -> bool:
    return any((export / name).is_file() for name in _PROCESSOR_FILES)


def _curl(asked_as: str, host: str, port: int, *, picture: bool) -> str:
    """Return an example request. With `picture`, the shell inserts the file photo.png."""
    content: object = "What is 2 + 3?"
    if picture:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_PHOTO}"}}
        content = [image, {"type": "text", "text": "What is this?"}]
    body = {"model": asked_as, "messages": [{"role": "user", "content": content}], "max_tokens": 64}
    url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}/v1/chat/completions"
    text = shlex.quote(json.dumps(body)).replace(_PHOTO, "'\"$(base64 < photo.png | tr -d '\\n')\"'")
    return f"curl -s {url} -H 'Content-Type: application/json' -d {text}"


def _become(command: list[str]) -> NoReturn:
    """Replace this process by the server, so that it receives signals and its exit code is returned."""
    sys.stdout.flush()
    os.execv(command[0], command)
