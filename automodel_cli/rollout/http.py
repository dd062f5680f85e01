"""JSON over HTTP to a server: time limits, retries and error messages."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPMessage
from typing import IO, Any
from urllib.parse import urlsplit

from automodel_cli.config.errors import RunError

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_MAX_DELAY = 30.0
_MOST_BYTES = 1 << 30
"""Maximum size of a response. The largest are routed experts of each token of a batch (`rollout.replay_routing`)."""


class ServerError(RunError):
    """Error of a server. `status` is the HTTP status, or None if there was no response in time."""

    status: int | None = None
    code = "server_rejected"

    @property
    def is_busy_or_gone(self) -> bool:
        """Whether the server did not respond or was busy, as opposed to rejecting the request."""
        return self.status is None or self.status in _RETRIED


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows no redirect to another host, port or scheme: urllib would send the key along."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            raise urllib.error.HTTPError(newurl, code, f"redirects to {newurl}", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Connection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        _open.sockets.append(self.sock)


class _TlsConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        _open.sockets.append(self.sock)


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_TlsConnection, req)


_open = threading.local()
"""`sockets` of the request that a thread waits for."""
_OPENER = urllib.request.build_opener(_SameHost, _Http, _Https)


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Limit the time of a complete request. A socket timeout restarts with each byte. Raises TimeoutError."""
    sockets: list[socket.socket] = []
    _open.sockets = sockets
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        for opened in sockets:
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        # The socket timeout has the same value and may expire first. urllib wraps it while connecting.
        if not expired.is_set() and not isinstance(getattr(error, "reason", error), TimeoutError):
            raise
        raise TimeoutError(f"no complete response within {seconds:g} s") from error
    finally:
        timer.cancel()
    if expired.is_set():  # the response may be incomplete
        raise TimeoutError(f"no complete response within {seconds:g} s")


def _read(answer: http.client.HTTPResponse) -> bytes:
    """Read the complete response, up to `_MOST_BYTES`."""
    parts, size = [], 0
    while part := answer.read1(1 << 20):
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            raise OverflowError(f"the response has more than {_MOST_BYTES:,} bytes")
    return b"".join(parts)


def _beginning(error: urllib.error.HTTPError) -> str:
    """Return the beginning of an error response. It may arrive slowly, or not at all."""
    try:
        answer: Any = error.fp
        text: str = answer.read1(2000).decode(errors="replace")
        return text[:500]
    except (OSError, http.client.HTTPException, ValueError, AttributeError):
        return ""


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
    """Config key of the address, for errors."""
    advice: str | None = None
    """Fix if the server does not respond. None: start it, or set another address."""

    def get(self, path: str) -> Any:
        return self.request("GET", path, None)

    def post(self, path: str, body: dict[str, object] | None = None) -> Any:
        return self.request("POST", path, body or {})

    def request(self, method: str, path: str, body: dict[str, object] | None, *, retries: int | None = None) -> Any:
        """Return the JSON of the response, or None if it is empty.

        Raises ServerError with the request, the response and the number of attempts.
        """
        retries = self.retries if retries is None else retries
        for attempt in range(retries + 1):
            try:
                return self._once(method, path, body)
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {error.reason}: {_beginning(error)}"
                if error.code not in _RETRIED:
                    raise self._failed("server_rejected", method, path, reason, attempt, error.code) from error
                last: Exception = error
            except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
                reason, last = str(getattr(error, "reason", error)) or type(error).__name__, error
            except (ValueError, RecursionError, OverflowError) as error:
                raise self._failed("invalid_response", method, path, f"invalid JSON: {error}", attempt) from error
            if attempt < retries:
                time.sleep(min(self.backoff * 2**attempt, _MAX_DELAY) * random.uniform(0.5, 1.0))
        status = getattr(last, "code", None)
        raise self._failed("server_unreachable", method, path, reason, retries, status) from last

    def _once(self, method: str, path: str, body: dict[str, object] | None) -> object:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data, headers, method=method)
        with _within(self.timeout), _OPENER.open(request, timeout=self.timeout) as answer:
            content = _read(answer)
        return json.loads(content) if content.strip() else None

    def _failed(
        self, code: str, method: str, path: str, reason: str, attempt: int, status: int | None = None
    ) -> ServerError:
        tries = "" if attempt == 0 else f" ({attempt + 1} tries)"
        failed = ServerError(
            f"{method} {self.url.rstrip('/')}{path} failed{tries}: {reason}",
            code=code,
            keys=(self.setting,),
            fix=self.advice or f"start the server, or set {self.setting}",
        )
        failed.status = status
        return failed
