"""The device mesh of a run: five axes that always exist, and axes derived from them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from automodel_cli.distributed import torch_compat
from automodel_cli.distributed.mesh_config import AXES, Layout
from automodel_cli.distributed.process_group import hold_timeout, wait_for_each_collective


@dataclass(frozen=True)
class Mesh:
    """The mesh from the view of one rank. Every axis is a one-dimensional DeviceMesh that contains this rank.

    Flattened axes are stored as torch returned them. A lookup by name would warn, and fails on views.
    """

    layout: Layout
    device: torch.device
    root: DeviceMesh
    """Axes (pp, dp_replicate, dp_shard, cp, tp)."""
    dp: DeviceMesh
    """Ranks with different sequences."""
    dp_cp: DeviceMesh
    """Ranks with different tokens, over which gradients are summed."""
    dp_shard_cp: DeviceMesh
    """Ranks that share one copy of the parameters."""
    loss: DeviceMesh
    """Ranks whose losses are summed: dp, and pp because only the last stage has a loss.

    The ranks of a cp group have log-probs of full sequences, so each of them has the complete loss.
    """
    fsdp: DeviceMesh
    """Mesh of FSDP2: (shard,), or (replicate, shard) for hybrid sharding."""
    expert: DeviceMesh | None
    """Axes (pp, ep_shard, ep) over the same ranks, with tp neighbors innermost. None without expert parallelism."""
    ep_group: dist.ProcessGroup | None = None
    """Group of `ep` for token dispatch only, with its own communicator, so that tokens do not queue behind parameters.
    """

    # Cached, because torch creates a new object for each lookup, in 0.14 ms.
    @cached_property
    def ep(self) -> DeviceMesh | None:
        """Ranks with the other experts of a layer."""
        return None if self.expert is None else self.expert["ep"]

    @cached_property
    def ep_shard(self) -> DeviceMesh | None:
        """Ranks that share the same experts."""
        return None if self.expert is None else self.expert["ep_shard"]

    @cached_property
    def pp(self) -> DeviceMesh:
        return self.root["pp"]

    @cached_property
    def cp(self) -> DeviceMesh:
        return self.root["cp"]

    @cached_property
    def tp(self) -> DeviceMesh:
        return self.root["tp"]

    @property
    def dp_rank(self) -> int:
        return self.dp.get_local_rank()

    @property
    def dp_size(self) -> int:
        return self.dp.size()

    def sum_over(self, axis: DeviceMesh, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over the ranks of a one-dimensional axis, as a new tensor. Collective over the
        axis.
        """
        total = tensor.detach().to(self.device, copy=True)
        if axis.size() > 1:  # With one rank, gloo would still pass it to another thread and wait.
            dist.all_reduce(total, group=axis.get_group())
        return total


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """Return the mesh of this rank. Collective over all ranks of the process group, which must have
    `layout.world_size`.
    """
    # FSDP2 shards tensors that tp or ep have sharded already, so gathering takes two steps. torch warns each time.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if device_type == "cpu" and layout.tp > 1:
        wait_for_each_collective()
    world_size = dist.get_world_size()
    assert world_size == layout.world_size, f"a layout of {layout.world_size} ranks in a group of {world_size}"
    sizes = tuple(getattr(layout, axis) for axis in AXES)
    root = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
    expert = expert_mesh(layout, device_type) if layout.ep > 1 else None
    mesh = Mesh(
        layout=layout,
        device=device,
        root=root,
        # tp is the innermost axis, because its collectives are the most frequent and neighbors have the fastest links.
        # pp is the outermost: it sends least. Rank = (((pp * 2 + dp_replicate) * 2 + dp_shard) * 2 + cp) * 2 + tp for
        # axes of 2.
        dp=root["dp_replicate", "dp_shard"]._flatten("dp"),
        dp_cp=root["dp_replicate", "dp_shard", "cp"]._flatten("dp_cp"),
        dp_shard_cp=root["dp_shard", "cp"]._flatten("dp_shard_cp"),
        loss=root["pp", "dp_replicate", "dp_shard"]._flatten("loss"),
        fsdp=fsdp_mesh(root),
        expert=expert,
        ep_group=None if expert is None else _own_group(expert["ep"]),
    )
    hold_timeout()
    return mesh


def expert_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Return the mesh (pp, ep_shard, ep). In each pipeline stage, `ep` neighbors of dp x cp x tp form a group."""
    sizes = (layout.pp, layout.ep_shard, layout.ep)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "ep_shard", "ep"))


def _own_group(axis: DeviceMesh) -> dist.ProcessGroup:
    """Return a group for exclusive use.

    DeviceMesh reuses the group of the world for an axis of that size. Collective.
    """
    if axis.size() < dist.get_world_size():
        return axis.get_group()
    # On one communicator, NCCL runs collectives in the order of their launch: tokens would wait for gathers of
    # parameters.
    group: dist.ProcessGroup = dist.new_group(group_desc="experts")
    return group


def fsdp_mesh(root: DeviceMesh) -> DeviceMesh:
    """Return the mesh of FSDP2: `dp_shard`, flattened with `cp`, and preceded by `dp_replicate` for hybrid sharding."""
    shard = root["dp_shard", "cp"]._flatten("dp_shard_cp") if root["cp"].size() > 1 else root["dp_shard"]
    if root["dp_replicate"].size() == 1:
        return shard
    return torch_compat.joined(root["dp_replicate"], shard)
