"""Simulated time of one GPU: one clock each for the host, every stream and every communicator.

The host launches one call after another (`LAUNCH_SECONDS` each); a kernel starts when the host has come to it and its
stream is free; a collective when its communicator is free too. Waiting moves clocks forward, as streams and events
order it, so that what is hidden behind other work costs nothing, and what is not is seen.
"""

from __future__ import annotations

from automodel_cli.dryrun.hardware import LAUNCH_SECONDS


class Clock:
    """All clocks in seconds since the dry run began."""

    def __init__(self) -> None:
        self.host = 0.0
        self.streams: dict[int, float] = {}
        self.groups: dict[str, float] = {}
        self.current = [0]

    @property
    def stream(self) -> int:
        return self.current[-1]

    def at(self, stream: int) -> float:
        return self.streams.get(stream, 0.0)

    def now(self) -> float:
        """When everything launched so far is done."""
        return max([self.host, *self.streams.values(), *self.groups.values()])

    def kernel(self, seconds: float) -> None:
        self.host += LAUNCH_SECONDS
        self.streams[self.stream] = max(self.at(self.stream), self.host) + seconds

    def copy(self, direction: str, seconds: float) -> None:
        """On the current stream, between a host and a device: one at a time each way."""
        self.collective(direction, seconds, asynchronous=False)

    def collective(self, group: str, seconds: float, *, asynchronous: bool) -> float:
        """Returns when it ends."""
        self.host += LAUNCH_SECONDS
        end = max(self.at(self.stream), self.host, self.groups.get(group, 0.0)) + seconds
        self.groups[group] = end
        if not asynchronous:
            self.streams[self.stream] = end
        return end

    def wait(self, stream: int, until: float) -> None:
        """What is launched on `stream` from now on starts after `until`."""
        self.streams[stream] = max(self.at(stream), until)

    def wait_for_group(self, group: str) -> None:
        """The current stream waits for the last message of this communicator."""
        self.wait(self.stream, self.groups.get(group, 0.0))

    def host_waits(self, until: float | None = None) -> None:
        """For the current stream, or until a moment."""
        self.host = max(self.host, self.at(self.stream) if until is None else until)
