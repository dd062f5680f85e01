"""`sweep --optuna`: what is proposed, against Hydra's grammar and a function whose minimum is known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from automodel_cli.cli.optuna_sweep import Search, axes, corners
from automodel_cli.config.errors import ConfigError
from tests.errors import raises

SPACE = ["optimizer.lr=tag(log, interval(1e-5, 1e-1))", "optimizer=adamw,muon", "seed=range(0,10,3)", "train.x=2"]


def test_the_space_is_what_hydras_grammar_says() -> None:
    found, fixed = axes([*SPACE, "n=tag(int, interval(1,8))", "s=shuffle(range(3))"])
    assert fixed == ["train.x=2"]
    lr, optimizer, seed, n, shuffled = found
    assert (lr.key, lr.low, lr.high, lr.log, lr.whole) == ("optimizer.lr", 1e-5, 1e-1, True, False)
    assert (optimizer.values, optimizer.ordered) == (("adamw", "muon"), False)
    assert (seed.values, seed.ordered) == (("0", "3", "6", "9"), True)
    assert (n.whole, n.log, n.text(3.0)) == (True, False, "3") and not shuffled.ordered
    assert corners([lr, optimizer, seed]) == [
        ["optimizer.lr=1e-05", "optimizer=adamw", "seed=0"],
        ["optimizer.lr=0.1", "optimizer=muon", "seed=9"],
    ]


@pytest.mark.parametrize(
    ("words", "code", "values"),
    [
        (["seed=1"], "empty_value", ()),
        (["x=glob(*)"], "invalid_override", ("x=glob(*)",)),
        (["x=interval(2,1)"], "invalid_override", ("x=interval(2,1)",)),
        (["x=tag(log, interval(0,1))"], "invalid_override", ("x=tag(log, interval(0,1))",)),
        (["x=interval(a,b)"], "invalid_override", ()),
    ],
)
def test_what_is_no_space_is_refused(words: list[str], code: str, values: tuple[str, ...]) -> None:
    with raises(ConfigError, code, values=values):
        axes(words)


def worth(words: list[str]) -> float:
    """Least, 0, at lr=1e-3, muon, seed=6."""
    lr, optimizer, seed = (word.partition("=")[2] for word in words)
    return (math.log10(float(lr)) + 3) ** 2 + 0.5 * (optimizer == "adamw") + 0.01 * (int(seed) - 6) ** 2


def search(folder: Path, num_trials: int) -> Search:
    pytest.importorskip("optuna")
    folder.mkdir(exist_ok=True)
    return Search(folder, axes(SPACE)[0], num_trials, maximize=False)


def test_a_search_comes_nearer_to_the_best_than_chance_does(tmp_path: Path) -> None:
    found = search(tmp_path / "s", 30)
    assert found.run(lambda number, words: 0, lambda number, words: worth(words)) == 0
    values = [worth(words) for words in found.trials()]
    assert len(values) == 30 and min(values[10:]) < 0.2
    assert sum(values[20:]) < 0.7 * sum(values[:10])


def test_a_search_that_was_interrupted_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = search(tmp_path / "whole", 9)
    whole.run(lambda number, words: int(number == 2), lambda number, words: worth(words))
    started: list[int] = []

    def start(number: int, words: list[str]) -> int:
        started.append(number)
        if number == 5 and started.count(5) == 1:
            return 130  # Ctrl-C
        return int(number == 2)  # this run fails

    cut = tmp_path / "cut"
    assert search(cut, 9).run(start, lambda number, words: worth(words)) == 130
    again = search(cut, 9)
    assert again.run(start, lambda number, words: worth(words)) == 0
    assert started == [0, 1, 2, 3, 4, 5, 5, 6, 7, 8]
    assert again.trials() == whole.trials() and len(set(map(tuple, whole.trials()))) > 6
