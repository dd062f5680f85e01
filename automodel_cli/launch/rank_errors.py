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
    """Print errors of this context on rank 0 only. For checks of the config and the number of ranks."""
    try:
        yield
    except ConfigError as error:
        _leave_it_to_another(detect().rank > 0, error)
        raise


@contextmanager
def by_one_of_a_host() -> Iterator[None]:
    """Print errors of this context on the first rank of each host. For checks of files, which differ between hosts."""
    try:
        yield
    except ConfigError as error:
        place = detect()
        _leave_it_to_another(place.rank > 0 and place.local_rank > 0, error)
        raise


def _leave_it_to_another(silent: bool, error: ConfigError) -> None:
    """End this process silently if another rank has the same error, and give that rank time to print it."""
    if silent:
        time.sleep(_SECONDS)
        sys.exit(error.exit_code)
