"""Simulated time of one GPU: one clock each for the host, every stream and every communicator.

The host launches one call after another; a kernel starts when the host has come to it and its stream is free; a
collective when its communicator is free too. Waiting moves clocks forward, as streams and events order it, so that what
is hidden behind other work costs nothing, and what is not is seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from automodel_cli.planning.efficiency import Efficiency

Seconds = Mapping[str, float]
"""Seconds of a span of time by kind of cost, an attribute of `Efficiency`."""


class Moment(float):
    """A time. `cause` is the moment that it had to wait for, `kind` is what ran between the two."""

    __slots__ = ("cause", "kind")
    cause: float
    kind: str

    def __new__(cls, cause: float, kind: str, seconds: float) -> Moment:
        made = super().__new__(cls, cause + seconds)
        made.cause, made.kind = cause, kind
        return made

    def __reduce__(self) -> tuple[type, tuple[float]]:
        return float, (float(self),)


def critical_path(began: float, ended: float) -> dict[str, float]:
    """Return the seconds from `began` to `ended` by kind, along the chain of causes of `ended`. Hidden work is not in
    it. The sum is `ended - began`, if `ended` is a moment of the same clock."""
    found: dict[str, float] = {}
    while ended > began and isinstance(ended, Moment):
        found[ended.kind] = found.get(ended.kind, 0.0) + float(ended) - max(float(ended.cause), float(began))
        ended = ended.cause
    return found


def summed(spans: Iterable[Seconds], minus: Seconds | None = None) -> dict[str, float]:
    """Return the sum of spans, less another one, by kind."""
    found: dict[str, float] = {}
    for span, sign in (*((span, 1.0) for span in spans), (minus or {}, -1.0)):
        for kind, seconds in span.items():
            found[kind] = found.get(kind, 0.0) + sign * seconds
    return found


# Example: a GEMM of 1 s, then an asynchronous all-reduce of 3 s from second 1 on, then a GEMM of 1 s that ends at 2. A
# wait for the all-reduce ends at 4. On the critical path are the first GEMM and the all-reduce. The second GEMM is
# hidden.
class Clock:
    """All clocks in seconds since the dry run began."""

    def __init__(self, rates: Efficiency | None = None) -> None:
        self.rates = rates or Efficiency()
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

    def kernel(self, kind: str, seconds: float, number: int = 1) -> None:
        """Launch `number` equal kernels that take so many seconds together."""
        for _ in range(number):
            self.host_computes(self.rates.host)
            # A kernel starts when its stream is free and the host has launched it. A slow host leaves gaps between
            # short kernels.
            self.streams[self.stream] = Moment(max(self.at(self.stream), self.host), kind, seconds / number)

    def host_computes(self, seconds: float) -> None:
        self.host = Moment(self.host, "host", seconds)

    def copy(self, direction: str, seconds: float) -> None:
        """On the current stream, between a host and a device: one at a time each way."""
        self._occupy(direction, "copy", seconds, asynchronous=False)

    def collective(self, group: str, kind: str, seconds: float, *, asynchronous: bool) -> float:
        """Return when it ends. Beside kernels, it takes multiprocessors and bandwidth from them."""
        if asynchronous or self.stream:
            self.streams[0] = Moment(self.at(0), "interference", seconds * self.rates.interference)
        return self._occupy(group, kind, seconds, asynchronous=asynchronous)

    def _occupy(self, group: str, kind: str, seconds: float, *, asynchronous: bool) -> float:
        self.host_computes(self.rates.host)
        # Collectives of one communicator run one after the other.
        end = Moment(max(self.at(self.stream), self.host, self.groups.get(group, 0.0)), kind, seconds)
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
