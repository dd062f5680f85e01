"""Gradient norm and clipping against closed forms, on plain and sharded parameters together; then refused steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from automodel_cli.data.head_output import HeadOutput
from automodel_cli.distributed.gradients import clip_grad_norm_
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import fsdp2_strategy_parallelize, parallelize, to_cpu
from automodel_cli.objectives.sft import SFT
from automodel_cli.training.stages import SingleStage
from automodel_cli.training.step import NonFiniteError, train_step
from tests.dist.harness import launch, launch_all
from tests.dist.parity import FSDP2, Case, GradientRecorder, one_step, reference, step_batches, tiny_part

pytestmark = pytest.mark.slow

REPLICATED_THEN_SHARDED = MeshConfig(dp_replicate_size=2)


class Mixed(nn.Module):
    """A sharded layer, a plain one, and one parameter under two names."""

    def __init__(self, mesh):
        super().__init__()
        self.sharded = nn.Linear(5, 3, bias=False)
        self.plain = nn.Linear(4, 2, bias=False)
        self.tied = nn.Linear(4, 2, bias=False)
        self.tied.weight = self.plain.weight
        fully_shard(self.sharded, mesh=mesh.fsdp)
        self.mesh = mesh

    def fill(self, sharded_value, plain_value):
        weight = self.sharded.weight
        full = torch.full(weight.shape, sharded_value)
        placements = weight.placements
        weight.grad = distribute_tensor(full, weight.device_mesh, placements)
        self.plain.weight.grad = torch.full((2, 4), plain_value)


def _norms(rank, world):
    mesh = build_mesh(REPLICATED_THEN_SHARDED.resolve(world), "cpu")
    part = Mixed(mesh)
    found = []
    for values in ((2.0, 3.0), (0.0, 0.0), (6e31, 0.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, -math.inf)):
        part.fill(*values)
        found.append(clip_grad_norm_([part], None, mesh).item())
    part.fill(2.0, 3.0)
    before = clip_grad_norm_([part, part], 1.0, mesh).item()  # the same part twice is still counted once
    after = clip_grad_norm_([part], 100.0, mesh).item()
    unchanged = clip_grad_norm_([part], None, mesh).item()
    return found, before, after, unchanged


def test_norm_counts_every_gradient_once_and_keeps_non_finite_values():
    want = math.sqrt(15 * 4 + 8 * 9)
    for found, before, after, unchanged in launch_all(_norms, 4):
        assert found[:2] == pytest.approx([want, 0.0], rel=1e-6)
        assert found[2] == pytest.approx(6e31 * math.sqrt(15), rel=1e-6)
        assert math.isnan(found[3]) and found[4] == found[5] == math.inf
        assert before == pytest.approx(want, rel=1e-6)
        assert after == pytest.approx(1.0, rel=1e-6) and unchanged == after


def _clipped(rank, world):
    mesh = build_mesh(MeshConfig().resolve(world), "cpu")
    of_ranks = step_batches(Case(), world)
    whole = reference("llama", [batch for batches in of_ranks for batch in batches])
    norm, want = whole.grad_norm, whole.gradients
    result, got = one_step(Case(), mesh, of_ranks[rank], max_grad_norm=norm / 4)
    worst = max((got[name] - want[name] / 4).abs().max().item() for name in want)
    return abs(result.grad_norm.item() / norm - 1), worst / max(g.abs().max().item() for g in want.values())


def test_clipping_scales_every_gradient_alike():
    norm_error, gradient_error = launch(_clipped, 2)
    assert norm_error < 1e-6 and gradient_error < 1e-6


class Poisoned(nn.Module):
    """A part whose log-probs are nan where it meets a certain token."""

    def __init__(self, part, token):
        super().__init__()
        self.part, self.token = part, token

    def forward(self, *, labels, **model_inputs):
        output = self.part(labels=labels, **model_inputs)
        return HeadOutput(output.logprobs_BT.masked_fill(model_inputs["input_ids"] == self.token, torch.nan))


class InfiniteGradient(SFT):
    def __call__(self, output, batch):
        output.logprobs_BT.register_hook(lambda grad: grad * torch.inf)
        return super().__call__(output, batch)


def _refused(rank, world, kind):
    mesh = build_mesh(MeshConfig().resolve(world), "cpu")
    batches = step_batches(Case(), world)[rank]
    part = tiny_part("llama")
    stages, objective = SingleStage(parallelize(part, mesh, FSDP2)), SFT()
    if kind == "loss":
        batches[1].input_ids_BT[1, 20] = 155 if rank == 1 else 3  # one row of rank 1; ordinary rows stay below 150
        stages._module = Poisoned(part, 155)
    elif kind == "gradient":
        objective = InfiniteGradient()
    else:
        for batch in batches:
            batch.labels_BT.fill_(-100)
    recorder = GradientRecorder(part)
    with pytest.raises(NonFiniteError) as caught:
        train_step(stages, batches, objective, recorder, mesh, max_grad_norm=1.0)
    located = str(caught.value.located(7, lambda row: f"train.jsonl:{row}"))
    return str(caught.value), caught.value.rows, recorder.gradients == {}, located


@pytest.mark.parametrize(
    ("kind", "reason", "rows"),
    [
        ("loss", "the loss is nan", (9,)),
        ("gradient", "the gradient norm is nan", tuple(range(12))),
        ("no labels", "nothing to train on", tuple(range(12))),
    ],
)
def test_a_step_that_is_not_finite_stops_before_the_optimizer_on_every_rank(kind, reason, rows):
    for message, found, optimizer_untouched, located in launch_all(_refused, 2, kind):
        assert message.startswith(reason) and "before the optimizer step" in message
        assert found == rows and optimizer_untouched
        assert located.startswith(f"step 7: {reason}") and f"train.jsonl:{rows[-1]}" in located


def _to_cpu(rank, world):
    mesh = build_mesh(MeshConfig().resolve(world), "cpu")
    full = torch.arange(6.0)
    sharded = distribute_tensor(full, mesh.dp, [Shard(0)])
    on_meta = DTensor.from_local(torch.empty(3, device="meta"), build_mesh(mesh.layout, "cpu").dp, [Shard(0)])
    with pytest.raises(ValueError, match="device meta"):
        to_cpu(on_meta)
    return to_cpu(sharded).tolist(), to_cpu(full) is full, to_cpu("text")


def test_to_cpu_gives_whole_tensors():
    assert launch_all(_to_cpu, 2) == [([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], True, "text")] * 2


class _Block(GradientCheckpointingLayer):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.linear(x_BD).tanh()


def _with_shared_weight() -> nn.Sequential:
    """Four layers; the second and the last have one weight between them, as Zamba's blocks have."""
    model = nn.Sequential(*(_Block(seed) for seed in range(4)))
    model[3].linear.weight = model[1].linear.weight
    return model


def _shared_gradients(rank: int, world: int) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    exact = MixedPrecisionPolicy(param_dtype=None, reduce_dtype=None)
    model = fsdp2_strategy_parallelize(_with_shared_weight(), mesh, exact)
    assert model[3].linear.weight is model[1].linear.weight and len(list(model.parameters())) == 3
    model(_inputs_of(rank)).square().sum().backward()
    return [param.grad.full_tensor() for param in model.parameters()]


def _inputs_of(rank: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(10 + rank))


def test_layers_that_share_a_weight_have_one_gradient() -> None:
    model = _with_shared_weight()
    torch.stack([model(_inputs_of(rank)).square().sum() for rank in range(2)]).sum().backward()
    for got, param in zip(launch(_shared_gradients, 2), model.parameters(), strict=True):
        torch.testing.assert_close(got, param.grad)
