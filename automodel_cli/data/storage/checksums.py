"""One fast hash for files: XXH3-128, to notice damage and change, not an adversary.

One core of a Xeon with SHA units hashes 6.6 GB/s with it, 2.1 with zlib's crc32, 1.1 with SHA-256 (0.3 without those
units), 0.4 with BLAKE2b. The package comes with `datasets`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash

_CHUNK_BYTES = 4 << 20


class Checksum:
    """A running hash: `update` with bytes or a buffer of them, as often as there is something."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Any) -> None:
        """Add what comes next."""
        self._state.update(data)

    def hexdigest(self) -> str:
        """Of all that came so far, 32 digits."""
        return self._state.hexdigest()


def content_hash(path: Path) -> str:
    """Of a file's bytes, read once."""
    digest = Checksum()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()
