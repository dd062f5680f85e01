"""Weight updates of servers: pause, replace, reset caches, set the version, resume."""

from __future__ import annotations

import threading
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal, TypedDict

from automodel_cli.config.errors import RunError
from automodel_cli.rollout.engines.servers.http_engine import HTTPEngine
from automodel_cli.rollout.types import Completion, SamplingParams, WeightStream
from automodel_cli.rollout.weight_sync.transports import Transfer


class VersionSpan(TypedDict):
    """Tokens `start` to `end` of a completion, which weights of one version sampled."""

    version: str
    start: int
    end: int


class WeightUpdateMixin(HTTPEngine):
    """Mixin of `HTTPEngine` for servers with weight updates. Only rank 0 talks to the server. Each update gives the
    weights of the server a new name, which is verified after each generation."""

    def receive_by(self, transfer: Transfer) -> None:
        """How new weights reach it. To be called once, before anything else here."""
        self._transfer = transfer
        self._given: str | None = None
        self._versions: dict[str, int] = {}
        """Which of our versions the server's names for its weights are."""
        self._replacing = threading.Lock()

    # -- requests to a server

    @abstractmethod
    def pause(self) -> None:
        """Generate nothing until `go_on`, and keep the requests."""

    @abstractmethod
    def go_on(self, *, retries: int | None = None) -> None: ...

    @abstractmethod
    def forget(self) -> None:
        """Reset the KV cache, including running requests."""

    @abstractmethod
    def load_files(self, folder: Path) -> None:
        """Have the server read every weight from the safetensors in `folder`. Raises ServerError."""

    @abstractmethod
    def num_ranks(self) -> int:
        """How many ranks of a group its workers are, to which weights are sent from GPU to GPU."""

    @abstractmethod
    def name_weights(self, name: str) -> None: ...

    @abstractmethod
    def weights_name(self) -> str | None:
        """Name of the weights on the server."""

    @abstractmethod
    def sleep(self, *, weights_follow: bool) -> None:
        """Free GPU memory. With `weights_follow` the current weights may be dropped, because new ones arrive before
        the next generation."""

    @abstractmethod
    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Allocate the memory again that `sleep` freed."""

    # -- an engine

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """See `HTTPEngine.generate`. Raises RunError if the server was restarted or another run has replaced its
        weights."""
        losses = self.num_losses
        completions = super().generate(prompts, params, seeds)
        self._check_weights(losses)
        return completions

    def update_weights(self, stream: WeightStream) -> None:
        """Replace the weights of the server. Running requests continue with the new weights.

        The server resumes even if a transfer fails. Then RunError is raised, and its weights are a mixture. RunError
        is raised too if a transfer exceeds the time limit of the server or the server ends.
        """
        version = self.weight_version + 1
        self._transfer.send(self, iter(stream), partial(self.paused, version))
        self.weight_version = version

    def read_weights(self, folder: Path, version: int) -> None:
        """`update_weights` to this version from the files of `FileTransfer.written`. Raises ServerError."""
        with self.paused(version):
            self.load_files(folder)
        self.weight_version = version

    def has_given_weights(self) -> bool:
        """Return whether the server has the last weights of this run. A restarted server has its initial weights."""
        with self._replacing:
            return self._given is None or self.weights_name() == self._given

    def versions_in(
        self, spans: Sequence[VersionSpan] | None, num_tokens: int, asked: int
    ) -> tuple[int, list[int] | None]:
        """Return the oldest weight version that sampled a token, and the version of each token if there are several.
        `spans` are the server's (version, start, end). Tokens outside count as sampled by `asked`."""
        versions = [asked] * num_tokens
        for span in spans or ():
            tokens = slice(span["start"], span["end"])
            # A response that spans an update has tokens of two versions: importance ratios use the log-prob of each
            # token as sampled.
            versions[tokens] = [self._versions.get(span["version"], asked)] * len(versions[tokens])
        return min(versions, default=asked), versions if len(set(versions)) > 1 else None

    @contextmanager
    def paused(self, version: int) -> Iterator[None]:
        """Context in which the server does not generate. Afterwards it recomputes its KV cache with the new weights,
        including running requests."""
        if not self.has_given_weights():
            self.num_losses += 1
        with self._replacing, self._stopped():
            yield
            # Cached keys belong to the old weights. Running requests are continued, and their caches recomputed.
            self.forget()
            # A random name, so that neither a restarted server nor one that another run has updated has it.
            given = uuid.uuid4().hex
            self._versions[given] = version
            self.name_weights(given)
            self._given = given

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        except BaseException:
            with suppress(RunError):  # the server may be gone; the first error is more informative
                self.go_on(retries=0)
            raise
        self.go_on()

    def _check_weights(self, losses: int) -> None:
        if self.num_losses != losses or not self.has_given_weights():
            raise RunError(
                f"{self.server.url} no longer has the weights of this run: the server was restarted, or "
                "another run uses it. The samples of this step were discarded",
                code="server_mismatch",
                keys=("rollout.engine.url",),
                fix="automodel resume RUN",
            )
