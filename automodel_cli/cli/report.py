"""`report RUN...`: one offline page for one run or several. Imports no torch."""

from __future__ import annotations

from pathlib import Path

import click

from automodel_cli.cli import complete


@click.command(short_help="One offline page of curves, samples and configs, for one run or several.")
@click.argument("names", nargs=-1, required=True, metavar="RUN...", shell_complete=complete.runs)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write; default: RUN/report.html of one run, report.html here of several.",
)
def report(names: tuple[str, ...], out: Path | None) -> None:
    """Write one HTML file that shows runs, also those that go on; it loads nothing.

    RUN is a folder or a name below runs/; a folder of runs stands for all in it.
    """
    from automodel_cli.runs.catalogue import named
    from automodel_cli.runs.page import FILE, write_own_page, write_page

    runs = named(names)
    if len(runs) == 1 and out is None:
        click.echo(write_own_page(runs[0].folder))
    else:
        click.echo(write_page(runs, out or Path(FILE)))
