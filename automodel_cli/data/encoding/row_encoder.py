"""Tokenize rows and compute their loss masks.

Steps of one batch of rows: the format reads rows as documents (`formats/`), documents are rendered and encoded
(`chat/encoder.py` for conversations, `text_encoder.py` without a template), and rows without a trained token are
rejected. A rejected row is a `RowError` value in the results, so that the other rows of the batch are still encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from automodel_cli.data.chat.encoder import ChatEncoder
from automodel_cli.data.chat.special_tokens import SpecialChats, SpecialText
from automodel_cli.data.config import DataConfig
from automodel_cli.data.encoding.encode_spec import EncodeSpec
from automodel_cli.data.encoding.grouped import GroupEncoder
from automodel_cli.data.encoding.labeled import LabeledEncoder
from automodel_cli.data.encoding.pre_rendered import Added, refuse_rendered
from automodel_cli.data.encoding.text_encoder import TextEncoder
from automodel_cli.data.formats.base import PREFERENCES
from automodel_cli.data.formats.column_mapping import picture_columns
from automodel_cli.data.formats.examples import (
    AnsweredPrompt,
    Conversation,
    Example,
    JudgedResponse,
    Pair,
    PlainText,
)
from automodel_cli.data.formats.format_reader import RowReader
from automodel_cli.data.formats.preference import judged_document
from automodel_cli.data.formats.unused_columns import AllowedKeys
from automodel_cli.data.json_reader import Row
from automodel_cli.data.labels import LabelSpec
from automodel_cli.data.pictures.pixels import num_threads
from automodel_cli.data.pictures.reader import PictureSupport
from automodel_cli.data.pictures.rows import with_pictures
from automodel_cli.data.row_errors import RowError, attempt, attempt_each, unwrap, usable
from automodel_cli.data.tokenized import Encoded, EncodedRow, Unrolled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RowEncoder:
    """Encoder for the rows of one dataset. Picklable, for worker processes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, spec: EncodeSpec, pictures: PictureSupport | None = None):
        """`pictures`: reads the pictures of rows. None: rows must not have any."""
        self.tokenizer, self.spec, self.pictures = tokenizer, spec, pictures
        keys = AllowedKeys.of(spec.template, spec.ignored_columns)
        self.reader = RowReader(spec.fmt, spec.columns, chat=spec.template is not None, keys=keys)
        special = SpecialText(tokenizer, spec.special_choice)
        self.own: LabeledEncoder | GroupEncoder | None = None
        if isinstance(spec.row_spec, LabelSpec):
            self.own = LabeledEncoder(tokenizer, spec.row_spec, add_special_tokens=spec.add_bos)
        elif spec.row_spec is not None:
            self.own = GroupEncoder(tokenizer, spec.row_spec, add_special_tokens=spec.add_bos)
        self.text = TextEncoder(tokenizer, spec, special)
        self.chat = None
        if spec.template is not None:
            encoder = ChatEncoder(
                tokenizer,
                spec.template,
                spec.mask,
                turns=spec.turns,
                stop_ids=spec.stop_ids,
                own_template=spec.own_template,
                pictures=pictures is not None,
            )
            self.chat = SpecialChats(encoder, special)

    def encode(self, rows: Sequence[Row | RowError]) -> list[EncodedRow]:
        """Return one result per row, in order. Rows without a trained token are rejected."""
        if self.pictures is None:
            read = attempt_each(self._read, rows)
        else:  # decoders release the interpreter's lock
            with ThreadPoolExecutor(num_threads(), "pictures") as threads:
                read = list(threads.map(lambda row: attempt(lambda: self._read(unwrap(row))), rows))
        if self.own is not None:
            return [*self.own.encode(read)]
        return (self._encode_preferences if self.spec.fmt.makes in PREFERENCES else self._encode_documents)(read)

    def _read(self, row: Row) -> Example:
        """Return the row as a document with its pictures. Raises RowError."""
        if self.pictures is None:
            return self.reader.read(row)
        names = ("chosen", "rejected") if self.spec.fmt.makes == "pairs" else ()
        sides = [self.spec.columns.get(name, name) for name in names]
        order, columns = self.reader.ordered_columns(row), picture_columns(self.spec.columns)
        marked, found = self.pictures.rows.marked(row, order, sides, columns)
        return with_pictures(self.reader.read(marked), found)

    def refuse_rendered(self, rows: Sequence[Row], config: DataConfig, where: str) -> None:
        """Raise DataError if most rows contain BOS, EOS or a rendered template that would be added a second time."""
        if self.own is not None:
            return  # tokens are those of `tokenizer(text)`, whatever the text is
        templated = self.chat is not None and self.spec.fmt.makes != "texts"
        render = self.chat.encoder.render_messages if self.chat is not None and templated else None
        refuse_rendered(
            usable(attempt_each(self._read, rows)),
            config,
            Added.of(self.tokenizer, render),
            where=where,
            templated=templated,
            plain_works=lambda: self.reader.reads_without_template(rows),
        )

    def _encode_documents(self, documents: Sequence[Example | RowError]) -> list[EncodedRow]:
        """Encode the documents of each kind in one batch."""
        chats = iter(self._encode_chats([each for each in documents if isinstance(each, Conversation)]))
        completions = iter(self.text.completions([each for each in documents if isinstance(each, AnsweredPrompt)]))
        texts = iter(self.text.texts([each for each in documents if isinstance(each, PlainText)]))
        out: list[EncodedRow] = []
        for document in documents:
            match document:
                case Conversation():
                    out.append(_refuse_untrained(next(chats)))
                case AnsweredPrompt():
                    out.append(_refuse_untrained(next(completions)))
                case PlainText():
                    out.append(_refuse_untrained(next(texts)))
                case RowError():
                    out.append(document)
                case _:
                    raise AssertionError(f"a {type(document).__name__} has an encoder of its own")
        return out

    def _encode_preferences(self, read: Sequence[Example | RowError]) -> list[EncodedRow]:
        """Return both documents of each row as one item.

        A pair consists of the chosen and the rejected response. A judged row consists of its response and, for the
        reference point of KTO, the response of the next judged row after the prompt of this row.
        """
        judged = [row for row in read if isinstance(row, JudgedResponse)]
        next_of = {id(row): judged[(i + 1) % len(judged)] for i, row in enumerate(judged)}
        documents: list[Example | RowError] = []
        for row in read:
            match row:
                case Pair():
                    documents += [row.chosen, row.rejected]
                case JudgedResponse():
                    both = partial(judged_document, row, chat=self.spec.template is not None)
                    documents += [attempt(both, other) for other in (row, next_of[id(row)])]
                case _:
                    documents += [row, row]
        encoded = self._encode_documents(documents)
        return [attempt(_joined, row, a, b) for row, a, b in zip(read, encoded[::2], encoded[1::2], strict=True)]

    def _encode_chats(self, chats: Sequence[Conversation]) -> list[EncodedRow]:
        if self.chat is None and chats:
            fix = "data.chat_template=<a .jinja file>, or a tokenizer with a chat template"
            return [
                RowError("no_template", "messages require a chat template, but the tokenizer has none", fix=fix)
            ] * len(chats)
        results = self.chat.encode(chats) if self.chat is not None else []
        if self.pictures is None:
            return results
        return [attempt(self.pictures.expanded, chat, found) for chat, found in zip(chats, results, strict=True)]


def _joined(row: Example | RowError, chosen: EncodedRow, rejected: EncodedRow) -> Encoded:
    """Concatenate two documents into one item, which packing keeps together. Raises the error of one of them."""
    first, second = _single(row, "chosen", chosen), _single(row, "rejected", rejected)
    both = Encoded(
        np.concatenate([first.ids, second.ids]),
        np.concatenate([first.trained, second.trained]),
        split=len(first.ids),
        num_special=first.num_special,
        pictures=first.pictures + second.pictures,
        num_first_pictures=len(first.pictures),
    )
    match row:
        case Pair():
            return replace(both, margin=row.margin, num_special=first.num_special + second.num_special)
        case JudgedResponse():
            return replace(both, judgement=int(row.desirable))
    raise AssertionError(f"{type(row).__name__} is no preference")


def _single(row: Example | RowError, side: str, result: EncodedRow) -> Encoded:
    match result:
        case Encoded():
            return result
        case Unrolled():
            raise RowError(
                "several_turns",
                f"{side} has {len(result.documents)} trained turns that the chat template cannot render as one "
                "document, but a preference compares two documents",
                fix="data.loss_mask=last_turn, or data.multi_turn=single",
            )
        case RowError() if isinstance(row, Pair):
            raise RowError(result.code, f"{side}: {result.message}", fix=result.fix, raw=result.raw)
    raise result


def _refuse_untrained(result: EncodedRow) -> EncodedRow:
    """Reject a row without a trained token. The first token does not count, because it is never predicted."""
    if isinstance(result, Encoded) and not result.trained[1:].any():
        return RowError("no_label_token", f"none of the {len(result.ids)} tokens of the row would be trained")
    return result
