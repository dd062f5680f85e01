"""Time and memory of a full step from traced ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from automodel_cli.dryrun.types import GIB, RankResult
from automodel_cli.planning.hardware import Gpu
from automodel_cli.planning.reserve import usable_bytes
from automodel_cli.planning.step_time import Range, StepTime, step_time


@dataclass(frozen=True)
class Estimate(StepTime):
    """Time of a step, and memory, of a whole run from its traced ranks."""

    ranks: tuple[RankResult, ...] = field(kw_only=True)

    @property
    def reserved(self) -> Range:
        """Bytes that the allocator reserves on the heaviest rank. It frees unused blocks where the GPU has no more."""
        peak, rates, most = self.heaviest.peak, self.gpu.rates, max(self.gpu.memory_gib * GIB, self.heaviest.peak)
        return Range(min(peak * rates.reserved_low, most), min(peak * rates.reserved_high, most))

    @property
    def heaviest(self) -> RankResult:
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def fits(self) -> bool:
        return self.heaviest.peak <= usable_bytes(self.gpu.memory_gib)

    def counted(self) -> dict[str, object]:
        """What `scripts/calibrate.py` fits constants to: seconds at rates of 1, without what was fitted."""
        rates = self.gpu.rates
        factors = {kind: getattr(rates, kind) for kind in self.seconds}
        factors |= {"host": 1.0, "interference": 1 / rates.interference}
        return {
            "seconds": {kind: seconds * factors[kind] for kind, seconds in self.seconds.items()},
            "tokens": self.tokens_per_second_per_gpu * self.step_seconds,
            "peak_gib": self.heaviest.peak / GIB,
        }

    @property
    def utilisation_bound(self) -> float:
        """What kernels alone would allow: all FLOPs of a step at the peak, over the time of all its kernels, one after
        the other."""
        flops = sum(rank.step_flops for rank in self.ranks)
        seconds = sum(rank.step_kernel_seconds for rank in self.ranks)
        return flops / self.gpu.peak_bf16 / seconds if seconds else 0.0

    def to_json(self) -> dict[str, object]:
        """Memory and collectives of the heaviest rank; of the counts the largest of all traced ranks."""
        heaviest = self.heaviest
        return {
            "peak_gib": heaviest.peak / GIB,
            "peak_by_kind": {kind: size / GIB for kind, size in heaviest.peak_by_kind.items()},
            "plan_gib": heaviest.plan / GIB,
            "host_syncs_per_microbatch": max(rank.num_syncs / rank.measured_microbatches for rank in self.ranks),
            "kernels_per_microbatch": max(rank.num_kernels / rank.measured_microbatches for rank in self.ranks),
            "collectives": heaviest.collectives,
            "reserved_gib": self.reserved.times(1 / GIB).to_json(),
            "step_seconds": self.step_range.to_json(),
            "tokens_per_second_per_gpu": self.throughput.to_json(),
            "mfu_estimate": None if self.mfu is None else self.mfu.to_json(),
            "seconds_by_kind": dict(self.seconds),
            "counted": self.counted(),
            "utilisation_bound": self.utilisation_bound,
            "fits": self.fits,
        }


def estimate(ranks: Sequence[RankResult], gpu: Gpu, num_gpus: int) -> Estimate:
    """Return the estimate of a run from one rank, or from a rank of each kind of stage."""
    return Estimate(**vars(step_time(ranks, gpu, num_gpus)), ranks=tuple(ranks))
