"""The `automodel` command: lazy sub-commands, and how whatever goes wrong becomes text and an exit code.

Exit codes: 0 ok, 1 the run failed, 2 usage or config, 3 data, 4 out of memory, 75 preempted (SIGTERM, SIGUSR1),
130 Ctrl-C.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import click

from automodel_cli import __version__
from automodel_cli.cli import answers
from automodel_cli.config import bundled
from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.launch import output, peers, worker

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_FAILED, _USAGE, _OUT_OF_MEMORY, _INTERRUPTED = 1, 2, 4, 130

_CLICK = str(Path(click.__file__).parent)

COMMANDS = {
    "finetune": ("automodel_cli.cli.finetune", "finetune"),
    "dpo": ("automodel_cli.cli.finetune", "dpo"),
    "rm": ("automodel_cli.cli.finetune", "rm"),
    "kd": ("automodel_cli.cli.finetune", "kd"),
    "grpo": ("automodel_cli.cli.finetune", "grpo"),
    "resume": ("automodel_cli.cli.finetune", "resume"),
    "sweep": ("automodel_cli.cli.sweep", "sweep"),
    "submit": ("automodel_cli.cli.submit", "submit"),
    "check": ("automodel_cli.cli.check", "check"),
    "plan": ("automodel_cli.cli.plan", "plan"),
    "dryrun": ("automodel_cli.cli.dryrun", "dryrun"),
    "verify": ("automodel_cli.cli.verify", "verify"),
    "bench": ("automodel_cli.cli.bench", "bench"),
    "data": ("automodel_cli.cli.data", "data"),
    "runs": ("automodel_cli.cli.runs", "runs"),
    "import-config": ("automodel_cli.cli.import_config", "import_config"),
    "report": ("automodel_cli.cli.report", "report"),
    "eval": ("automodel_cli.cli.evaluate", "evaluate"),
    "chat": ("automodel_cli.cli.chat", "chat"),
    "serve": ("automodel_cli.cli.serve", "serve"),
    "push": ("automodel_cli.cli.push", "push"),
    "export": ("automodel_cli.cli.export", "export"),
    "recipes": ("automodel_cli.cli.recipes", "recipes"),
    "options": ("automodel_cli.cli.options", "options"),
    "doctor": ("automodel_cli.cli.doctor", "doctor"),
    "completion": ("automodel_cli.cli.completion", "completion"),
}


class LazyGroup(click.Group):
    """Imports a command's module when it is named; `automodel CONF [overrides]` is `automodel finetune llm -c CONF`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word not in COMMANDS:
            if word.endswith((".yaml", ".yml")) or word in bundled.names():
                return super().resolve_command(ctx, ["finetune", "llm", "-c", *args])
            if (answer := answers.other_command(word)) is not None:
                raise answer
            near = difflib.get_close_matches(word, [*COMMANDS, *bundled.names()], 1, 0.6)
            fix = f"automodel {near[0]}" if near else "automodel --help"
            raise ConfigError(f"no such command: {word}", fix=fix)
        return super().resolve_command(ctx, args)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nShort form  automodel CONF [KEY=VALUE]...\nStart here  automodel recipes ls",
)
@click.version_option(__version__, message="automodel %(version)s")
def cli() -> None:
    """One YAML file in, one training run out, for any Hugging Face causal language model."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command line and exit with its code."""
    worker.begin()
    worker.leave(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command line in this process; every known way to fail is printed to stderr and becomes an exit code."""
    try:
        result: Any = cli.main(args=list(arguments), prog_name="automodel", standalone_mode=False, obj=list(arguments))
        return result if isinstance(result, int) else 0
    except ConfigError as error:
        if (code := _lost_peer(error)) is not None:
            return code
        click.echo(render(error), err=True)
        worker.note_error(error)
        return error.exit_code
    except click.NoSuchOption as error:
        click.echo(render(answers.unknown_option(error, arguments)), err=True)
        return _USAGE
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _INTERRUPTED
    except Exception as error:
        if (code := _lost_peer(error)) is not None:
            return code
        worker.note_error(error)
        if isinstance(error, OSError) and error.errno in _DISK:
            click.echo(render(_disk(error)), err=True)
            return _FAILED
        traceback.print_exception(error.with_traceback(_own_frames(error)))
        return _OUT_OF_MEMORY if type(error).__name__ == "OutOfMemoryError" else _FAILED
    finally:
        output.restore()


def render(error: ConfigError) -> str:
    """The error as it is printed: the class in red, `from` and `fix` labels dimmed and green on a terminal."""
    text = str(error)
    text = re.sub(r"^( +)(from )", lambda m: m[1] + click.style(m[2], dim=True), text, flags=re.M)
    text = re.sub(r"^( +)(fix |try )", lambda m: m[1] + click.style(m[2], fg="green"), text, flags=re.M)
    return f"{click.style(type(error).__name__ + ':', fg='red', bold=True)} {text}"


def _lost_peer(error: Exception) -> int | None:
    """Say that another rank is gone, if that is what `error` means, and return the exit code."""
    lost = peers.lost(error)
    if lost is None:
        return None
    click.echo(render(lost), err=True)
    peers.let_the_first_end()
    return lost.exit_code


def _disk(error: OSError) -> RunError:
    """A full or read-only disk is nobody's mistake in the code, wherever it shows."""
    return RunError(
        f"{error.filename or 'a file'} could not be written: {error.strerror}",
        fix="free space there, or output_dir=another-disk data.cache_dir=another-disk/cache",
    )


def _own_frames(error: BaseException) -> TracebackType | None:
    """The traceback from the command on: click's frames above it tell nobody anything."""
    frame = error.__traceback__
    while frame and frame.tb_next and frame.tb_frame.f_code.co_filename.startswith((_CLICK, __file__)):
        frame = frame.tb_next
    return frame
