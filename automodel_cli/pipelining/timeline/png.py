"""A timeline as PNG, without an imaging library: rectangles in a numpy canvas, a 5 x 7 dot font, zlib. Torch-free."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from automodel_cli.pipelining.timeline.picture import Box, Label, Rule, schedule_picture
from automodel_cli.pipelining.timeline.simulator import Timeline

SCALE = 2
"""Dots per pixel of the picture: sharp on screens of high density."""

# Columns of each glyph from left to right, lowest bit on top, bit 7 below the baseline; blank columns at the sides are
# cut off, which makes the font proportional.
_GLYPHS = {
    " ": "000000", "%": "2313086462", "(": "1C2241", ")": "41221C", "*": "2A1C7F1C2A", ",": "8070", "-": "080808",
    ".": "6060", "/": "2010080402", ":": "2424", ";": "8064", "=": "1414141414", "[": "7F4141", "]": "41417F",
    "\N{MIDDLE DOT}": "1818", "<": "08142241", ">": "41221408", "|": "7F", "_": "8080808080", "+": "08083E0808",
    "0": "3E5149453E", "1": "427F40", "2": "7249494946", "3": "2141494D33", "4": "1814127F10", "5": "2745454539",
    "6": "3C4A494931", "7": "4121110907", "8": "3649494936", "9": "464949291E",
    "A": "7C1211127C", "B": "7F49494936", "C": "3E41414122", "D": "7F4141413E", "E": "7F49494941", "F": "7F09090901",
    "G": "3E41415173", "H": "7F0808087F", "I": "417F41", "J": "2040413F01", "K": "7F08142241", "L": "7F40404040",
    "M": "7F021C027F", "N": "7F0408107F", "O": "3E4141413E", "P": "7F09090906", "Q": "3E4151215E", "R": "7F09192946",
    "S": "2649494932", "T": "01017F0101", "U": "3F4040403F", "V": "1F2040201F", "W": "3F4038403F", "X": "6314081463",
    "Y": "0304780403", "Z": "6151494543",
    "a": "2054545478", "b": "7F48444438", "c": "3844444428", "d": "384444487F", "e": "3854545418", "f": "087E0902",
    "g": "18A4A4A47C", "h": "7F08040478", "i": "447D40", "j": "40803D", "k": "7F102844", "l": "417F40",
    "m": "7C04780478", "n": "7C08040478", "o": "3844444438", "p": "FC24242418", "q": "18242424FC", "r": "7C080404",
    "s": "4854545424", "t": "043F4424", "u": "3C4040207C", "v": "1C2040201C", "w": "3C4030403C", "x": "4428102844",
    "y": "1CA0A0A07C", "z": "4464544C44",
}  # fmt: skip


def draw_png(timeline: Timeline, *, title: str | None = None, unit: str = "") -> bytes:
    """The timeline as the bytes of a PNG file; what it shows is `schedule_picture`'s."""
    picture = schedule_picture(timeline, title=title, unit=unit)
    canvas = np.full((picture.height * SCALE, picture.width * SCALE, 3), 255, dtype=np.uint8)
    for shape in picture.shapes:
        if isinstance(shape, Box):
            _paint_box(canvas, shape)
        elif isinstance(shape, Rule):
            x = round(shape.x * SCALE)
            canvas[round(shape.top * SCALE) : round(shape.bottom * SCALE), x : x + 1] = _rgb(shape.colour)
        else:
            _paint_label(canvas, shape)
    return _encode(canvas)


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[k : k + 2], 16) for k in (1, 3, 5))


def _paint_box(canvas: np.ndarray, box: Box) -> None:
    """The box with its corner dots left out; the stroke is one dot wide, inside."""
    x0, y0 = round(box.x * SCALE), round(box.y * SCALE)
    x1, y1 = round((box.x + box.width) * SCALE), round((box.y + box.height) * SCALE)
    if box.stroke:
        canvas[y0:y1, x0:x1] = _rgb(box.stroke)
        x0, y0, x1, y1 = x0 + 1, y0 + 1, x1 - 1, y1 - 1
    if x1 <= x0 or y1 <= y0:
        return
    inside = canvas[y0:y1, x0:x1]
    corners = [(v, h, inside[v, h].copy()) for v in (0, -1) for h in (0, -1)]
    inside[:] = _rgb(box.fill)
    for v, h, before in corners if box.radius else ():
        inside[v, h] = before


def _paint_label(canvas: np.ndarray, label: Label) -> None:
    """Text in whole dots, so that it stays sharp: a glyph is 7 dots times a whole number high."""
    dot = max(1, round(label.size * SCALE * 0.72 / 7))
    mask = _text_mask(label.text, bold=label.bold).repeat(dot, 0).repeat(dot, 1)
    width = mask.shape[1]
    shift = {"start": 0.0, "middle": width / 2, "end": float(width)}[label.anchor]
    x, y = round(label.x * SCALE - shift), round(label.y * SCALE) - 7 * dot
    mask = mask[max(0, -y) :, max(0, -x) :]
    target = canvas[max(0, y) : max(0, y) + mask.shape[0], max(0, x) : max(0, x) + mask.shape[1]]
    target[mask[: target.shape[0], : target.shape[1]]] = _rgb(label.colour)


def _text_mask(text: str, *, bold: bool) -> np.ndarray:
    """Which dots of [8 rows, columns] are ink. Characters without a glyph show as a filled block."""
    columns: list[int] = []
    for character in text:
        glyph = list(bytes.fromhex(_GLYPHS.get(character, "7F7F7F7F7F")))
        if bold:
            glyph = [a | b for a, b in zip([*glyph, 0], [0, *glyph], strict=True)]
        columns += [*glyph, 0]
    bits = np.array(columns[:-1], dtype=np.uint8)
    return (bits[None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1).astype(bool)


def _encode(canvas: np.ndarray) -> bytes:
    """PNG: 8-bit RGB, every row without filter."""
    height, width, _ = canvas.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), canvas.reshape(height, width * 3)], axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(rows.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
