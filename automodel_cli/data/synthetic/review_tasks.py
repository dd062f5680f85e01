"""Short reviews made in code, with their sentiment. Torch-free."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from automodel_cli.config.value_checks import check_minimums
from automodel_cli.data.json_reader import Row
from automodel_cli.data.synthetic.chat_tasks import Split

_VERSION = 1
"""Part of every cache key. Raise it when the same node would produce other rows."""
_THINGS = ("food", "room", "staff", "view", "music", "price", "wine", "bed", "soup", "tour")
_GOOD = ("good", "great", "fine", "nice", "lovely", "superb")
_BAD = ("bad", "poor", "awful", "dull", "dirty", "slow")
_DEGREES = ("", "very ", "quite ", "really ")
LABELS = ("negative", "mixed", "positive")


@dataclass(frozen=True)
class ReviewTasks:
    """Reviews of two clauses. `label` is positive or negative if both clauses agree, else mixed.

    A clause names a thing and a word of praise or blame, which `not` reverses: `the soup was not bad and the view was
    really superb`. No validation text occurs in training.
    """

    num_train: int = 3000
    """Number of training rows."""
    num_validation: int = 256
    """Number of validation rows."""
    seed: int = 0
    """Seed of the rows."""

    def __post_init__(self) -> None:
        check_minimums(self, num_train=1, num_validation=1)

    def rows(self, split: Split) -> Iterator[Row]:
        """Return dicts with `text` and `label`. Equal nodes return equal rows."""
        rng = random.Random(f"reviews {self.seed}")
        held_out = dict(_review(rng) for _ in range(self.num_validation))
        if split == "validation":
            yield from ({"text": text, "label": label} for text, label in held_out.items())
            return
        made = 0
        while made < self.num_train:
            text, label = _review(rng)
            if text not in held_out:
                made += 1
                yield {"text": text, "label": label}

    def cache_key(self) -> str:
        """Hex digest of everything that decides the rows."""
        text = json.dumps({"class": type(self).__name__, "version": _VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _review(rng: random.Random) -> tuple[str, str]:
    first, second = rng.sample(_THINGS, 2)
    wanted = rng.choice(LABELS)
    liked = rng.random() < 0.5
    sides = {"positive": (True, True), "negative": (False, False), "mixed": (liked, not liked)}[wanted]
    clauses = [_clause(rng, thing, side) for thing, side in zip((first, second), sides, strict=True)]
    return f" {rng.choice(('and', 'but'))} ".join(clauses), wanted


def _clause(rng: random.Random, thing: str, positive: bool) -> str:
    negated = rng.random() < 0.4
    word = rng.choice(_GOOD if positive != negated else _BAD)
    return f"the {thing} was {'not ' if negated else ''}{rng.choice(_DEGREES)}{word}"
