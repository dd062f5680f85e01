"""One case of a comparison: a layout and the settings that run on it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from automodel_cli.config.parameter_patterns import EVERYTHING, Selection
from automodel_cli.distributed.compile_modes import FUSED_OPS
from automodel_cli.distributed.config import FSDP2Config, MixedPrecision
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.strategies.base import Strategy
from automodel_cli.models.fp8_config import Fp8Config
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.qat_config import QATConfig
from automodel_cli.objectives.base import Objective
from automodel_cli.objectives.sft import SFT
from automodel_cli.pipelining.config import PipelineConfig

NUM_MICROBATCHES = 8  # per step over all data-parallel ranks, so that all layouts share one reference
FP32 = MixedPrecision(param_dtype=None, reduce_dtype=None)
ULPS_OF_SUMS, ULPS_OF_GRADIENTS = 2, 32
"""Bounds of cases in lower precision, in units in the last place (at 1) of the compute dtype. Rounding averages out in
loss and norm. Single gradients change by 3 in dense models, and by 17 for unselected experts (GPT-OSS, measured)."""
FP8_OF_SUMS, FP8_OF_GRADIENTS = 2.0**-5, 0.5
"""Bounds of cases with fp8 GEMMs. Measured: loss and norm 1e-2, single gradients 0.14 of the largest in dense models,
0.4 if a router rounds to another expert (GPT-OSS)."""
_ULP = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
_AXES = (("pp_size", "pp"), ("dp_size", "dp"), ("cp_size", "cp"), ("tp_size", "tp"), ("ep_size", "ep"))


@dataclass(frozen=True)
class Case:
    """A layout and its settings. `mesh` defines every size.

    num_microbatches: of the full step, over all data-parallel ranks.
    lora: train only adapters.
    compute_dtype: compute dtype of the parallelizer, if not fp32.
    fp8: use fp8 GEMMs in linear layers and experts.
    qat: fake-quantize linear layers. The reference does not.
    selection: train only these parameters.
    own_layers: use a copy with the model's number of layers, for the stage split of the recipe.
    """

    mesh: MeshConfig = field(default_factory=lambda: MeshConfig(dp_size=1))
    parallelizer: Strategy = field(default_factory=lambda: FSDP2Config(mp_policy=FP32))
    pipeline: PipelineConfig | None = None
    packed: bool = True
    objective: Objective = field(default_factory=SFT)
    num_microbatches: int = NUM_MICROBATCHES
    lora: LoRAConfig | None = None
    compute_dtype: str | None = None
    fp8: Fp8Config | None = None
    qat: QATConfig | None = None
    own_layers: bool = False
    selection: Selection = EVERYTHING

    @property
    def world_size(self) -> int:
        return (self.mesh.dp_size or 1) * self.mesh.ranks_per_replica

    @property
    def layout(self) -> str:
        """Sizes above 1 with their options: `pp2 1f1b, dp4 (2 replicas), tp2 sp, ep2`."""
        words = []
        for key, name in _AXES:
            size = getattr(self.mesh, key) or 1
            if size > 1:
                words.append(f"{name}{size}{self._detail(name)}")
        words = words or ["one rank"]
        settings = {
            "recompute": self.parallelizer.activation_checkpointing,
            f"compiled:{self.parallelizer.compile_backend}": self.parallelizer.enable_compile is True,
            f"fused_ops:{self.parallelizer.compile_backend}": self.parallelizer.enable_compile == FUSED_OPS,
            "lora": self.lora is not None,
            "frozen": self.selection != EVERYTHING,
            f"own-stages:{self.mesh.pp_size}": self.own_layers,
            str(self.compute_dtype): self.compute_dtype is not None,
            f"fp8:{self.fp8.recipe if self.fp8 else ''}": self.fp8 is not None,
            f"qat:{self.qat.weight_dtype if self.qat else ''}": self.qat is not None,
        }
        return " ".join(words + [word for word, used in settings.items() if used])

    def bounds(self, tolerance: float) -> tuple[float, float]:
        """Return the relative bounds of (loss and norm, gradients).

        They are `tolerance`, units in the last place of a lower precision, or the fp8 bounds.
        """
        if self.fp8 is not None:
            return max(tolerance, FP8_OF_SUMS), max(tolerance, FP8_OF_GRADIENTS)
        if self.compute_dtype is None:
            return tolerance, tolerance
        return max(tolerance, ULPS_OF_SUMS * self.ulp), max(tolerance, ULPS_OF_GRADIENTS * self.ulp)

    @property
    def is_exact(self) -> bool:
        """Whether only the order of fp32 sums may differ."""
        return self.compute_dtype is None and self.fp8 is None

    @property
    def ulp(self) -> float:
        """Unit in the last place, at 1, of the compute dtype."""
        return _ULP[self.compute_dtype or "float32"]

    def _detail(self, axis: str) -> str:
        if axis == "pp" and self.pipeline is not None:
            return f" {self.pipeline.schedule}"
        if axis == "dp" and (self.mesh.dp_replicate_size or 1) > 1:
            return f" hsdp{self.mesh.dp_replicate_size}"
        if axis == "dp" and self.parallelizer.name != "fsdp2":
            return f" {self.parallelizer.name}"
        if axis == "tp" and self.parallelizer.axis_options().sequence_parallel:
            return " sp"
        return ""

    @property
    def rows(self) -> str:
        return "packed" if self.packed else "padded"

    def __str__(self) -> str:
        return f"{self.layout}, {self.rows}"
