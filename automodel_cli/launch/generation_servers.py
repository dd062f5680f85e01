"""Config of the generation servers that a job starts in addition to its ranks. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

ADDRESSES = "AUTOMODEL_ROLLOUT_URLS"
"""Set by the batch script for its ranks, never by a user: where the servers of the job answer, cut by commas."""
HOST, PORT = "{host}", "{port}"
"""Stand in a command where the address to listen at and the port of a server do."""


@dataclass(frozen=True)
class GenerationServers:
    """`number` servers over all machines, with `gpus` GPUs each (0: CPU), on GPUs of their own or `colocated` with the
    ranks. `command` holds `HOST` and `PORT`: the first server of a machine has `port`, the next one `port` + 1."""

    number: int
    gpus: int
    port: int
    command: tuple[str, ...]
    colocated: bool = False
    gpu_memory_utilization: float | None = None
    """Of each GPU, that a server takes; None is its own choice."""

    @property
    def own_gpus(self) -> int:
        """GPUs of all servers that no rank has."""
        return 0 if self.colocated else self.number * self.gpus

    def words(self, host: str, port: str) -> list[str]:
        """The command of one server."""
        return [{HOST: host, PORT: port}.get(word, word) for word in self.command]
