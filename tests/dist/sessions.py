"""A real run inside a forked rank: what the command line would do, without the seconds that a new process costs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from automodel_cli.config.check import check
from automodel_cli.config.compose import compose
from automodel_cli.config.trust import Trust
from automodel_cli.launch import stop


@contextmanager
def session(
    folder: Path, config: str, *overrides: str, run: str | None = None, trust: tuple[str, ...] = ()
) -> Iterator[Any]:
    """The session of `config` (YAML text) with its cache and runs below `folder`; `run` is the name of one to resume,
    `trust` are packages that lie in `folder`.

    Call it in a function for `launch(..., process_group=False)`.
    """
    from automodel_cli.run.session import open_session

    os.chdir(folder)
    os.environ["AUTOMODEL_CACHE"] = str(folder / "cache")
    path = folder / "config.yaml"
    path.write_text(config)
    composed = compose(path, overrides, run_dir=folder / "runs" / run if run else None)
    stop.install()
    with open_session(check(composed, Trust(packages=trust)), composed) as opened:
        yield opened
