"""Open token files of any supported format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.data.token_files import megatron, nanogpt
from automodel_cli.data.token_files.token_file import SUFFIX, TokenFile


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
    if not has_index(path) and not nanogpt.is_nanogpt(path):
        raise DataError(
            f"{path} is neither a token file of Megatron, because {path.with_suffix(megatron.INDEX_SUFFIX).name} does "
            "not exist, nor one of nanoGPT, because its magic number is another",
            code="unsupported_file_type",
            keys=("data.path",),
            fix=f"copy {path.with_suffix(megatron.INDEX_SUFFIX).name} beside it",
        )


def has_index(path: Path) -> bool:
    """Whether the `.idx` of a Megatron dataset is beside the `.bin`."""
    return path.with_suffix(megatron.INDEX_SUFFIX).is_file()


def token_ids(path: Path) -> np.ndarray:
    """Map the tokens of a file without its documents."""
    check_token_file(path)
    return megatron.token_ids(path) if has_index(path) else nanogpt.token_ids(path)


def open_token_file(path: Path, delimiters: Sequence[int]) -> TokenFile:
    """Open a file. `delimiters`: tokens that may separate documents of formats without bounds, most likely first."""
    check_token_file(path)
    return megatron.read(path) if has_index(path) else nanogpt.read(path, delimiters)
