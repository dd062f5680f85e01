"""Config of the generation servers that a job starts in addition to its ranks. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

ADDRESSES = "AUTOMODEL_ROLLOUT_URLS"
"""Addresses of the job's servers, separated by commas. Set by the batch script, never by a user."""
HOST, PORT = "{host}", "{port}"
"""Placeholders in a command for the listening address and port of a server."""


@dataclass(frozen=True)
class GenerationServers:
    """`number` servers over all machines with `gpus` GPUs each (0: CPU), on separate GPUs or `colocated` with the
    ranks. `command` contains `HOST` and `PORT`. The first server of a machine has `port`, the next one `port` + 1."""

    number: int
    gpus: int
    port: int
    command: tuple[str, ...]
    colocated: bool = False
    gpu_memory_utilization: float | None = None
    """Memory fraction of each GPU for a server. None: the server's default."""

    @property
    def own_gpus(self) -> int:
        """GPUs of all servers that no rank has."""
        return 0 if self.colocated else self.number * self.gpus

    def words(self, host: str, port: str) -> list[str]:
        """The command of one server."""
        return [{HOST: host, PORT: port}.get(word, word) for word in self.command]
