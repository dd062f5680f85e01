"""Requests of a weight update, each sent once."""

from __future__ import annotations

import base64
import pickle
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from automodel_cli.config.errors import RunError
from automodel_cli.distributed.device_threads import on_this_device
from automodel_cli.rollout.http import Server

T = TypeVar("T")


def json_safe(update_info: dict[str, object]) -> dict[str, object]:
    """Encode memory handles as base64 pickle, as vLLM's HTTP client does. Other values are unchanged."""
    handles = update_info.get("ipc_handles")
    if handles is None:
        return update_info
    pickled = base64.b64encode(pickle.dumps(handles)).decode("ascii")
    return {**update_info, "ipc_handles": None, "ipc_handles_pickled": pickled}


class UpdateClient:
    """Client that vLLM's trainer engine calls (its `VLLMWeightSyncClient`). An update has many buckets, so start and
    end of an update are separate calls. Every call goes to all `servers`. `workers` are the workers of each, if a
    group is created."""

    def __init__(self, servers: Sequence[Server], watch: Watch, workers: Sequence[int] = ()):
        self._servers, self._watch, self._workers = servers, watch, workers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        infos = [dict(init_info) for _ in self._servers]
        if "rank_offset" in init_info:  # fields of a group; all others are equal for all servers
            for number, info in enumerate(infos):
                # Example: servers with 2 and 4 workers. Their ranks begin at offset and offset + 2.
                info["rank_offset"] += sum(self._workers[:number])
        self._posted("/init_weight_transfer_engine", [{"init_info": info} for info in infos])

    def start_weight_update(self) -> None:
        """Sent once for all buckets."""

    def update_weights(self, update_info: dict[str, object] | list[dict[str, object]]) -> None:
        safe = list(map(json_safe, update_info)) if isinstance(update_info, list) else json_safe(update_info)
        self.each("/update_weights", {"update_info": safe})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Sent once for all buckets."""

    def each(self, path: str, body: dict[str, object]) -> None:
        self._posted(path, [body] * len(self._servers))

    def _posted(self, path: str, bodies: Sequence[dict[str, object]]) -> None:
        posts = [
            begun(partial(posted, server, path, body, self._watch))
            for server, body in zip(self._servers, bodies, strict=True)
        ]
        for post in posts:
            post.result()


class Watch:
    """Runs a call that needs the server, and ends with the first failure of either side, or at the time limit.

    The local side may hang in a collective that the server left. It then stays in its thread, and the run ends.
    """

    def __init__(self, server: Server):
        self._server = server
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def failed(self, error: BaseException) -> None:
        self._ended.put(error)

    def run(self, call: Callable[[], T]) -> T:
        results: list[T] = []

        def ours() -> None:
            try:
                results.append(call())
                self._ended.put(None)
            except BaseException as error:
                self._ended.put(error)

        # A daemon thread, because it may hang in a collective that the server never joins.
        threading.Thread(target=on_this_device(ours), daemon=True).start()
        try:
            # The first entry wins: either the end of the local call, or a failure of a request.
            # Requests have their own limit, with a better message.
            error = self._ended.get(timeout=self._server.timeout + 1)
        except queue.Empty:
            raise RunError(
                f"the weights did not reach {self._server.url} within {self._server.timeout:g} seconds",
                code="weight_update_failed",
                keys=("rollout.engine.timeout",),
                fix="read the log of the server; then automodel resume RUN",
            ) from None
        if error is not None:
            raise error
        return results[0]


def begun(call: Callable[[], None]) -> Future[None]:
    """Run `call` in a thread that does not delay the end of the process, because a server may hang in a broadcast."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            call()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def posted(server: Server, path: str, body: dict[str, object], watch: Watch) -> None:
    """Run `once`, and notify `watch` immediately if it fails."""
    try:
        once(server, path, body)
    except BaseException as error:
        watch.failed(error)
        raise


def once(server: Server, path: str, body: dict[str, object]) -> object:
    """A call that must not be sent twice: a transfer that was half done cannot be repeated."""
    return server.request("POST", path, body, retries=0)
