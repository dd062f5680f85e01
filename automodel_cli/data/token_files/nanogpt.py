"""Read and write token files of nanoGPT and its descendants: a header of 256 int32, then one stream of tokens.

Header: magic, version 1, number of tokens, bytes per token. The magic 20240520 (llm.c, modded-nanogpt) always has
uint16 tokens and does not use the last field. 278895051 (NeMo AutoModel) has uint16 or uint32.

The format has no document bounds. Writers begin each document with a token (GPT-2: `<|endoftext|>`), some end it so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.data.token_files.detection import NANOGPT_MAGIC, NANOGPT_MAGIC_WITH_SIZE
from automodel_cli.data.token_files.token_file import TokenFile, damaged, mapped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HEADER_INTS = 256
_CHUNK = 1 << 24


def read(path: Path, delimiters: Sequence[int]) -> TokenFile:
    """Open a file. The first of `delimiters` that occurs separates documents.

    If the file begins with it, each document begins with it. Otherwise each document ends with it. Without any, the
    file is one document. Raises DataError if the file is damaged.
    """
    ids = token_ids(path)
    starts = _starts(ids, delimiters)
    return TokenFile(path, "nanoGPT tokens", ids, starts, np.diff(np.append(starts, len(ids))))


def token_ids(path: Path) -> np.ndarray:
    """Map the tokens of a file. Raises DataError if the file is damaged."""
    header = np.fromfile(path, np.int32, _HEADER_INTS)
    if len(header) < _HEADER_INTS:
        raise damaged(path, "ends in its header")
    size = 2 if header[0] == NANOGPT_MAGIC else int(header[3])
    if header[1] != 1 or size not in (2, 4):
        raise DataError(
            f"{path} has version {header[1]} and {size} bytes per token; supported are version 1 and 2 or 4 bytes",
            code="unsupported_file_type",
            fix="write the file again",
        )
    ids = mapped(path, np.dtype(f"uint{8 * size}"), 4 * _HEADER_INTS)
    if len(ids) != int(header[2]):
        raise damaged(path, f"has {len(ids):,} tokens, but its header requires {int(header[2]):,}")
    return ids


def delimiters_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that may separate documents, most likely first: BOS and EOS."""
    return [i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None]


def _starts(ids: np.ndarray, delimiters: Sequence[int]) -> np.ndarray:
    """Return the first token of each document."""
    for delimiter in delimiters:
        chunks = range(0, len(ids), _CHUNK)
        found = np.concatenate(
            [np.zeros(0, np.int64), *(a + np.flatnonzero(ids[a : a + _CHUNK] == delimiter) for a in chunks)]
        )
        if len(found):
            starts = found if found[0] == 0 else np.append(0, found + 1)
            return starts[starts < len(ids)]
    return np.zeros(min(1, len(ids)), np.int64)


def write(path: Path, documents: Iterable[np.ndarray], delimiter: int, dtype: np.dtype) -> tuple[int, int]:
    """Write documents, each with `delimiter` before it unless it begins or ends with it.

    Return the numbers of documents and tokens.
    """
    num_documents = num_tokens = 0
    with path.open("wb") as file:
        file.write(bytes(4 * _HEADER_INTS))
        for ids in documents:
            own = ids[:-1] if len(ids) > 1 and ids[-1] == delimiter and ids[0] != delimiter else ids
            begun = own if len(own) and own[0] == delimiter else np.append(delimiter, own)
            file.write(begun.astype(dtype).tobytes())
            num_documents, num_tokens = num_documents + 1, num_tokens + len(begun)
        if num_tokens > np.iinfo(np.int32).max:
            raise DataError(
                f"{path} would have {num_tokens:,} tokens, but the header counts up to 2,147,483,647",
                code="limit_exceeded",
                fix="convert to Megatron's format, or convert the files one by one",
            )
        header = np.zeros(_HEADER_INTS, np.int32)
        header[:4] = (NANOGPT_MAGIC if dtype.itemsize == 2 else NANOGPT_MAGIC_WITH_SIZE), 1, num_tokens, dtype.itemsize
        file.seek(0)
        file.write(header.tobytes())
    return num_documents, num_tokens
