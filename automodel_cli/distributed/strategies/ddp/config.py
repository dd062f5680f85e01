"""Config node of DDP. Torch-free at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from automodel_cli.config.value_checks import check_range
from automodel_cli.distributed.strategies.base import BuiltInStrategy, MemoryTraits


@dataclass(frozen=True)
class DDPConfig(BuiltInStrategy):
    """Replicated model on every rank; gradients are reduced in buckets during backward.

    `static_graph` supports one microbatch per step only, because torch's DDP cannot both record the graph and defer the
    reduction.
    """

    supports: ClassVar[frozenset[str]] = frozenset({"pp", "nf4", "fp8", "qat", "sampler", "mtp"})

    broadcast_buffers: bool = False
    """Copy rank 0's buffers to all ranks before each forward pass."""
    find_unused_parameters: bool = False
    """Search the graph for parameters without a gradient. Slower."""
    static_graph: bool = False
    """Assume that every step uses the same parameters. Requires one microbatch per step."""
    bucket_cap_mb: float | None = None
    """Bucket size in MiB. null: torch's choice."""
    gradient_as_bucket_view: bool = False
    """Keep gradients in the buckets, which saves memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("bucket_cap_mb", self.bucket_cap_mb, above=0, unit="MiB", fix="parallelizer.bucket_cap_mb=25")

    def storage(self) -> MemoryTraits:
        """Return the memory traits. Buckets are a second copy of the gradients, unless gradients are views of them."""
        return MemoryTraits(gradient_copies=1 if self.gradient_as_bucket_view else 2)
