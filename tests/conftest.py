"""What holds for every test: a fix that is offered for pasting works."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported, in the ranks' server too
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: workers and ranks share the cores

import pytest

from tests.pasted import watch

_BYTES_PER_WORKER = 2 * 1024**3


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of parallel workers: none for up to three files, else one more than the machine has cores.

    Many tests wait for other processes, so one worker more than cores keeps all cores busy. A worker with its ranks
    takes up to 2 GiB.
    """
    if len(config.args) <= 3 and all(".py" in argument for argument in config.args):
        return 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)) + 1, memory // _BYTES_PER_WORKER))


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


_LONG = (
    "test_tutorials.py",
    "test_quickstarts.py",
    "test_recipes.py",
    "test_composed_recipes.py",
    "test_slurm.py",
    "test_local.py",
)
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


def pytest_unconfigure() -> None:
    """Unfreeze, because extension modules report frozen objects as leaks."""
    gc.unfreeze()
