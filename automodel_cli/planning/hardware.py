"""Hardware constants of the dry run: GPU peaks and link bandwidths. Torch-free.

Peaks are those of the vendors' data sheets. Rates of single kernels are what others have published of an H100 or H200.
GEMM rates: `wgrad_fusion/gemm_timings.py`. What a long run reaches of them is fitted: `efficiency.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from automodel_cli.distributed.wgrad_fusion import gemm_timings
from automodel_cli.planning.efficiency import Efficiency, efficiency
from automodel_cli.planning.reserve import CARD_GIB
from automodel_cli.training.metrics.flops import device_peak_flops

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """`name` as the driver gives it. `memory_gib` is what torch can allocate; peaks in FLOP/s (dense) and bytes/s."""

    name: str
    memory_gib: float
    peak_fp32: float
    bandwidth: float
    capability: tuple[int, int]
    link: float
    """Bytes/s between GPUs of one machine, one way."""
    host: float
    """Bytes/s to the memory of the machine, one way."""
    rates: Efficiency

    @property
    def peak_bf16(self) -> float:
        """The same that MFU is measured against in a run."""
        peak = device_peak_flops(self.name)
        assert peak is not None, f"{self.name} has no peak in training/metrics/flops.py"
        return peak

    def attention(self, tokens: float, *, backward: bool) -> float:
        """FLOP/s of FlashAttention-2 in documents of so many tokens."""
        share = attention_efficiency(tokens, backward=backward)
        return self.peak_bf16 * share * (_FLASH_ON_8 if self.capability[0] == 8 else 1.0)


_FLASH_ON_8 = 1.75
"""FlashAttention-2 reaches 50 to 73% of the peak of an A100 (arXiv:2307.08691), and 35% of that of an H100
(arXiv:2407.08608)."""
_H100 = "NVIDIA H100 80GB HBM3"
GPUS = {
    "h100": Gpu(_H100, CARD_GIB, 67e12, 3.35e12, (9, 0), 450e9, 64e9, efficiency("h100")),
    "h100-500w": Gpu(_H100, 95.0, 67e12, 2.4e12, (9, 0), 450e9, 64e9, efficiency("h100-500w")),
    "h200": Gpu("NVIDIA H200", 139.8, 67e12, 4.8e12, (9, 0), 450e9, 64e9, efficiency("h200")),
    "b200": Gpu("NVIDIA B200", 178.3, 80e12, 8.0e12, (10, 0), 900e9, 64e9, efficiency("b200")),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", CARD_GIB, 19.5e12, 2.04e12, (8, 0), 300e9, 32e9, efficiency("a100")),
    "l40s": Gpu("NVIDIA L40S", 44.5, 91.6e12, 0.864e12, (8, 9), 32e9, 32e9, efficiency("l40s")),
}
"""`h100-500w` is the card of Grand Teton servers: 96 GB of HBM2e and a power limit of 500 W."""

FLEX = 0.29
"""Of attention that torch compiles: 0.85 of FlashAttention-2's in long documents, of the blocks that it computes."""
FP32_PRODUCTS = 0.77
"""51.9 of 67 TFLOP/s on squares of 4096."""
HOST_MEMORY = 40e9
"""Bytes/s of a machine's memory for each of its GPUs, which optimizers of offloaded parameters read and write: assumed,
as of 12 channels of DDR5 for 8 GPUs."""
GROUPED_IN_8_BITS = 1.48
"""How much faster than in bfloat16 `torch._scaled_grouped_mm` with a scale for each row is: 0.885 ms for 1.31 on 16
uneven groups of 8,192 x 5,120 x 8,192, on an H100 (pytorch/ao pull request 2490)."""
_ATTENTION = (
    (512, 0.193, 0.134), (1024, 0.263, 0.195), (2048, 0.301, 0.242),
    (4096, 0.323, 0.272), (8192, 0.337, 0.289), (16384, 0.339, 0.294),
)  # fmt: skip
"""Forward and backward of FlashAttention-2 by tokens of a document, causal, heads of 128, on an H100: 191 to 335
TFLOP/s forward, and 214 to 322 backward without a mask, to which a mask is taken to do what it does forward (figures 5
and 6 of arXiv:2407.08608)."""


def attention_efficiency(tokens: float, *, backward: bool) -> float:
    """Share of the BF16 peak that attention is granted in documents of so many tokens."""
    return gemm_timings.between([(at, back if backward else forth) for at, forth, back in _ATTENTION], tokens)


KERNEL_SECONDS = 3e-6
"""The shortest kernel."""
COLLECTIVE_SECONDS = 15e-6


@dataclass(frozen=True)
class Links:
    """How ranks reach each other: `gpus_per_node` neighbours over `node` bytes/s, all others over `network`, each GPU
    by a card of its own. Rings between machines run side by side, one over each card of a machine whose GPU is in the
    group (as NCCL lays them), so that together they are as fast as these are; of an exchange of all with all each rank
    sends its own part over its own card."""

    node: float
    network: float = 50e9
    gpus_per_node: int = 8
    rates: Efficiency = field(default_factory=Efficiency)
    leaf: int = 32
    """Nodes below one leaf of the network."""
    oversubscription: float = 1.0
    """Bandwidth below a leaf over that of its way to other leaves."""

    def crosses(self, ranks: Sequence[int]) -> bool:
        """Return whether these ranks are on several machines."""
        return len({rank // self.gpus_per_node for rank in ranks}) > 1

    def kind(self, ranks: Sequence[int]) -> str:
        """Return the kind of cost of a message between these ranks."""
        return "network" if self.crosses(ranks) else "node"

    def seconds(self, kind: str, num_bytes: float, ranks: Sequence[int]) -> float:
        """Of one collective in which this rank's largest tensor has `num_bytes`, by a ring's volume."""
        # Example: 8 GB over NVLink (450 GB/s at a rate of 0.7) on 8 ranks. all_gather moves 7/8 of it: 22 ms.
        # all_reduce moves that twice: 44 ms. On 16 ranks of two machines, 8 network cards per machine work together, so
        # all_gather takes 27 ms. On two ranks of different machines one card does: 114 ms.
        size = len(ranks)
        if size <= 1:
            return 0.0
        of_machine = Counter(rank // self.gpus_per_node for rank in ranks)
        crosses, beside = len(of_machine) > 1, min(of_machine.values())
        through_spine = len({machine // self.leaf for machine in of_machine}) > 1
        network = self.network / (self.oversubscription if through_spine else 1.0)
        if kind.startswith(("send", "recv")):
            took = num_bytes / (network if crosses else self.node)
        elif kind.startswith("alltoall"):
            # Each pair of ranks exchanges a part of its own, so parts to other machines use one card each.
            part = num_bytes / size
            took = max(part * (beside - 1) / self.node, part * (size - beside) / network)
        else:
            # A ring: each rank forwards size - 1 of size parts. All-reduce is reduce-scatter and all-gather, twice the
            # volume.
            volume = num_bytes * (size - 1) / size * (2 if "reduce" in kind and "scatter" not in kind else 1)
            took = volume / (min(self.node, network * beside) if crosses else self.node)
        return COLLECTIVE_SECONDS + took / (self.rates.network if crosses else self.rates.node)
