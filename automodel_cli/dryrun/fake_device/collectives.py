"""Simulated collectives in one process: counted, timed, and with the integers of the other ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from automodel_cli.distributed.context_parallel import RankGroup
from automodel_cli.distributed.expert_parallel.token_dispatcher import Arriving
from automodel_cli.distributed.tensors import tensors_in
from automodel_cli.dryrun.fake_device import concrete_integers, torch_compat
from automodel_cli.dryrun.fake_device.concrete_integers import Twins
from automodel_cli.dryrun.fake_device.torch_compat import unset_fake_temporarily
from automodel_cli.planning.cost_model import OperatorCall
from automodel_cli.planning.hardware import Links
from automodel_cli.planning.simulated_clock import Clock

PassOn = Callable[[RankGroup, Tensor], Callable[[], Tensor]]
Key = tuple[str, str, int]
"""Operator, group, ranks."""


class Collectives:
    """Other ranks are taken to hold what this one holds: to route, pack and count as it does."""

    def __init__(self, clock: Clock, links: Links):
        self.clock, self.links, self.twins = clock, links, Twins()
        self.count: Counter[Key] = Counter()
        self.bytes: Counter[Key] = Counter()
        self.seconds: defaultdict[Key, float] = defaultdict(float)
        self.ends: dict[int, float] = {}
        self._awaited = False  # whether somebody takes the time of this one's wait; else it ends where it began

    def ran(self, call: OperatorCall, out: object, *, counting: bool) -> None:
        """An operator of c10d has been called."""
        name, args = call.name, call.args
        if name == "wait_tensor":
            self.clock.wait(self.clock.stream, self.ends.pop(torch_compat.storage_key(args[0]), 0.0))
            return
        tensors = tensors_in((args, call.kwargs, out))
        group = torch_compat.group_of(tree_leaves((args, call.kwargs)))
        self._integers(call, group)
        if not any(map(torch_compat.is_cuda, tensors)):
            return
        size = max((t.numel() * t.element_size() for t in tensors), default=0)
        if "coalesced" in name:  # several in one message: the larger of both lists
            size = max(sum(t.numel() * t.element_size() for t in some) for some in args[:2] if isinstance(some, list))
        kind = name.strip("_")
        ranks = torch_compat.group_ranks(group) if group is not None else ()
        seconds = self.links.seconds(kind, size, ranks)
        functional = name == kind and not kind.endswith("_")
        point_to_point = kind in ("send", "recv_", "recv")
        label = group.group_name if group is not None else "?"
        if not point_to_point:  # `passed_on` times a ring's, the simulator of schedules those between stages
            asynchronous = functional or self._awaited
            end = self.clock.collective(label, self.links.kind(ranks), seconds, asynchronous=asynchronous)
            for t in tensors_in(out) if functional else ():
                self.ends[torch_compat.storage_key(t)] = end
        if counting:
            key = (kind.rstrip("_"), _described(group), len(ranks))
            self.count[key] += 1
            self.bytes[key] += size
            self.seconds[key] += seconds

    def passed_on(self, pass_on: PassOn) -> PassOn:
        """`RankGroup.pass_on` that takes its time: a message to the next rank while one comes from the previous one,
        beside what is computed until somebody asks for it."""

        def timed(group: RankGroup, x: Tensor) -> Callable[[], Tensor]:
            arrived = pass_on(group, x)
            seconds = self.links.seconds("send", x.numel() * x.element_size(), group.ranks)
            kind = self.links.kind(group.ranks)
            end = self.clock.collective(f"ring of {group.ranks}", kind, seconds, asynchronous=True)

            def waited() -> Tensor:
                self.clock.wait(self.clock.stream, end)
                return arrived()

            return waited

        return timed

    def exchanged(self, exchange: Callable[..., Arriving]) -> Callable[..., Arriving]:
        """`token_dispatcher.exchange` whose rows take their time, beside what is computed until somebody wants them."""

        def timed(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None) -> Arriving:
            self._awaited = True
            arriving = exchange(rows, send, receive, group)
            self._awaited = False
            if group is None:
                return arriving
            return replace(arriving, work=_Timed(self.clock, self.clock.groups.get(group.group_name, 0.0)))

        return timed

    def rows(self) -> list[dict[str, object]]:
        """By group, largest first. `bytes` of the largest tensor of each call."""
        return [
            {
                "operator": operator,
                "group": group,
                "ranks": ranks,
                "count": self.count[operator, group, ranks],
                "bytes": total,
                "seconds": self.seconds[operator, group, ranks],
            }
            for (operator, group, ranks), total in self.bytes.most_common()
        ]

    def _integers(self, call: OperatorCall, group: dist.ProcessGroup | None) -> None:
        name, args = call.name, call.args
        size, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        if "alltoall_base" in name and args[0].dtype in concrete_integers.KINDS:
            sent = self.twins.get(args[1])
            if sent is not None and sent.numel() % size == 0 and args[0].numel() == sent.numel():
                with unset_fake_temporarily():
                    # Counts of expert tokens decide shapes, so they need values. Other ranks are assumed to send what
                    # this rank sends: rank r receives part r of these counts from each.
                    self.twins.put(args[0], sent.view(size, -1)[rank].repeat(size).view(args[0].shape))
        elif name.startswith("_allgather_base") and args[1].dtype in concrete_integers.KINDS:
            mine = self.twins.get(args[1])
            if mine is not None:
                with unset_fake_temporarily():
                    self.twins.put(args[0], mine.flatten().repeat(size).view(args[0].shape))


@dataclass(frozen=True)
class _Timed:
    """Work whose end a stream waits for."""

    clock: Clock
    end: float

    def wait(self) -> None:
        self.clock.wait(self.clock.stream, self.end)


def _described(group: dist.ProcessGroup | None) -> str:
    """The axis that a group was made for."""
    if group is None:
        return "?"
    return (group.group_desc or group.group_name).removeprefix("mesh_")
