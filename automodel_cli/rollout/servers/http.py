"""JSON over HTTP to a generation server: time limits, retries, errors that say which server and what it answered."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from automodel_cli.config.errors import RunError

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_MAX_DELAY = 30.0


class ServerError(RunError):
    """What a server refused: `status` is HTTP's number, None where nothing answered in time."""

    status: int | None = None

    @property
    def is_busy_or_gone(self) -> bool:
        """Whether the server could not answer, as against one that answered with a refusal."""
        return self.status is None or self.status in _RETRIED


@dataclass(frozen=True)
class Server:
    """`url` without a path (`http://localhost:8000`). A request that finds the server busy, starting or gone is sent
    again up to `retries` times, after `backoff` seconds, then twice that, and so on (with jitter, at most 30 s)."""

    url: str
    timeout: float = 600.0
    retries: int = 4
    backoff: float = 0.5
    api_key: str | None = None
    setting: str = "rollout.engine.url"
    """What in the config says the address; errors name it."""
    advice: str | None = None
    """What to do where nothing answers; None: start it, or say another address."""

    def get(self, path: str) -> Any:
        return self.request("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self.request("POST", path, body or {})

    def request(self, method: str, path: str, body: dict[str, Any] | None, *, retries: int | None = None) -> Any:
        """The JSON that the server answers, None for an empty answer.

        Raises ServerError: what was asked, what came back, how often it was tried.
        """
        retries = self.retries if retries is None else retries
        for attempt in range(retries + 1):
            try:
                return self._once(method, path, body)
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {error.reason}: {error.read().decode(errors='replace')[:500]}"
                if error.code not in _RETRIED:
                    raise self._failed(method, path, reason, attempt, error.code) from error
                last: Exception = error
            except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
                reason, last = str(getattr(error, "reason", error)) or type(error).__name__, error
            except json.JSONDecodeError as error:
                raise self._failed(method, path, f"no JSON: {error}", attempt) from error
            if attempt < retries:
                time.sleep(min(self.backoff * 2**attempt, _MAX_DELAY) * random.uniform(0.5, 1.0))
        raise self._failed(method, path, reason, retries, getattr(last, "code", None)) from last

    def _once(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=self.timeout) as answer:
            content = answer.read()
        return json.loads(content) if content.strip() else None

    def _failed(self, method: str, path: str, reason: str, attempt: int, status: int | None = None) -> ServerError:
        tries = "" if attempt == 0 else f" ({attempt + 1} tries)"
        failed = ServerError(
            f"{method} {self.url.rstrip('/')}{path} failed{tries}: {reason}",
            keys=(self.setting,),
            fix=self.advice or f"start the server, or set {self.setting}",
        )
        failed.status = status
        return failed
