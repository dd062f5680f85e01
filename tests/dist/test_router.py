"""The load-balancing loss, the selection bias and the load metrics against their formulas, written out in one process
over the very microbatches that the ranks see.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.moe.load_balancing import LoadBalancer
from automodel_cli.models.moe_config import MoEConfig
from automodel_cli.objectives.sft import SFT
from automodel_cli.pipelining.build_stages import build_stages
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.training.stages import SingleStage
from automodel_cli.training.step import NonFiniteError, train_step
from tests import tiny
from tests.dist.harness import launch
from tests.dist.parity import FSDP2, microbatch, tiny_part
from tests.errors import assert_error
from tests.rounding import tolerance

pytestmark = pytest.mark.slow

COEF, SPEED = 0.05, 0.01
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")


@dataclass(frozen=True)
class Case:
    family: str
    mesh: MeshConfig = field(default_factory=MeshConfig)
    schedule: str | None = None
    config: FSDP2Config = field(default=FSDP2)
    coef: float = COEF
    num_microbatches: int = 2


def batches_of(rank: int, count: int) -> list[Batch]:
    """Microbatches in which some documents have no label, and one that has none at all."""
    batches = [microbatch(rank * count + i, packed=True) for i in range(count)]
    for i, batch in enumerate(batches):
        labels_BT = batch.labels_BT.clone()
        labels_BT.view(-1)[int(batch.cu_seqlens[1]) : int(batch.cu_seqlens[2])] = IGNORE_INDEX
        if rank == 1 and i == 0:
            labels_BT[:] = IGNORE_INDEX
        batches[i] = replace(batch, labels_BT=labels_BT)
    return batches


@dataclass
class Wanted:
    loss: float
    aux_loss: float
    gradients: dict[str, Tensor]
    loads: dict[str, Tensor]
    """By router: choices of each expert over the whole step."""


def has_label(batch: Batch) -> Tensor:
    """Bool [B*T], document by document."""
    labels_N = batch.labels_BT.flatten()
    bounds = batch.cu_seqlens.tolist()
    return torch.cat([(labels_N[a:b] != IGNORE_INDEX).any().expand(b - a) for a, b in itertools.pairwise(bounds)])


def explicit(family: str, batches: list[Batch], coef: float) -> Wanted:
    """The definition: every microbatch whole, the loss of each layer added to the objective before one backward."""
    part = tiny_part(family)
    seen: list[tuple[str, Tensor, Tensor]] = []
    for name, module in part.model.named_modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(lambda m, a, out, name=name: seen.append((name, out[0], out[2])))
    weight = sum(int(batch.num_label_tokens) for batch in batches)
    total = sum(int(has_label(batch).sum()) for batch in batches)
    loss, aux = torch.zeros(()), torch.zeros(())
    loads: dict[str, Tensor] = {}
    for batch in batches:
        seen.clear()
        loss = loss - part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT.sum() / weight
        real_N = has_label(batch)
        for name, logits_NE, index_NK in seen:
            num_experts = logits_NE.shape[-1]
            chosen_NE = nn.functional.one_hot(index_NK, num_experts).sum(1)[real_N]
            loads[name] = loads.get(name, 0) + chosen_NE.sum(0)
            if real_N.any():
                mean_E = logits_NE[real_N].float().softmax(-1).mean(0)
                balance = num_experts * (chosen_NE.float().mean(0) * mean_E).sum()
                aux = aux + coef * balance * real_N.sum() / total
    (loss + aux).backward()
    gradients = {ModelPart.hub_name(n): g for n, g in tiny.gradients(part).items()}
    return Wanted(loss.item(), aux.item(), gradients, loads)


class Recorder(torch.optim.Optimizer):
    def __init__(self, parts):
        super().__init__([p for part in parts for p in part.parameters()], {})
        self.parts, self.gradients = parts, {}

    def step(self, closure=None):
        for part in self.parts:
            self.gradients |= {ModelPart.hub_name(n): g for n, g in tiny.gradients(part).items()}


def run(rank: int, world: int, case: Case):
    """(loss, metrics, gradients, selection biases) of one step on these ranks."""
    mesh = build_mesh(case.mesh.resolve(world), "cpu")
    part, count = tiny_part(case.family), case.num_microbatches
    if case.schedule is None:
        stages = SingleStage(parallelize(part, mesh, case.config))
    else:
        pipeline = PipelineConfig(schedule=case.schedule)
        stages = build_stages(part, mesh, pipeline, case.config, num_microbatches=count)
    watch = LoadBalancer(stages.parts, MoEConfig(aux_loss_coef=case.coef, bias_update_rate=speed(case)), mesh)
    recorder = Recorder(stages.parts)
    batches = batches_of(mesh.dp_rank, count)
    result = train_step(stages, batches, SFT(), recorder, mesh, max_grad_norm=None, hooks=[watch])
    biases = {
        ModelPart.hub_name(name): buffer.clone()
        for part in stages.parts
        for name, buffer in part.named_buffers()
        if "correction_bias" in name
    }
    everywhere = [({}, {}) for _ in range(world)]
    dist.all_gather_object(everywhere, (recorder.gradients, biases))
    gradients = {name: grad for own, _ in everywhere for name, grad in own.items()}
    for _, own in everywhere:  # all ranks have moved a bias alike
        assert all(torch.equal(bias, biases[name]) for name, bias in own.items() if name in biases)
        biases = own | biases
    metrics = {name: value.item() for name, value in result.metrics.items()}
    return result.loss.item(), metrics, gradients, biases


def speed(case: Case) -> float:
    return SPEED if case.family == "deepseek_v3" else 0.0


def check(world: int, case: Case) -> None:
    mesh = case.mesh.resolve(world)
    batches = [batch for rank in range(mesh.dp) for batch in batches_of(rank, case.num_microbatches)]
    want = explicit(case.family, batches, case.coef)
    loss, metrics, gradients, biases = launch(run, world, case)
    assert loss == pytest.approx(want.loss, rel=tolerance()), case
    assert tiny.gradient_error(want.gradients, gradients) <= tolerance(), case
    loads = torch.stack([load.double() for load in want.loads.values()])
    assert metrics["expert_load_max"] == pytest.approx((loads.amax(1) / loads.mean(1)).max().item(), rel=1e-9)
    spread = (loads.std(1, correction=0) / loads.mean(1)).mean().item()
    assert metrics["expert_load_cv"] == pytest.approx(spread, rel=1e-9)
    if case.coef:
        assert metrics["aux_loss"] == pytest.approx(want.aux_loss, rel=tolerance())
    else:
        assert "aux_loss" not in metrics
    before = {n: b for n, b in tiny.build_hf(case.family).named_buffers() if "correction_bias" in n}
    assert biases.keys() == before.keys()
    for name, bias in biases.items():
        load = want.loads[name.removesuffix(".e_score_correction_bias")].double()
        moved = SPEED * torch.sign(load.mean() - load)
        assert torch.allclose(bias - before[name], moved.float(), atol=1e-7), name


EP2 = MeshConfig(ep_size=2)
RECOMPUTE = replace(FSDP2, activation_checkpointing=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process(family):
    check(1, Case(family))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen3_moe", RECOMPUTE),
        ("deepseek_v3", FSDP2),
        ("qwen3_moe", FSDP2),
        ("deepseek_v3", RECOMPUTE),
    ],
)
def test_experts_over_ranks(family, config):
    check(2, Case(family, EP2, config=config, num_microbatches=3))


@pytest.mark.parametrize(
    ("schedule", "family"),
    [("1f1b", "gpt_oss"), ("zb_h1", "deepseek_v3"), ("zbv", "qwen3_moe")],
)
def test_under_a_pipeline(schedule, family):
    config = RECOMPUTE if schedule == "1f1b" else FSDP2
    check(4, Case(family, MeshConfig(pp_size=2, ep_size=2), schedule, config, num_microbatches=4))


@pytest.mark.parametrize("mesh", [MeshConfig(cp_size=2), MeshConfig(cp_size=2, ep_size=2)], ids=["cp", "cp x ep"])
def test_rows_over_ranks(mesh):
    """f and P are those of the whole rows."""
    check(2, Case("qwen3_moe", mesh))


def test_without_a_loss_nothing_but_the_metrics_changes():
    check(2, Case("qwen3_moe", EP2, coef=0.0))


def _refused_step(rank, world):
    """(bias moved?, metrics after the next good step) where the first step is not finite."""
    mesh = build_mesh(EP2.resolve(world), "cpu")
    part = tiny_part("deepseek_v3")
    stages = SingleStage(parallelize(part, mesh, FSDP2))
    watch = LoadBalancer(stages.parts, MoEConfig(bias_update_rate=SPEED), mesh)
    biases = [b for n, b in part.named_buffers() if "correction_bias" in n]
    before = [b.clone() for b in biases]
    batches = batches_of(rank, 2)

    class Broken(SFT):
        def __call__(self, output, batch):
            return super().__call__(output, batch) * float("inf")

    optimizer = Recorder(stages.parts)
    with pytest.raises(NonFiniteError):
        train_step(stages, batches, Broken(), optimizer, mesh, max_grad_norm=None, hooks=[watch])
    moved = any(not torch.equal(a, b) for a, b in zip(before, biases, strict=True))
    part.zero_grad()
    result = train_step(stages, batches, SFT(), optimizer, mesh, max_grad_norm=None, hooks=[watch])
    return moved, result.metrics["expert_load_cv"].item()


def test_a_refused_step_moves_no_bias_and_leaves_no_counts():
    moved, spread = launch(_refused_step, 2)
    batches = [batch for rank in range(2) for batch in batches_of(rank, 2)]
    loads = torch.stack([load.double() for load in explicit("deepseek_v3", batches, 0.0).loads.values()])
    assert not moved
    assert spread == pytest.approx((loads.std(1, correction=0) / loads.mean(1)).mean().item(), rel=1e-9)


def _refusals(rank, world):
    mesh = build_mesh(MeshConfig().resolve(world), "cpu")
    errors = []
    for family, options in (
        ("llama", {"aux_loss_coef": COEF}),
        ("qwen3_moe", {"bias_update_rate": SPEED}),
    ):
        with pytest.raises(ConfigError) as caught:
            LoadBalancer([tiny_part(family)], MoEConfig(**options), mesh)
        errors.append(caught.value)
    assert LoadBalancer([tiny_part("llama")], MoEConfig(), mesh).finish() == {}
    return errors


def test_options_that_could_not_act_are_refused():
    dense, softmax = launch(_refusals, 1)
    assert_error(dense, "not_supported_by_model", "model.moe.aux_loss_coef", values=(0.05, "LlamaForCausalLM"))
    assert_error(softmax, "not_supported_by_model", values=("bias_update_rate", "e_score_correction_bias"))
