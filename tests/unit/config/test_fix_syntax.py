"""What of a fix can be pasted, and that the suite's watch notices one that cannot."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from automodel_cli.config import fix_syntax
from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.diagnostics import Problem
from automodel_cli.config.errors import ConfigError
from tests.pasted import Watch


@pytest.mark.parametrize(
    ("text", "kinds", "label"),
    [
        ("mesh.dp_size=2, or start 8 ranks", ["overrides", "words"], "fix"),
        ("mesh.pp_size=2 pipeline=1f1b", ["overrides"], "fix"),
        ("'data.column_mapping={prompt: question}'", ["overrides"], "fix"),
        ("mesh.pp_size=1 (one of [1, 3])", ["overrides"], "fix"),
        ("-c quickstart   (bundled)", ["command"], "fix"),
        ("pip install peft", ["command"], "fix"),
        ("start the server, or set rollout.engine.url", ["words", "words"], "try"),
        ("model.pretrained=<a folder>", ["words"], "try"),
        ("optimizer.lr=VALUE", ["words"], "try"),
        ("~objective.loss, or objective=dpo", ["overrides", "overrides"], "fix"),
    ],
)
def test_what_can_be_pasted(text: str, kinds: list[str], label: str) -> None:
    assert [fix_syntax.kind(part) for part in fix_syntax.alternatives(text)] == kinds
    assert str(ConfigError("x", fix=text)) == f"x\n  {label}   {text}"


def test_keys_are_placed_and_words_are_left_alone() -> None:
    text = "'a=\"x y=1\"' b.c=2, or keep d"
    assert fix_syntax.map_keys(text, lambda key: f"s.{key}") == "'s.a=\"x y=1\"' s.b.c=2, or keep d"
    assert fix_syntax.map_keys("~a", lambda key: f"s.{key}") == "~s.a"


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
        check_config(composed)
    assert (complaint is None) == (not found.complaints)
    assert complaint is None or any(complaint in text for text in found.complaints)


NASTY = ("a b", "it's", 'say "hi"', "$HOME", "a;b", "back\\slash", "plain-1.0/x_y")


@pytest.mark.parametrize("text", NASTY)
def test_a_word_and_an_override_arrive_as_they_are(text: str) -> None:
    """Through a real shell, and through the grammar of overrides."""
    done = subprocess.run(
        ["sh", "-c", f"printf %s {fix_syntax.word(text)}"], capture_output=True, text=True, check=True
    )
    assert done.stdout == text
    argument = subprocess.run(
        ["sh", "-c", f"printf %s {fix_syntax.override('run_name', text)}"], capture_output=True, text=True
    )
    assert compose("sft", [argument.stdout]).tree["run_name"] == text


def test_every_path_in_a_command_is_one_word() -> None:
    """What is put into the text of a command is quoted: `{word(path)}`, not `{path}`."""
    of_runs = r"automodel (?:resume|export|chat|report|runs \w+|import-config|recipes cp|eval|check -c|finetune llm -c)"
    pattern = re.compile(rf"(?:{of_runs}|chmod u\+r|mv|rm -r) \{{(?!word\()(?!near\[0\])[^{{}}]+\}}")
    root = Path(fix_syntax.__file__).parents[2]
    files = [file for folder in ("automodel_cli", "recipes") for file in (root / folder).rglob("*.py")]
    found = [f"{file.relative_to(root)}: {match[0]}" for file in files for match in pattern.finditer(file.read_text())]
    assert found == []
