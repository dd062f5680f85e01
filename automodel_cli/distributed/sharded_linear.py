"""Linear layers sharded by tensor parallelism that compute with their own function on local tensors."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

Compute = Callable[[Tensor, Tensor, Shard, DeviceMesh], Tensor]
"""Outputs of local inputs and a local weight `[O, I]`, placed as given on this mesh."""


def linear_over_tp(x: Tensor, weight: DTensor, compute: Compute) -> Tensor:
    """Return the outputs of a layer sharded over tp.

    Column-parallel: full inputs, a shard of the outputs. Row-parallel: a shard of the inputs, a partial sum of the
    outputs.
    """
    mesh, (placement,) = weight.device_mesh, weight.placements
    assert isinstance(x, DTensor) and isinstance(placement, Shard), f"a weight placed as {placement}"
    by_outputs = placement.dim == 0
    local_x = x.to_local(grad_placements=[Partial()] if by_outputs else x.placements)
    local_y = compute(local_x, weight.to_local(grad_placements=[placement]), placement, mesh)
    return DTensor.from_local(local_y, mesh, [Shard(-1) if by_outputs else Partial()], run_check=False)
