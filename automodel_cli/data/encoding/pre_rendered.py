"""Detect rows that already contain BOS, EOS or the text of a chat template.

Preparation would add these a second time, without an error and with a plausible loss. If at least half of a sample of
the dataset is already rendered, DataError suggests the overrides that read the rows unchanged. A single question about
control tokens does not count. `special_tokens_policy=as_text` skips the check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from automodel_cli.config.errors import DataError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.formats.examples import AnsweredPrompt, Conversation, JudgedResponse, Messages, Pair, PlainText
from automodel_cli.data.row_errors import RowError
from automodel_cli.data.tokenized import around

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE_ROWS = 64
KNOWN_OPENERS = (
    *("<|im_start|>user", "<|im_start|>system", "<|start_header_id|>", "<start_of_turn>user", "[INST]"),
    *("<|start|>user", "<|start|>system", "<|user|>", "<|system|>", "<｜User｜>", "<|turn>user", "<|turn>system"),
    *("<|START_OF_TURN_TOKEN|>", "[gMASK]"),
)
"""Message openings of other templates, for rows that were rendered for another model."""
_SAID, _ANSWERED, _NEXT = "kwelvorn", "zindrath", "ombrellac"
"""Markers that occur in no template."""

Render = Callable[[Messages, None], str]


@dataclass(frozen=True)
class Ends:
    """Text at both ends of a row: directly after BOS and directly before EOS. "" if there is none."""

    begin: str
    end: str


@dataclass(frozen=True)
class Added:
    """Text that preparation adds around a row: BOS and EOS ("" if the tokenizer has none), and message openings."""

    bos: str
    """BOS of the tokenizer, whether or not it is added."""
    eos: str
    writes_bos: bool
    """Whether rows get BOS, from the chat template or, without one, from the tokenizer."""
    begins_itself: bool
    """Whether the tokenizer adds BOS automatically."""
    ends_itself: bool
    """Whether the tokenizer adds EOS automatically."""
    openers: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, render: Render | None) -> Added:
        """`render`: the chat template, if one renders the rows."""
        before, after = around(tokenizer)
        bos = "".join(tokenizer.convert_ids_to_tokens(before)) or tokenizer.bos_token or ""
        openers = () if render is None else _openers(render, bos)
        writes_bos = bool(before) if render is None else bool(bos) and _try(render, "user").startswith(bos)
        return cls(bos, tokenizer.eos_token or "", writes_bos, bool(before), bool(after), openers)

    def is_rendered(self, ends: Ends) -> bool:
        """Return whether the text begins as the chat template opens a message."""
        begin = ends.begin.lstrip()
        begin = begin.removeprefix(self.bos).lstrip()
        return begin.startswith((*self.openers, *KNOWN_OPENERS))

    def has_bos(self, ends: Ends) -> bool:
        return bool(self.bos) and ends.begin.lstrip().startswith(self.bos)

    def has_eos(self, ends: Ends) -> bool:
        """Return whether an added EOS would follow another one."""
        text = ends.end.rstrip()
        return bool(self.eos) and text.endswith(self.eos) and (text != ends.end or self.ends_itself)

    def ends_turn(self, ends: Ends) -> bool:
        """Return whether the response ends with the end-of-turn token."""
        return bool(self.eos) and ends.end.rstrip().endswith(self.eos)


def _openers(render: Render, bos: str) -> tuple[str, ...]:
    """Return the text that the template writes before the first user or system text, without BOS and one-time text."""
    openers = []
    for role in ("user", "system"):
        text = _try(render, role).removeprefix(bos)
        first, second = text.partition(_SAID)[0].strip(), text.partition(_ANSWERED)[2].partition(_NEXT)[0].strip()
        second = second.removeprefix(text.rpartition(_NEXT)[2].strip()).strip()
        # a default system message occurs before the first message only
        openers += [first] if role == "system" else [first, _shared_end(first, second)]
    return tuple(opener for opener in openers if len(opener) >= 3)


def _try(render: Render, role: str) -> str:
    """Render a conversation that begins with a message of this role. "" if the template rejects it."""
    messages = [
        {"role": role, "content": _SAID},
        {"role": "assistant", "content": _ANSWERED},
        {"role": "user", "content": _NEXT},
    ]
    if role == "system":
        messages.insert(1, {"role": "user", "content": "?"})
    try:
        return render(messages, None)
    except RowError:
        return ""


def _shared_end(a: str, b: str) -> str:
    count = 0
    while count < min(len(a), len(b)) and a[-1 - count] == b[-1 - count]:
        count += 1
    return a[len(a) - count :]


def ends_of(document: object) -> Ends:
    """Return both ends of a document. For a pair, those of the chosen document."""
    match document:
        case PlainText():
            return Ends(document.text, document.text)
        case AnsweredPrompt():
            return Ends(document.prompt, document.completion)
        case Pair():
            return ends_of(document.chosen)
        case JudgedResponse():
            return _ends_of_messages([*document.prompt, *document.response])
        case Conversation():
            return _ends_of_messages(document.messages)
    return Ends("", "")


def _ends_of_messages(messages: Messages) -> Ends:
    answer = messages[-1]["content"] if messages and messages[-1]["role"] == "assistant" else ""
    begins = [message["content"] for message in messages if message["role"] != "assistant"]
    return Ends(begins[0] if begins else "", answer)


def refuse_rendered(
    documents: Iterable[object],
    config: DataConfig,
    added: Added,
    *,
    where: str,
    templated: bool,
    plain_works: Callable[[], bool] = lambda: False,
) -> None:
    """Raise DataError if at least half of the documents contain text that would be added a second time.

    `templated`: a chat template renders the documents. `plain_works`: whether the rows can be read without a template.
    """
    if config.special_tokens_policy == "as_text":
        return
    ends = [ends_of(document) for document in documents]
    if templated:
        _refuse_templated(ends, added, where, plain_works)
        return
    fix = " ".join(_without_template(ends, config, added))
    if fix:
        twice = [name for name, key in (("BOS", "add_bos"), ("EOS", "add_eos")) if key in fix]
        token = repr(added.bos if twice[0] == "BOS" else added.eos)
        held = added.has_bos if twice[0] == "BOS" else added.has_eos
        raise DataError(
            f"{where}: the rows already contain {' and '.join(twice)} ({_shown(ends, held)}), so {token} would be "
            "added twice",
            code="invalid_template",
            keys=("data.add_bos", "data.add_eos"),
            fix=fix,
        )


def _refuse_templated(ends: Sequence[Ends], added: Added, where: str, plain_works: Callable[[], bool]) -> None:
    if _most(ends, added.is_rendered):
        words = f"{where}: the rows are already rendered ({_shown(ends, added.is_rendered)}), so the chat template "
        words += "would be applied twice"
        if not plain_works():
            raise DataError(
                words,
                code="invalid_template",
                keys=("data.chat_template",),
                fix="write the messages without the text of a template",
            )
        keys = _without_template(ends, DataConfig(path=where), added)
        raise DataError(
            words,
            code="invalid_template",
            keys=("data.chat_template",),
            fix=" ".join(["data.chat_template=none", *keys]),
        )
    for held, token, place in (
        (lambda each: added.writes_bos and added.has_bos(each), added.bos, "begin"),
        (added.ends_turn, added.eos, "end"),
    ):
        if _most(ends, held, least=2):  # a single row may be about the token
            raise DataError(
                f"{where}: the rows {place} with {token!r} ({_shown(ends, held)}), which the chat template also adds",
                code="invalid_template",
                keys=("data.chat_template",),
                fix=f"remove {token!r} from the {place} of the rows",
            )


def _without_template(ends: Sequence[Ends], config: DataConfig, added: Added) -> list[str]:
    """Return the overrides that read rendered rows unchanged, if no template renders the rows."""
    keys = []
    as_the_template = not added.writes_bos  # the template writes no BOS, so the rows that it rendered have none
    if config.add_bos and added.begins_itself and (as_the_template or _most(ends, added.has_bos)):
        keys.append("data.add_bos=false")
    if config.add_eos and _most(ends, added.has_eos):
        keys.append("data.add_eos=false")
    return keys


def _most(ends: Sequence[Ends], held: Callable[[Ends], bool], *, least: int = 1) -> bool:
    return sum(map(held, ends)) >= max(least, len(ends) / 2)


def _shown(ends: Sequence[Ends], held: Callable[[Ends], bool]) -> str:
    """Return how many rows of the sample match, and the first of them."""
    matches = [each for each in ends if held(each)]
    example = matches[0].begin or matches[0].end
    shown = repr(example if len(example) <= 60 else f"{example[:40]} ... {example[-16:]}")
    return f"{len(matches)} of the first {len(ends)}: {shown}"
