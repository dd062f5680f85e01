"""Open token files of any supported format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from automodel_cli.data.token_files import megatron, nanogpt
from automodel_cli.data.token_files.detection import check_token_file, has_index
from automodel_cli.data.token_files.token_file import TokenFile


def token_ids(path: Path) -> np.ndarray:
    """Map the tokens of a file without its documents."""
    check_token_file(path)
    return megatron.token_ids(path) if has_index(path) else nanogpt.token_ids(path)


def open_token_file(path: Path, delimiters: Sequence[int]) -> TokenFile:
    """Open a file. `delimiters`: tokens that may separate documents of formats without bounds, most likely first."""
    check_token_file(path)
    return megatron.read(path) if has_index(path) else nanogpt.read(path, delimiters)
