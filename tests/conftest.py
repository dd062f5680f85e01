"""What holds for every test: a fix that is offered for pasting works."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pasted import watch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported, in the ranks' server too

# A shell's `&` and `nohup` leave these ignored, and a run that inherits that does not hear them.
for _signum, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, _handler)


@pytest.fixture(autouse=True)
def every_fix_works_when_pasted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test whose errors offer a fix that does not parse, names no key, or does not help."""
    with watch() as found:
        yield
    assert not found.complaints, "\n".join(found.complaints)


_LONG = ("test_tutorials.py", "test_quickstarts.py", "test_composed_recipes.py", "test_slurm.py", "test_local.py")
"""Files that take a minute or more."""
_TAKE_TURNS = ("dist", "e2e", "unit/rollout")
"""Folders whose files keep cores busy, and two whose files wait for processes and servers most of the time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order in which parallel workers take files: so that no core waits for work.

    The longest ones begin first: begun last, one keeps a core busy while the others have nothing left to do. Then those
    that compute and those that wait alternate.
    """
    place: dict[Path, float] = {}
    for folder in _TAKE_TURNS:
        files = dict.fromkeys(item.path for item in items if item.path.is_relative_to(Path(__file__).parent / folder))
        place |= {path: number / len(files) for number, path in enumerate(files)}
    items.sort(key=lambda item: (item.path.name not in _LONG, place.get(item.path, 1.0)))


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: no later collection of garbage walks it."""
    gc.freeze()
