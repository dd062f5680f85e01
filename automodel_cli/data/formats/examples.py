"""Documents: results of formats and inputs of encoders. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates want them, the tools they may call, and per message whether it is trained.

    `pictures` belong to the marks in the messages (`data/pictures/rows.py`), in their order.
    """

    messages: list[dict[str, Any]]
    trained: list[bool]
    tools: list[dict[str, Any]] | None = None
    pictures: tuple[Any, ...] = ()


@dataclass(frozen=True)
class AnsweredPrompt:
    """A prompt and its continuation without a chat template."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class PlainText:
    """A document of which every token is trained."""

    text: str


Document = Conversation | AnsweredPrompt | PlainText


@dataclass(frozen=True)
class LabeledText:
    """A text and its label as the row has it (`data/labels.py` reads it), or words with a label each."""

    text: str | tuple[str, ...]
    label: Any
    column: str = "label"


@dataclass(frozen=True)
class TextGroup:
    """A query, a passage that answers it, passages that do not, and the score of a scored pair."""

    query: str
    positive: str
    negatives: tuple[str, ...] = ()
    score: float | None = None


@dataclass(frozen=True)
class Pair:
    """One prompt with a better and a worse response. `margin`: difference of their scores."""

    chosen: Document
    rejected: Document
    margin: float = 0.0


@dataclass(frozen=True)
class JudgedResponse:
    """A prompt and one response, good (`desirable`) or bad. Prompt and response are separate, because KTO also scores
    the prompt with the response of another row.
    """

    prompt: Messages
    response: Messages
    trained: list[bool]
    system: str
    tools: list[dict[str, Any]] | None
    desirable: bool
    pictures: tuple[Any, ...] = ()
    """Pictures of the prompt, as in `Conversation`."""
