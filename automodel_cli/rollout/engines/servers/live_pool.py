"""Several servers whose weights are updated."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from automodel_cli.rollout.engines.live_update import WeightUpdateMixin
from automodel_cli.rollout.engines.servers.server_pool import Member, ServerPool
from automodel_cli.rollout.http import ServerError
from automodel_cli.rollout.types import WeightStream
from automodel_cli.rollout.weight_sync.transports import FileTransfer, SharedTransfer


class LivePool(ServerPool[WeightUpdateMixin]):
    """Servers that get new weights by one transfer: all read the files that are written once, or are in one group."""

    def __init__(
        self,
        engines: Sequence[WeightUpdateMixin],
        transfer: FileTransfer | SharedTransfer,
        *,
        concurrency: int,
        health_every: float = 10.0,
    ):
        super().__init__(engines, concurrency=concurrency, health_every=health_every)
        self._transfer = transfer

    def update_weights(self, stream: WeightStream) -> None:
        """Update every server that responds, including excluded ones, which are then used again. Raises RunError if a
        server rejects the weights, and if none is left. If a server ends during a broadcast, the run ends, because
        the other servers have a mixture of weights."""
        if isinstance(self._transfer, FileTransfer):
            with self._transfer.written(iter(stream)) as folder:
                requested = self._servers_to_update(sure=False)
                with ThreadPoolExecutor(max(1, len(requested))) as threads:
                    list(threads.map(lambda member: self._update_server(member, folder), requested))
        elif requested := self._servers_to_update(sure=True):
            paused = [partial(member.engine.paused, self.weight_version) for member in requested]
            self._transfer.send_to([member.engine for member in requested], iter(stream), paused)
            for member in requested:
                member.engine.weight_version = self.weight_version
                self._take_back(member)
        for member in self._live():
            if member.engine.weight_version != self.weight_version:
                self._leave_out(member, "it was taken back while the others were given new weights")
        if not self._live():
            raise self._all_gone()

    def _servers_to_update(self, *, sure: bool) -> list[Member[WeightUpdateMixin]]:
        """Return the servers that get the next version, and count it. With `sure`, only servers that respond now."""
        requested = []
        for member in self._members:
            if (member.gone is None and not sure) or member.is_healthy():
                requested.append(member)
            else:
                self._leave_out(member, "it does not answer /health")
        with self._changed:
            self.weight_version += 1  # from here on, no server is used again without these weights
        return requested

    def _update_server(self, member: Member[WeightUpdateMixin], folder: Path) -> None:
        try:
            member.engine.read_weights(folder, self.weight_version)
        except ServerError as error:
            if member.gone is None and error.status is not None and member.is_healthy():
                raise  # the server responds and rejects the weights
            self._leave_out(member, error.message)
        else:
            self._take_back(member)
