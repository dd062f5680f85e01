"""The layers of a stage as the clock of `layer_times` runs them: kernels, parameters and exchanged bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from automodel_cli.planning.kernel import Kernel
from automodel_cli.planning.layer_calls import Call
from automodel_cli.planning.layer_costs import Unit


class Shard(NamedTuple):
    """Parameters of one unit in one group of ranks."""

    ranks: Sequence[int]
    held: float
    """Elements that a rank computes with."""
    trained: float
    stored_bytes: float
    """Of one element between steps."""
    is_expert: bool = False


@dataclass(frozen=True)
class Segment:
    """One layer of a stage, or what stands before or after its layers.

    Attributes:
        again: calls that backward repeats.
        units: parameters that are gathered together, in `shards` by group.
        exchanged: bytes of tokens that experts exchange, one way.
        keys: bytes of keys and values that a rank of context parallelism sends.
        has_backward: whether it or something before it is trained.
    """

    calls: Sequence[Call]
    again: Sequence[Call] = ()
    units: Sequence[Unit] = ()
    shards: Sequence[Shard] = ()
    exchanged: float = 0.0
    keys: float = 0.0
    is_layer: bool = False
    has_backward: bool = True

    def kernels(self, of: str) -> Iterable[Kernel]:
        """Yield the kernels of "inputs" or "weights", the last layer's first."""
        for call in reversed(self.calls):
            yield from getattr(call, of)
