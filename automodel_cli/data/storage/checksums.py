"""Fast file hash (XXH3-128) to detect damage and change. Not secure against an attacker.

Throughput of one Xeon core with SHA units: 6.6 GB/s. zlib's crc32 has 2.1, SHA-256 1.1 (0.3 without SHA units) and
BLAKE2b 0.4 GB/s. The package is a dependency of `datasets`.
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
        """Add the next bytes."""
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
