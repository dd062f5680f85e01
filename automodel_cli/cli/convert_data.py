"""`data convert`: datasets between files of rows and token files."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "layout",
    type=click.Choice(["megatron", "nanogpt"]),
    default="megatron",
    show_default=True,
    help="Format of a TARGET that ends in .bin.",
)
@click.option("--tokenizer", metavar="NAME", help="Folder or hub id of the tokenizer.")
@click.option("--column", default="text", show_default=True, help="Column of the text.")
@click.option("--split", default="train", show_default=True, help="Split of SOURCE.")
@click.option("--name", help="Configuration of a hub dataset.")
@click.option("--no-eos", is_flag=True, help="Do not end tokenized texts with EOS.")
def convert(
    source: str,
    target: Path,
    layout: str,
    tokenizer: str | None,
    column: str,
    split: str,
    name: str | None,
    no_eos: bool,
) -> None:
    """Convert a dataset to another format.

    SOURCE is what `data.path` takes: a file, folder, glob, URL, saved dataset or hub id. The suffix of TARGET selects
    the format: .bin (tokens), .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .arrow. Without a suffix, TARGET is a folder
    of `datasets.save_to_disk`. Text is tokenized and tokens are decoded with --tokenizer.
    """
    from automodel_cli.run.commands.convert_data import convert_data

    convert_data(
        source, target, layout=layout, tokenizer=tokenizer, column=column, split=split, name=name, append_eos=not no_eos
    )
