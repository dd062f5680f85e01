"""What one optimizer step promises: a bad one changes nothing, a notice reaches everyone, few collectives."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from automodel_cli.distributed.gradients import clip_grad_norm_
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.objectives.sft import SFT
from automodel_cli.training.optimizers.nodes import AdamW
from automodel_cli.training.stages import SingleStage
from automodel_cli.training.step import NonFiniteError, train_step
from tests.dist.harness import launch_all
from tests.dist.parity import FSDP2, microbatch, tiny_part

pytestmark = pytest.mark.slow


class BadOnce(SFT):
    """On rank 0 the gradient of the chosen step is not finite, while its loss is."""

    bad = False

    def __call__(self, output, batch):
        loss = super().__call__(output, batch)
        if not self.bad or dist.get_rank() > 0:
            return loss
        return loss + (output.logprobs_BT * 0).sum().sqrt()  # d sqrt(x) / dx at 0


def _kept(part, optimizer):
    tensors = {f"parameter {n}": p.to_local() if hasattr(p, "to_local") else p for n, p in part.named_parameters()}
    for i, state in enumerate(optimizer.state.values()):
        for name, value in state.items():
            tensors[f"state {i} {name}"] = value.to_local() if hasattr(value, "to_local") else value
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _after_a_bad_step(rank, world, implementation):
    """(what the bad step changed, what a good one after it changed)."""
    mesh = build_mesh(MeshConfig().resolve(world), "cpu")
    module = parallelize(part := tiny_part("llama"), mesh, FSDP2)
    optimizer = AdamW(lr=1e-3, implementation=implementation).build([part])
    objective, batches = BadOnce(), [microbatch(rank, packed=True)]

    def step():
        train_step(SingleStage(module), batches, objective, optimizer, mesh, max_grad_norm=1.0)

    step()
    before = _kept(part, optimizer)
    object.__setattr__(objective, "bad", True)
    with pytest.raises(NonFiniteError, match=r"the gradient norm is (nan|inf)"):
        step()
    unchanged = _kept(part, optimizer)
    assert before.keys() == unchanged.keys() and any(name.endswith("exp_avg_sq") for name in before)
    changed = [name for name, value in before.items() if not torch.equal(value, unchanged[name])]
    object.__setattr__(objective, "bad", False)
    optimizer.zero_grad()
    step()
    moved = [name for name, value in _kept(part, optimizer).items() if not torch.equal(value, before[name])]
    return changed, len(moved)


@pytest.mark.parametrize("implementation", ["fused", "loop"])
def test_a_step_that_is_not_finite_changes_nothing(implementation):
    """The fused kernel is launched before anybody knows, the loop after."""
    for changed, moved in launch_all(_after_a_bad_step, 2, implementation):
        assert changed == [] and moved > 10


def _noticed(rank, world, mesh_config):
    """(notice after the step, loss, all-reduces of loss, flag, notices, own seconds and waits together)."""
    mesh = build_mesh(mesh_config.resolve(world), "cpu")
    module = parallelize(tiny_part("llama"), mesh, FSDP2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    batches = [microbatch(mesh.dp_rank, packed=True)]
    seen, plain = [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        seen.append(tensor.numel())
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        notice = (0, 15)[rank == world - 1] or (10 if rank == 0 else 0)
        result = train_step(
            SingleStage(module), batches, SFT(), optimizer, mesh, max_grad_norm=None, stop_signal=lambda: notice
        )
    finally:
        dist.all_reduce = plain
    return result.stop_signal, result.loss.item(), seen.count(2 + 32 + 2 * world)


@pytest.mark.parametrize("mesh_config", [MeshConfig(), MeshConfig(tp_size=2), MeshConfig(cp_size=2)])
def test_every_rank_hears_the_largest_notice_with_the_loss(mesh_config):
    """Also from a rank that holds a copy of another's loss, which is still counted once."""
    found = launch_all(_noticed, 2, mesh_config)
    assert [notice for notice, _, _ in found] == [15, 15]
    assert found[0][1] == found[1][1]
    ((_, alone, _),) = launch_all(_noticed, 1, MeshConfig())
    if mesh_config != MeshConfig():  # the same rows as one process
        assert found[0][1] == pytest.approx(alone, rel=1e-6)
    assert found[0][2] == 1


def _clipped(rank, world):
    """Gradients of several dtypes, clipped, against a float64 definition."""
    mesh = build_mesh(MeshConfig().resolve(world), "cpu")
    part = tiny_part("llama")
    generator = torch.Generator().manual_seed(0)
    for i, param in enumerate(part.parameters()):
        param.data = param.data.to((torch.float32, torch.bfloat16, torch.float64)[i % 3])
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    want = copy.deepcopy([p.grad.double() for p in part.parameters()])
    norm = torch.cat([g.flatten() for g in want]).norm()
    got = clip_grad_norm_([part], 0.5, mesh)
    assert got.item() == pytest.approx(norm.item(), rel=1e-6)
    for param, grad in zip(part.parameters(), want, strict=True):
        tolerance = 2**-7 if param.dtype == torch.bfloat16 else 1e-6
        assert torch.allclose(param.grad.double(), grad * 0.5 / norm, rtol=tolerance)


def test_clipping_is_that_of_float64_for_every_dtype():
    launch_all(_clipped, 1)
