"""Table of the built-in formats, and detection of the format of given rows. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from automodel_cli.config.errors import DataError
from automodel_cli.data.formats.base import KINDS, DataKind, FirstRows, Format, KnownFormat, Makes
from automodel_cli.data.formats.column_mapping import LIST_COLUMNS, column_for, columns_fix, text_columns
from automodel_cli.data.formats.examples import Conversation, Document, Messages, PlainText
from automodel_cli.data.formats.groups import Retrieval
from automodel_cli.data.formats.labeled import LabeledTexts, LabeledTokens, suggest_columns
from automodel_cli.data.formats.messages import NO_TEMPLATE_FIX, chat_or_text, messages_in, turn, with_system
from automodel_cli.data.formats.preference import JudgedResponses, PreferencePairs
from automodel_cli.data.formats.row_accessor import Fields
from automodel_cli.data.row_errors import RowError


@dataclass(frozen=True)
class Chats:
    """OpenAI messages (`role`, `content`) in one column."""

    name: ClassVar[str] = "messages"
    fields: ClassVar[tuple[str, ...]] = ("messages", "system", "tools")
    makes: ClassVar[Makes] = "conversations"

    def detects(self, sample: FirstRows) -> bool:
        return sample.listed is not None and not sample.is_pair

    def read(self, row: Fields) -> Conversation:
        messages, trained = row.messages("messages")
        return with_system(messages, trained, row.optional_text("system"), row.tools())


@dataclass(frozen=True)
class ShareGPT(Chats):
    """Messages with `from` and `value` in one column."""

    name: ClassVar[str] = "sharegpt"

    def detects(self, sample: FirstRows) -> bool:
        match messages_in(sample.first(sample.listed)) if sample.listed else None:
            case [{"from": _}, *_]:
                return not sample.is_pair
        return False


@dataclass(frozen=True)
class Alpaca:
    """An instruction, perhaps with an input and earlier turns, and the output."""

    name: ClassVar[str] = "alpaca"
    fields: ClassVar[tuple[str, ...]] = ("instruction", "input", "output", "system", "history")
    makes: ClassVar[Makes] = "conversations"

    def detects(self, sample: FirstRows) -> bool:
        return {"instruction", "output"} <= sample.has

    def read(self, row: Fields) -> Document:
        question = row.text("instruction")
        extra = row.optional_text("input")
        if extra.strip():
            question = f"{question}\n{extra}"
        answer = row.text("output")
        messages: Messages = []
        history = row.get("history") or []
        if not isinstance(history, list):
            raise RowError("bad_history", f"{row.column('history')} is {type(history).__name__}, not a list of pairs")
        for number, pair in enumerate(history):
            match pair:
                case [str(asked), str(answered)]:
                    messages += [turn("user", asked), turn("assistant", answered)]
                case _:
                    raise RowError("bad_history", f"history[{number}] must be a pair of strings")
        messages += [turn("user", question), turn("assistant", answer)]
        trained = [message["role"] == "assistant" for message in messages]
        return chat_or_text(messages, trained, row.optional_text("system"), None, chat=row.chat)


@dataclass(frozen=True)
class PromptCompletion:
    """A prompt and its completion, each as text or as messages."""

    name: ClassVar[str] = "prompt_completion"
    fields: ClassVar[tuple[str, ...]] = ("prompt", "completion", "system", "tools")
    makes: ClassVar[Makes] = "conversations"

    def detects(self, sample: FirstRows) -> bool:
        return {"prompt", "completion"} <= sample.has

    def read(self, row: Fields) -> Document:
        prompt, _ = row["prompt"], row["completion"]  # both must be there before either is looked into
        before, _ = row.messages_of("prompt", "user")
        after, has_loss = row.messages_of("completion", "assistant")
        if not isinstance(prompt, str) and not row.chat:
            words = f"{row.column('prompt')} contains messages, which require a chat template"
            raise RowError("no_template", words, fix=NO_TEMPLATE_FIX)
        if any(message["role"] != "assistant" for message in after):
            raise RowError("bad_role", f"{row.column('completion')} must contain only assistant messages")
        trained = [False] * len(before) + has_loss
        return chat_or_text(before + after, trained, row.optional_text("system"), row.tools(), chat=row.chat)


@dataclass(frozen=True)
class Texts:
    """Documents of plain text, every token of which is trained."""

    name: ClassVar[str] = "text"
    fields: ClassVar[tuple[str, ...]] = ("text",)
    makes: ClassVar[Makes] = "texts"

    def detects(self, sample: FirstRows) -> bool:
        return "text" in sample.has

    def read(self, row: Fields) -> PlainText:
        return PlainText(row.text("text"))


@dataclass(frozen=True)
class Prompts:
    """Prompts for generation: messages or a prompt in each row. Rewards read the other columns."""

    name: ClassVar[str] = "of prompts"
    fields: ClassVar[tuple[str, ...]] = ("messages", "prompt", "system", "tools")
    makes: ClassVar[Makes] = "conversations"

    def read(self, row: Fields) -> Conversation:
        if "prompt" not in row.columns and "messages" in row:
            messages, trained = row.messages("messages")
        elif "prompt" in row:
            messages, trained = row.messages_of("prompt", "user")
        else:
            raise RowError(
                "missing_column",
                f"the prompt column {row.column('prompt')!r} is missing (columns: {', '.join(row.row)})",
                fix="data.column_mapping='{prompt: <column>}'",
            )
        return with_system(messages, trained, row.optional_text("system"), row.tools())


_TABLE: tuple[KnownFormat, ...] = (
    *(ShareGPT(), Chats(), PromptCompletion(), Alpaca(), Texts()),
    *(PreferencePairs(), JudgedResponses()),
    *(LabeledTexts(), LabeledTokens(), Retrieval()),
)
FORMATS: dict[str, KnownFormat] = {fmt.name: fmt for fmt in _TABLE}
"""By name, in the order in which they are looked for."""

_NAMES: dict[type, str] = {type(fmt): fmt.name for fmt in _TABLE} | {Prompts: Prompts.name}
_READ_AS_PROMPTS = ("auto", "messages", "sharegpt", "prompt_completion")


def find_format(fmt: str | Format) -> Format:
    """The format that a config names, or that it holds."""
    return FORMATS[fmt] if isinstance(fmt, str) else fmt


def prompt_format(fmt: str | Format) -> Format:
    """The format that reads prompts under this choice of `data.format`."""
    return Prompts() if fmt in _READ_AS_PROMPTS else find_format(fmt)


def format_name(fmt: Format) -> str:
    """Return the name of a format in messages, as written in the config."""
    return _NAMES.get(type(fmt)) or f"{type(fmt).__module__}.{type(fmt).__qualname__}"


def detect_format(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], where: str, *, kind: DataKind = "documents"
) -> KnownFormat:
    """Detect the format of the first rows by the columns that most of them share, or by `columns` alone.

    Raises DataError with the columns and a `columns` value to paste.
    """
    columns = text_columns(columns)
    sample = FirstRows(rows, columns)
    of_kind = [fmt for fmt in FORMATS.values() if fmt.makes in KINDS[kind]]
    fitting = [fmt for fmt in of_kind if set(columns) <= set(fmt.fields)]
    if not fitting and kind == "documents":
        raise DataError(
            f"{where}: data.column_mapping maps {', '.join(columns)}, but no single format has all these fields",
            code="unknown_format",
            keys=("data.column_mapping",),
            fix="data.column_mapping='{prompt: question, completion: answer}'",
        )
    detected = next((fmt for fmt in fitting if fmt.detects(sample)), None)
    if detected is not None:
        return detected
    names = ", ".join(sorted(sample.shared)) or "(no column that most rows share)"
    if kind in ("labeled", "groups"):
        what = "text and label, or tokens and tags" if kind == "labeled" else "query and positive"
        raise DataError(
            f"{where}: the columns {names} do not fit the recipe: a row needs {what}",
            code="unknown_format",
            keys=("data.column_mapping",),
            fix=columns_fix(suggest_columns(sample, ("text", "label") if kind == "labeled" else ("query", "positive"))),
        )
    if kind == "preferences":
        what = "a pair needs chosen and rejected, a judged response needs label"
        fix = (
            "data.column_mapping='{prompt: <column>, chosen: <column>, rejected: <column>}', "
            "or a recipe for data without preferences (sft)"
        )
        raise DataError(
            f"{where}: the columns {names} contain no preferences: {what}",
            code="unknown_format",
            keys=("data.column_mapping",),
            fix=fix,
        )
    raise DataError(
        f"{where}: the columns {names} match no data format",
        code="unknown_format",
        keys=("data.format", "data.column_mapping"),
        fix=_suggest_columns(sample),
    )


def _suggest_columns(sample: FirstRows) -> str:
    columns = [c for c in dict.fromkeys(column for row in sample.rows for column in row) if c in sample.shared]
    if {"chosen", "rejected"} <= sample.shared:
        prompt = next((c for c in ("prompt", "question", *LIST_COLUMNS) if c in sample.shared), "prompt")
        plain = f"data.column_mapping='{{prompt: {prompt}, completion: chosen}}' trains on the preferred answer"
        return f"{plain}; a recipe of kind dpo trains on both"
    listed = [c for c in columns if _is_chat(sample.first(c))]
    if listed:
        return columns_fix({"messages": listed[0]})
    texts = [c for c in columns if isinstance(sample.first(c), str)]
    prompt_column, answered, text = (column_for(field, texts) for field in ("prompt", "completion", "text"))
    if prompt_column and answered:
        return columns_fix({"prompt": prompt_column, "completion": answered})
    if text or len(texts) == 1:
        return columns_fix({"text": text or texts[0]})
    names = f"one of {', '.join(texts)}" if texts else "column"
    return f"data.column_mapping='{{prompt: <{names}>, completion: <{names}>}}', or '{{text: <{names}>}}'"


def _is_chat(value: object) -> bool:
    match messages_in(value):
        case [{"role": _} | {"from": _}, *_]:
            return True
    return False
