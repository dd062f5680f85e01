"""Rows in, tokens and mask out; in this process, or for large data in worker processes that each hold the tokenizer."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import get_context
from typing import Any

import numpy as np

from automodel_cli.data.chat.encoder import ChatEncoder
from automodel_cli.data.chat.special_tokens import SpecialChats, SpecialText
from automodel_cli.data.config import DataConfig, Mask, SpecialTokensInText, Turns
from automodel_cli.data.formats.base import PREFERENCES, Format
from automodel_cli.data.formats.examples import AnsweredPrompt, Conversation, Document, JudgedResponse, Pair, PlainText
from automodel_cli.data.formats.format_reader import RowReader
from automodel_cli.data.formats.preference import judged_document
from automodel_cli.data.formats.unused_columns import AllowedKeys
from automodel_cli.data.preparation.pre_rendered import Added, refuse_rendered
from automodel_cli.data.row_errors import RowError, attempt
from automodel_cli.data.sources.file_readers import Row
from automodel_cli.data.tokenized import Encoded, Unrolled, around, encode_texts

BATCH_ROWS = 256
BYTES_PER_WORKER = 16 << 20
"""Starting a worker costs a few seconds, which is what tokenising this much takes."""


@dataclass(frozen=True)
class EncodeSpec:
    """What decides the tokens of a row, besides the tokenizer. `own_template` is the tokenizer's where `template`
    stands in for it; `stop_ids` are tokens at which generation stops, besides EOS.
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

    @property
    def special_choice(self) -> SpecialTokensInText:
        """What is done with special tokens in the text of rows."""
        if self.special_tokens_policy != "auto":
            return self.special_tokens_policy
        return "keep" if self.template is None or self.fmt.makes == "texts" else "as_text"


class RowEncoder:
    """Rows of one dataset to tokens. Pickles."""

    def __init__(self, tokenizer: Any, spec: EncodeSpec):
        self.tokenizer, self.spec = tokenizer, spec
        keys = AllowedKeys.of(spec.template, spec.ignored_columns)
        self.reader = RowReader(spec.fmt, spec.columns, chat=spec.template is not None, keys=keys)
        self.special = SpecialText(tokenizer, spec.special_choice)
        self.chat = None
        if spec.template is not None:
            options: dict[str, Any] = {"stop_ids": spec.stop_ids, "own_template": spec.own_template}
            encoder = ChatEncoder(tokenizer, spec.template, spec.mask, turns=spec.turns, **options)
            self.chat = SpecialChats(encoder, self.special)

    def encode(self, rows: Sequence[Row | RowError]) -> list[Encoded | Unrolled | RowError]:
        """One result per row, in order. A row is refused also when nothing of it would be trained."""
        read = [row if isinstance(row, RowError) else attempt(self.reader.read, row) for row in rows]
        return (self._encode_preferences if self.spec.fmt.makes in PREFERENCES else self._encode_documents)(read)

    def refuse_rendered(self, rows: Sequence[Row], config: DataConfig, where: str) -> None:
        """Raise DataError where most of these rows hold BOS, EOS or a template that would be added again."""
        documents = [attempt(self.reader.read, row) for row in rows]
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
        """Both documents of each row, one after the other: of a pair the chosen and the rejected response; of a judged
        row its own response, and for the reference point of KTO that of the next judged row.
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
        return self.chat.encode(chats) if self.chat is not None else []

    def _encode_texts(self, texts: Sequence[Any]) -> list[Encoded | RowError]:
        """BOS where the tokenizer adds one, the text, EOS; all of it trained."""
        counts, results = self._own_texts([t.text for t in texts])
        out: list[Encoded | RowError] = []
        for count, ids in zip(counts, results, strict=True):
            if isinstance(ids, RowError):
                out.append(ids)
                continue
            ids = self._with_eos(self._without_eos(ids))
            trained = np.ones(len(ids), np.uint8)
            trained[self._own_end(ids) :] = 0
            out.append(Encoded(ids, trained, num_special=count))
        return out

    def _own_texts(
        self, texts: Sequence[str], *, add_special_tokens: bool | None = None
    ) -> tuple[list[int], list[np.ndarray | RowError]]:
        """Token ids of texts that rows bring whole, and the number of special tokens in each."""
        add_special_tokens = self.spec.add_bos if add_special_tokens is None else add_special_tokens
        results: list[Any] = list(encode_texts(self.tokenizer, texts, add_special_tokens=add_special_tokens))
        counts = [self.special.count(text) for text in texts]
        if self.special.choice != "keep":
            for place in np.flatnonzero(counts).tolist():
                results[place] = attempt(self.special.encode_text, texts[place], add_special_tokens)
        return counts, results

    def _encode_completions(self, pairs: Sequence[Any]) -> list[Encoded | RowError]:
        """BOS, prompt, completion, EOS; the completion and EOS trained.

        Encoded as one text when the prompt's tokens are a prefix of it, else prompt and completion each for itself:
        that is what the model will see when it is given the prompt alone.
        """
        _, prompts = self._own_texts([p.prompt for p in pairs])
        counts, wholes = self._own_texts([p.prompt + p.completion for p in pairs])
        _, rests = self._own_texts([p.completion for p in pairs], add_special_tokens=False)
        out: list[Encoded | RowError] = []
        for pair, count, prompt, whole, rest in zip(pairs, counts, prompts, wholes, rests, strict=True):
            if isinstance(whole, RowError) or isinstance(prompt, RowError) or isinstance(rest, RowError):
                out.append(next(error for error in (whole, prompt, rest) if isinstance(error, RowError)))
                continue
            prompt, whole = self._without_eos(prompt), self._with_eos(self._without_eos(whole))
            ids = whole
            if not np.array_equal(whole[: len(prompt)], prompt):
                ids = self._with_eos(np.concatenate([prompt, rest]))
                if self.tokenizer.decode(ids) != self.tokenizer.decode(whole):
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
        """Without the EOS that the tokenizer adds behind a text by itself; one of the row's own stays."""
        return ids[:-1] if self.spec.add_bos and self._tokenizer_adds_eos else ids

    def _own_end(self, ids: np.ndarray) -> int:
        """Where a row that brings its own EOS ends: white space behind it is no part of what the model says."""
        if self.spec.add_eos or self.tokenizer.eos_token_id is None:
            return len(ids)
        found = np.flatnonzero(ids == self.tokenizer.eos_token_id)
        if not len(found):
            return len(ids)
        end = int(found[-1]) + 1
        return len(ids) if self.tokenizer.decode(ids[end:]).strip() else end

    @cached_property
    def _tokenizer_adds_eos(self) -> bool:
        return around(self.tokenizer)[1] == [self.tokenizer.eos_token_id]


_NOTHING = RowError("internal", "the row was not encoded")


def _together(row: Pair | JudgedResponse | RowError, first: Any, second: Any) -> Any:
    """Two documents as one item that no packer takes apart, or why one of them cannot be used."""
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
    assert isinstance(first, Encoded) and isinstance(second, Encoded), "refused above"
    return Encoded(
        np.concatenate([first.ids, second.ids]),
        np.concatenate([first.trained, second.trained]),
        split=len(first.ids),
        judgement=int(row.desirable) if isinstance(row, JudgedResponse) else -1,
        margin=row.margin if isinstance(row, Pair) else 0.0,
        num_special=first.num_special + (second.num_special if isinstance(row, Pair) else 0),
    )


def _refuse_untrained(result: Encoded | Unrolled | RowError) -> Encoded | Unrolled | RowError:
    """The first token is never predicted, so a row needs a trained token after it."""
    if isinstance(result, Encoded) and not result.trained[1:].any():
        return RowError("no_label_token", f"none of the {len(result.ids)} tokens of the row would be trained")
    return result


def choose_workers(num_workers: int | None, num_bytes: int) -> int:
    """Worker processes to use: as configured, or by default none for small data and up to one per core for large."""
    if num_workers is not None:
        return num_workers
    cores = len(os.sched_getaffinity(0))
    workers = min(cores, num_bytes // BYTES_PER_WORKER)
    return workers if workers > 1 else 0


def encode_all(
    encoder: RowEncoder, rows: Iterable[Row | RowError], num_workers: int
) -> Iterator[list[Encoded | Unrolled | RowError]]:
    """Results in the order of `rows`, batch by batch, whatever the number of workers."""
    batches = _batches(rows, BATCH_ROWS)
    if num_workers == 0:
        yield from map(encoder.encode, batches)
        return
    # spawn: a fork of a process whose tokenizer has started threads can hang
    with ProcessPoolExecutor(num_workers, get_context("spawn"), _start_worker, (encoder,)) as pool:
        waiting: deque[Future[list[Encoded | Unrolled | RowError]]] = deque()
        for batch in batches:
            waiting.append(pool.submit(_encode_in_worker, batch))
            if len(waiting) > 2 * num_workers:  # bounded, or the whole file would stand in memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _batches(rows: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(rows)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


_worker_encoder: RowEncoder | None = None


def _start_worker(encoder: RowEncoder) -> None:
    global _worker_encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already use the cores
    _worker_encoder = encoder


def _encode_in_worker(rows: list[Row | RowError]) -> list[Encoded | Unrolled | RowError]:
    assert _worker_encoder is not None, "the worker was started without its encoder"
    return _worker_encoder.encode(rows)
