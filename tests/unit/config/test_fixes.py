"""What of a fix can be pasted, and that the suite's watch notices one that cannot."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from automodel_cli.config import fixes
from automodel_cli.config.check import check
from automodel_cli.config.compose import compose
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.problems import Problem
from tests.pasted import Watch


@pytest.mark.parametrize(
    ("text", "kinds", "label"),
    [
        ("mesh.dp_size=2, or start 8 ranks", ["overrides", "words"], "fix"),
        ("mesh.pp_size=2 pipeline=1f1b", ["overrides"], "fix"),
        ("'data.columns={prompt: question}'", ["overrides"], "fix"),
        ("mesh.pp_size=1 (one of [1, 3])", ["overrides"], "fix"),
        ("-c quickstart   (bundled)", ["command"], "fix"),
        ("pip install peft", ["command"], "fix"),
        ("start the server, or set rollout.engine.url", ["words", "words"], "try"),
        ("model.pretrained=<a folder>", ["words"], "try"),
        ("optimizer.lr=VALUE", ["words"], "try"),
    ],
)
def test_what_can_be_pasted(text: str, kinds: list[str], label: str) -> None:
    assert [fixes.kind(part) for part in fixes.alternatives(text)] == kinds
    assert str(ConfigError("x", fix=text)) == f"x\n  {label}   {text}"


def test_keys_are_placed_and_words_are_left_alone() -> None:
    text = "'a=\"x y=1\"' b.c=2, or keep d"
    assert fixes.map_keys(text, lambda key: f"s.{key}") == "'s.a=\"x y=1\"' s.b.c=2, or keep d"


@pytest.mark.parametrize(
    ("fix", "complaint"),
    [
        ("train.max_stepz=1", "is refused: unknown key train.max_stepz"),
        ("train.max_steps=0", "does not help"),
        ("optimizer=adma", "cannot be pasted"),
        ("train.max_steps=1", None),
    ],
)
def test_the_watch_notices_a_fix_that_does_not_work(fix: str, complaint: str | None) -> None:
    found = Watch()

    composed = compose("quickstart", ["train.max_steps=0"])

    def refuse(problems: list[Problem]) -> ConfigError:
        changed = [dataclasses.replace(problem, fix=fix) for problem in problems]
        found.refused(composed, changed, sys._getframe(1))
        return ConfigError("refused")

    object.__setattr__(composed, "error", refuse)
    with pytest.raises(ConfigError):
        check(composed)
    assert (complaint is None) == (not found.complaints)
    assert complaint is None or any(complaint in text for text in found.complaints)
