"""The `parallelizer` nodes by their documented names. The implementations are in `strategies/`."""

from __future__ import annotations

from automodel_cli.distributed.strategies.base import ParallelizerConfig
from automodel_cli.distributed.strategies.ddp.config import DDPConfig
from automodel_cli.distributed.strategies.fsdp2.config import CPUOffload, FSDP2Config, MixedPrecision
from automodel_cli.distributed.strategies.megatron_fsdp.config import MegatronFSDPConfig

DistributedConfig = FSDP2Config | MegatronFSDPConfig | DDPConfig
"""Config of any strategy of this package."""

__all__ = [
    "CPUOffload",
    "DDPConfig",
    "DistributedConfig",
    "FSDP2Config",
    "MegatronFSDPConfig",
    "MixedPrecision",
    "ParallelizerConfig",
]
