"""Whether tensor parallelism of a size, or with asynchronous collectives, is possible for a model and plan."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.warn import warn
from automodel_cli.distributed.tensor_parallel.plan import Plan
from automodel_cli.distributed.tensor_parallel.styles import (
    PackedColwise,
)
from automodel_cli.distributed.torch_compat import overlap_tensor_parallelism

if TYPE_CHECKING:
    from transformers import PretrainedConfig


QUERY = ("q_proj", "q_b_proj", "query_key_value", "qkv_proj")
KEY = ("k_proj", "kv_b_proj", "query_key_value", "qkv_proj")


def is_local_colwise(style: ParallelStyle | None) -> bool:
    """Return whether the style leaves a shard of the outputs on each rank."""
    return isinstance(style, ColwiseParallel) and style.output_layouts == (Shard(-1),)


def use_async_collectives(mesh: DeviceMesh) -> None:
    """Overlap all-gathers and reduce-scatters of sequence parallelism with adjacent GEMMs, through symmetric memory.

    The compiler does the overlap. Enables sequence parallelism with a warning. Raises ConfigError without CUDA.
    """
    if mesh.device_type != "cuda":
        raise ConfigError(
            "enable_async_tensor_parallel=true needs CUDA devices for symmetric memory, but this run uses "
            f"{mesh.device_type}",
            code="hardware_required",
            keys=("parallelizer.enable_async_tensor_parallel",),
            fix="parallelizer.enable_async_tensor_parallel=false",
        )
    warn("implied_setting", "enable_async_tensor_parallel enables sequence_parallel, whose communication it overlaps")
    overlap_tensor_parallelism(mesh.get_group())


def check_heads(config: PretrainedConfig, plan: Plan, tp_size: int) -> None:
    """Raise ConfigError if `tp_size` does not divide the heads that the plan shards."""
    text = config.get_text_config()
    counts = {}
    for field, projections in (("num_key_value_heads", KEY), ("num_attention_heads", QUERY)):
        count = getattr(text, field, None)  # Some families have no separate number of key-value heads.
        if isinstance(count, int) and any(
            name.rpartition(".")[2] in projections and is_local_colwise(style) for name, style in plan.items()
        ):
            counts[field] = count
    for field, count in counts.items():
        if count % tp_size:
            # Sizes that divide both numbers of heads: 32 query and 8 KV heads allow 1, 2, 4 and 8.
            sizes = [size for size in range(1, count + 1) if math.gcd(*counts.values()) % size == 0]
            nearest = max((size for size in sizes if size < tp_size), default=1)
            raise ConfigError(
                f"mesh.tp_size={tp_size} must divide {field}={count}. Valid sizes for this model: "
                f"{', '.join(map(str, sizes))}",
                code="not_divisible",
                keys=("mesh.tp_size",),
                fix=f"mesh.tp_size={nearest}",
            )


def check_features(name: str, module: nn.Module, style: ParallelStyle, tp_size: int) -> None:
    """Raise ConfigError if `tp_size` does not divide the features of a linear layer that the style shards."""
    match module, style:
        case nn.Linear(), ColwiseParallel() | PackedColwise():
            field, size = "out_features", module.out_features
        case nn.Linear(), RowwiseParallel():
            field, size = "in_features", module.in_features
        case _:
            return
    if size % tp_size:
        raise ConfigError(
            f"mesh.tp_size={tp_size} must divide {field}={size} of {name}",
            code="not_divisible",
            keys=("mesh.tp_size",),
            fix=f"mesh.tp_size={math.gcd(size, tp_size)}",
        )
