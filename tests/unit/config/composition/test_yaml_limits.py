"""YAML that refers to itself, nests without end or multiplies itself: one sentence with its line, within a second."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from automodel_cli.config.composition.compose import compose
from automodel_cli.config.composition.yaml_limits import MAX_CHARACTERS, MAX_DEPTH, MAX_NODES, too_large
from automodel_cli.config.errors import ConfigError
from tests.errors import assert_error, raises

BEGIN = "defaults: [sft, _self_]\n"
ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)
TEXTS = "a0: xxxxxxxxxx\n" + "".join(f"a{i}: '{f'${{a{i - 1}}}' * 10}'\n" for i in range(1, 20))
SECTIONS = (
    "s: {a0: {x: 1}" + "".join(f", a{i}: {{x: '${{..a{i - 1}}}', y: '${{s.a{i - 1}}}'}}" for i in range(1, 40)) + "}"
)
HOSTILE = {
    "recursive mapping": ("data: &a {path: x, more: *a}", "invalid_yaml", "*a", 2),
    "recursive merge": ("data: &a\n  <<: *a\n", "invalid_yaml", "*a", 3),
    "recursive list": ("x: &a [1, [2, *a]]", "invalid_yaml", "*a", 2),
    "deep flow": (f"data: {'[' * 20_000}{']' * 20_000}", "limit_exceeded", MAX_DEPTH, 2),
    "deep block": ("".join(f"{' ' * i}a:\n" for i in range(600)), "limit_exceeded", MAX_DEPTH, 41),
    "unclosed": (f"data: {'[' * 200_000}", "limit_exceeded", MAX_DEPTH, 2),
    "aliases": (ALIASES, "limit_exceeded", f"{MAX_NODES:,}", 6),
    "texts": (TEXTS, "limit_exceeded", f"a5 expand to more than {MAX_CHARACTERS:,}", 7),
    "sections": (SECTIONS, "limit_exceeded", f"s expand to more than {MAX_CHARACTERS:,}", 2),
    "long": (f"x: [{'1, ' * 400_000}]", "limit_exceeded", f"{1 << 20:,}", 1),
    "a control character": ("x: \0", "invalid_yaml", r"'\x00'", 2),
}


def refused(path: Path, *overrides: str) -> ConfigError:
    began = time.process_time()
    with pytest.raises(ConfigError) as caught:
        compose(path, overrides)
    assert time.process_time() - began < 1
    return caught.value


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("where", ["the file", "a file that it names"])
def test_hostile_yaml_is_named_with_its_line(tmp_path: Path, name: str, where: str) -> None:
    text, code, value, line = HOSTILE[name]
    path = tmp_path / "mine.yaml"
    if where == "the file":
        path.write_text(BEGIN + text)
    else:
        (tmp_path / "part.yaml").write_text("\n" + text)
        path.write_text("defaults: [part, _self_]\n")
    error = refused(path)
    assert_error(error, code, values=(value,))
    hidden = "part" if where != "the file" else "mine"
    assert f"{hidden}.yaml:{line}" in error.origin


def test_text_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(BEGIN.encode() + b"run_name: caf\xe9\n")
    error = refused(path)
    assert_error(error, "invalid_yaml", values=("mine.yaml", "UTF-8"))
    assert error.origin.endswith("mine.yaml:2")
    assert error.fix.startswith("iconv -f latin1 -t utf-8 ")


def test_a_command_line_value_that_nests_without_end_is_refused() -> None:
    assert_error(refused("quickstart", f"data={'[' * 3000}{']' * 3000}"), "limit_exceeded", values=(3000,))


def test_ordinary_interpolations_are_counted_as_what_they_expand_to() -> None:
    """Relative ones, lists, words that only look like keys, and circles, which the resolution names by itself."""
    tree = {"a": {"b": "x" * 600_000, "c": ["${..b}", "${.0}"]}, "again": "a ${a.c[1]} b"}
    assert too_large(tree) == "a", "three times 600,000"
    tree["a"]["c"] = []
    assert too_large(tree) is None
    assert too_large({"x": "${y}", "y": "${x}", "z": "${oc.env:HOME}"}) is None


def test_every_bundled_config_is_far_below() -> None:
    from automodel_cli.config.composition import bundled_recipes

    largest = max(len(path.read_bytes()) for path in bundled_recipes.conf_dir().rglob("*.yaml"))
    assert largest * 50 < 1 << 20


def test_defaults_lists_that_double_are_refused(tmp_path: Path) -> None:
    """Two files on each of 40 levels, each of which names both of the next: 2**40 in all."""
    for level in range(40):
        for name in "ab":
            (tmp_path / f"{name}{level}.yaml").write_text(f"defaults: [a{level + 1}, b{level + 1}]\n")
    for name in "ab":
        (tmp_path / f"{name}40.yaml").write_text("x: 1\n")
    began = time.monotonic()
    with raises(ConfigError, "limit_exceeded", keys=("defaults",), values=("3,000",)):
        compose(tmp_path / "a0.yaml")
    assert time.monotonic() - began < 30
