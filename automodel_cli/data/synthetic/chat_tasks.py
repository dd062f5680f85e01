"""Generated chat tasks: short questions with one exact answer, for runs without a download. Torch-free.

A hash of each problem (a kind and its operands) assigns it to the training or the validation split. The splits are
therefore disjoint for every seed and size, and a later stage (DPO, GRPO) with another seed still uses held-out
questions. Strings are random capital letters, so that answers must be computed and cannot be memorized.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Literal

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.config.value_checks import check_minimums, check_range
from automodel_cli.data.formats.messages import ROLES
from automodel_cli.data.json_reader import Row

Split = Literal["train", "validation"]
Operands = tuple[int | str, ...]

# Part of every cache key. Raise it when the same node would produce other rows.
_VERSION = 1
# One problem in ten is held out. A constant: as an option, two runs could disagree on the held-out problems.
_HELD_OUT_IN = 10


@dataclass(frozen=True)
class _Kind:
    """Sampling, question and answer of one kind of problem. Operands have a canonical order (2 + 3 is 3 + 2)."""

    draw: Callable[[random.Random, ChatTasks], Operands]
    ask: Callable[[random.Random, Operands], str]
    answer: Callable[[Operands], str]


@dataclass(frozen=True)
class ChatTasks:
    """Verifiable chat rows: one user question, one assistant answer, both short.

    `kinds` maps a kind to its relative frequency. `max_number` bounds every number, `max_addend` the smaller operand of
    a sum or a difference, `max_length` the letters or digits of a string (at least 2). `context` are untrained messages
    before each question, `{role: ..., content: ...}`, for example instructions or worked examples. `num_train` rows are
    sampled with replacement. `num_validation` rows are distinct problems that occur in no training split.
    """

    kinds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 1.0))
    """Relative frequency of each kind of question. Any positive numbers; 0 excludes a kind."""
    num_train: int = 20_000
    """Number of training rows, sampled with replacement."""
    num_validation: int = 256
    """Number of validation rows: distinct problems that no training split contains."""
    max_number: int = 99
    """Upper bound of every number."""
    max_addend: int = 9
    """Upper bound of the smaller operand of a sum or difference."""
    max_length: int = 5
    """Largest number of letters or digits of a string (at least 2)."""
    context: list[dict[str, str]] = field(default_factory=list)
    """Messages before each question, without loss: `[{role: system, content: ...}]`."""
    seed: int = 0
    """Seed of the questions."""

    def __post_init__(self) -> None:
        for name, share in self.kinds.items():
            if name not in KINDS:
                raise ConfigError(
                    f"kinds.{name} must be one of: {', '.join(KINDS)}", code="invalid_choice", keys=(f"kinds.{name}",)
                )
            check_range(f"kinds.{name}", share, at_least=0, fix=f"kinds.{name}=1")
        if not sum(self.kinds.values()) > 0:
            raise ConfigError(
                f"kinds={self.kinds} must contain a share greater than 0",
                code="empty_value",
                keys=("kinds",),
                fix="kinds.add=1",
            )
        for index, message in enumerate(self.context):
            if set(message) != {"role", "content"} or message["role"] not in ROLES:
                raise ConfigError(
                    f"context[{index}]={message} must have the keys role ({', '.join(ROLES)}) and content",
                    code="invalid_value",
                    keys=("context",),
                    fix="context=[{role: system, content: Be brief.}]",
                )
        check_minimums(self, num_train=1, num_validation=0, max_number=9, max_addend=1, max_length=2)

    def rows(self, split: Split) -> Iterator[Row]:
        """The rows of one split, the same for the same node: dicts with `messages` (the context, user, assistant),
        `answer`, `kind`.

        Raises DataError when the held-out problems of the chosen kinds are fewer than `num_validation`.
        """
        # A string seed is hashed with SHA-512 by `random`, so the two streams are unrelated and the same on every
        # machine.
        rng = random.Random(f"{self.seed} {split}")
        before = [{**message, "train": False} for message in self.context]
        names = list(self.kinds)
        shares = list(self.kinds.values())
        total = self.num_train if split == "train" else self.num_validation
        seen: set[tuple[str, Operands]] = set()
        made = repeats = 0
        while made < total:
            name = rng.choices(names, shares)[0]
            kind = KINDS[name]
            operands = kind.draw(rng, self)
            if _is_held_out(name, operands) != (split == "validation"):
                continue
            if split == "validation":
                if (name, operands) in seen:
                    repeats += 1
                    if repeats > 100 * total:
                        raise DataError(
                            f"num_validation={total} exceeds the {len(seen)} distinct held-out problems",
                            code="not_enough_rows",
                            keys=("num_validation",),
                            fix=f"num_validation={len(seen)}",
                        )
                    continue
                seen.add((name, operands))
            made += 1
            answer = kind.answer(operands)
            question = {"role": "user", "content": kind.ask(rng, operands)}
            messages = [*before, question, {"role": "assistant", "content": answer}]
            yield {"messages": messages, "answer": answer, "kind": name}

    def cache_key(self) -> str:
        """Hex digest of everything that decides the rows: the fields and the version of this code."""
        text = json.dumps({"class": type(self).__name__, "version": _VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def check_answer(self, completion: str, answer: str) -> bool:
        """Return whether the completion is exactly the answer, ignoring surrounding white space."""
        return completion.strip() == answer


def _is_held_out(kind: str, operands: Operands) -> bool:
    digest = hashlib.blake2b(json.dumps([kind, *operands]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _HELD_OUT_IN == 0


def _phrases(*templates: str) -> Callable[[random.Random, Operands], str]:
    """Write the question with one of the templates. `{0}` and `{1}` are the operands in sampling order."""

    def ask(rng: random.Random, operands: Operands) -> str:
        return rng.choice(templates).format(*operands)

    return ask


def _either_order(*templates: str) -> Callable[[random.Random, Operands], str]:
    """Write the question with the operands in either order, for commutative kinds. The canonical order must not
    show."""

    def ask(rng: random.Random, operands: Operands) -> str:
        return rng.choice(templates).format(*rng.sample(operands, 2))

    return ask


def _pair(rng: random.Random, node: ChatTasks) -> Operands:
    """Two numbers, the larger one first, at least one of them at most `max_addend`."""
    return tuple(sorted((rng.randint(0, node.max_number), rng.randint(0, node.max_addend)), reverse=True))


def _unequal_pair(rng: random.Random, node: ChatTasks) -> Operands:
    return tuple(sorted(rng.sample(range(node.max_number + 1), 2), reverse=True))


def _letters(rng: random.Random, node: ChatTasks) -> Operands:
    return ("".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=rng.randint(2, node.max_length))),)


def _digits(rng: random.Random, node: ChatTasks) -> Operands:
    return ("".join(rng.choices("0123456789", k=rng.randint(2, node.max_length))),)


KINDS: dict[str, _Kind] = {
    "add": _Kind(
        _pair,
        _either_order("What is {0} + {1}?", "Add {0} and {1}.", "{0} plus {1}", "Find the sum of {0} and {1}."),
        lambda x: str(int(x[0]) + int(x[1])),
    ),
    "subtract": _Kind(
        _pair,
        _phrases("What is {0} - {1}?", "Subtract {1} from {0}.", "{0} minus {1}", "Take {1} away from {0}."),
        lambda x: str(int(x[0]) - int(x[1])),
    ),
    "larger": _Kind(
        _unequal_pair,
        _either_order("Which is larger, {0} or {1}?", "Give the larger of {0} and {1}.", "Larger number: {0} or {1}"),
        lambda x: str(x[0]),
    ),
    "reverse": _Kind(
        _letters,
        _phrases(
            "Reverse {0}.",
            "What is {0} in reverse?",
            "Write {0} backwards.",
            "Spell {0} from the last letter to the first.",
        ),
        lambda x: str(x[0])[::-1],
    ),
    "last_letter": _Kind(
        _letters,
        _phrases("What is the last letter of {0}?", "Give the last letter of {0}.", "{0} ends in which letter?"),
        lambda x: str(x[0])[-1],
    ),
    "count_letters": _Kind(
        _letters,
        _phrases("How many letters are in {0}?", "Count the letters of {0}.", "What is the number of letters in {0}?"),
        lambda x: str(len(str(x[0]))),
    ),
    "sort_digits": _Kind(
        _digits,
        _phrases("Sort the digits of {0}.", "Write the digits of {0} in order.", "Put the digits {0} in order."),
        lambda x: "".join(sorted(str(x[0]))),
    ),
    "repeat": _Kind(
        _letters,
        _phrases("Repeat {0}.", "Say {0} again.", "Write {0} once more."),
        lambda x: str(x[0]),
    ),
}
