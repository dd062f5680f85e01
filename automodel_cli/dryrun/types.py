"""Requests and results of a dry run. Torch-free, because the command imports it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from automodel_cli.planning.hardware import GIB, GPUS, Gpu, Links
from automodel_cli.planning.reserve import MemoryBreakdown
from automodel_cli.planning.step_time import RankTimes

__all__ = ["GIB", "LIMITS", "Line", "RankResult", "TraceRequest"]

LIMITS = """\
Nothing was computed: no wrong number, race, deadlock or kernel fault is found here.
Memory is of tensors, as torch's allocator rounds them; the CUDA context, cuBLAS, NCCL and fragmentation come on top
  (5 GiB are set aside for them). Temporaries inside a kernel are not seen, nor frees that wait for another stream.
Time is a roofline at rates that were fitted to published runs of other programs; other ranks route, pack and wait as
  this one does. Without its windows, sliding flash attention counts too many FLOPs. Data loading, checkpoints,
  rollouts, and a reference model's own passes are not in the step.
DDP's reducer is one in Python that follows its rules. Not run: torch.compile (fused operations and FlexAttention
  count as one kernel each, whole layers as written), autocast, Transformer Engine, DeepEP, 4-bit bases, vLLM."""


@dataclass(frozen=True)
class TraceRequest:
    """One rank of one config. `data`: read the config's data for the lengths of documents. `route` is how tokens choose
    experts: "balanced", or "worst": all choose those of the first rank. `microbatches` to run; None: enough to tell.
    Bandwidths in bytes/s, one way: `host` is to the machine's memory, None the GPU's own, as of `node`.
    """

    conf: str
    overrides: tuple[str, ...]
    num_gpus: int
    rank: int = 0
    data: bool = False
    gpu: str = "h100"
    route: str = "balanced"
    microbatches: int | None = None
    document: int | None = None
    picture: str | None = None
    network: float = 50e9
    node: float | None = None
    gpus_per_node: int = 8
    host: float | None = None
    trust_words: tuple[str, ...] = ()
    trust_packages: tuple[str, ...] = ()

    @property
    def device(self) -> Gpu:
        return GPUS[self.gpu]

    @property
    def links(self) -> Links:
        return Links(self.node or self.device.link, self.network, self.gpus_per_node, self.device.rates)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TraceRequest:
        known: dict[str, Any] = json.loads(text)
        tuples = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        return cls(**{**known, **tuples})


@dataclass(frozen=True)
class Line:
    """A row of a table: what, how often, how much (bytes or seconds)."""

    what: str
    count: float
    amount: float = 0.0


@dataclass(frozen=True)
class RankResult(RankTimes):
    """What one rank's step showed. Bytes and seconds; counts are of the measured step unless they say otherwise."""

    rank: int
    layout: str
    measured_microbatches: int
    peak: int
    peak_by_kind: dict[str, int]
    largest: list[Line]
    plan: float
    syncs: list[Line]
    collectives: list[dict[str, Any]]
    kernels: list[Line]
    num_kernels: int
    flops: float
    kernel_seconds: float
    step_flops: float
    """Of a step with all of the config's microbatches, as `step_kernel_seconds`: what is done once counts once."""
    step_kernel_seconds: float
    front_seconds: float
    """Of the kernels of tower and projector, forward and backward, a microbatch."""
    cpu_seconds: float
    rss_gib: float
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_dict(cls, known: dict[str, Any]) -> RankResult:
        rows = {name: [Line(**row) for row in known[name]] for name in ("largest", "syncs", "kernels")}
        return cls(**{**known, **rows})

    @property
    def breakdown(self) -> MemoryBreakdown:
        return MemoryBreakdown(self.peak_by_kind, self.peak)

    @property
    def num_syncs(self) -> float:
        return sum(line.count for line in self.syncs)
