"""Muon on a mesh: one rank orthogonalizes each matrix, and the numbers are those of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.training.optimizers import muon
from automodel_cli.training.optimizers.matrix_exchange import cost, rounds_of
from automodel_cli.training.optimizers.nodes import Muon
from tests.dist.harness import launch_all
from tests.dist.parity import FSDP2, tiny_part
from tests.tiny import full

pytestmark = pytest.mark.slow

LAYOUTS = {
    "fsdp4": ("llama", MeshConfig()),
    "hsdp2x2": ("llama", MeshConfig(dp_replicate_size=2)),
    "tp2": ("llama", MeshConfig(tp_size=2)),
    "ep2": ("qwen3_moe", MeshConfig(ep_size=2)),
    "ep2 x tp2": ("qwen3_moe", MeshConfig(ep_size=2, tp_size=2)),
}
OF_EIGHT = {"tp2 x hsdp2x2": ("llama", MeshConfig(tp_size=2, dp_replicate_size=2))}
STEPS = 2
ROWS = {"intermediate_size": 90}  # no multiple of 4


def _set_gradient(param: nn.Parameter, seed: int) -> None:
    """A gradient of normal numbers, which does not depend on the layout."""
    whole = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
    if isinstance(param, DTensor):
        mesh = param.device_mesh
        replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        param.grad = replicated.redistribute(placements=param.placements)
    else:
        param.grad = whole


def _train(model: nn.Module, dtype: str) -> dict[str, torch.Tensor]:
    optimizer = Muon(lr=1e-2, ns_dtype=dtype).build([model])
    for number in range(STEPS):
        for i, (_, param) in enumerate(sorted(model.named_parameters())):
            _set_gradient(param, 1000 * number + i)
        optimizer.step()
    return {name: full(param.detach()) for name, param in model.named_parameters()}


def _differences(rank, world, layouts, dtype):
    """Largest difference of a Muon matrix from one process by layout, and how many matrices this rank computed."""
    computed: list[int] = []
    orthogonalize = muon.orthogonalize

    def counted(matrix, *args):
        computed.append(matrix.numel())
        return orthogonalize(matrix, *args)

    found = {}
    for label, (family, config) in layouts.items():
        extra = ROWS if family == "llama" else {}
        want = _train(tiny_part(family, **extra), dtype)
        module = parallelize(tiny_part(family, **extra), build_mesh(config.resolve(world), "cpu"), FSDP2)
        computed.clear()
        muon.orthogonalize = counted
        got = _train(module, dtype)
        muon.orthogonalize = orthogonalize
        names = [name for name in want if Muon(lr=1.0).orthogonalizes(_item(module, name))]
        worst = max((got[name] - want[name]).abs().max().item() for name in names)
        rest = max((got[name] - want[name]).abs().max().item() for name in want)
        params = dict(module.named_parameters())
        copies = sum(
            world // params[name].device_mesh.size() for name in names
        )  # router gates have one on each tp rank
        found[label] = worst, rest, len(computed), copies * STEPS
    return found


def _item(module, name):
    from automodel_cli.training.optimizers.param_groups import trainable

    return next(item for item in trainable([module]) if item.name == name)


@pytest.mark.parametrize(
    ("world", "layouts", "dtype"),
    [
        (4, LAYOUTS, "float32"),
        (4, {"fsdp4": LAYOUTS["fsdp4"]}, "bfloat16"),
        (4, LAYOUTS, "bfloat16"),
        (8, OF_EIGHT, "float32"),
    ],
    ids=["float32", "bfloat16", "bfloat16 everywhere", "8 ranks"],
)
def test_every_layout_computes_the_numbers_of_one_process(world, layouts, dtype):
    """Bitwise for equal gradients: a matrix is complete where it is orthogonalized, and updates travel in its dtype."""
    of_ranks = launch_all(_differences, world, layouts, dtype)
    for label in layouts:
        for worst, rest, _, _ in (found[label] for found in of_ranks):
            assert worst == 0.0, (label, worst)
            assert rest < 1e-6, label
        counts = [found[label][2] for found in of_ranks]
        assert sum(counts) == of_ranks[0][label][3], (label, counts)  # once on its mesh
        assert max(counts) - min(counts) <= STEPS, (label, counts)


def _costs(rank, world, sizes):
    """What this rank orthogonalizes of matrices of these sizes, and the whole."""
    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    shapes = [(rows, columns) for rows, columns, count in sizes for _ in range(count)]
    params = [
        nn.Parameter(DTensor.from_local(torch.empty(shape, device="meta"), mesh, [Replicate()], run_check=False))
        for shape in shapes
    ]
    own = [cost(round_.own.shape) for round_ in rounds_of(params) if round_.own is not None]
    return sum(own), sum(map(cost, shapes)), max(map(cost, shapes))


def test_ranks_share_the_cost_of_a_model():
    llama_8b_layers = [(4096, 4096, 2), (1024, 4096, 2), (14336, 4096, 2), (4096, 14336, 1)]
    for own, total, largest in launch_all(_costs, 3, [(r, c, n * 8) for r, c, n in llama_8b_layers]):
        assert abs(own - total / 3) <= largest
