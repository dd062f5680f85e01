"""One picture: its bytes, its size without decoding, and its pixels. Torch-free."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import warnings
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_cli.data.picture import Picture
from automodel_cli.data.row_errors import RowError

if TYPE_CHECKING:
    from PIL import Image as PIL_Image

MAX_BYTES = 64 << 20
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_SHORTEST_BASE64 = 64
VALUE_KEYS = ("bytes", "path", "image", "image_url", "url", "base64")
"""Keys of a dict that can hold a picture."""


def key_of(data: bytes) -> bytes:
    """Return the hash of a picture's content."""
    return blake2b(data, digest_size=16).digest()


def read_picture(value: object, folder: str, max_pixels: int) -> Picture:
    """Read a picture of a row.

    Args:
        value: a path, a `data:` URL, base64, bytes, or a dict with one of `VALUE_KEYS`.
        folder: folder of relative paths.
        max_pixels: largest number of pixels.

    Raises:
        RowError: there is no such picture, or it cannot be read.
    """
    data, path = _content(value, folder)
    try:
        height, width = _size(data, max_pixels)
    except RowError as error:
        error.file = path
        raise
    return Picture(key_of(data), height, width, path, None if path is not None else data)


def _content(value: object, folder: str) -> tuple[bytes, str | None]:
    """Return the bytes, and their path if they are in a file."""
    match value:
        case dict():
            for name in VALUE_KEYS:
                if value.get(name) is not None:
                    return _content(value[name], folder)
            raise RowError("no_picture", f"the picture has the keys {sorted(value)}, but neither bytes nor a path")
        case bytes() | bytearray():
            return bytes(value), None
        case str():
            return _content_of_text(value, folder)
    raise RowError("no_picture", f"the picture is {type(value).__name__}, not a path, bytes or base64")


def _content_of_text(value: str, folder: str) -> tuple[bytes, str | None]:
    if value.startswith(("http://", "https://")):
        raise RowError(
            "picture_url",
            f"{value[:60]} is a web address, and pictures are not downloaded during training",
            fix="download the pictures, and write their paths into the rows",
        )
    if value.startswith("data:"):
        head, _, body = value.partition(",")
        if not head.endswith(";base64"):
            raise RowError("bad_picture", "the picture is a data: URL without base64")
        return _decoded(body), None
    path = os.path.abspath(os.path.join(folder, value.removeprefix("file://")))
    if os.path.isfile(path):
        if (size := os.path.getsize(path)) > MAX_BYTES:
            raise RowError("huge_picture", f"{value} has {size >> 20} MiB, more than {MAX_BYTES >> 20}", file=path)
        return Path(path).read_bytes(), path
    # The base64 text of a JPEG begins with `/9j/`, as a path could.
    if len(value) >= _SHORTEST_BASE64 and not len(value) % 4 and _BASE64.fullmatch(value):
        return _decoded(value), None
    is_relative = not os.path.isabs(value)
    raise RowError(
        "no_picture",
        f"the picture {value[:80]} {'is a folder' if os.path.isdir(path) else 'does not exist'}"
        f"{f' (data.media_dir={folder})' if folder and is_relative else ''}",
        fix="data.media_dir=<folder of the pictures>" if is_relative else None,
        file=path,
    )


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise RowError("bad_picture", f"the picture is not base64: {error}") from error


def _opened(data: bytes, max_pixels: int | None) -> PIL_Image.Image:
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image: PIL_Image.Image = Image.open(io.BytesIO(data))
    except UnidentifiedImageError as error:
        start = f", starting with {data[:8]!r}" if data else ""
        raise RowError("no_picture_format", f"the picture has {len(data)} bytes of no known format{start}") from error
    except Image.DecompressionBombError as error:
        raise RowError("huge_picture", f"the picture is too large to be opened. {error}") from error
    except Exception as error:  # decoders raise any class
        raise RowError("bad_picture", f"the picture cannot be opened: {type(error).__name__}: {error}") from error
    width, height = image.size
    if max_pixels is not None and width * height > max_pixels:
        raise RowError(
            "huge_picture",
            f"the picture has {width} x {height} pixels, more than {max_pixels}",
            fix=f"data.max_image_pixels={width * height}",
        )
    return image


def _orientation(image: PIL_Image.Image) -> int:
    """Return the EXIF orientation from the header. `getexif` of a PNG would decode the picture."""
    from PIL import Image

    if image.format != "PNG":
        return int(image.getexif().get(0x0112, 1))
    exif = Image.Exif()
    if image.info.get("exif"):
        exif.load(image.info["exif"])
    return int(exif.get(0x0112, 1))


def _size(data: bytes, max_pixels: int) -> tuple[int, int]:
    """Return height and width as seen. Reads the header only, except for formats that can break off behind it."""
    image = _opened(data, max_pixels)
    try:
        sideways = _orientation(image) >= 5
        image.load()
    except Exception as error:  # decoders raise any class
        raise RowError(
            "bad_picture", f"the {image.format} of {image.size[0]} x {image.size[1]} pixels is damaged: {error}"
        ) from error
    width, height = image.size
    return (width, height) if sideways else (height, width)


def rgb(data: bytes) -> PIL_Image.Image:
    """Return the picture in RGB, turned as EXIF says.

    Transparent pixels are white. An animation is its first frame. 16-bit gray is scaled, which PIL alone would clip.
    """
    from PIL import Image

    image = _opened(data, None)
    flip = Image.Transpose
    turns = {
        2: flip.FLIP_LEFT_RIGHT,
        3: flip.ROTATE_180,
        4: flip.FLIP_TOP_BOTTOM,
        5: flip.TRANSPOSE,
        6: flip.ROTATE_270,
        7: flip.TRANSVERSE,
        8: flip.ROTATE_90,
    }
    turn = turns.get(_orientation(image))
    image.load()
    if turn is not None:
        image = image.transpose(turn)
    if image.mode == "I" or image.mode.startswith("I;16"):
        import numpy as np

        image = Image.fromarray((np.asarray(image).astype("float64") / 257).clip(0, 255).astype("uint8"))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        seen = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", seen.size, (255, 255, 255, 255)), seen)
    return image.convert("RGB")
