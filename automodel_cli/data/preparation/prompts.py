"""Prepare prompts for generation: conversations without their final answer, with the row that rewards read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.data.chat.chat_template import resolve_chat_template
from automodel_cli.data.chat.encoder import ChatEncoder
from automodel_cli.data.chat.special_tokens import SpecialChats, SpecialText
from automodel_cli.data.config import DataConfig
from automodel_cli.data.formats.builtin import find_format, format_name, prompt_format
from automodel_cli.data.formats.column_mapping import check_mapped
from automodel_cli.data.formats.examples import Conversation
from automodel_cli.data.formats.format_reader import RowReader
from automodel_cli.data.formats.unused_columns import MEDIA, AllowedKeys, IgnoredNames, check_ignored
from automodel_cli.data.mixture import Mixture
from automodel_cli.data.pictures.content import Picture
from automodel_cli.data.pictures.reader import PictureSupport
from automodel_cli.data.pictures.rows import with_pictures, with_tags
from automodel_cli.data.preparation.dataset import length_histogram
from automodel_cli.data.preparation.pre_rendered import SAMPLE_ROWS, Added, refuse_rendered
from automodel_cli.data.preparation.row_stream import shuffled
from automodel_cli.data.preparation.statistics import MANY, SpecialReport, round_length
from automodel_cli.data.row_errors import Rejected, RowError, SourceRow, attempt, refuse_damaged, rows_error
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.sources.sources import Source, TaskSource, first_rows, open_source
from automodel_cli.data.storage.cache import cache_root
from automodel_cli.data.storage.checksums import Checksum
from automodel_cli.data.tokenized import around, encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
BATCH_ROWS = 256


@dataclass(frozen=True)
class Prompt:
    """One prompt. `number`: index in the dataset. `tokens`: ids up to the start of the response. `row`: the row that
    rewards read. `tools`: tool descriptions that the chat template renders. `pictures`: of each run of placeholders."""

    number: int
    tokens: list[int]
    messages: list[Message]
    row: dict[str, Any]
    origin: str
    tools: list[dict[str, Any]] | None = None
    pictures: tuple[Picture, ...] = ()


ToolsOf = Callable[[Mapping[str, Any]], Sequence[dict[str, Any]]]


def no_tools(row: Mapping[str, Any]) -> Sequence[dict[str, object]]:
    """Return no tools: tools of these rows, if any, are in a column."""
    return ()


class PromptDataset:
    """Prompts of one or more sources. `BatchLoader` distributes them over ranks and steps like sequences."""

    def __init__(self, sources: Sequence[Sequence[Prompt]], mixture: Mixture):
        self.prompts = [prompt for source in sources for prompt in source]
        self.mixture = mixture
        self.first_rows = np.cumsum([0, *(len(source) for source in sources)])
        self.contents = [_content(source) for source in sources]

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def row_lengths(self) -> np.ndarray:
        """Return 1 for each prompt: a `sampling_weight` is a share of the prompts."""
        return np.ones(len(self), np.int64)

    def collate(self, row_indices: Sequence[int]) -> list[Prompt]:
        """Return the prompts with these indices."""
        return [self.prompts[int(row)] for row in row_indices]

    def tokens(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ids, label mask and bounds like `PackedDataset.tokens`. No token of a prompt has loss."""
        ids = np.array(self.prompts[row].tokens, np.int64)
        return ids, np.zeros(len(ids), np.uint8), np.array([0, len(ids)])

    def taught_stops(self) -> list[int]:
        """Return no token: a prompt teaches none."""
        return []

    def largest_id(self) -> tuple[int, str]:
        """Return the largest token id of all prompts, and the file and line of a prompt that holds it."""
        return max(((max(prompt.tokens, default=-1), prompt.origin) for prompt in self.prompts), default=(-1, ""))

    def units_per_row(self) -> tuple[str, float]:
        """See `PackedDataset.units_per_row`: a row is one prompt."""
        return "prompts", 1.0

    def statistics(self) -> list[dict[str, object]]:
        """See `PackedDataset.statistics`. Prompts are not packed and have no loss."""
        bounds = self.first_rows.tolist()
        parts = [self.prompts[begin:end] for begin, end in itertools.pairwise(bounds)]
        return [
            {"name": name, **length_histogram(np.array([len(prompt.tokens) for prompt in part], np.int64))}
            for part, (name, _) in zip(parts, self.contents, strict=True)
        ]

    def mean_context(self) -> float:
        """Mean prompt length in tokens, without the response."""
        return float(np.mean([len(prompt.tokens) for prompt in self.prompts]))

    def describe(self, row: int) -> str:
        """Origin of the prompt, for messages."""
        return self.prompts[row].origin if 0 <= row < len(self) else "(padding)"


def _content(prompts: Sequence[Prompt]) -> tuple[str, str]:
    """Return the files of the prompts, and a hash of the tokens and of the rows that rewards read."""
    digest = Checksum()
    for prompt in prompts:
        digest.update(json.dumps([prompt.tokens, prompt.row], sort_keys=True, default=str).encode())
    names = dict.fromkeys(prompt.origin.rpartition(":")[0] for prompt in prompts)
    return ", ".join(names), digest.hexdigest()


@dataclass(frozen=True)
class PromptReport:
    """Report of the preparation, for the startup summary."""

    names: list[str]
    num_train: int
    num_validation: int
    num_dropped: int
    longest: int
    limit: int
    needed: int
    special: SpecialReport

    def lines(self) -> list[str]:
        """Return the counts of both splits, and a warning if many prompts were skipped."""
        dropped = f", {self.num_dropped:,} longer than {self.limit} tokens dropped" if self.num_dropped else ""
        total = self.num_train + self.num_validation + self.num_dropped
        many = self.num_dropped > MANY * total
        share = f"{100 * self.num_dropped / max(1, total):.0f}% of the prompts are dropped because they are long"
        return [
            f"{', '.join(self.names)}: {self.num_train:,} prompts of up to {self.longest} tokens{dropped}",
            *([f"  warning: {share}: data.seq_len={self.needed} keeps all of them"] if many else []),
            *self.special.lines(),
            f"validation: {self.num_validation:,} prompts",
        ]


@dataclass(frozen=True)
class PreparedPrompts:
    """Prompts of a run that generates responses, with their report."""

    train: PromptDataset
    validation: PromptDataset | None
    report: PromptReport


def prepare_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    max_tokens: int,
    tools_of: ToolsOf = no_tools,
    samples_per_row: int = 1,
    pictures: PictureSupport | None = None,
) -> PreparedPrompts:
    """Read, render and tokenize all prompts.

    Prompts longer than `max_tokens` are dropped or rejected, depending on `data.truncation`. `samples_per_row` is the
    number of samples that share a packed row. `tools_of` returns the environment tools of a row, which the template
    renders. `pictures` reads the pictures of rows, which are rejected without it. Raises DataError that lists all
    rejected rows.
    """
    reader = _Reader(config, tokenizer, max_tokens, tools_of, samples_per_row, pictures)
    root = cache_root(config.cache_dir)
    described = SourceConfig("task", format="messages")
    if config.generator is not None:
        train = [reader.read(TaskSource(config.generator, "train"), described)]
        held_out = [reader.read(TaskSource(config.generator, "validation"), described)]
        names = [type(config.generator).__name__]
    else:
        sources = config.train_sources()
        opened = [open_source(source, root) for source in sources]
        train = [reader.read(source, node) for source, node in zip(opened, sources, strict=True)]
        names = _names(opened, sources)
        held_out = [
            reader.read(open_source(each.source, root, whole=each.whole), each.source)
            for each in config.validation_sources()
        ]
    check_ignored(config.ignored_columns, reader.ignored.missing, reader.ignored.present)
    reader.finish()
    if config.validation_size:
        train, held_out = _hold_out(train, config.validation_size, seed)
    return _prepared(train, held_out, names, config.mixture(), reader)


def _prepared(
    train: list[list[Prompt]], held_out: list[list[Prompt]], names: list[str], mixture: Mixture, reader: _Reader
) -> PreparedPrompts:
    for prompts, name in zip(train, names, strict=True):
        if not prompts:
            why = f": {reader.num_dropped:,} are longer than {reader.max_tokens} tokens" if reader.num_dropped else ""
            longer = reader.seq_len_of_all if reader.num_dropped else "<longer>"
            raise DataError(
                f"no prompt of {name} is left{why}",
                code="not_enough_rows",
                keys=("data.seq_len",),
                fix=f"data.seq_len={longer}",
            )
    dataset = PromptDataset(train, mixture)
    validation = PromptDataset(held_out, Mixture.single()) if any(held_out) else None
    longest = max(len(prompt.tokens) for prompt in dataset.prompts)
    num_validation = len(validation) if validation is not None else 0
    report = PromptReport(
        names,
        len(dataset),
        num_validation,
        reader.num_dropped,
        longest,
        reader.max_tokens,
        reader.seq_len_of_all,
        reader.special_report(),
    )
    return PreparedPrompts(dataset, validation, report)


def _names(opened: Sequence[Source], sources: Sequence[SourceConfig]) -> list[str]:
    """Return each source with the name of its format, if the config names one."""
    chosen = ["" if node.format == "auto" else f" ({format_name(find_format(node.format))})" for node in sources]
    notes = [f" ({source.note})" if source.note else "" for source in opened]
    return [f"{source.name}{fmt}{note}" for source, fmt, note in zip(opened, chosen, notes, strict=True)]


def _hold_out(train: list[list[Prompt]], wanted: float, seed: int) -> tuple[list[list[Prompt]], list[list[Prompt]]]:
    """Move validation prompts out of all sources together, by a seeded shuffle."""
    everything = [prompt for prompts in train for prompt in prompts]
    number = max(1, round(wanted * len(everything))) if wanted < 1 else int(wanted)
    if number >= len(everything):
        raise DataError(
            f"validation_size={wanted:g} leaves no training prompts: the dataset has {len(everything):,} prompts",
            code="not_enough_rows",
            keys=("data.validation_size",),
            fix="data.validation_size=0.1",
        )
    chosen = {everything[i].number for i in shuffled(len(everything), seed, 0x5EED)[:number].tolist()}
    kept = [[prompt for prompt in prompts if prompt.number not in chosen] for prompts in train]
    return kept, [[prompt for prompt in everything if prompt.number in chosen]]


class _Reader:
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
        self._refuse_rendered([attempt(self._without_answer, reader, row) for row in sample], source.name)
        prompts: list[Prompt] = []
        rows = self.ignored.watch(source.rows())
        while batch := list(itertools.islice(rows, BATCH_ROWS)):
            prompts += self._usable_prompts(batch, source, reader)
        return prompts

    def _refuse_rendered(self, sample: Sequence[Conversation | RowError], where: str) -> None:
        """Raise DataError if most prompts contain BOS or a rendered template that would be added a second time."""
        chats = [chat for chat in sample if not isinstance(chat, RowError)]
        templated = self.chats is not None
        render = self.chats.encoder.render_messages if self.chats is not None else None
        refuse_rendered(
            chats,
            self.config,
            Added.of(self.tokenizer, render),
            where=where,
            templated=templated,
            plain_works=lambda: all(not isinstance(attempt(_only_text, chat), RowError) for chat in chats),
        )

    def _usable_prompts(self, batch: Sequence[SourceRow], source: Source, reader: RowReader) -> Iterator[Prompt]:
        """Return the usable prompts of these rows, and count the other rows."""
        self.num_rows += len(batch)
        read = [attempt(self._asked, reader, origin.row) for origin in batch]
        good = [chat for chat in read if not isinstance(chat, RowError)]
        tokens = iter(self._tokens(good))
        for origin, chat in zip(batch, read, strict=True):
            ids = chat if isinstance(chat, RowError) else next(tokens)
            name = source.files[origin.file]
            if isinstance(ids, RowError):
                row = ids.raw if ids.raw is not None else origin.row
                self._rejected.append(Rejected(name, origin.line, ids.code, ids.message, row, ids.fix))
                continue
            number, self._number = self._number, self._number + 1
            where = f"{name}:{origin.line}"
            messages = [{**message, "content": with_tags(message["content"])} for message in chat.messages]
            prompt = Prompt(number, [int(i) for i in ids], messages, origin.row, where, chat.tools, chat.pictures)
            if len(prompt.tokens) <= self.max_tokens:
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

    def _without_answer(self, reader: RowReader, row: Any) -> Conversation:
        if self._pictures is None or isinstance(row, RowError):
            return _asked(reader, row)
        marked, found = self._pictures.rows.marked(row, reader.ordered_columns(row))
        chat = _asked(reader, marked)
        shown: Conversation = with_pictures(chat, found)
        return shown

    def _asked(self, reader: RowReader, row: Any) -> Conversation:
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
        else:
            encoded = self._encode_texts([attempt(_only_text, chat) for chat in chats])
        self._special_counts += [count for ids, count in encoded if not isinstance(ids, RowError)]
        return [ids for ids, _ in encoded]

    def _encode_texts(self, texts: Sequence[str | RowError]) -> list[tuple[np.ndarray | RowError, int]]:
        plain = [text for text in texts if not isinstance(text, RowError)]
        add_bos = self.config.add_bos
        encoded = iter(encode_texts(self.tokenizer, plain, add_special_tokens=add_bos))
        out: list[tuple[np.ndarray | RowError, int]] = []
        for text in texts:
            if isinstance(text, RowError):
                out.append((text, 0))
                continue
            ids, count = next(encoded), self.special.count(text)
            if count and self.special.choice != "keep":
                ids = attempt(self.special.encode_text, text, add_bos)
            if add_bos and self._adds_eos and not isinstance(ids, RowError):
                ids = ids[:-1]  # the response follows
            out.append((ids, count))
        return out


def _asked(reader: RowReader, row: Any) -> Conversation:
    """Return the conversation of a row without the assistant messages at its end."""
    if isinstance(row, RowError):
        raise row
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
