"""docs/cli.md: every command with its arguments and options, from the command line itself.

python scripts/cli_page.py > docs/cli.md
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from automodel_cli.cli.main import cli


def page() -> str:
    """The whole page, as it stands in docs/cli.md; a test compares."""
    lines = [
        "# Every command",
        "",
        "Made by `python scripts/cli_page.py` from the command line itself; a test compares. Keys of configs",
        "(`KEY=VALUE`, in Hydra's grammar) are in [config.md](config.md). Exit codes: 0 done, 1 the run failed, 2",
        "usage or config, 3 data, 4 out of memory, 75 preempted, 130 Ctrl-C.",
    ]
    for name, command in _commands(cli, "automodel"):
        lines += ["", f"## `{name}`", "", *_described(command, name)]
    return "\n".join(lines) + "\n"


def _commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _described(command: click.Command, path: str) -> Iterator[str]:
    context = click.Context(command, info_name=path)
    yield f"    {path} {' '.join(command.collect_usage_pieces(context))}"
    yield ""
    for paragraph in (command.help or "").replace("\b", "").strip().split("\n\n"):
        yield " ".join(paragraph.split())
        yield ""
    options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
    if options:
        yield "| option | |"
        yield "|---|---|"
    for option in options:
        left, right = option.get_help_record(context) or ("", "")
        yield f"| `{_cell(left)}` | {_cell(right)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
