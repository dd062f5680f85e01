"""What a plan says a rank holds, against the shards that a rank of the same layout really has."""

from __future__ import annotations

import pytest
from torch.profiler import ProfilerActivity, profile

from automodel_cli.distributed.config import DDPConfig, FSDP2Config
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.distributed.tensor_parallel.apply import cut_parameters
from automodel_cli.models import transformers_compat
from automodel_cli.models.builder import build_part
from automodel_cli.models.config import ModelConfig
from automodel_cli.planning.layer_costs import read_units
from automodel_cli.planning.memory import Accounting
from automodel_cli.training.optimizers.nodes import AdamW
from tests.dist.harness import launch
from tests.marks import slow
from tests.tiny import tiny_fields

LAYOUTS = {
    "fsdp2 x4": MeshConfig(),
    "ep2 x shard2": MeshConfig(ep_size=2),
    "ep4": MeshConfig(ep_size=4),
    "cp2 x ep2": MeshConfig(cp_size=2, ep_size=2),
    "tp2 x fsdp2": MeshConfig(tp_size=2),
    "tp4": MeshConfig(tp_size=4),
    "tp2 x ep2": MeshConfig(tp_size=2, ep_size=2),
}


def _of_every_layout(rank: int, world: int, family: str, names: list[str]) -> dict[str, tuple[int, int]]:
    return {name: _real_and_planned(world, family, LAYOUTS[name]) for name in names}


def _real_and_planned(world: int, family: str, sizes: MeshConfig) -> tuple[int, int]:
    """Elements of the first rank, which has the most."""
    layout, config = sizes.resolve(world), FSDP2Config()
    model = ModelConfig(config=tiny_fields(family))
    whole = build_part(model)
    over_tp = (
        cut_parameters(whole.model, config.axis_options(), layout.tp, shard_experts=layout.ep == 1)
        if layout.tp > 1
        else ()
    )
    accounting = Accounting(config.storage(), layout, AdamW(lr=1e-3), 1, frozenset(over_tp))
    units = read_units(whole, None)
    planned = sum(accounting.stored_numel(item) for unit in (units.before, *units.layers) for item in unit.params)
    part = build_part(model)
    parallelize(part, build_mesh(layout, "cpu"), config)
    return sum(transformers_compat.local(p).numel() for p in part.parameters()), planned


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", *slow("gpt_oss", "qwen3_moe")])
def test_planned_shards_are_the_real_ones(family: str) -> None:
    names = [
        name
        for name, sizes in LAYOUTS.items()
        if not (family == "llama" and sizes.ep_size != 1)  # a dense model has no experts
        and (family == "deepseek_v3" or name != "tp4")  # the others have 2 key-value heads
    ]
    found = launch(_of_every_layout, 4, family, names)
    assert {name: real for name, (real, _) in found.items()} == {name: planned for name, (_, planned) in found.items()}


def _left_behind(rank: int, world: int, frozen: bool) -> tuple[int, int]:
    """Bytes that wrapping allocates and keeps, and those of the parameters."""
    part = build_part(ModelConfig(config=tiny_fields("llama")))
    part.requires_grad_(not frozen)
    mesh = build_mesh(MeshConfig().resolve(world), "cpu")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        module = parallelize(part, mesh, DDPConfig())
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    assert module is not None
    return sum(e.nbytes() for e in events if e.name() == "[memory]"), sum(p.nbytes for p in part.parameters())


def test_a_frozen_copy_has_no_buckets_for_gradients_under_ddp() -> None:
    """By the allocator."""
    trained, parameters = launch(_left_behind, 2, False)
    frozen, _ = launch(_left_behind, 2, True)
    assert trained >= 2 * parameters
    assert parameters <= frozen <= 1.02 * parameters
