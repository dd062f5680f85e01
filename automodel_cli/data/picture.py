"""A picture of a row. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Picture:
    """A readable picture of a row.

    Attributes:
        key: 16 bytes, the hash of the content.
        height, width: as seen, after EXIF orientation [pixels].
        path: where the content is, or None if `data` is the content.
        grid: patches in time, height and width, of families with rotary positions for them.
    """

    key: bytes
    height: int
    width: int
    path: str | None = None
    data: bytes | None = None
    grid: tuple[int, int, int] = (0, 0, 0)

    def content(self) -> bytes:
        """Return the bytes of the picture."""
        if self.data is not None:
            return self.data
        assert self.path is not None, "a picture has a path or data"
        return Path(self.path).read_bytes()
