"""Print an error that all ranks of a host raise only once."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from automodel_cli.config.errors import ConfigError
from automodel_cli.launch.process_context import detect

_SECONDS = 2.0


@contextmanager
def by_rank_0() -> Iterator[None]:
    """Let rank 0 alone print what is refused in here, by rules that read the config and the number of ranks only."""
    try:
        yield
    except ConfigError as error:
        _leave_it_to_another(detect().rank > 0, error)
        raise


@contextmanager
def by_one_of_a_host() -> Iterator[None]:
    """Let the first rank of each host print what is refused in here: what lies on a disk differs between hosts only."""
    try:
        yield
    except ConfigError as error:
        place = detect()
        _leave_it_to_another(place.rank > 0 and place.local_rank > 0, error)
        raise


def _leave_it_to_another(silent: bool, error: ConfigError) -> None:
    """End this process without a word where another rank has the same error, and give that one the time to print."""
    if silent:
        time.sleep(_SECONDS)
        sys.exit(error.exit_code)
