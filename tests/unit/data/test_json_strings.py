"""Strings of nested JSON values."""

from __future__ import annotations

from automodel_cli.data.json_strings import map_strings, strings_in

VALUE = {"a": ["b", {"c": 1, "d": None}], "e": "f"}


def test_strings_include_keys_which_precede_their_values():
    assert list(strings_in(VALUE)) == ["a", "e", "b", "c", "d", "f"]


def test_every_string_and_key_is_replaced():
    assert map_strings(str.upper, VALUE) == {"A": ["B", {"C": 1, "D": None}], "E": "F"}
