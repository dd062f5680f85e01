"""Render and tokenize the prompts of rows: conversations without their final answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.data.batched import batched
from automodel_cli.data.chat.chat_template import resolve_chat_template
from automodel_cli.data.chat.encoder import ChatEncoder
from automodel_cli.data.chat.special_tokens import SpecialChats, SpecialText
from automodel_cli.data.config import DataConfig
from automodel_cli.data.encoding.pre_rendered import SAMPLE_ROWS, Added, refuse_rendered
from automodel_cli.data.formats.builtin import prompt_format
from automodel_cli.data.formats.column_mapping import check_mapped
from automodel_cli.data.formats.examples import Conversation, Message
from automodel_cli.data.formats.format_reader import RowReader
from automodel_cli.data.formats.unused_columns import MEDIA, AllowedKeys, IgnoredNames
from automodel_cli.data.json_reader import Row
from automodel_cli.data.pictures.reader import PictureSupport
from automodel_cli.data.pictures.rows import in_order, with_tags
from automodel_cli.data.preparation.prompt_dataset import Prompt
from automodel_cli.data.preparation.statistics import SpecialReport, round_length
from automodel_cli.data.row_errors import (
    Rejected,
    RowError,
    SourceRow,
    attempt,
    attempt_batch,
    attempt_each,
    refuse_damaged,
    rows_error,
    unwrap,
    usable,
)
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.sources.sources import Source, first_rows
from automodel_cli.data.tokenized import around

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_ROWS = 256
ToolsOf = Callable[[Mapping[str, object]], Sequence[Message]]


def no_tools(row: Mapping[str, object]) -> Sequence[Message]:
    """Return no tools: tools of these rows, if any, are in a column."""
    return ()


class PromptReader:
    """Converts rows to prompts and counts unusable rows."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
        tools_of: ToolsOf,
        samples_per_row: int = 1,
        pictures: PictureSupport | None = None,
    ):
        self._tools_of, self._samples_per_row, self._pictures = tools_of, samples_per_row, pictures
        self.config, self.tokenizer, self.max_tokens = config, tokenizer, max_tokens
        self.template = resolve_chat_template(config.chat_template, tokenizer)
        self.keys = AllowedKeys.of(self.template, config.ignored_columns)
        self.ignored = IgnoredNames(config.ignored_columns)
        choice = config.special_tokens_policy
        if choice == "auto":
            choice = "keep" if self.template is None else "as_text"
        self.special = SpecialText(tokenizer, choice)
        self.chats, self._adds_eos = None, around(tokenizer)[1] == [tokenizer.eos_token_id]
        if self.template is not None:
            encoder = ChatEncoder(tokenizer, self.template, "all", pictures=pictures is not None)
            self.chats = SpecialChats(encoder, self.special)
        self.num_dropped = self.longest_dropped = self.num_rows = self._number = 0
        self._special_counts: list[int] = []
        self._rejected: list[Rejected] = []

    def read(self, source: Source, node: SourceConfig) -> list[Prompt]:
        """Return every usable prompt of a source."""
        sample = first_rows(source, SAMPLE_ROWS)
        check_mapped(sample, node.column_mapping, source.name)
        fmt = prompt_format(node.format)
        refused = (*MEDIA, "functions")  # rewards may read other columns
        reader = RowReader(fmt, node.column_mapping, chat=True, keys=self.keys, refused=refused)
        self._refuse_rendered(usable(attempt(self._without_answer, reader, row) for row in sample), source.name)
        batches = batched(self.ignored.watch(source.rows()), BATCH_ROWS)
        return [prompt for batch in batches for prompt in self._usable_prompts(batch, source, reader)]

    def _refuse_rendered(self, chats: Sequence[Conversation], where: str) -> None:
        """Raise DataError if most prompts contain BOS or a rendered template that would be added a second time."""
        templated = self.chats is not None
        render = self.chats.encoder.render_messages if self.chats is not None else None
        refuse_rendered(
            chats,
            self.config,
            Added.of(self.tokenizer, render),
            where=where,
            templated=templated,
            plain_works=lambda: len(usable(attempt_each(_only_text, chats))) == len(chats),
        )

    def _usable_prompts(self, batch: Sequence[SourceRow], source: Source, reader: RowReader) -> Iterator[Prompt]:
        """Return the usable prompts of these rows, and count the other rows."""
        self.num_rows += len(batch)
        read = [attempt(self._asked, reader, origin) for origin in batch]
        tokens = attempt_batch(self._tokens, read)
        for origin, chat, ids in zip(batch, read, tokens, strict=True):
            name = source.files[origin.file]
            prompt = attempt(self._prompt, origin.row, f"{name}:{origin.line}", chat, ids)
            if isinstance(prompt, RowError):
                row = prompt.raw if prompt.raw is not None else origin.row
                self._rejected.append(Rejected(name, origin.line, prompt.code, prompt.message, row, prompt.fix))
            elif len(prompt.tokens) <= self.max_tokens:
                yield prompt
            elif self.config.truncation != "error":
                self.num_dropped += 1
                self.longest_dropped = max(self.longest_dropped, len(prompt.tokens))
            else:
                raise DataError(
                    f"{prompt.origin}: the prompt has {len(prompt.tokens)} tokens, but the limit is {self.max_tokens}: "
                    "data.seq_len minus rollout.max_new_tokens",
                    code="sequence_length",
                    keys=("data.seq_len", "rollout.max_new_tokens"),
                    fix="data.truncation=drop, or a larger data.seq_len",
                )

    def _prompt(self, row: Row, where: str, read: Conversation | RowError, tokens: np.ndarray | RowError) -> Prompt:
        chat, ids = unwrap(read), unwrap(tokens)
        number, self._number = self._number, self._number + 1
        messages = [{**message, "content": with_tags(message["content"])} for message in chat.messages]
        return Prompt(number, ids.tolist(), messages, row, where, chat.tools, chat.pictures)

    def _without_answer(self, reader: RowReader, row: Row) -> Conversation:
        if self._pictures is None:
            return _asked(reader, row)
        marked, found = self._pictures.rows.marked(row, reader.ordered_columns(row))
        return in_order([_asked(reader, marked)], found)[0]

    def _asked(self, reader: RowReader, origin: SourceRow) -> Conversation:
        row: Row = unwrap(origin.row)
        chat = self._without_answer(reader, row)
        tools = list(self._tools_of(row))
        if not tools:
            return chat
        if chat.tools:
            raise RowError(
                "two_tools",
                "both the row and its environment define tools",
                fix="data.column_mapping.tools=''",
            )
        if "tools" not in (self.template or ""):
            raise RowError(
                "template_without_tools",
                "the chat template does not render tools, so the prompt would not contain the tools of the environment",
                fix="rollout.environment.show_tools=false, and describe the tools in a system column",
            )
        return replace(chat, tools=tools)

    @property
    def seq_len_of_all(self) -> int:
        """Smallest `data.seq_len` with which no prompt so far would be dropped."""
        kept_free = self.config.seq_len // self._samples_per_row - self.max_tokens  # for the response
        return round_length(self._samples_per_row * (self.longest_dropped + kept_free))

    def special_report(self) -> SpecialReport:
        """Special tokens in the text of the prompts so far."""
        return SpecialReport(self.special.choice, sum(self._special_counts), sum(map(bool, self._special_counts)))

    def finish(self) -> None:
        """Apply the policy for invalid rows over all sources."""
        refuse_damaged(self._rejected, self.num_rows)
        allowed = 0.0 if self.config.on_invalid_row == "fail" else self.config.max_invalid_fraction * self.num_rows
        if len(self._rejected) > allowed:
            raise rows_error(self._rejected, self.num_rows, fix="correct the rows, or data.on_invalid_row=drop")

    def _tokens(self, chats: Sequence[Conversation]) -> list[np.ndarray | RowError]:
        """Return the prompt ids of each conversation, up to the start of the response."""
        if self.chats is not None:
            encoded = self.chats.prompt_ids(chats)
            if self._pictures is not None:
                expand = self._pictures.expanded_prompt
                encoded = [(attempt(expand, chat, ids), n) for chat, (ids, n) in zip(chats, encoded, strict=True)]
            return attempt_each(self._counted, encoded)
        texts = attempt_each(_only_text, chats)
        return attempt_each(self._counted, attempt_batch(self._encode_texts, texts))

    def _counted(self, encoded: tuple[np.ndarray | RowError, int]) -> np.ndarray:
        ids = unwrap(encoded[0])
        self._special_counts.append(encoded[1])
        return ids

    def _encode_texts(self, texts: Sequence[str]) -> list[tuple[np.ndarray | RowError, int]]:
        encoded = self.special.encode_texts(texts, self.config.add_bos)
        if not (self.config.add_bos and self._adds_eos):
            return encoded
        # the response follows, so the EOS that the tokenizer adds is removed
        without_eos = attempt_each(lambda ids: ids[:-1], [ids for ids, _ in encoded])
        return [(ids, count) for ids, (_, count) in zip(without_eos, encoded, strict=True)]


def _asked(reader: RowReader, row: Row) -> Conversation:
    """Return the conversation of a row without the assistant messages at its end."""
    chat = reader.read(row)
    if not isinstance(chat, Conversation):
        words = f"format {reader.name} returned {type(chat).__name__}, but a prompt must be a Conversation"
        raise RowError("format_error", words)
    messages = list(chat.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise RowError("no_prompt", "no message precedes the answer")
    return Conversation(messages, [False] * len(messages), chat.tools)


def _only_text(chat: Conversation) -> str:
    if len(chat.messages) != 1:
        raise RowError("no_template", "several messages require a chat template")
    return str(chat.messages[0]["content"])
