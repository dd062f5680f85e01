"""The device mesh of a run: five axes that always exist, and the derived axes that answer one question each."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from automodel_cli.distributed.mesh_config import AXES, Layout
from automodel_cli.distributed.process_group import hold_timeout, wait_for_each_collective


@dataclass(frozen=True)
class Mesh:
    """One process among many. Every axis is a one-dimensional DeviceMesh of the ranks that this rank shares it with.

    Flattened axes are kept here as the objects torch returned: looking them up by name again warns, and fails on views.
    """

    layout: Layout
    device: torch.device
    root: DeviceMesh
    """(pp, dp_replicate, dp_shard, cp, tp)"""
    dp: DeviceMesh
    """Who reads different rows."""
    dp_cp: DeviceMesh
    """Whose weights add up: every rank with other tokens."""
    dp_shard_cp: DeviceMesh
    """Who holds shards of one copy of the parameters."""
    loss: DeviceMesh
    """Whose losses add up: dp, and pp because only the last stage has a loss. (Ranks of one cp group hold the log-probs
    of whole rows, so each of them has the whole loss of its rows.)"""
    fsdp: DeviceMesh
    """What FSDP2 works on: (shard,), or (replicate, shard) for hybrid sharding."""
    expert: DeviceMesh | None
    """(pp, ep_shard, ep) over the same ranks, tp neighbours innermost; None where experts are not distributed."""
    ep_group: dist.ProcessGroup | None = None
    """The ranks of `ep`, for tokens only: on a communicator of their own they do not queue behind parameters."""

    # Cached: torch makes a new object for each question, in 0.14 ms.
    @cached_property
    def ep(self) -> DeviceMesh | None:
        """Who holds the other experts of a layer."""
        return None if self.expert is None else self.expert["ep"]

    @cached_property
    def ep_shard(self) -> DeviceMesh | None:
        """Who holds shards of the same experts."""
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
        """Sum of `tensor` over the ranks of a one-dimensional axis, as a new tensor. Collective over the axis."""
        total = tensor.detach().to(self.device, copy=True)
        if axis.size() > 1:  # alone gloo would still hand it to another thread and wait
            dist.all_reduce(total, group=axis.get_group())
        return total


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """The mesh of this rank. Collective over all ranks; the process group must have `layout.world_size` ranks."""
    # FSDP2 shards what tp or ep have sharded already, so gathering takes two steps; torch warns about that each time.
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
    """(pp, ep_shard, ep): inside each pipeline stage, the ranks of dp, cp and tp taken `ep` neighbours at a time."""
    sizes = (layout.pp, layout.ep_shard, layout.ep)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "ep_shard", "ep"))


def _own_group(axis: DeviceMesh) -> dist.ProcessGroup:
    """A group that nothing else uses: DeviceMesh takes the world's for an axis of that size. Collective."""
    if axis.size() < dist.get_world_size():
        return axis.get_group()
    return dist.new_group(group_desc="experts")


def fsdp_mesh(root: DeviceMesh) -> DeviceMesh:
    """What FSDP2 works on: `dp_shard`, joined with `cp` where there is one, behind `dp_replicate` for hybrid
    sharding.
    """
    shard = root["dp_shard", "cp"]._flatten("dp_shard_cp") if root["cp"].size() > 1 else root["dp_shard"]
    if root["dp_replicate"].size() == 1:
        return shard
    # Private in torch 2.11 and 2.13; public slicing cannot put a flattened axis next to another. The only use.
    return DeviceMesh._concatenate([root["dp_replicate"], shard])
