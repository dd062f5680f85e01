"""Shared checks of values: which values pass, and what the error names."""

from types import SimpleNamespace

import pytest

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_choice, check_minimums, check_range, reject_fields, require_package
from tests.errors import raises


@pytest.mark.parametrize(
    "bounds, inside, outside",
    [
        ({"at_least": 1}, (1, 2.5), (0, 0.99, -1)),
        ({"above": 0}, (1e-9, 3), (0, -1)),
        ({"at_least": 0, "at_most": 1}, (0, 0.5, 1), (-0.1, 1.1)),
        ({"above": 0, "below": 1}, (0.5,), (0, 1)),
    ],
)
def test_bounds(bounds, inside, outside):
    for value in (*inside, None):
        check_range("rate", value, **bounds)
    for value in (*outside, float("nan")):
        with pytest.raises(ConfigError) as caught:
            check_range("rate", value, unit="s", note=" (note)", fix="rate=1", **bounds)
        assert (caught.value.code, caught.value.keys, caught.value.fix) == ("out_of_range", ("rate",), "rate=1")
        assert caught.value.message.startswith(f"rate={value} s ")
        assert all(str(bound) in caught.value.message for bound in bounds.values())


def test_choices_do_not_mix_types():
    """1 == True in Python, but not in YAML."""
    for value in ("auto", True, False, None):
        check_choice("mode", value, ("auto", True, False, None))
    for value in ("other", 1, 0, "true"):
        with pytest.raises(ConfigError) as caught:
            check_choice("mode", value, ("auto", True, False, None), fix="mode=auto")
        assert (caught.value.code, caught.value.keys, caught.value.fix) == ("invalid_choice", ("mode",), "mode=auto")
        assert caught.value.message.endswith("auto, true, false, null")


def test_fields_of_nodes():
    node = SimpleNamespace(count=0, limit=None)
    check_minimums(node, count=0, limit=1)
    with pytest.raises(ConfigError) as caught:
        check_minimums(node, limit=1, count=2)
    assert (caught.value.keys, caught.value.fix) == (("count",), "count=2")
    with pytest.raises(ConfigError) as caught:
        reject_fields(node, "no_effect", "have no effect", "count", "limit", fix="count=1")
    assert (caught.value.code, caught.value.keys) == ("no_effect", ("count", "limit"))
    assert "count=0" in caught.value.message
    assert "limit=None" in caught.value.message


def test_packages():
    require_package("json", "this test", install="json")
    with raises(ConfigError, "missing_package", keys=("a.b",), values=("no_such_module",), fix="pip install 'x[y]'"):
        require_package("no_such_module", "this test", install="'x[y]'", keys=("a.b",))
