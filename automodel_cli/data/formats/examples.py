"""Documents: results of formats and inputs of encoders. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from automodel_cli.data.picture import Picture

Message = dict[str, Any]
"""A message, one of its tool calls, or the description of a tool. Chat templates read any key."""
Messages = list[Message]


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates want them, the tools they may call, and per message whether it is trained.

    `pictures` belong to the marks in the messages (`data/pictures/rows.py`), in their order.
    """

    messages: Messages
    trained: list[bool]
    tools: Messages | None = None
    pictures: tuple[Picture, ...] = ()


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

    text: str | tuple[str, ...] | list[str]
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
    tools: Messages | None
    desirable: bool
    pictures: tuple[Picture, ...] = ()
    """Pictures of the prompt, as in `Conversation`."""


Example = Document | Pair | JudgedResponse | LabeledText | TextGroup
"""What a format makes of a row."""
