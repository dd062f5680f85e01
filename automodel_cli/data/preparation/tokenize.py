"""Tokenize rows and compute their loss masks, in this process or in worker processes.

Steps of one batch of rows: the format reads rows as documents (`formats/`), documents are rendered and encoded
(`chat/encoder.py` for conversations, this module for plain text and completions), and rows without a trained token are
rejected. A rejected row is a `RowError` value in the results, so that the other rows of the batch are still encoded.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import get_context
from typing import Any, Protocol

import numpy as np

from automodel_cli.data.chat.encoder import ChatEncoder
from automodel_cli.data.chat.special_tokens import SpecialChats, SpecialText
from automodel_cli.data.config import DataConfig, Mask, SpecialTokensInText, Turns
from automodel_cli.data.fill_in_the_middle import MOVED, TOO_LONG, UNCHANGED, InfillSpec, after_anchor, anchored
from automodel_cli.data.formats.base import PREFERENCES, Format
from automodel_cli.data.formats.examples import AnsweredPrompt, Conversation, Document, JudgedResponse, Pair, PlainText
from automodel_cli.data.formats.format_reader import RowReader
from automodel_cli.data.formats.preference import judged_document
from automodel_cli.data.formats.unused_columns import AllowedKeys
from automodel_cli.data.groups import GroupSpec
from automodel_cli.data.labels import LabelSpec
from automodel_cli.data.pictures.pixels import num_threads
from automodel_cli.data.pictures.reader import PictureSupport
from automodel_cli.data.pictures.rows import with_pictures
from automodel_cli.data.preparation.grouped import GroupEncoder
from automodel_cli.data.preparation.labeled import LabeledEncoder
from automodel_cli.data.preparation.pre_rendered import Added, refuse_rendered
from automodel_cli.data.row_errors import RowError, attempt
from automodel_cli.data.sources.file_readers import Row
from automodel_cli.data.tokenized import Encoded, Unrolled, around, encode_texts

BATCH_ROWS = 256
BYTES_PER_WORKER = 16 << 20
"""Number of bytes whose tokenization takes as long as starting a worker, a few seconds."""


@dataclass(frozen=True)
class EncodeSpec:
    """Settings that determine the tokens of a row, in addition to the tokenizer.

    `own_template` is the tokenizer's template if `template` replaces it for training. `stop_ids` are the tokens other
    than EOS at which generation stops.
    """

    fmt: Format
    columns: dict[str, str]
    template: str | None
    mask: Mask
    ignored_columns: tuple[str, ...] = ()
    turns: Turns = "auto"
    own_template: str | None = None
    stop_ids: tuple[int, ...] = ()
    special_tokens_policy: SpecialTokensInText = "auto"
    add_bos: bool = True
    add_eos: bool = True
    row_spec: LabelSpec | GroupSpec | None = None
    infill: InfillSpec | None = None

    @property
    def special_choice(self) -> SpecialTokensInText:
        """How special tokens in the text of rows are encoded, with `auto` resolved."""
        if self.special_tokens_policy != "auto":
            return self.special_tokens_policy
        return "keep" if self.template is None or self.fmt.makes == "texts" else "as_text"


class Encodes(Protocol):
    """Encodes the rows of one dataset with its tokenizer. Picklable, for worker processes."""

    tokenizer: Any

    def encode(self, rows: Sequence[Row | RowError]) -> list[Encoded | Unrolled | RowError]:
        """Return one result per row, in order. Rows without a trained token are rejected."""


class RowEncoder:
    """Encoder for the rows of one dataset. Picklable, for worker processes."""

    def __init__(self, tokenizer: Any, spec: EncodeSpec, pictures: PictureSupport | None = None):
        """`pictures`: reads the pictures of rows. None: rows must not have any."""
        self.tokenizer, self.spec, self.pictures = tokenizer, spec, pictures
        keys = AllowedKeys.of(spec.template, spec.ignored_columns)
        self.reader = RowReader(spec.fmt, spec.columns, chat=spec.template is not None, keys=keys)
        self.special = SpecialText(tokenizer, spec.special_choice)
        self.own: LabeledEncoder | GroupEncoder | None = None
        if isinstance(spec.row_spec, LabelSpec):
            self.own = LabeledEncoder(tokenizer, spec.row_spec, add_special_tokens=spec.add_bos)
        elif spec.row_spec is not None:
            self.own = GroupEncoder(tokenizer, spec.row_spec, add_special_tokens=spec.add_bos)
        self.chat = None
        if spec.template is not None:
            options: dict[str, Any] = {"stop_ids": spec.stop_ids, "own_template": spec.own_template}
            options["pictures"] = pictures is not None
            encoder = ChatEncoder(tokenizer, spec.template, spec.mask, turns=spec.turns, **options)
            self.chat = SpecialChats(encoder, self.special)

    def encode(self, rows: Sequence[Row | RowError]) -> list[Encoded | Unrolled | RowError]:
        """Return one result per row, in order. Rows without a trained token are rejected."""
        if self.pictures is None:
            read = [self._attempted(row) for row in rows]
        else:  # decoders release the interpreter's lock
            with ThreadPoolExecutor(num_threads(), "pictures") as threads:
                read = list(threads.map(self._attempted, rows))
        if self.own is not None:
            return [*self.own.encode(read)]
        return (self._encode_preferences if self.spec.fmt.makes in PREFERENCES else self._encode_documents)(read)

    def _attempted(self, row: Row | RowError) -> Any:
        return row if isinstance(row, RowError) else attempt(self._read, row)

    def _read(self, row: Row) -> Any:
        """Return the row as a document with its pictures. Raises RowError."""
        if self.pictures is None:
            return self.reader.read(row)
        names = ("chosen", "rejected") if self.spec.fmt.makes == "pairs" else ()
        sides = [self.spec.columns.get(name, name) for name in names]
        marked, found = self.pictures.rows.marked(row, self.reader.ordered_columns(row), sides)
        return with_pictures(self.reader.read(marked), found)

    def refuse_rendered(self, rows: Sequence[Row], config: DataConfig, where: str) -> None:
        """Raise DataError if most rows contain BOS, EOS or a rendered template that would be added a second time."""
        if self.own is not None:
            return  # tokens are those of `tokenizer(text)`, whatever the text is
        documents = [attempt(self._read, row) for row in rows]
        templated = self.chat is not None and self.spec.fmt.makes != "texts"
        render = self.chat.encoder.render_messages if self.chat is not None and templated else None
        refuse_rendered(
            [document for document in documents if not isinstance(document, RowError)],
            config,
            Added.of(self.tokenizer, render),
            where=where,
            templated=templated,
            plain_works=lambda: self.reader.reads_without_template(rows),
        )

    def _encode_documents(self, documents: Sequence[Document | RowError]) -> list[Encoded | Unrolled | RowError]:
        out: list[Encoded | Unrolled | RowError] = [d if isinstance(d, RowError) else _NOTHING for d in documents]
        for kind, encode in (
            (Conversation, self._encode_chats),
            (AnsweredPrompt, self._encode_completions),
            (PlainText, self._encode_texts),
        ):
            places = [i for i, document in enumerate(documents) if isinstance(document, kind)]
            for place, result in zip(places, encode([documents[i] for i in places]), strict=True):
                out[place] = _refuse_untrained(result)
        return out

    def _encode_preferences(self, read: Sequence[Pair | JudgedResponse | RowError]) -> list[Any]:
        """Return both documents of each row as one item.

        A pair consists of the chosen and the rejected response. A judged row consists of its response and, for the
        reference point of KTO, the response of the next judged row after the prompt of this row.
        """
        judged = [row for row in read if isinstance(row, JudgedResponse)]
        next_of = {id(row): judged[(i + 1) % len(judged)] for i, row in enumerate(judged)}
        documents: list[Document | RowError] = []
        for row in read:
            if isinstance(row, Pair):
                documents += [row.chosen, row.rejected]
            elif isinstance(row, JudgedResponse):
                both = partial(judged_document, row, chat=self.spec.template is not None)
                documents += [attempt(both, other) for other in (row, next_of[id(row)])]
            else:
                documents += [row, row]
        encoded = self._encode_documents(documents)
        return [_together(row, a, b) for row, a, b in zip(read, encoded[::2], encoded[1::2], strict=True)]

    def _encode_chats(self, chats: Sequence[Any]) -> list[Encoded | Unrolled | RowError]:
        if self.chat is None and chats:
            fix = "data.chat_template=<a .jinja file>, or a tokenizer with a chat template"
            return [
                RowError("no_template", "messages require a chat template, but the tokenizer has none", fix=fix)
            ] * len(chats)
        results = self.chat.encode(chats) if self.chat is not None else []
        if self.pictures is None:
            return results
        return [attempt(self.pictures.expanded, chat, found) for chat, found in zip(chats, results, strict=True)]

    def _encode_texts(self, texts: Sequence[Any]) -> list[Encoded | RowError]:
        """Encode `[BOS] text EOS`, with BOS if the tokenizer adds one. All tokens are trained."""
        counts, results = self._own_texts([t.text for t in texts])
        moved = self._moved({i: t.text for i, t in enumerate(texts) if not isinstance(results[i], RowError)})
        out: list[Encoded | RowError] = []
        for place, (count, plain) in enumerate(zip(counts, results, strict=True)):
            in_order = moved.get(place)
            if (error := next((ids for ids in (plain, in_order) if isinstance(ids, RowError)), None)) is not None:
                out.append(error)
                continue
            ids, infill = self._ended(plain, in_order)
            trained = np.ones(len(ids), np.uint8)
            trained[self._own_end(ids) :] = 0
            out.append(Encoded(ids, trained, num_special=count, infill=infill))
        return out

    def _ended(self, plain: Any, moved: Any) -> tuple[Any, int]:
        """Return the tokens of a document with EOS, and `MOVED`, `UNCHANGED` or `TOO_LONG`."""
        if moved is not None and self.spec.infill is not None:
            ids, most = self._with_eos(moved), self.spec.infill.max_tokens
            if most is None or len(ids) <= most:
                return ids, MOVED
        return self._with_eos(self._without_eos(plain)), UNCHANGED if moved is None else TOO_LONG

    def _moved(self, texts: Mapping[int, str]) -> dict[int, np.ndarray | RowError]:
        """Return the tokens of the documents whose middle is moved to the end, by their places. Without EOS."""
        spec = self.spec.infill
        if spec is None:
            return {}
        splits = {place: split for place, text in texts.items() if (split := spec.split(text)) is not None}
        parts = [part for split in splits.values() for part in split[:3]]
        if self._is_anchored:
            found = after_anchor(self.tokenizer, spec, parts)
        else:
            found = self._own_texts(parts, add_special_tokens=False)[1]
        out: dict[int, np.ndarray | RowError] = {}
        begin = np.array(around(self.tokenizer)[0] if self.spec.add_bos else [], np.int32)
        for number, (place, split) in enumerate(splits.items()):
            of_text = found[3 * number : 3 * number + 3]
            error = next((part for part in of_text if isinstance(part, RowError)), None)
            out[place] = error or np.concatenate([begin, spec.arranged(of_text, is_spm=split[3])])
        return out

    @cached_property
    def _is_anchored(self) -> bool:
        assert self.spec.infill is not None, "only called with fill-in-the-middle"
        return anchored(self.tokenizer, self.spec.infill)

    def _own_texts(
        self, texts: Sequence[str], *, add_special_tokens: bool | None = None
    ) -> tuple[list[int], list[np.ndarray | RowError]]:
        """Return token ids of complete texts and the number of special tokens in each."""
        add_special_tokens = self.spec.add_bos if add_special_tokens is None else add_special_tokens
        results: list[Any] = list(encode_texts(self.tokenizer, texts, add_special_tokens=add_special_tokens))
        counts = [self.special.count(text) for text in texts]
        if self.special.choice != "keep":
            for place in np.flatnonzero(counts).tolist():
                results[place] = attempt(self.special.encode_text, texts[place], add_special_tokens)
        return counts, results

    def _encode_completions(self, pairs: Sequence[Any]) -> list[Encoded | RowError]:
        """Encode `[BOS] prompt completion EOS`. The completion and EOS are trained.

        If the tokens of the prompt are a prefix of the tokens of the concatenated text, the text is encoded at once.
        Otherwise prompt and completion are encoded separately, because the model will see the tokens of the prompt
        alone at inference. If the separate tokens decode to another text, the row is rejected.
        """
        _, prompts = self._own_texts([p.prompt for p in pairs])
        counts, wholes = self._own_texts([p.prompt + p.completion for p in pairs])
        _, rests = self._own_texts([p.completion for p in pairs], add_special_tokens=False)
        out: list[Encoded | RowError] = []
        for pair, count, prompt, full_ids, rest in zip(pairs, counts, prompts, wholes, rests, strict=True):
            if isinstance(full_ids, RowError) or isinstance(prompt, RowError) or isinstance(rest, RowError):
                out.append(next(error for error in (full_ids, prompt, rest) if isinstance(error, RowError)))
                continue
            prompt, full_ids = self._without_eos(prompt), self._with_eos(self._without_eos(full_ids))
            ids = full_ids
            if not np.array_equal(full_ids[: len(prompt)], prompt):
                ids = self._with_eos(np.concatenate([prompt, rest]))
                if self.tokenizer.decode(ids) != self.tokenizer.decode(full_ids):
                    where = f"{pair.prompt[-12:]!r} + {pair.completion[:12]!r}"
                    reason = f"a token crosses the end of the prompt ({where})"
                    out.append(
                        RowError(
                            "not_a_prefix",
                            reason,
                            fix="end the prompt with a newline, or begin the completion with a space",
                        )
                    )
                    continue
            trained = np.ones(len(ids), np.uint8)
            trained[: len(prompt)] = self.spec.mask == "all"
            trained[self._own_end(ids) :] = 0
            out.append(Encoded(ids, trained, num_special=count))
        return out

    def _with_eos(self, ids: np.ndarray) -> np.ndarray:
        eos = self.tokenizer.eos_token_id
        if not self.spec.add_eos or eos is None or (len(ids) and ids[-1] == eos):
            return ids
        return np.append(ids, np.int32(eos))

    def _without_eos(self, ids: np.ndarray) -> np.ndarray:
        """Remove the EOS that the tokenizer appends to every text. An EOS in the text of the row is kept."""
        return ids[:-1] if self.spec.add_bos and self._tokenizer_adds_eos else ids

    def _own_end(self, ids: np.ndarray) -> int:
        """Return the end of the trained tokens. White space after an EOS of the row itself is not trained."""
        if self.spec.add_eos or self.tokenizer.eos_token_id is None:
            return len(ids)
        positions = np.flatnonzero(ids == self.tokenizer.eos_token_id)
        if not len(positions):
            return len(ids)
        end = int(positions[-1]) + 1
        return len(ids) if self.tokenizer.decode(ids[end:]).strip() else end

    @cached_property
    def _tokenizer_adds_eos(self) -> bool:
        return around(self.tokenizer)[1] == [self.tokenizer.eos_token_id]


_NOTHING = RowError("internal", "the row was not encoded")


def _together(row: Pair | JudgedResponse | RowError, first: Any, second: Any) -> Any:
    """Concatenate two documents into one item, which packing keeps together, or return the error of one of them."""
    for side, result in (("chosen", first), ("rejected", second)):
        if isinstance(result, Unrolled):
            return RowError(
                "several_turns",
                f"{side} has {len(result.documents)} trained turns that the chat template cannot render as one "
                "document, but a preference compares two documents",
                fix="data.loss_mask=last_turn, or data.multi_turn=single",
            )
        if isinstance(result, RowError):
            if not isinstance(row, Pair):
                return result
            return RowError(result.code, f"{side}: {result.message}", fix=result.fix, raw=result.raw)
    assert isinstance(first, Encoded) and isinstance(second, Encoded), "errors are returned above"
    return Encoded(
        np.concatenate([first.ids, second.ids]),
        np.concatenate([first.trained, second.trained]),
        split=len(first.ids),
        judgement=int(row.desirable) if isinstance(row, JudgedResponse) else -1,
        margin=row.margin if isinstance(row, Pair) else 0.0,
        num_special=first.num_special + (second.num_special if isinstance(row, Pair) else 0),
        pictures=first.pictures + second.pictures,
        num_first_pictures=len(first.pictures),
    )


def _refuse_untrained(result: Encoded | Unrolled | RowError) -> Encoded | Unrolled | RowError:
    """Reject a row without a trained token. The first token does not count, because it is never predicted."""
    if isinstance(result, Encoded) and not result.trained[1:].any():
        return RowError("no_label_token", f"none of the {len(result.ids)} tokens of the row would be trained")
    return result


def choose_workers(num_workers: int | None, num_bytes: int) -> int:
    """Return the number of worker processes. By default 0 for small data and at most one per core for large data."""
    if num_workers is not None:
        return num_workers
    cores = len(os.sched_getaffinity(0))
    workers = min(cores, num_bytes // BYTES_PER_WORKER)
    return workers if workers > 1 else 0


def encode_all(
    encoder: Encodes, rows: Iterable[Row | RowError], num_workers: int
) -> Iterator[list[Encoded | Unrolled | RowError]]:
    """Yield the results of each batch in the order of `rows`, independent of `num_workers`."""
    batches = _batches(rows, BATCH_ROWS)
    if num_workers == 0:
        yield from map(encoder.encode, batches)
        return
    # Spawn, because a fork of a process whose tokenizer has started threads can deadlock.
    with ProcessPoolExecutor(num_workers, get_context("spawn"), _start_worker, (encoder,)) as pool:
        waiting: deque[Future[list[Encoded | Unrolled | RowError]]] = deque()
        for batch in batches:
            waiting.append(pool.submit(_encode_in_worker, batch))
            if len(waiting) > 2 * num_workers:  # bound the queue, so that the file is not held in memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _batches(rows: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(rows)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


_worker_encoder: Encodes | None = None


def _start_worker(encoder: Encodes) -> None:
    global _worker_encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already use the cores
    _worker_encoder = encoder


def _encode_in_worker(rows: list[Row | RowError]) -> list[Encoded | Unrolled | RowError]:
    assert _worker_encoder is not None, "the worker was started without its encoder"
    return _worker_encoder.encode(rows)
