"""Prompts to sample from: conversations without their answer, each with the row it comes from, for the rewards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.data.cache import cache_root
from automodel_cli.data.chat import ChatEncoder
from automodel_cli.data.checksums import Checksum
from automodel_cli.data.columns import check_mapped
from automodel_cli.data.config import DataConfig, SourceConfig
from automodel_cli.data.dataset import shuffled
from automodel_cli.data.formats import LIST_COLUMNS, Conversation, RowReader
from automodel_cli.data.report import MANY, SpecialReport, round_length
from automodel_cli.data.rows import Rejected, RowError, refuse_damaged, rows_error, without_nulls
from automodel_cli.data.sources import Source, TaskSource, first_rows, open_source
from automodel_cli.data.special_chats import SpecialChats
from automodel_cli.data.special_text import SpecialText
from automodel_cli.data.template_choice import resolve_chat_template
from automodel_cli.data.unread import MEDIA, KnownKeys

Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """`number` names it in the dataset, `tokens` end where the model begins to speak; `row` is what rewards read."""

    number: int
    tokens: list[int]
    messages: list[Message]
    row: dict[str, Any]
    origin: str


class PromptDataset:
    """The prompts of one or more sources, numbered through; `StepLoader` deals them to ranks and steps like rows."""

    def __init__(self, sources: Sequence[Sequence[Prompt]], weights: Sequence[float]):
        self.prompts = [prompt for source in sources for prompt in source]
        self.weights = list(weights)
        self.first_rows = np.cumsum([0, *(len(source) for source in sources)])
        self.contents = [_content(source) for source in sources]

    def __len__(self) -> int:
        return len(self.prompts)

    def collate(self, row_indices: Sequence[int]) -> list[Prompt]:
        """The prompts of these numbers."""
        return [self.prompts[int(row)] for row in row_indices]

    def tokens(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, label mask (no token of a prompt is trained) and bounds, as of a packed row."""
        ids = np.array(self.prompts[row].tokens, np.int64)
        return ids, np.zeros(len(ids), np.uint8), np.array([0, len(ids)])

    def mean_context(self) -> float:
        """Mean tokens of a prompt; responses come on top."""
        return float(np.mean([len(prompt.tokens) for prompt in self.prompts]))

    def describe(self, row: int) -> str:
        """Where the prompt comes from, for messages."""
        return self.prompts[row].origin if 0 <= row < len(self) else "(padding)"


def _content(prompts: Sequence[Prompt]) -> tuple[str, str]:
    """The files that prompts come from, and a hash of what is sampled from and what rewards read."""
    digest = Checksum()
    for prompt in prompts:
        digest.update(json.dumps([prompt.tokens, prompt.row], sort_keys=True, default=str).encode())
    names = dict.fromkeys(prompt.origin.rpartition(":")[0] for prompt in prompts)
    return ", ".join(names), digest.hexdigest()


@dataclass(frozen=True)
class PromptReport:
    """What preparation did, for the run's header."""

    names: list[str]
    num_train: int
    num_validation: int
    num_dropped: int
    longest: int
    limit: int
    needed: int
    special: SpecialReport

    def lines(self) -> list[str]:
        """Prompts of both kinds, and a warning where many are left out."""
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
    """What a run that samples reads."""

    train: PromptDataset
    validation: PromptDataset | None
    report: PromptReport


def prepare_prompts(config: DataConfig, tokenizer: Any, *, seed: int, max_tokens: int) -> PreparedPrompts:
    """Read, render and tokenise all prompts. Those longer than `max_tokens` are dropped or refused, as
    `long_documents` says. Raises DataError with every row that cannot be used.
    """
    reader = _Reader(config, tokenizer, max_tokens)
    root = cache_root(config.cache_dir)
    described = SourceConfig("task", format="messages")
    if config.task is not None:
        train = [reader.read(TaskSource(config.task, "train"), described)]
        held_out = [reader.read(TaskSource(config.task, "validation"), described)]
        names, weights = [type(config.task).__name__], [1.0]
    else:
        sources = config.train_sources()
        opened = [open_source(source, root) for source in sources]
        train = [reader.read(source, node) for source, node in zip(opened, sources, strict=True)]
        names, weights = [source.name for source in opened], [node.weight for node in sources]
        node = config.validation_source()
        held_out = [] if node is None else [reader.read(open_source(node, root), node)]
    reader.finish()
    if config.validation_rows:
        train, held_out = _hold_out(train, config.validation_rows, seed)
    return _prepared(train, held_out, names, weights, reader)


def _prepared(
    train: list[list[Prompt]], held_out: list[list[Prompt]], names: list[str], weights: list[float], reader: _Reader
) -> PreparedPrompts:
    for prompts, name in zip(train, names, strict=True):
        if not prompts:
            raise DataError(f"no prompt of {name} is left", fix="data.seq_len=<longer>")
    dataset = PromptDataset(train, weights)
    validation = PromptDataset(held_out, [1.0] * len(held_out)) if any(held_out) else None
    longest = max(len(prompt.tokens) for prompt in dataset.prompts)
    num_validation = len(validation) if validation is not None else 0
    needed = round_length(reader.longest_dropped + reader.config.seq_len - reader.max_tokens)
    report = PromptReport(
        names,
        len(dataset),
        num_validation,
        reader.num_dropped,
        longest,
        reader.max_tokens,
        needed,
        reader.special_report(),
    )
    return PreparedPrompts(dataset, validation, report)


def _hold_out(train: list[list[Prompt]], wanted: float, seed: int) -> tuple[list[list[Prompt]], list[list[Prompt]]]:
    """Take validation prompts out of all sources together, by a seeded shuffle."""
    everything = [prompt for prompts in train for prompt in prompts]
    number = max(1, round(wanted * len(everything))) if wanted < 1 else int(wanted)
    if number >= len(everything):
        raise DataError(
            f"validation_rows={wanted:g} leaves nothing to train on: there are {len(everything):,} prompts",
            fix="data.validation_rows=0.1",
        )
    chosen = {everything[i].number for i in shuffled(len(everything), seed, 0x5EED)[:number].tolist()}
    kept = [[prompt for prompt in prompts if prompt.number not in chosen] for prompts in train]
    return kept, [[prompt for prompt in everything if prompt.number in chosen]]


class _Reader:
    """Rows to prompts, and an account of those that cannot be used."""

    def __init__(self, config: DataConfig, tokenizer: Any, max_tokens: int):
        self.config, self.tokenizer, self.max_tokens = config, tokenizer, max_tokens
        self.template = resolve_chat_template(config.chat_template, tokenizer)
        self.keys = KnownKeys.of(self.template, config.ignore_columns)
        choice = config.special_tokens_in_text
        if choice == "auto":
            choice = "keep" if self.template is None else "as_text"
        self.special = SpecialText(tokenizer, choice)
        self.chats = None
        if self.template is not None:
            self.chats = SpecialChats(ChatEncoder(tokenizer, self.template, "all"), self.special)
        self.num_dropped = self.longest_dropped = self.num_rows = self._number = 0
        self._special_counts: list[int] = []
        self._rejected: list[Rejected] = []

    def read(self, source: Source, node: SourceConfig) -> list[Prompt]:
        """Every usable prompt of a source."""
        prompts = []
        check_mapped(first_rows(source), node.columns, source.name)
        for origin in source.rows():
            self.num_rows += 1
            name = source.files[origin.file]
            try:
                prompt = self._prompt(origin.row, node.columns, f"{name}:{origin.line}")
            except RowError as error:
                row = error.raw if error.raw is not None else origin.row
                self._rejected.append(Rejected(name, origin.line, error.code, error.message, row, error.fix))
                continue
            if len(prompt.tokens) <= self.max_tokens:
                prompts.append(prompt)
            elif self.config.long_documents != "fail":
                self.num_dropped += 1
                self.longest_dropped = max(self.longest_dropped, len(prompt.tokens))
            else:
                raise DataError(
                    f"{prompt.origin}: the prompt has {len(prompt.tokens)} tokens, and rows have room for "
                    f"{self.max_tokens} before the response",
                    keys=("data.seq_len", "rollout.max_new_tokens"),
                    fix="data.long_documents=drop, or a larger data.seq_len",
                )
        return prompts

    def special_report(self) -> SpecialReport:
        """Special tokens in the text of prompts so far."""
        return SpecialReport(self.special.choice, sum(self._special_counts), sum(map(bool, self._special_counts)))

    def finish(self) -> None:
        """The policy for refused rows, over all sources together."""
        refuse_damaged(self._rejected, self.num_rows)
        allowed = 0.0 if self.config.on_bad_row == "fail" else self.config.max_bad * self.num_rows
        if len(self._rejected) > allowed:
            raise rows_error(self._rejected, self.num_rows, fix="correct the rows, or data.on_bad_row=drop")

    def _prompt(self, row: Any, columns: Mapping[str, str], origin: str) -> Prompt:
        if isinstance(row, RowError):
            raise row
        chat = self._conversation(row, columns)
        messages = list(chat.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise RowError("no_prompt", "no message comes before the answer")
        tokens = self._tokens(messages, chat.tools)
        self._number += 1
        return Prompt(self._number - 1, tokens, messages, row, origin)

    def _conversation(self, row: Mapping[str, Any], columns: Mapping[str, str]) -> Conversation:
        row = without_nulls(row)
        self.keys.refuse(row, columns.values(), "a prompt", (*MEDIA, "functions"))
        listed = columns.get("messages") or next((name for name in LIST_COLUMNS if name in row), None)
        if "prompt" not in columns and listed is not None and listed in row:
            return RowReader("sharegpt", {**columns, "messages": listed}, chat=True, keys=self.keys).read_prompt(row)
        if columns.get("prompt", "prompt") not in row:
            raise RowError(
                "missing_column",
                f"no column {columns.get('prompt', 'prompt')!r} with the prompt (the row has: {', '.join(row)})",
                fix="data.columns='{prompt: <column>}'",
            )
        return RowReader("prompt_completion", columns, chat=True, keys=self.keys).read_prompt(row)

    def _tokens(self, messages: list[Message], tools: Any) -> list[int]:
        if self.chats is not None:
            ids, count = self.chats.prompt_ids(Conversation(messages, [False] * len(messages), tools))
        elif len(messages) != 1:
            raise RowError("no_template", "several messages need a chat template")
        else:
            text = messages[0]["content"]
            ids, count = self.tokenizer(text)["input_ids"], self.special.count(text)
            if count and self.special.choice != "keep":
                ids = self.special.encode_text(text, True)
        self._special_counts.append(count)
        return [int(number) for number in ids]
