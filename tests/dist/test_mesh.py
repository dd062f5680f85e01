"""The device mesh on 8 pretended ranks and on real ones, and the process group under it."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from automodel_cli.distributed import process_group
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from tests.dist.harness import launch, launch_all

# request -> axes of the FSDP mesh, dp ranks of rank 0, FSDP ranks of rank 0 (replicas x shards)
WORLD_8 = {
    "none": ({}, ("dp_shard",), [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]),
    "tp2": ({"tp_size": 2}, ("dp_shard",), [0, 2, 4, 6], [0, 2, 4, 6]),
    "cp2": ({"cp_size": 2}, ("dp_shard_cp",), [0, 2, 4, 6], [0, 1, 2, 3, 4, 5, 6, 7]),
    "tp2 cp2": ({"tp_size": 2, "cp_size": 2}, ("dp_shard_cp",), [0, 4], [0, 2, 4, 6]),
    "pp2": ({"pp_size": 2}, ("dp_shard",), [0, 1, 2, 3], [0, 1, 2, 3]),
    "pp2 tp2 cp2": ({"pp_size": 2, "tp_size": 2, "cp_size": 2}, ("dp_shard_cp",), [0], [0, 2]),
    "rep2": (
        {"dp_replicate_size": 2},
        ("dp_replicate", "dp_shard"),
        [0, 1, 2, 3, 4, 5, 6, 7],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
    ),
    "rep2 cp2": (
        {"dp_replicate_size": 2, "cp_size": 2},
        ("dp_replicate", "dp_shard_cp"),
        [0, 2, 4, 6],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
    ),
    "pp2 rep2": ({"pp_size": 2, "dp_replicate_size": 2}, ("dp_replicate", "dp_shard"), [0, 1, 2, 3], [[0, 1], [2, 3]]),
    "tp2 ep4": ({"tp_size": 2, "ep_size": 4}, ("dp_shard",), [0, 2, 4, 6], [0, 2, 4, 6]),
}


def _pretended_rank_0_of_8(rank, world):
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    rows = {}
    for name, (sizes, *_) in WORLD_8.items():
        layout = MeshConfig(**sizes).resolve(8)
        mesh = build_mesh(layout, "cpu")
        sizes_hold = (mesh.dp.size(), mesh.dp_cp.size(), mesh.dp_shard_cp.size()) == (
            layout.dp,
            layout.dp_cp,
            layout.dp_shard_cp,
        )
        rows[name] = (
            mesh.fsdp.mesh_dim_names,
            mesh.dp.mesh.tolist(),
            mesh.fsdp.mesh.tolist(),
            sizes_hold and mesh.loss.size() == layout.dp * layout.pp and mesh.pp.size() == layout.pp,
        )
    dist.destroy_process_group()
    return rows


def test_axes_of_the_mesh_on_8_ranks():
    rows = launch(_pretended_rank_0_of_8, 1, process_group=False)
    for name, (_, fsdp_axes, dp_ranks, fsdp_ranks) in WORLD_8.items():
        assert rows[name] == (fsdp_axes, dp_ranks, fsdp_ranks, True), name


# request -> experts' mesh (pp, ep_shard, ep), ranks with the other experts of rank 3, ranks that share its experts
EXPERTS_OF_8 = {
    "ep8": ({"ep_size": 8}, (1, 1, 8), [0, 1, 2, 3, 4, 5, 6, 7], [3]),
    "ep2": ({"ep_size": 2}, (1, 4, 2), [2, 3], [1, 3, 5, 7]),
    "tp2 ep4": ({"tp_size": 2, "ep_size": 4}, (1, 2, 4), [0, 1, 2, 3], [3, 7]),
    "pp2 ep4": ({"pp_size": 2, "ep_size": 4}, (2, 1, 4), [0, 1, 2, 3], [3]),
    "pp2 ep2 cp2": ({"pp_size": 2, "ep_size": 2, "cp_size": 2}, (2, 2, 2), [2, 3], [1, 3]),
    "rep2 ep2": ({"dp_replicate_size": 2, "ep_size": 2}, (1, 4, 2), [2, 3], [1, 3, 5, 7]),
}


def _pretended_rank_3_of_8(rank, world):
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    rows = {}
    for name, (sizes, *_) in EXPERTS_OF_8.items():
        mesh = build_mesh(MeshConfig(**sizes).resolve(8), "cpu")
        rows[name] = tuple(mesh.expert.shape), mesh.ep.mesh.tolist(), mesh.ep_shard.mesh.tolist()
    none = build_mesh(MeshConfig(tp_size=2).resolve(8), "cpu")
    assert none.expert is None and none.ep is None and none.ep_shard is None
    dist.destroy_process_group()
    return rows


def test_expert_mesh_on_8_ranks():
    rows = launch(_pretended_rank_3_of_8, 1, process_group=False)
    for name, (_, *want) in EXPERTS_OF_8.items():
        assert list(rows[name]) == want, name


def _hybrid(rank, world):
    mesh = build_mesh(MeshConfig(dp_replicate_size=2, cp_size=2).resolve(world), "cpu")
    value = torch.tensor([float(rank)])
    sums = [mesh.sum_over(axis, value).item() for axis in (mesh.dp, mesh.dp_cp, mesh.cp, mesh.pp)]
    return mesh.dp_rank, mesh.dp_size, sums, value.item()


def test_sums_and_ranks_on_a_hybrid_mesh():
    results = launch_all(_hybrid, 8)
    for rank, (dp_rank, dp_size, sums, untouched) in enumerate(results):
        assert (dp_rank, dp_size, untouched) == (rank // 2, 4, rank)
        first_of_cp = rank - rank % 2
        assert sums == [sum(range(rank % 2, 8, 2)), 28, 2 * first_of_cp + 1, rank]


def _one_rank_without_network(rank, world):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    device = process_group.init_process_group()
    mesh = build_mesh(MeshConfig().resolve(1), device.type)
    total = mesh.sum_over(mesh.dp, torch.ones(())).item()
    process_group.stop()
    process_group.stop()
    return device.type, total, dist.is_initialized()


def test_one_rank_needs_no_launcher():
    assert launch(_one_rank_without_network, 1, process_group=False) == ("cpu", 1.0, False)


def _started_from_the_environment(rank, world):
    device = process_group.init_process_group("gloo", timeout_minutes=1)
    mesh = build_mesh(MeshConfig().resolve(world), device.type)
    total = mesh.sum_over(mesh.dp, torch.ones(())).item()
    dist.barrier()
    process_group.stop()
    return device.type, total


def test_ranks_of_a_launcher_find_each_other():
    assert launch_all(_started_from_the_environment, 2, process_group=False) == [("cpu", 2.0)] * 2


def _wrong_size(rank, world):
    with pytest.raises(AssertionError, match="a layout of 4 ranks in a group of 2"):
        build_mesh(MeshConfig().resolve(4), "cpu")


def test_a_layout_of_another_size_is_a_bug():
    launch(_wrong_size, 2)
