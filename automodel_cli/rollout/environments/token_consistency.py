"""Token consistency of multi-turn episodes: render replies, and verify that earlier tokens are unchanged.

Tokens that the model read or generated are never tokenized again. Each turn checks two properties:

- the engine read exactly the tokens of the conversation (`check_read`, if it returns them),
- the chat template renders earlier turns as before (`tokens_between`). A template that rewrites its history would show
  other conversations than those that are trained.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from automodel_cli.config.errors import DataError, RunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from automodel_cli.rollout.types import Message

_PLACE = "\N{INVISIBLE SEPARATOR}reply\N{INVISIBLE SEPARATOR}"  # placeholder for text of the model
_AROUND = 4  # tokens shown on either side of a difference


class Conversation(Protocol):
    """The part of an episode that this module reads, and `rendered`, which it sets."""

    name: str
    messages: Sequence[Message]
    tools: list[dict[str, object]] | None
    tokens: list[int]
    response_messages: list[Message]
    rendered: list[str]

    @property
    def num_turns(self) -> int: ...


def tokens_between(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    episode: Conversation,
    observations: Sequence[Message],
) -> list[int]:
    """Return the tokens between two messages of the model.

    They contain the end of its turn (unless generated), the observations, and the header of its next message. Example
    with ChatML after `4<|im_end|>`: `\n<|im_start|>tool\n8<|im_end|>\n<|im_start|>assistant\n`. Raises DataError if
    the template does not render the next messages after a message, or renders earlier turns differently.
    """
    # The placeholder stands for text of the model, so that the template's text between two messages can be cut out. The
    # model's own tokens are never encoded again: text -> tokens is not the inverse of tokens -> text.
    messages = [
        {"role": "assistant", "content": _PLACE} if m["role"] == "assistant" else m for m in episode.response_messages
    ]
    text = str(
        tokenizer.apply_chat_template(
            [*episode.messages, *messages, *observations],
            chat_template=chat_template,
            tools=cast(Any, episode.tools),
            add_generation_prompt=True,
            tokenize=False,
        )
    )
    *before, after = text.split(_PLACE)
    if len(before) != episode.num_turns or not before[0] or not after:
        raise DataError(
            "the chat template does not render an assistant message exactly once, followed by the next messages. "
            "This tokenizer does not support several turns",
            code="invalid_template",
            keys=("model.tokenizer",),
        )
    if episode.rendered:
        _check_history(tokenizer, episode, before)
    episode.rendered = [*before, after]
    # A finished message ends with its stop token. A cut one does not, and needs the end of its turn from the template.
    stop = str(tokenizer.decode(episode.tokens[-1:]))
    if after.startswith(stop):
        after = after.removeprefix(stop)
    return list(tokenizer(after, add_special_tokens=False)["input_ids"])


def check_read(sent: Sequence[int], read: Sequence[int], where: str) -> None:
    """Raise RunError if an engine has read other tokens than it was sent."""
    if list(sent) != list(read):
        raise RunError(
            f"{where}: the engine read other tokens than the conversation contains: {_difference(sent, read)}",
            code="invalid_response",
            keys=("rollout.engine",),
            fix="rollout=sampler",
        )


def _check_history(tokenizer: PreTrainedTokenizerBase, episode: Conversation, before: Sequence[str]) -> None:
    for number, (then, now) in enumerate(zip(episode.rendered, before, strict=True)):
        if then == now:
            continue
        old, new = (list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (then, now))
        raise DataError(
            f"{episode.name}, turn {episode.num_turns}: the chat template renders the text before assistant message "
            f"{number + 1} differently than in the previous turn: {_difference(old, new)} ({then!r} became {now!r}). "
            "This template does not support "
            "several turns",
            code="invalid_template",
            keys=("data.chat_template", "model.tokenizer"),
            fix="data.chat_template=<a template that leaves earlier turns as they are>",
        )


def _difference(old: Sequence[int], new: Sequence[int]) -> str:
    place = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    around = slice(max(0, place - _AROUND), place + _AROUND)
    return f"tokens {list(old[around])} became {list(new[around])} at position {place} of {len(old)}"
