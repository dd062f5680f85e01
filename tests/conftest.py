"""What holds for every test: a fix that is offered for pasting works."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from tests.pasted import watch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported, in the ranks' server too


@pytest.fixture(autouse=True)
def every_fix_works_when_pasted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test whose errors offer a fix that does not parse, names no key, or does not help."""
    with watch() as found:
        yield
    assert not found.complaints, "\n".join(found.complaints)


_LONG = ("test_tutorials.py", "test_quickstarts.py", "test_composed_recipes.py")
"""Files of which a single test takes a minute or more."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files begin first: begun last, one keeps a core busy while the other one has nothing left to do."""
    items.sort(key=lambda item: item.path.name not in _LONG)


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: no later collection of garbage walks it."""
    gc.freeze()
