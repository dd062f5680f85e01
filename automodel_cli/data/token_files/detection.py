"""Recognize token files by their names and first bytes. Imports no numpy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from automodel_cli.config.errors import DataError

SUFFIX, INDEX_SUFFIX = ".bin", ".idx"
NANOGPT_MAGIC, NANOGPT_MAGIC_WITH_SIZE = 20240520, 278895051
"""The first always has uint16 tokens. The second has the bytes of a token in its header."""


def are_token_files(paths: Sequence[Path]) -> bool:
    """Whether the paths are token files. Raises DataError if only some of them are."""
    tokens = [path for path in paths if path.name.endswith(SUFFIX)]
    if tokens and len(tokens) < len(paths):
        other = next(path for path in paths if path not in tokens)
        raise DataError(
            f"{tokens[0].name} has tokens and {other.name} has rows: they cannot be one dataset",
            code="ambiguous",
            keys=("data.path",),
            fix=f"data.path='{tokens[0].parent}/*{SUFFIX}'",
        )
    return bool(tokens)


def check_token_file(path: Path) -> None:
    """Raise DataError unless the file has a known format. Reads the headers only."""
    if not has_index(path) and not is_nanogpt(path):
        raise DataError(
            f"{path} is neither a token file of Megatron, because {path.with_suffix(INDEX_SUFFIX).name} does "
            "not exist, nor one of nanoGPT, because its magic number is another",
            code="unsupported_file_type",
            keys=("data.path",),
            fix=f"copy {path.with_suffix(INDEX_SUFFIX).name} beside it",
        )


def has_index(path: Path) -> bool:
    """Whether the `.idx` of a Megatron dataset is beside the `.bin`."""
    return path.with_suffix(INDEX_SUFFIX).is_file()


def is_nanogpt(path: Path) -> bool:
    """Whether the file begins with one of the magic numbers."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(4), "little", signed=True) in (NANOGPT_MAGIC, NANOGPT_MAGIC_WITH_SIZE)
