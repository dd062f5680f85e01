"""Servers whose weights a run replaces: pause, replace, forget what the old ones computed, name the new ones, go on."""

from __future__ import annotations

import threading
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from automodel_cli.config.errors import RunError
from automodel_cli.rollout.engines.servers.http_engine import HTTPEngine
from automodel_cli.rollout.types import Completion, SamplingParams, WeightStream
from automodel_cli.rollout.weight_sync.transports import Transfer


class WeightUpdateMixin(HTTPEngine):
    """A `HTTPEngine` whose weights can be replaced. One process speaks to the server (rank 0 of the run).

    The server is given a new name for its weights with each update, and asked for it after each generation.
    """

    def receive_by(self, transfer: Transfer) -> None:
        """How new weights reach it. To be called once, before anything else here."""
        self._transfer = transfer
        self._given: str | None = None
        self._versions: dict[str, int] = {}
        """Which of our versions the server's names for its weights are."""
        self._replacing = threading.Lock()

    # -- what a server is asked

    @abstractmethod
    def pause(self) -> None:
        """Generate nothing until `go_on`, and keep the requests."""

    @abstractmethod
    def go_on(self, *, retries: int | None = None) -> None: ...

    @abstractmethod
    def forget(self) -> None:
        """Drop keys and values of all tokens, of those too that it is generating."""

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
        """What the server calls its weights."""

    @abstractmethod
    def sleep(self, *, weights_follow: bool) -> None:
        """Free the memory of the GPUs. With `weights_follow` new weights come before the next generation, so those at
        hand may be dropped."""

    @abstractmethod
    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Take the memory back that `sleep` freed."""

    # -- an engine

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """See `HTTPEngine.generate`. Raises RunError where the server has other weights than it was given last: it
        was started anew, or another run has replaced them."""
        losses = self.num_losses
        completions = super().generate(prompts, params, seeds)
        self._check_weights(losses)
        return completions

    def update_weights(self, stream: WeightStream) -> None:
        """Replace the server's weights; what is being generated goes on with the new ones.

        The server resumes even when a transfer fails; that raises RunError, and its weights are then a mixture. A
        transfer that does not end within the server's time limit, or whose server is gone, is an error too.
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
        """A server that was restarted answers again, with the weights it was started with."""
        with self._replacing:
            return self._given is None or self.weights_name() == self._given

    def versions_in(
        self, spans: Sequence[Mapping[str, Any]] | None, num_tokens: int, asked: int
    ) -> tuple[int, list[int] | None]:
        """The oldest of our versions that drew a token, and that of each token where there are several. `spans` is what
        the server says of its `version` from `start` to `end`; where it does not say, it was the one `asked`."""
        versions = [asked] * num_tokens
        for span in spans or ():
            drawn = slice(span["start"], span["end"])
            versions[drawn] = [self._versions.get(span["version"], asked)] * len(versions[drawn])
        return min(versions, default=asked), versions if len(set(versions)) > 1 else None

    @contextmanager
    def paused(self, version: int) -> Iterator[None]:
        """The server does not generate in here, and forgets afterwards what it had computed with the old weights: keys
        and values of what it is generating too, which it computes again with the new ones."""
        if not self.has_given_weights():
            self.num_losses += 1
        with self._replacing, self._stopped():
            yield
            self.forget()
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
            with suppress(RunError):  # a server that is gone; what happened first says more
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
