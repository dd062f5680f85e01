#!/usr/bin/env python3
"""Draw a set of pictures as found in practice: many sizes, modes and formats, and a share of damaged files.

    python scripts/odd_pictures.py FOLDER [--count 2000] [--damaged 0.01]

Writes `FOLDER/rows.jsonl` and one file for each row. Questions are those of `data=picture_tasks`.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from automodel_cli.data.synthetic.picture_tasks import PictureTasks

Draw = Callable[[Image.Image, Path], None]
_UPRIGHT = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
"""EXIF orientation -> how the stored pixels are turned, so that a reader sees the picture upright."""


def _turned(orientation: int) -> Draw:
    def draw(image: Image.Image, path: Path) -> None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        image.transpose(_UPRIGHT[orientation]).save(path, "JPEG", exif=exif)

    return draw


def _transparent(image: Image.Image, path: Path) -> None:
    seen = image.convert("RGBA")
    seen.putalpha(ImageOps.invert(image.convert("L")).point(lambda value: 255 if value else 0))
    seen.save(path, "PNG")


def _gray_of_16_bits(image: Image.Image, path: Path) -> None:
    Image.fromarray(np.asarray(image.convert("L")).astype("uint16") * 257).save(path, "PNG")


def _animation(image: Image.Image, path: Path) -> None:
    white = Image.new("RGB", image.size, "white")
    image.save(path, "GIF", save_all=True, append_images=[white, white], duration=100)


def _saved(kind: str, mode: str = "RGB", **options: object) -> Draw:
    return lambda image, path: image.convert(mode).save(path, kind, **options)


ODD: dict[str, tuple[str, Draw]] = {
    "plain": (".png", _saved("PNG")),
    "turned by 180": (".jpg", _turned(3)),
    "turned right": (".jpg", _turned(6)),
    "turned left": (".jpg", _turned(8)),
    "transparent": (".png", _transparent),
    "palette": (".png", _saved("PNG", "P")),
    "16-bit gray": (".png", _gray_of_16_bits),
    "8-bit gray": (".jpg", _saved("JPEG", "L")),
    "CMYK": (".jpg", _saved("JPEG", "CMYK")),
    "progressive": (".jpeg", _saved("JPEG", progressive=True)),
    "animation": (".gif", _animation),
    "WebP": (".webp", _saved("WEBP")),
    "TIFF": (".tiff", _saved("TIFF", compression="tiff_lzw")),
    "BMP": (".bmp", _saved("BMP")),
    "wrong suffix": (".jpg", _saved("PNG")),
}
"""Kind of a readable picture -> suffix of its file, how it is written."""


def _cut(kind: str) -> Draw:
    def draw(image: Image.Image, path: Path) -> None:
        stream = io.BytesIO()
        image.resize((256, 256)).save(stream, kind)
        path.write_bytes(stream.getvalue()[: len(stream.getvalue()) * 2 // 3])

    return draw


DAMAGED: dict[str, tuple[str, Draw]] = {
    "cut JPEG": (".jpg", _cut("JPEG")),
    "cut PNG": (".png", _cut("PNG")),
    "missing": (".png", lambda image, path: None),
    "bomb": (".png", lambda image, path: Image.new("1", (30_000, 30_000)).save(path, "PNG")),
    "text": (".png", lambda image, path: path.write_text("404 Not Found\n") and None),
    "empty": (".jpg", lambda image, path: path.write_bytes(b"") and None),
    "folder": (".png", lambda image, path: path.mkdir(exist_ok=True)),
}
"""Kind of an unreadable picture -> suffix of its file, how it is written."""


def draw(folder: Path, count: int, damaged: float) -> Iterator[tuple[str, dict[str, object]]]:
    """Write the pictures. Yields the kind of each with its row."""
    rng = random.Random(0)
    unreadable = set(rng.sample(range(count), round(count * damaged)))
    odd, broken = itertools.cycle(ODD.items()), itertools.cycle(DAMAGED.items())
    for number, row in enumerate(PictureTasks(num_train=count).rows("train")):
        kind, (suffix, write) = next(broken if number in unreadable else odd)
        (image, question), answer = row["messages"][0]["content"], row["answer"]
        picture = Image.open(io.BytesIO(image["bytes"]))
        picture = picture.resize([round(side * rng.uniform(1, 20)) for side in picture.size])
        name = f"pictures/{number:05}{suffix}"
        write(picture, folder / name)
        turns = [{"role": "user", "content": f"<image>{question['text']}"}, {"role": "assistant", "content": answer}]
        yield kind, {"messages": turns, "images": [name]}


def main() -> None:
    """Draw the set of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--damaged", type=float, default=0.01)
    args = parser.parse_args()
    (args.folder / "pictures").mkdir(parents=True, exist_ok=True)
    drawn = list(draw(args.folder, args.count, args.damaged))
    (args.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _, row in drawn))
    for kind in [*ODD, *DAMAGED]:
        print(f"{sum(found == kind for found, _ in drawn):5} {kind}")


if __name__ == "__main__":
    main()
