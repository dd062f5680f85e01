"""Patterns of parameter names: what they select, and how an entry without a match is reported."""

from __future__ import annotations

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import list_override
from automodel_cli.config.parameter_patterns import check_matched, check_syntax, matches

UP, DOWN = "model.layers.3.mlp.up_proj.weight", "model.layers.13.mlp.down_proj.weight"
EMBED = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("pattern", "selected"),
    [
        ("mlp", {UP, DOWN}),
        ("layers.*.mlp.up_proj", {UP}),
        ("layers.3", {UP}),
        ("layers.[0-9]", {UP}),
        ("layers.1?", {DOWN}),
        ("*embed*", {EMBED}),
        ("up", set()),
        ("model.mlp", set()),
        (r"re:model\.layers\.(3|13)\.", {UP, DOWN}),
        ("re:mlp", set()),
    ],
)
def test_a_pattern_selects_consecutive_parts_or_a_regular_expression_from_the_start(pattern, selected):
    assert {name for name in (UP, DOWN, EMBED) if matches(pattern, name)} == selected


def test_an_entry_without_a_parameter_is_refused_with_the_nearest_that_has_one():
    with pytest.raises(ConfigError) as refusal:
        check_matched("train.freeze", ["layers.4", "embed_token", "mlp"], {UP, DOWN, EMBED})
    assert refusal.value.code == "unknown_name" and refusal.value.keys == ("train.freeze",)
    assert shlex.split(refusal.value.fix)[0] == "train.freeze=[layers.3,embed_tokens,mlp]"


@pytest.mark.parametrize("pattern", ["", ".", "re:("])
def test_a_pattern_that_can_never_match_is_refused(pattern):
    with pytest.raises(ConfigError) as refusal:
        check_syntax("train.freeze", ["mlp", pattern])
    assert refusal.value.code == "invalid_value" and refusal.value.fix == "'train.freeze=[mlp]'"


@pytest.mark.parametrize(
    "value", ["layers.*.mlp", "layers.[0-3]", r"re:model\.(?:1[6-9]|2)$", 're:a"b', 're:a\\"b', "a b"]
)
def test_a_list_survives_the_shell_and_the_grammar_of_overrides(value):
    (pasted,) = shlex.split(list_override("train.freeze", [value, "x"]))
    parsed = OverridesParser.create().parse_override(pasted).value()
    assert [getattr(entry, "text", entry) for entry in parsed] == [value, "x"]
