"""Odd pictures: what is read, and what is refused with which code."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from automodel_cli.data.pictures.content import read_picture, rgb
from automodel_cli.data.row_errors import RowError
from tests.errors import raises
from tests.vision import encoded, noise

MOST = 10_000


def _pixel(data: bytes, place: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
    return tuple(np.asarray(rgb(data))[place].tolist())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_turns_size_and_pixels(orientation: int):
    image = noise(4, 6)
    exif = Image.Exif()
    exif[0x0112] = orientation
    for kind in ("JPEG", "PNG"):
        data = encoded(image, kind, exif=exif)
        picture = read_picture(data, "", MOST)
        assert (picture.height, picture.width) == ((6, 4) if orientation >= 5 else (4, 6))
        assert rgb(data).size == (picture.width, picture.height)
    corner = {1: (0, 0), 2: (0, 5), 3: (3, 5), 4: (3, 0), 5: (0, 0), 6: (3, 0), 7: (3, 5), 8: (0, 5)}[orientation]
    assert _pixel(data) == tuple(np.asarray(image)[corner].tolist())  # the last one is PNG, without loss


def test_transparent_pixels_are_white():
    image = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    assert _pixel(encoded(image)) == (255, 255, 255)
    palette = Image.new("P", (2, 2), 0)
    palette.putpalette([255, 0, 0])
    assert _pixel(encoded(palette, transparency=0)) == (255, 255, 255)


def test_gray_of_16_bits_is_scaled():
    values = np.array([[0, 257 * 100], [257 * 200, 65535]], np.uint16)
    data = encoded(Image.fromarray(values))
    assert [_pixel(data, place)[0] for place in ((0, 0), (0, 1), (1, 0), (1, 1))] == [0, 100, 200, 255]


def test_cmyk_and_the_first_frame_of_an_animation():
    assert _pixel(encoded(Image.new("CMYK", (2, 2), (0, 0, 0, 0)), "JPEG")) == (255, 255, 255)
    frames = [Image.new("RGB", (2, 2), color) for color in ((250, 0, 0), (0, 250, 0))]
    data = encoded(frames[0], "PNG", save_all=True, append_images=frames[1:])
    assert _pixel(data) == (250, 0, 0)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_truncated_file_is_refused(kind: str):
    data = encoded(noise(40, 40), kind)
    with raises(RowError, "bad_picture"):
        read_picture(data[: len(data) // 2], "", MOST)


def test_bombs_and_unknown_formats_are_refused():
    with raises(RowError, "huge_picture", values=(200,)):
        read_picture(encoded(Image.new("1", (200, 200))), "", MOST)
    small = encoded(Image.new("1", (8, 8)))
    header = b"IHDR" + struct.pack(">II", 30_000, 30_000) + small[24:29]
    with raises(RowError, "huge_picture", values=(900_000_000,)):
        read_picture(small[:12] + header + struct.pack(">I", zlib.crc32(header)) + small[33:], "", MOST)
    for data in (b"no picture at all", b""):
        with raises(RowError, "no_picture_format"):
            read_picture(data, "", MOST)


def test_every_way_to_give_a_picture(tmp_path: Path):
    data = encoded(noise(4, 6))
    (tmp_path / "a.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    key = read_picture(data, "", MOST).key
    for value in (
        "a.png",
        f"file://{tmp_path / 'a.png'}",
        text,
        f"data:image/png;base64,{text}",
        {"bytes": data, "path": None},
        {"bytes": None, "path": "a.png"},
        {"image_url": {"url": f"data:image/png;base64,{text}"}},
    ):
        assert read_picture(value, str(tmp_path), MOST).key == key


def test_base64_of_a_jpeg_is_no_path(tmp_path: Path):
    text = base64.b64encode(encoded(noise(20, 20), "JPEG")).decode()
    assert text.startswith("/9j/")
    assert read_picture(text, str(tmp_path), MOST).width == 20


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("https://example.com/a.png", "picture_url"),
        ("missing.png", "no_picture"),
        (".", "no_picture"),
        ("data:image/png,abc", "bad_picture"),
        (17, "no_picture"),
        ({"size": 3}, "no_picture"),
    ],
)
def test_what_is_no_picture_is_refused(value: object, code: str):
    with raises(RowError, code) as error:
        read_picture(value, "", MOST)
    assert "media_dir" not in error.value.message  # no folder is set, as in a chat


@pytest.mark.parametrize(("path", "is_relative"), [("missing.png", True), ("/missing.png", False)])
def test_only_relative_paths_depend_on_the_folder(path: str, is_relative: bool):
    with raises(RowError, "no_picture") as error:
        read_picture(path, "pictures", MOST)
    assert ("data.media_dir=pictures" in error.value.message) == (error.value.fix is not None) == is_relative


def test_rgb_of_a_stream_that_pil_reads_lazily():
    assert rgb(encoded(noise(3, 5))).size == Image.open(io.BytesIO(encoded(noise(3, 5)))).size
