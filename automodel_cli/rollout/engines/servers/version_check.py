"""Check the release of a server."""

from __future__ import annotations

import re
from typing import Any

from automodel_cli.config.errors import ConfigError
from automodel_cli.rollout.http import Server, ServerError


def check_release(server: Server, path: str, engine: str, oldest: tuple[int, ...], *, start: str) -> dict[str, Any]:
    """Return the response at `path`, which contains `version`. `start` is the command of a suitable server, for the
    fix.

    Raises ConfigError for a release before `oldest`, and for another kind of server. Newer releases than the tested
    ones are accepted.
    """
    try:
        answer = server.get(path)
    except ServerError as error:
        if error.status != 404:
            raise
        answer = None
    if not isinstance(answer, dict) or "version" not in answer:
        raise ConfigError(
            f"{server.url} is no {engine} server: {path} returns no version",
            code="server_mismatch",
            keys=("rollout.engine.url",),
            fix=start,
        )
    version = str(answer["version"])
    match = re.match(r"\.".join([r"(\d+)"] * len(oldest)), version)
    if match is None or tuple(map(int, match.groups())) >= oldest:
        return answer  # a build from source may call itself anything
    text = ".".join(map(str, oldest))
    raise ConfigError(
        f"{server.url} is {engine} {version}, whose API for weight updates differs. At least {text} is required",
        code="version_mismatch",
        keys=("rollout.engine.url",),
        fix=f"pip install '{engine.lower()}>={text}'",
    )
