"""One row of a comparison: a layout and what runs on it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from automodel_cli.distributed.config import DDPConfig, FSDP2Config, MixedPrecision, ParallelizerConfig
from automodel_cli.distributed.layout import MeshConfig
from automodel_cli.objectives.sft import SFT
from automodel_cli.pipelining.config import PipelineConfig

NUM_MICROBATCHES = 8  # of one step over all data-parallel ranks, so that one reference serves every layout
FP32 = MixedPrecision(param_dtype=None, reduce_dtype=None)
_AXES = (("pp_size", "pp"), ("dp_size", "dp"), ("cp_size", "cp"), ("tp_size", "tp"), ("ep_size", "ep"))


@dataclass(frozen=True)
class Row:
    """`mesh` says every size. `num_microbatches` is of the whole step, over all data-parallel ranks."""

    mesh: MeshConfig = field(default_factory=lambda: MeshConfig(dp_size=1))
    parallelizer: ParallelizerConfig = field(default_factory=lambda: FSDP2Config(mp_policy=FP32))
    pipeline: PipelineConfig | None = None
    packed: bool = True
    objective: Any = field(default_factory=SFT)
    num_microbatches: int = NUM_MICROBATCHES

    @property
    def world_size(self) -> int:
        return (self.mesh.dp_size or 1) * self.mesh.ranks_per_replica

    @property
    def layout(self) -> str:
        """Sizes above 1 with what belongs to them: `pp2 1f1b, dp4 (2 replicas), tp2 sp, ep2`."""
        words = []
        for key, name in _AXES:
            size = getattr(self.mesh, key) or 1
            if size > 1:
                words.append(f"{name}{size}{self._detail(name)}")
        words = words or ["one rank"]
        return " ".join([*words, "recompute"] if self.parallelizer.activation_checkpointing else words)

    def _detail(self, axis: str) -> str:
        if axis == "pp" and self.pipeline is not None:
            return f" {self.pipeline.schedule}"
        if axis == "dp" and isinstance(self.parallelizer, DDPConfig):
            return " ddp"
        if axis == "dp" and (self.mesh.dp_replicate_size or 1) > 1:
            return f" hsdp{self.mesh.dp_replicate_size}"
        if axis == "tp" and getattr(self.parallelizer, "sequence_parallel", False):
            return " sp"
        return ""

    @property
    def rows(self) -> str:
        return "packed" if self.packed else "padded"

    def __str__(self) -> str:
        return f"{self.layout}, {self.rows}"
