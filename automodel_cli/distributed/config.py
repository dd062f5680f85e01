"""The `parallelizer` nodes by their documented names. What each does stands in its folder under `strategies/`."""

from __future__ import annotations

from automodel_cli.distributed.strategies.base import ParallelizerConfig
from automodel_cli.distributed.strategies.ddp.config import DDPConfig
from automodel_cli.distributed.strategies.fsdp2.config import CPUOffload, FSDP2Config, MixedPrecision
from automodel_cli.distributed.strategies.megatron_fsdp.config import MegatronFSDPConfig

__all__ = ["CPUOffload", "DDPConfig", "FSDP2Config", "MegatronFSDPConfig", "MixedPrecision", "ParallelizerConfig"]
