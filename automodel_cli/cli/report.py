"""`report RUN...`: one offline page for one run or several. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from automodel_cli.cli import completion_values
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import word


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN...", shell_complete=completion_values.runs)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write.  [default: RUN/report.html; for several runs: report.html]",
)
def report(names: tuple[str, ...], out: Path | None) -> None:
    """Write one offline HTML page for one or more runs.

    Runs in progress are included. The page loads nothing from the network. RUN is a folder, a name below runs/, or a
    URL, whose records are downloaded. A folder of runs stands for all runs in it.
    """
    from automodel_cli.runs.index import runs_named
    from automodel_cli.runs.report_page import FILE, write_own_page, write_page

    runs = runs_named([str(folder) for name in names for folder in _folders(name)])
    if len(runs) == 1 and out is None:
        click.echo(write_own_page(runs[0].folder))
    else:
        click.echo(write_page(runs, out or Path(FILE)))


def _folders(name: str) -> Iterator[str | Path]:
    """Return the name, or for a URL the local folders of its runs."""
    from automodel_cli.run.remote.remote_storage import fetch, is_url, runs_at

    if not is_url(name):
        yield name
        return
    folders = runs_at(name)
    if not folders:
        raise ConfigError(f"{name} is not a run", code="run_not_found", fix=f"automodel runs ls {word(name)}")
    for url in folders:
        yield fetch(url)
