"""Assertions on errors by code, keys, values and fix, so that tests do not depend on the wording of messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import click
import pytest

from automodel_cli.config import fix_syntax
from automodel_cli.config.error_codes import ALL_CODES
from automodel_cli.config.errors import ConfigError
from automodel_cli.data.row_errors import RowError

E = TypeVar("E", bound=ConfigError | RowError)
_CODE = re.compile(r"\[([a-z][a-z_-]+)\]:? ")


@contextmanager
def raises(
    kind: type[E], code: str, *, keys: Sequence[str] = (), values: Sequence[object] = (), fix: str | None = None
) -> Iterator[pytest.ExceptionInfo[E]]:
    """`pytest.raises` for an error with a code. The other arguments are those of `assert_error`::

    with raises(ConfigError, "out_of_range", keys=("train.max_steps",), values=(0,), fix="train.max_steps=1"):
        TrainConfig(max_steps=0)
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert_error(caught.value, code, *keys, values=values, fix=fix)


def assert_error(
    error: ConfigError | RowError | str, code: str, *keys: str, values: Sequence[object] = (), fix: str | None = None
) -> None:
    """Assert that an error, or the output of a command, reports one cause.

    Args:
        error: an exception, or text with `ConfigError [code]: ...`. A list of several errors is searched.
        code: the expected code. Must be registered.
        keys: config keys that the error names. In text they occur in the message, the origin or the fix.
        values: each occurs as a whole word in the text of the error.
        fix: the whole fix, or one of its alternatives. In text, an excerpt of the error.
    """
    assert code in ALL_CODES, f"{code} is not registered"
    if isinstance(error, str) or getattr(error, "problems", ()):
        _assert_text(error if isinstance(error, str) else error.full_text, code, keys, values, fix)
        return
    assert error.code == code, f"code {error.code}, not {code}: {error}"
    missing = set(keys) - set(getattr(error, "keys", ()))
    assert not missing, f"keys {error.keys} lack {missing}: {error}"
    text = str(error)
    for value in values:
        assert _occurs(value, text), f"{value!r} does not occur in: {text}"
    if fix is not None:
        offered = (
            [] if error.fix is None else [error.fix, *fix_syntax.alternatives(error.fix), *error.fix.split(", or ")]
        )
        assert fix in offered, f"{fix!r} is not the fix: {error.fix!r}"


def _assert_text(text: str, code: str, keys: Sequence[str], values: Sequence[object], fix: str | None) -> None:
    text = click.unstyle(text)
    starts = [found.start() for found in _CODE.finditer(text) if found[1] in ALL_CODES]
    blocks = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    # The left column of a list has the file of the next error, and may be the only place of a key.
    same = [block for block in blocks if block.startswith(f"[{code}]")]
    assert same, f"no error with the code {code} in: {text}"
    wanted = [*keys, *values]
    fitting = [b for b in same if all(_occurs(word, b) for word in wanted) and (fix is None or fix in b)]
    assert fitting, f"no error [{code}] with {wanted} and the fix {fix!r} in: {text}"


def _occurs(value: object, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(str(value))}(?!\w)", text) is not None
