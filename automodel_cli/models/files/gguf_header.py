"""Metadata of a GGUF file, read without a library and without its tensors. Torch-free.

Layout (ggml's docs/gguf.md): magic, version, tensor count, metadata count, then `key, value type, value` with
little-endian integers. A string is a 64-bit length and UTF-8. An array is an element type, a 64-bit count and the
elements.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from automodel_cli.config.errors import ConfigError

_STRING, _ARRAY = 8, 9
# Bytes of the scalar types: u8 i8 u16 i16 u32 i32 f32 bool, and u64 i64 f64.
_WIDTH = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def gguf_strings(path: Path) -> dict[str, str]:
    """Return all metadata entries that are strings, by key. Raises ConfigError if the file is not a GGUF file."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ConfigError(
                f"gguf_file={path} is not a GGUF file, because it does not begin with `GGUF`",
                code="unsupported_file_type",
                keys=("gguf_file",),
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _strings(data)
            except (struct.error, KeyError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"gguf_file={path} cannot be read: {error}", code="damaged_file", keys=("gguf_file",)
                ) from error


def _strings(data: mmap.mmap) -> dict[str, str]:
    (num_entries,) = struct.unpack_from("<Q", data, 16)
    entries: dict[str, str] = {}
    at = 24
    for _ in range(num_entries):
        key, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        if kind == _STRING:
            entries[key], at = _string(data, at + 4)
        else:
            at = _skip(data, at + 4, kind)
    return entries


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    return data[at + 8 : at + 8 + length].decode(), at + 8 + length


def _skip(data: mmap.mmap, at: int, kind: int) -> int:
    """Return the end of the value of type `kind` that starts at `at`."""
    if kind == _STRING:
        (length,) = struct.unpack_from("<Q", data, at)
        return int(at + 8 + length)
    if kind != _ARRAY:
        return at + _WIDTH[kind]
    element, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if element in _WIDTH:
        return int(at + count * _WIDTH[element])
    for _ in range(count):
        at = _skip(data, at, element)
    return at
