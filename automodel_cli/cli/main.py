"""The `automodel` command: sub-commands that are imported on use, error output and exit codes.

Exit codes: 0 ok, 1 the run failed, 2 usage or config, 3 data, 4 out of memory, 75 preempted (SIGTERM, SIGUSR1),
130 Ctrl-C.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import itertools
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import click

from automodel_cli import __version__
from automodel_cli.cli import foreign_commands
from automodel_cli.config.composition import bundled_recipes
from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.launch import peer_failure, rank_process, safe_output

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_FAILED, _USAGE, _OUT_OF_MEMORY, _INTERRUPTED = 1, 2, 4, 130

_CLICK = str(Path(click.__file__).parent)


class Entry(NamedTuple):
    """A command: its group in `automodel --help`, its module in `cli/`, its function there, and its summary.

    The table has the summaries, so that `automodel --help` imports no command. They have at most 60 characters.
    """

    group: str
    module: str
    function: str
    summary: str


COMMANDS = {
    "finetune": Entry("Train", "finetune", "finetune", "Fine-tune a model, or run any other recipe."),
    "pretrain": Entry("Train", "finetune", "pretrain", "Pretrain on text, from scratch or from a checkpoint."),
    "dpo": Entry("Train", "finetune", "dpo", "Train on preferences: pairs or single rated responses."),
    "rm": Entry("Train", "finetune", "rm", "Train a reward model on preference pairs."),
    "kd": Entry("Train", "finetune", "kd", "Distill a teacher's token distributions into a student."),
    "grpo": Entry("Train", "finetune", "grpo", "Train on the model's own samples with rewards."),
    "resume": Entry("Train", "finetune", "resume", "Continue a run from its newest checkpoint."),
    "sweep": Entry("Train", "sweep", "sweep", "Run a config once for each combination of values."),
    "submit": Entry("Train", "submit", "submit", "Run a config on Slurm, or write a Kubernetes job."),
    "check": Entry("Inspect", "check", "check", "Check a config. Nothing runs."),
    "plan": Entry("Inspect", "plan", "plan", "Estimate stages, memory and idle time. Nothing runs."),
    "dryrun": Entry("Inspect", "dryrun", "dryrun", "Measure memory and time of the real step without a GPU."),
    "verify": Entry("Inspect", "verify", "verify", "Compare every layout of a recipe with one process."),
    "bench": Entry("Inspect", "bench", "bench", "Time the steps of one config, or of two alternately."),
    "data": Entry("Inspect", "data", "data", "Print, prepare, convert or check data."),
    "options": Entry("Inspect", "options", "options", "List config keys with type, default and meaning."),
    "recipes": Entry("Inspect", "recipes", "recipes", "List, print and copy bundled recipes."),
    "eval": Entry("Evaluate", "evaluate", "evaluate", "Evaluate a run or a model on held-out questions."),
    "chat": Entry("Evaluate", "chat", "chat", "Chat with a run, also side by side with another model."),
    "serve": Entry("Evaluate", "serve", "serve", "Serve a run with an OpenAI-compatible server."),
    "report": Entry("Evaluate", "report", "report", "Write an offline page of curves, samples and configs."),
    "runs": Entry("Manage", "runs", "runs", "List, follow, compare and clean up runs."),
    "export": Entry("Manage", "export", "export", "Write a Hugging Face folder and verify it."),
    "push": Entry("Manage", "push", "push", "Upload a run's export to the Hugging Face hub."),
    "import-config": Entry("Manage", "import_config", "import_config", "Translate a config of another tool."),
    "doctor": Entry("Manage", "doctor", "doctor", "Check the installation, or the files of a run."),
    "completion": Entry("Manage", "completion", "completion", "Print a shell completion script."),
}
"""Every command, in the order of `automodel --help`."""


class LazyGroup(click.Group):
    """Imports a command's module on use. `automodel CONF [overrides]` is short for `automodel finetune llm -c CONF`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        entry = COMMANDS[cmd_name]
        module = importlib.import_module(f"automodel_cli.cli.{entry.module}")
        command: click.Command = getattr(module, entry.function)
        command.short_help = entry.summary
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section per group, with columns that align across sections."""
        width = max(map(len, COMMANDS))
        for group, entries in itertools.groupby(COMMANDS.items(), key=lambda item: item[1].group):
            with formatter.section(group):
                formatter.write_dl([(name.ljust(width), entry.summary) for name, entry in entries])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word not in COMMANDS:
            if word.endswith((".yaml", ".yml")) or word in bundled_recipes.recipe_names():
                return super().resolve_command(ctx, ["finetune", "llm", "-c", *args])
            if (answer := foreign_commands.other_command(word)) is not None:
                raise answer
            near = difflib.get_close_matches(word, [*COMMANDS, *bundled_recipes.recipe_names()], 1, 0.6)
            fix = f"automodel {near[0]}" if near else "automodel --help"
            raise ConfigError(f"{word} is not a command", code="unknown_command", keys=(word,), fix=fix)
        return super().resolve_command(ctx, args)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="\b\nStart here: automodel recipes ls\nShort form: automodel CONF [KEY=VALUE]...",
)
@click.version_option(__version__, message="automodel %(version)s")
def cli() -> None:
    """Post-train Hugging Face causal language models from one YAML file."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command line and exit with its code."""
    rank_process.begin()
    rank_process.leave(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command line in this process. Known errors are printed to stderr and returned as an exit code."""
    try:
        result: Any = cli.main(args=list(arguments), prog_name="automodel", standalone_mode=False, obj=list(arguments))
        return result if isinstance(result, int) else 0
    except ConfigError as error:
        if (code := _lost_peer(error)) is not None:
            return code
        click.echo(render(error), err=True)
        rank_process.note_error(error)
        return error.exit_code
    except click.NoSuchOption as error:
        click.echo(render(foreign_commands.unknown_option(error, arguments)), err=True)
        return _USAGE
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return _USAGE
    except click.ClickException as error:
        click.echo(render(_usage(error, arguments)), err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _INTERRUPTED
    except Exception as error:
        if (code := _lost_peer(error)) is not None:
            return code
        rank_process.note_error(error)
        if isinstance(error, OSError) and error.errno in _DISK:
            click.echo(render(_disk(error)), err=True)
            return _FAILED
        traceback.print_exception(error.with_traceback(_own_frames(error)))
        return _OUT_OF_MEMORY if type(error).__name__ == "OutOfMemoryError" else _FAILED
    finally:
        safe_output.restore_streams()


def render(error: ConfigError) -> str:
    """The error as printed: class and code in red, `from` and `fix` labels dimmed and green on a terminal."""
    text = str(error)
    text = re.sub(r"^( +)(from )", lambda m: m[1] + click.style(m[2], dim=True), text, flags=re.M)
    text = re.sub(r"^( +)(fix |try )", lambda m: m[1] + click.style(m[2], fg="green"), text, flags=re.M)
    return f"{click.style(error.heading, fg='red', bold=True)} {text}"


def _usage(error: click.ClickException, arguments: Sequence[str]) -> ConfigError:
    """Return the error for a command line that click rejects: a missing argument or an invalid option value."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = f"automodel {arguments[0]}" if arguments and arguments[0] in COMMANDS else "automodel"
    if context is not None:
        command = context.command_path
    return ConfigError(error.format_message().rstrip("."), code="usage", fix=f"{command} --help")


def _lost_peer(error: Exception) -> int | None:
    """Print the error for a lost rank and return its exit code. None: `error` has another cause."""
    lost = peer_failure.peer_failure_error(error)
    if lost is None:
        return None
    click.echo(render(lost), err=True)
    peer_failure.delay_exit_after_peer_failure()
    return lost.exit_code


def _disk(error: OSError) -> RunError:
    """Return the error for a full or read-only disk, which any write can raise."""
    return RunError(
        f"{error.filename or 'a file'} could not be written: {error.strerror}",
        code="disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "unwritable_file",
        fix="free space there, or output_dir=another-disk data.cache_dir=another-disk/cache",
    )


def _own_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback without the frames of click, which do not help to find the error."""
    frame = error.__traceback__
    while frame and frame.tb_next and frame.tb_frame.f_code.co_filename.startswith((_CLICK, __file__)):
        frame = frame.tb_next
    return frame
