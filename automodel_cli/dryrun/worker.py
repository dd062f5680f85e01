"""`python -m automodel_cli.dryrun.worker`: trace one rank. Reads a `Request` from stdin, writes a result as its last
line of standard output. A process of its own, because what makes tensors fake is never undone."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, cast

from automodel_cli.config.errors import ConfigError
from automodel_cli.dryrun.types import TraceRequest

if TYPE_CHECKING:
    from automodel_cli.run.recipe import Recipe


def main() -> int:
    """0 with a result; 1 with what the step failed with; 2 with a ConfigError."""
    request = TraceRequest.from_json(sys.stdin.read())
    try:
        from automodel_cli.dryrun.trace_rank import trace

        answer: dict[str, object] = {"result": trace(load(request), request).to_dict()}
    except ConfigError as error:
        answer = {
            "refused": {
                "code": error.code,
                "message": error.message,
                "keys": list(error.keys),
                "origin": error.origin,
                "fix": error.fix,
            }
        }
    except Exception as error:
        from automodel_cli.dryrun.trace_errors import described

        answer = {"failed": described(error)}
    print(json.dumps(answer), flush=True)
    return 0 if "result" in answer else 1


def load(request: TraceRequest) -> Recipe:
    """The checked recipe, as the command found it."""
    from automodel_cli.config.check import check_config
    from automodel_cli.config.composition.compose import compose
    from automodel_cli.config.security.trust import Trust

    trust = Trust(frozenset(request.trust_words), request.trust_packages)
    return cast("Recipe", check_config(compose(request.conf, request.overrides), trust, []))


if __name__ == "__main__":
    sys.exit(main())
