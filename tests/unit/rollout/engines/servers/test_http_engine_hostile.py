"""Servers that answer without end, slowly, with too much, or with a redirect to somebody else."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from automodel_cli.rollout import http
from automodel_cli.rollout.http import Server, ServerError
from tests.errors import raises

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
Answer = Callable[[socket.socket], None]


class Listener:
    """A server whose answer is a function of its socket; `requests` are what it has read."""

    def __init__(self, answer: Answer):
        self.requests: list[bytes] = []
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        with connection:
            self.requests.append(connection.recv(65536))
            try:
                self._answer(connection)
            except OSError:
                return

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def listen() -> Iterator[Callable[[Answer], Listener]]:
    made: list[Listener] = []

    def make(answer: Answer) -> Listener:
        made.append(Listener(answer))
        return made[-1]

    yield make
    for listener in made:
        listener.close()


def drips(first: bytes, again: bytes) -> Answer:
    def answer(connection: socket.socket) -> None:
        connection.sendall(first)
        while True:
            connection.sendall(again)
            time.sleep(0.05)

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        drips(OK + b"\r\n", b" "),
        drips(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        drips(OK, b"x"),
        drips(b"", b"H"),
        drips(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        drips(b"HTTP/1.1 500 No\r\nContent-Length: 100\r\n\r\n", b""),
        drips(OK + b"Content-Length: 100\r\n\r\n{}", b""),
    ],
    ids=["body", "chunks", "headers", "status", "continue", "refusal", "cut"],
)
def test_an_answer_without_end_is_ended(listen: Callable[[Answer], Listener], answer: Answer) -> None:
    began = time.monotonic()
    with pytest.raises(ServerError) as error:
        Server(listen(answer).url, timeout=0.5, retries=0).get("/x")
    assert time.monotonic() - began < 10 and error.value.status in (None, 500)
    assert error.value.is_busy_or_gone


def test_an_answer_beyond_memory_is_ended(
    listen: Callable[[Answer], Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_MOST_BYTES", 1 << 22)
    listener = listen(drips(OK + b"\r\n", b" " * (1 << 20)))
    with raises(ServerError, "invalid_response", values=("4,194,304",)):
        Server(listener.url, timeout=60, retries=3).get("/x")
    assert len(listener.requests) == 1, "it would be as long again"


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe{", b"1" * 5000, b"{"])
def test_what_is_no_json_is_said(listen: Callable[[Answer], Listener], content: bytes) -> None:
    listener = listen(lambda connection: connection.sendall(OK + b"\r\n" + content))
    with raises(ServerError, "invalid_response"):
        Server(listener.url, timeout=10, retries=3).get("/x")
    assert len(listener.requests) == 1


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_key_goes_to_no_other_host(listen: Callable[[Answer], Listener], code: int) -> None:
    other = listen(lambda connection: connection.sendall(OK + b"\r\n{}"))
    to = f"HTTP/1.1 {code} Moved\r\nLocation: {other.url}/x\r\nContent-Length: 0\r\n\r\n".encode()
    listener = listen(lambda connection: connection.sendall(to))
    with raises(ServerError, "server_rejected", values=(f"{other.url}/x",)):
        Server(listener.url, timeout=10, retries=0, api_key="sk-secret").get("/x")
    assert b"Bearer sk-secret" in listener.requests[0] and not other.requests


def test_a_redirect_of_the_same_host_is_followed(listen: Callable[[Answer], Listener]) -> None:
    def answer(connection: socket.socket) -> None:
        if len(listener.requests) == 1:
            connection.sendall(b"HTTP/1.1 307 Moved\r\nLocation: /y\r\nContent-Length: 0\r\n\r\n")
        else:
            connection.sendall(OK + b"\r\n" + json.dumps([1]).encode())

    listener = listen(answer)
    assert Server(listener.url, timeout=10, retries=0, api_key="k").get("/x") == [1]
    assert b"GET /y" in listener.requests[1] and b"Bearer k" in listener.requests[1]
