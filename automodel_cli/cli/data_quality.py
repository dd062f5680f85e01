"""`data quality`: duplicates, overlap with evaluations, languages and lengths of datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from automodel_cli.cli import common
from automodel_cli.config.composition import bundled_recipes
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.security.trust import Trust

_CHECKS = ("exact", "near", "overlap", "language", "length")


class NamesType(click.ParamType):  # type: ignore[type-arg]
    """A list of names with commas, of which each is one of `choices`. None: any."""

    name = "names"

    def __init__(self, choices: tuple[str, ...] | None = None):
        self.choices = choices

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in str(value).split(",") if name.strip())
        for name in names:
            if self.choices is not None and name not in self.choices:
                self.fail(f"{name!r} is not one of: {', '.join(self.choices)}", param, ctx)
        return names


@click.command()
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option(
    "--against",
    multiple=True,
    metavar="EVAL",
    help="Compare with these evaluation rows: a file, folder, URL or hub id (PATH,name=NAME,split=SPLIT), or the "
    "config of an evaluation. Repeatable.",
)
@click.option(
    "--checks",
    metavar="NAME,...",
    type=NamesType(_CHECKS),
    help=f"Checks to run, of: {', '.join(_CHECKS)}.  [default: all; overlap with --against]",
)
@click.option("--format", "fmt", default="auto", show_default=True, help="Format of the rows, as `data.format`.")
@click.option("--column", help="Column of the text, with --format text or without --format.")
@click.option(
    "--text-unit",
    type=click.Choice(["file", "paragraph", "line"]),
    default="file",
    show_default=True,
    help="Row of a text file.",
)
@click.option("--split", default="train", show_default=True, help="Split of each SOURCE.")
@click.option("--name", help="Configuration of a hub dataset.")
@click.option("--similarity", default=0.8, show_default=True, help="Smallest similarity of near duplicates.")
@click.option("--ngram", default=13, show_default=True, help="Words of an n-gram of --against.")
@click.option(
    "--overlap",
    default=0.5,
    show_default=True,
    help="Smallest share of the n-grams of a text of an evaluation that a row contains. 0: one n-gram.",
)
@click.option("--languages", metavar="CODE,...", type=NamesType(), default=(), help="Languages to keep: en,de,unknown.")
@click.option("--min-words", type=click.IntRange(min=1), help="Smallest number of words to keep.")
@click.option("--max-words", type=click.IntRange(min=1), help="Largest number of words to keep.")
@click.option(
    "--remove",
    metavar="NAME,...",
    type=NamesType(("invalid", *_CHECKS)),
    default=(),
    help="With --write: remove the rows that these checks find, or rows that cannot be read (invalid).",
)
@click.option("--write", type=click.Path(path_type=Path), help="Folder for the rows that stay and the removed ones.")
@click.option(
    "--compression",
    type=click.Choice(["none", "gz", "zst"]),
    default="none",
    show_default=True,
    help="Compression of the files of --write.",
)
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report as JSON.")
@click.option("--num-workers", type=click.IntRange(min=0), help="Processes. 0: this one.  [default: by cores]")
@common.trust_option
def quality(
    sources: tuple[str, ...],
    against: tuple[str, ...],
    trust: Trust,
    checks: tuple[str, ...] | None,
    fmt: str,
    column: str | None,
    text_unit: str,
    split: str,
    name: str | None,
    remove: tuple[str, ...],
    write: Path | None,
    compression: str,
    report: Path | None,
    num_workers: int | None,
    **options: object,
) -> None:
    """Report duplicates, evaluation rows, languages and lengths.

    SOURCE is what `data.path` takes: a file, folder, glob, URL, saved dataset or hub id. Nothing is removed, unless
    --remove and --write are set. The first of several equal or similar rows stays.
    """
    if bool(remove) != (write is not None):
        option, other = ("--remove", "--write") if remove else ("--write", "--remove")
        fix = "--write clean" if remove else "--remove exact"
        raise ConfigError(f"{option} requires {other}", code="requires_setting", keys=(option, other), fix=fix)
    from automodel_cli.run.commands.data_quality import data_quality, quality_options, quality_source

    chosen = quality_options(checks, has_evaluations=bool(against), remove=remove, **options)
    evaluations: list[Any] = []
    for given in against:
        evaluations += _evaluation(given, trust)
    data_quality(
        [quality_source(path, name, split, fmt, column, text_unit) for path in sources],
        evaluations,
        chosen,
        report=report,
        write=write,
        suffix=".jsonl" if compression == "none" else f".jsonl.{compression}",
        num_workers=num_workers,
    )


def _evaluation(given: str, trust: Trust) -> list[object]:
    """Return the datasets of an evaluation's config, or the one dataset of a path."""
    is_config = given.endswith((".yaml", ".yml")) or (bundled_recipes.conf_dir() / "eval" / f"{given}.yaml").is_file()
    if not is_config:
        return [_rows(given)]
    from automodel_cli.cli.evaluate import load_evaluation
    from automodel_cli.evaluation.questions import question_sources

    found, without = question_sources(load_evaluation(given, (), trust)[1])
    for task in without:
        click.echo(f"{given}: the task {task} has no dataset of its own: add its rows with --against FILE", err=True)
    if not found:
        raise ConfigError(
            f"no task of {given} has a dataset of its own",
            code="not_enough_rows",
            keys=("--against",),
            fix="--against <a file of evaluation rows>",
        )
    return list(found)


def _rows(given: str) -> Any:
    from automodel_cli.run.commands.data_quality import quality_source

    path, *rest = given.split(",")
    settings = dict(part.partition("=")[::2] for part in rest)
    if not set(settings) <= {"name", "split"}:
        raise ConfigError(
            f"--against {given} has settings other than name and split",
            code="invalid_value",
            keys=("--against",),
            fix="--against PATH,name=NAME,split=test",
        )
    return quality_source(path, settings.get("name"), settings.get("split", "train"))
