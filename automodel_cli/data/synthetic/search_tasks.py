"""Questions made in code, with the profile that answers each of them. Torch-free."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_minimums
from automodel_cli.data.json_reader import Row
from automodel_cli.data.synthetic.chat_tasks import Split

_VERSION = 1
"""Part of every cache key. Raise it when the same node would produce other rows."""
_JOBS = {
    "baker": "makes bread",
    "doctor": "heals people",
    "farmer": "grows corn",
    "pilot": "flies planes",
    "singer": "sings songs",
    "tailor": "sews coats",
    "teacher": "runs a school",
    "writer": "prints books",
    "painter": "colors walls",
    "plumber": "mends pipes",
    "gardener": "plants trees",
    "fisher": "sells trout",
}
_TOWNS = ("Rome", "Oslo", "Lima", "Cairo", "Paris", "Delhi", "Tokyo", "Quito", "Sofia", "Dakar", "Perth", "Leeds")
_PLEASURES = {"plays chess": "games", "rides a bike": "wheels", "hikes alone": "hills", "cooks soup": "food"}
_NAMES = (
    "Ann",
    "Bob",
    "Cem",
    "Dia",
    "Eva",
    "Fay",
    "Gus",
    "Hal",
    "Ida",
    "Joe",
    "Kim",
    "Leo",
    "Mia",
    "Ned",
    "Ola",
    "Pia",
)


@dataclass(frozen=True)
class SearchTasks:
    """A question names a job, a town and a pleasure. Its passage describes them in other words.

    `query`: `baker from Rome who likes games`. `positive`: `Ann lives in Rome, plays chess and makes bread`.
    `negatives` has one passage that differs in one of the three. Combinations of the validation rows do not occur in
    training.
    """

    num_train: int = 3000
    """Number of training rows."""
    num_validation: int = 128
    """Number of validation rows, at most 288, half of the combinations."""
    seed: int = 0
    """Seed of the rows."""

    def __post_init__(self) -> None:
        check_minimums(self, num_train=1, num_validation=1)
        most = len(_JOBS) * len(_TOWNS) * len(_PLEASURES) // 2
        if self.num_validation > most:
            raise ConfigError(
                f"num_validation={self.num_validation} must be at most {most}, half of the combinations",
                code="out_of_range",
                keys=("num_validation",),
                fix=f"num_validation={most}",
            )

    def rows(self, split: Split) -> Iterator[Row]:
        """Return dicts with `query`, `positive` and `negatives`. Equal nodes return equal rows."""
        rng = random.Random(f"search {self.seed}")
        facts = list(itertools.product(_JOBS, _TOWNS, _PLEASURES))
        rng.shuffle(facts)
        held_out, trained = facts[: self.num_validation], facts[self.num_validation :]
        rng = random.Random(f"search {self.seed} {split}")
        chosen = held_out if split == "validation" else (rng.choice(trained) for _ in range(self.num_train))
        for job, town, pleasure in chosen:
            other = _changed(rng, job, town, pleasure)
            query = f"{job} from {town} who likes {_PLEASURES[pleasure]}"
            yield {"query": query, "positive": _profile(rng, job, town, pleasure), "negatives": [_profile(rng, *other)]}

    def cache_key(self) -> str:
        """Hex digest of everything that decides the rows."""
        text = json.dumps({"class": type(self).__name__, "version": _VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _changed(rng: random.Random, *facts: str) -> list[str]:
    """Return the facts with one of them replaced."""
    place = rng.randrange(3)
    options = (tuple(_JOBS), _TOWNS, tuple(_PLEASURES))[place]
    other = rng.choice([option for option in options if option != facts[place]])
    return [other if i == place else fact for i, fact in enumerate(facts)]


def _profile(rng: random.Random, job: str, town: str, pleasure: str) -> str:
    facts = [f"lives in {town}", _JOBS[job], pleasure]
    rng.shuffle(facts)
    return f"{rng.choice(_NAMES)} {facts[0]}, {facts[1]} and {facts[2]}"
