"""Which release of an engine answers at an address."""

from __future__ import annotations

import re
from typing import Any

from automodel_cli.config.errors import ConfigError
from automodel_cli.rollout.http import Server, ServerError


def check_release(server: Server, path: str, engine: str, oldest: tuple[int, ...], *, start: str) -> dict[str, Any]:
    """What the server answers at `path`, with its `version`. `start`: the command that starts one.

    Raises ConfigError for a release before `oldest`, and for another kind of server. One after those that were tested
    is let through: what it has is found out by using it.
    """
    try:
        answer = server.get(path)
    except ServerError as error:
        if error.status != 404:
            raise
        answer = None
    if not isinstance(answer, dict) or "version" not in answer:
        raise ConfigError(
            f"{server.url} has no {path} with a version, so it is no {engine} server",
            keys=("rollout.engine.url",),
            fix=start,
        )
    version = str(answer["version"])
    found = re.match(r"\.".join([r"(\d+)"] * len(oldest)), version)
    if found is None or tuple(map(int, found.groups())) >= oldest:
        return answer  # a build from source may call itself anything
    text = ".".join(map(str, oldest))
    raise ConfigError(
        f"{server.url} is {engine} {version}, whose weight updates are others than those of {text} and later",
        keys=("rollout.engine.url",),
        fix=f"pip install '{engine.lower()}>={text}'",
    )
