"""Pictures in rows: content parts and `<image>` tags become marks in the text, which formats read as usual. Torch-free.

A mark is one private character for each picture of the row. Formats, roles and loss masks then need no rule of their
own for pictures. The chat encoder turns the marks of a message into image parts for the template.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from automodel_cli.data.formats.examples import Conversation, Example, JudgedResponse, Pair
from automodel_cli.data.formats.unused_columns import PICTURES
from automodel_cli.data.picture import Picture
from automodel_cli.data.pictures.content import VALUE_KEYS, read_picture
from automodel_cli.data.row_errors import RowError

FIRST_MARK = 0x10E000
MOST_PICTURES = 4096
_MARK = re.compile(f"[{chr(FIRST_MARK)}-{chr(FIRST_MARK + MOST_PICTURES - 1)}]")
_TAG = re.compile(r"\n?<image>\n|\n?<image>")
_LONGEST_NAME = 200  # characters of a path in a message
IMAGE_PARTS = ("image", "image_url", "input_image")


def split_marks(text: str) -> list[tuple[int, str]]:
    """Return the pieces of text between marks, each with its start."""
    pieces, start = [], 0
    for match in _MARK.finditer(text):
        pieces.append((start, text[start : match.start()]))
        start = match.end()
    return [*pieces, (start, text[start:])]


def content_parts(text: str) -> list[dict[str, str]] | str:
    """Return the content of a message for a chat template: parts if the text has marks, else the text."""
    if not _MARK.search(text):
        return text
    pieces = re.split(f"({_MARK.pattern})", text)
    parts = [{"type": "image"} if _MARK.fullmatch(piece) else {"type": "text", "text": piece} for piece in pieces]
    return [part for part in parts if part["type"] == "image" or part["text"]]


def with_tags(text: str) -> str:
    """Return a text with tags in the place of marks, for display."""
    return _MARK.sub("<image>", text)


@dataclass(frozen=True)
class PictureRows:
    """Reads the pictures of rows.

    Attributes:
        folder: folder of relative paths (`data.media_dir`).
        max_pixels: largest number of pixels of a picture.
    """

    folder: str
    max_pixels: int

    def marked(
        self,
        row: Mapping[str, Any],
        fields: Sequence[str],
        sides: Sequence[str] = (),
        columns: Sequence[str] = PICTURES,
    ) -> tuple[dict[str, object], list[Picture]]:
        """Return the row with marks in the place of its pictures, and the pictures by number of the mark.

        Args:
            fields: columns in the order in which a format renders them.
            sides: columns of which each follows the others (the two responses of a pair, with or without the prompt).
                Equal pictures at the same place get the same mark.
            columns: columns with pictures. The first one with a value is read.

        Raises:
            RowError: a picture cannot be read, or tags and pictures differ in number.
        """
        column = next((name for name in columns if row.get(name) not in (None, [], "")), None)
        listed = [] if column is None else row[column]
        walk = _Walk(list(listed) if isinstance(listed, list | tuple) else [listed], column)
        rest = {name: value for name, value in row.items() if name not in columns}
        names = [*(name for name in fields if name in rest), *(name for name in rest if name not in fields)]
        marked = {name: walk.value(rest[name]) for name in names if name not in sides}
        branches = {name: walk.branch() for name in sides if name in rest}
        marked |= {name: branch.value(rest[name]) for name, branch in branches.items()}
        walk.num_taken = max([walk.num_taken, *(branch.num_taken for branch in branches.values())])
        walk.check()
        return {name: marked[name] for name in rest}, [
            self._read(value, f"{column or 'picture'}[{number}]") for number, value in enumerate(walk.found)
        ]

    def _read(self, value: object, where: str) -> Picture:
        try:
            return read_picture(value, self.folder, self.max_pixels)
        except RowError as error:
            if isinstance(value, str) and len(value) <= _LONGEST_NAME and value not in error.message:
                where += f" ({value})"
            raise RowError(error.code, f"{where}: {error.message}", fix=error.fix, file=error.file) from error


class _Walk:
    """Replaces pictures in the values of one row, and numbers them."""

    def __init__(self, listed: list[object], column: str | None):
        self.listed, self.column = listed, column
        self.found: list[Any] = []
        self.num_taken = self.num_marked = 0

    def branch(self) -> _Walk:
        """Return a walk that continues here. Branches share the numbers of equal pictures."""
        other = copy.copy(self)
        other.num_marked = len(self.found)
        return other

    def _mark(self, value: object) -> str:
        number = self.num_marked
        if number == len(self.found) or self.found[number] != value:
            number = len(self.found)
            self.found.append(value)
        if number == MOST_PICTURES:
            raise RowError("image_count", f"the row has more than {MOST_PICTURES} pictures")
        self.num_marked = number + 1
        return chr(FIRST_MARK + number)

    def _next(self) -> object:
        if self.num_taken == len(self.listed):
            raise RowError(
                "image_count",
                f"the text of the row has more image tags than the {len(self.listed)} pictures of the column "
                f"{self.column or 'images'!r}",
                fix="give each <image> tag or image part one picture",
            )
        self.num_taken += 1
        return self.listed[self.num_taken - 1]

    def value(self, value: object) -> Any:
        """Return a value of the row with marks."""
        match value:
            case str():
                return self._text(value)
            case list():
                if any(map(_is_picture, value)):
                    return "".join(self._part(item) for item in value)
                return [self.value(item) for item in value]
            case dict():
                return {key: self.value(item) for key, item in value.items()}
        return value

    def _text(self, text: str) -> str:
        if _MARK.search(text):
            raise RowError("bad_text", "the text contains private-use characters that mark pictures")
        if not self.listed:  # without pictures, a tag is text
            return text
        return _TAG.sub(lambda match: self._mark(self._next()), text)

    def _part(self, part: object) -> str:
        match part:
            case {"type": kind, **values} if kind in IMAGE_PARTS:
                given = {name: values[name] for name in VALUE_KEYS if values.get(name) is not None}
                return self._mark(given or self._next())
            case {"text": str(text)}:
                return self._text(text)
            case {**values}:
                kind = values.get("type", "unknown")
            case _:
                kind = type(part).__name__
        raise RowError("not_text", f"a content part has type {kind!r}, but only text and images are supported")

    def check(self) -> None:
        """Raise RowError if a picture of the column is used nowhere."""
        if self.num_taken < len(self.listed):
            raise RowError(
                "image_count",
                f"the column {self.column!r} has {len(self.listed)} pictures, but the text of the row has "
                f"{self.num_taken} image tags",
                fix="write <image> where each picture belongs",
            )


def _is_picture(part: object) -> bool:
    match part:
        case {"type": kind}:
            return kind in IMAGE_PARTS
    return False


def with_pictures(document: Example, pictures: Sequence[Picture]) -> Example:
    """Return the document, pair or judged response with its pictures in the order of its marks.

    Raises RowError if it is no conversation.
    """
    if not pictures:
        return document
    match document:
        case JudgedResponse(prompt, response, trained):
            messages = Conversation(prompt + response, [False] * len(prompt) + trained)
            return replace(document, pictures=in_order([messages], pictures)[0].pictures)
        case Pair():
            chosen, rejected = in_order([document.chosen, document.rejected], pictures)
            return replace(document, chosen=chosen, rejected=rejected)
    return in_order([document], pictures)[0]


def in_order(documents: Sequence[Example], pictures: Sequence[Picture]) -> list[Conversation]:
    """Return the documents of a row, each with its pictures in the order of its marks. Raises RowError."""
    chats: list[Conversation] = []
    orders = []
    for document in documents:
        if not isinstance(document, Conversation):
            raise RowError(
                "no_template",
                "pictures require a conversation and a chat template",
                fix="data.chat_template=<a .jinja file with image parts>",
            )
        for number, (message, is_trained) in enumerate(zip(document.messages, document.trained, strict=True)):
            if is_trained and _MARK.search(message["content"]):
                raise RowError(
                    "picture_in_answer",
                    f"message {number} is trained and contains a picture, but the model writes text only",
                    fix="train: false in this message",
                )
        marks = [mark for message in document.messages for mark in _MARK.findall(message["content"])]
        chats.append(document)
        orders.append([ord(mark) - FIRST_MARK for mark in marks])
    is_repeated = any(len(order) != len(set(order)) for order in orders)
    if is_repeated or {number for order in orders for number in order} != set(range(len(pictures))):
        raise RowError("image_count", "a picture of the row belongs to no message that is rendered")
    return [
        replace(chat, pictures=tuple(pictures[number] for number in order))
        for chat, order in zip(chats, orders, strict=True)
    ]
