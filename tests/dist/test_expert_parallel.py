"""Experts over ranks against one process whose model is wholly eager, on loss, gradient norm and every gradient: packed
rows, three microbatches with uneven label masks, alone and under every other parallelism.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from functools import cache
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import Batch
from automodel_cli.distributed import process_group
from automodel_cli.distributed.config import FSDP2Config, MixedPrecision
from automodel_cli.distributed.expert_parallel.apply import apply_expert_parallel, is_experts
from automodel_cli.distributed.mesh import Mesh, build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.distributed.wgrad_fusion import gemm_timings
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.reference import Reference, exact_process
from automodel_cli.pipelining import build_stages as pipelining_build_stages
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.training.stages import SingleStage, Stages
from automodel_cli.training.step import train_step
from tests import tiny
from tests.dist.harness import launch, launch_all
from tests.dist.parity import FSDP2, Errors, microbatch, tiny_part
from tests.errors import assert_error
from tests.marks import nightly
from tests.rounding import tolerance

CLEARLY_WRONG = 1e-3
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
FAST = ("gpt_oss", "deepseek_v3")  # biased, interleaved, transposed experts; a sigmoid router in groups
SLOW = nightly("qwen3_moe", "mixtral")
MICROBATCHES = 3


@dataclass(frozen=True)
class Case:
    """`skewed`: routers whose choice is always experts 0 and 1, so that most ranks receive no token."""

    family: str
    mesh: MeshConfig
    schedule: str | None = None
    config: FSDP2Config = field(default=FSDP2)
    skewed: bool = False

    @property
    def num_microbatches(self) -> int:
        return MICROBATCHES if self.schedule is None else 4

    @property
    def num_layers(self) -> int:
        """DeepSeek-V3's first has no experts; four stages have a layer each."""
        return 2 if self.schedule is None else tiny.NUM_LAYERS


class Recorder(torch.optim.Optimizer):
    """Keeps the gradients it was given, in full, and changes nothing."""

    def __init__(self, parts: list[nn.Module]):
        super().__init__([p for part in parts for p in part.parameters()], {})
        self.parts = parts
        self.gradients: dict[str, Tensor] = {}

    def step(self, closure=None):
        for part in self.parts:
            self.gradients |= {ModelPart.hub_name(n): g for n, g in tiny.gradients(part).items()}


def skew_routers(model: nn.Module) -> None:
    """Every token to experts 0 and 1, with the weights of those that the router would have chosen."""
    for module in model.modules():
        for child in module.children():
            if is_experts(child):
                router = module.gate if hasattr(module, "gate") else module.router
                forward = router.forward

                def first_two(hidden, *args, _forward=forward):
                    logits, weights, index = _forward(hidden, *args)
                    return logits, weights, torch.arange(2).expand_as(index)

                router.forward = first_two


def batches_of(rank: int, count: int) -> list[Batch]:
    return [microbatch(rank * count + i, packed=True) for i in range(count)]


@cache
def reference(family: str, skewed: bool, num_microbatches: int, num_layers: int) -> Reference:
    """The whole model in one process in float64, eager attention and eager experts, every document alone."""
    model = tiny.build_hf(family, num_hidden_layers=num_layers)
    if skewed:
        skew_routers(model)
    return exact_process(model, [microbatch(i, packed=True) for i in range(num_microbatches)], SFT())


def build_stages(case: Case, mesh: Mesh) -> Stages:
    part = tiny_part(case.family, num_hidden_layers=case.num_layers)
    if case.skewed:
        skew_routers(part.model)
    if case.schedule is None:
        return SingleStage(parallelize(part, mesh, case.config))
    pipeline = PipelineConfig(schedule=case.schedule)
    return pipelining_build_stages.build_stages(
        part, mesh, pipeline, case.config, num_microbatches=case.num_microbatches
    )


def run_case(case: Case, mesh: Mesh) -> Errors:
    stages = build_stages(case, mesh)
    recorder = Recorder(stages.parts)
    count = case.num_microbatches
    result = train_step(stages, batches_of(mesh.dp_rank, count), SFT(), recorder, mesh, max_grad_norm=None)
    of_stages: list[dict[str, Tensor]] = [{} for _ in range(mesh.layout.pp)]
    dist.all_gather_object(of_stages, recorder.gradients, group=mesh.pp.get_group())
    got = {name: grad for gradients in of_stages for name, grad in gradients.items()}
    if dist.get_rank() > 0:
        return Errors(0.0, 0.0, 0.0)
    want = reference(case.family, case.skewed, count * mesh.dp_size, case.num_layers)
    return Errors(
        loss=abs(result.loss.item() - want.loss) / abs(want.loss),
        grad_norm=abs(result.grad_norm.item() - want.grad_norm) / want.grad_norm,
        gradient=tiny.gradient_error(want.gradients, got),
        rounding=want.rounding,
    )


def compare(rank: int, world: int, cases: list[Case], sabotage=None) -> list[Errors]:
    if sabotage is not None:
        sabotage()
    return [run_case(case, build_mesh(case.mesh.resolve(world), "cpu")) for case in cases]


def check(world: int, cases: list[Case]) -> None:
    for case, errors in zip(cases, launch(compare, world, cases), strict=True):
        assert errors.within_rounding(), f"{case}: {errors}"


RECOMPUTE = replace(FSDP2, activation_checkpointing=True)
PREFETCH = replace(FSDP2, enable_fsdp2_prefetch=True)
EP2, EP4, EP2_TP2 = MeshConfig(ep_size=2), MeshConfig(ep_size=4), MeshConfig(tp_size=2, ep_size=2)


@pytest.mark.parametrize("family", [*FAST, *SLOW])
def test_two_ranks(family):
    """`test_under_a_pipeline` has the others by default."""
    check(2, [Case(family, EP2), Case(family, EP2, config=RECOMPUTE)])


@pytest.mark.slow
@pytest.mark.parametrize("family", [FAST[0], *nightly(FAST[1]), *SLOW])
def test_four_ranks(family):
    """Hybrid sharding. The matrix of `test_composed` has ep 2 x two shards of each expert, and ep 4, but for
    Mixtral."""
    others = [Case(family, EP2), Case(family, EP4)] if family == "mixtral" else []
    check(4, [*others, Case(family, MeshConfig(dp_replicate_size=2, ep_size=2))])


PIPELINES = [
    Case(family, MeshConfig(pp_size=2, ep_size=2), schedule)
    for schedule in ("1f1b", "zb_h1", "zbv")
    for family in FAMILIES
]


@pytest.mark.nightly
def test_under_a_pipeline():
    """Each schedule with some family (zb_h1 Mixtral, zbv Qwen3); `test_every_family_under_every_schedule` has the
    others."""
    recompute = Case("gpt_oss", MeshConfig(pp_size=2, ep_size=2), "1f1b", config=RECOMPUTE)
    check(4, [PIPELINES[5], PIPELINES[8], recompute])


@pytest.mark.nightly
def test_every_family_under_every_schedule():
    check(4, PIPELINES)


@pytest.mark.nightly
@pytest.mark.parametrize("family", [FAST[0], *nightly(FAST[1]), *SLOW])
def test_with_tensor_parallelism_in_the_same_layer(family):
    """Tokens are the same on all ranks of tp, whole or (sequence parallel) gathered for the layer."""
    sequence = replace(FSDP2, sequence_parallel=True)
    check(2, [Case(family, EP2_TP2)])
    check(4, [Case(family, MeshConfig(tp_size=2, ep_size=4)), Case(family, EP2_TP2, config=sequence)])


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAST[:1], *SLOW])
def test_ranks_that_receive_nothing(family):
    """All tokens go to two experts, so three of the four ranks never see one, and their experts get zero gradients."""
    check(4, [Case(family, EP4, skewed=True), Case(family, EP4, config=RECOMPUTE, skewed=True)])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", *nightly("deepseek_v3")])
def test_with_rows_over_ranks(family):
    """Under context parallelism every rank has tokens of its own, so the dispatch has nothing to know. `test_composed`
    has ep 2."""
    check(4, [Case(family, MeshConfig(cp_size=2, ep_size=4))])


class Exchanges:
    """Counts all-to-alls by how many bytes leave, those of a few numbers and those of tokens apart."""

    def __init__(self):
        self.numbers = self.tokens = self.bytes = 0

    def __enter__(self):
        self._plain = dist.all_to_all_single

        def counted(output, rows, *args, **kwargs):
            is_tokens = rows.is_floating_point() and rows.ndim == 2
            self.tokens += is_tokens
            self.numbers += not is_tokens
            self.bytes += rows.nbytes if is_tokens else 0
            return self._plain(output, rows, *args, **kwargs)

        dist.all_to_all_single = counted
        return self

    def __exit__(self, *exception):
        dist.all_to_all_single = self._plain


MODES = (False, "full", "selective", 2, "minimal")


def _by_mode(rank, world, family):
    """(all-to-alls of tokens, of numbers, bytes, gradients) of one step under each mode of recomputation."""
    mesh = build_mesh(EP2.resolve(world), "cpu")
    found = []
    for mode in MODES:
        stages = build_stages(Case(family, EP2, config=replace(FSDP2, activation_checkpointing=mode)), mesh)
        recorder = Recorder(stages.parts)
        with Exchanges() as seen:
            train_step(stages, batches_of(mesh.dp_rank, 1), SFT(), recorder, mesh, max_grad_norm=None)
        found.append((seen.tokens, seen.numbers, seen.bytes, recorder.gradients))
    return found


@pytest.mark.parametrize("family", [FAST[0], *nightly(FAST[1])])
def test_recomputation_exchanges_nothing_again(family):
    """Tokens there and back, their gradients there and back; only "minimal" has them sent again, by the sizes of
    before. The numbers are sizes, weights and gradients of weights. Recomputed or not, a gradient is the same to the
    last bit."""
    plain, *others, minimal = launch(_by_mode, 2, family)
    layers = plain[0] // 4
    assert layers >= 1 and plain[:2] == (4 * layers, 3 * layers)
    for mode, seen in zip(MODES[1:], others, strict=False):
        assert seen[:3] == plain[:3], mode
        assert all(torch.equal(seen[3][name], grad) for name, grad in plain[3].items()), mode
    assert minimal[0] > plain[0] and minimal[2] > plain[2] and minimal[1] == plain[1]
    assert all(torch.equal(minimal[3][name], grad) for name, grad in plain[3].items())


def _under_a_schedule(rank, world):
    """(all-to-alls of tokens, and layers with experts of this rank) of a step of four microbatches, of two
    schedules."""
    found = []
    for schedule in ("1f1b", "zb_h1"):
        case = Case("deepseek_v3", MeshConfig(pp_size=2, ep_size=2), schedule)
        mesh = build_mesh(case.mesh.resolve(world), "cpu")
        stages = build_stages(case, mesh)
        layers = sum(is_experts(module) for part in stages.parts for module in part.modules())
        with Exchanges() as seen:
            recorder = Recorder(stages.parts)
            train_step(stages, batches_of(mesh.dp_rank, 4), SFT(), recorder, mesh, max_grad_norm=None)
        found.append((seen.tokens, layers))
    return found


@pytest.mark.nightly
def test_a_split_backward_exchanges_no_tokens_twice():
    for found in launch_all(_under_a_schedule, 4):
        assert all(layers and tokens == 4 * 4 * layers for tokens, layers in found)


class _Casts(TorchDispatchMode):
    """How often float32 is copied into a bfloat16 of at least so many elements."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.count = numel, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and result.dtype == torch.bfloat16:
            self.count += result.numel() >= self.numel and args[1].dtype == torch.float32
        return result


def _without_and_with_kept_experts(rank, world):
    return [_with_kept_experts(world, keep) for keep in (False, True)]


def _with_kept_experts(world, keep):
    """(casts of experts, gradients) of two steps of three microbatches in bfloat16, and whether experts are shards
    after each."""
    mesh = build_mesh(EP2.resolve(world), "cpu")
    config = replace(FSDP2, mp_policy=MixedPrecision(), keep_cast_experts=keep)
    stages = build_stages(Case("qwen3_moe", EP2, config=config), mesh)
    experts = [module for module in stages.parts[0].modules() if is_experts(module)]
    smallest = min(param.to_local().numel() for module in experts for param in module.parameters())
    found = []
    for _ in range(2):
        recorder = Recorder(stages.parts)
        with _Casts(smallest) as casts:
            train_step(stages, batches_of(mesh.dp_rank, 3), SFT(), recorder, mesh, max_grad_norm=None)
        in_shards = all(param.dtype == torch.float32 for module in experts for param in module.parameters())
        found.append((casts.count / len(experts), recorder.gradients, in_shards))
    return found


@pytest.mark.slow
def test_kept_experts_are_cast_once_a_step_and_give_the_same_gradients():
    """Otherwise forward and backward of three microbatches cast two weights each; those of the last layer stay between
    its forward and its backward."""
    cast_again, kept = launch(_without_and_with_kept_experts, 2)
    for (more, want, _), (count, got, in_shards) in zip(cast_again, kept, strict=True):
        assert count == 2 and more >= 3 * count and in_shards
        assert all(torch.equal(got[name], grad) for name, grad in want.items())


def _compiled(rank, world, family):
    """(all-to-alls of tokens, gradients, graphs) of one step as written, and of compiled layers: kept, recomputed, and
    exchanged again; of compiled fused operations with products saved."""
    mesh = build_mesh(EP2.resolve(world), "cpu")
    compiled = replace(FSDP2, enable_compile=True, compile_backend="aot_eager")
    configs = [FSDP2, *(replace(compiled, activation_checkpointing=mode) for mode in (False, "full", "minimal"))]
    configs.append(replace(compiled, enable_compile="fused_ops", activation_checkpointing="selective"))
    found = []
    for config in configs:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        stages = build_stages(Case(family, EP2, config=config), mesh)
        recorder = Recorder(stages.parts)
        with Exchanges() as seen:
            train_step(stages, batches_of(mesh.dp_rank, 1), SFT(), recorder, mesh, max_grad_norm=None)
        found.append((seen.tokens, recorder.gradients, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["deepseek_v3"])
def test_layers_are_compiled_around_the_experts_and_recomputed_without_another_exchange(family):
    (exchanges, want, none), plain, full, minimal, fused = launch(_compiled, 2, family)
    assert none == 0 and plain[0] == full[0] == fused[0] == exchanges < minimal[0]
    for _, got, num_graphs in (plain, full, minimal, fused):
        assert num_graphs >= 2 and tiny.gradient_error(want, got) <= tolerance()


def _groups(rank, world):
    """Whether tokens have a group that nobody else has, and every group's timeout in minutes."""
    process_group.init_process_group("gloo", timeout_minutes=7)
    mesh = build_mesh(MeshConfig(ep_size=world).resolve(world), "cpu")
    others = [*mesh.root.get_all_groups(), *(m.get_group() for m in (mesh.dp, mesh.loss, mesh.dp_cp)), dist.group.WORLD]
    every = [*others, *mesh.expert.get_all_groups(), mesh.ep_group]
    minutes = {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() / 60 for group in every}
    return mesh.ep_group not in others, minutes, dist.get_world_size(mesh.ep_group)


def test_tokens_have_a_communicator_of_their_own_and_all_groups_one_timeout():
    assert launch_all(_groups, 2, process_group=False) == [(True, {7.0}, 2)] * 2


def each_expert_adds_in_a_product():
    gemm_timings.adds_faster = lambda rows, weights: True


ADDING = replace(FSDP2, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
ON_STAGES = MeshConfig(pp_size=2, ep_size=2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "cases",
    [
        [Case("gpt_oss", EP4, config=ADDING, skewed=True), Case("gpt_oss", ON_STAGES, "1f1b", config=ADDING)],
        *nightly(
            [
                Case("deepseek_v3", EP2, config=replace(ADDING, activation_checkpointing=True)),
                Case("deepseek_v3", ON_STAGES, "zb_h1", config=ADDING),  # splits the backward: products add nothing
            ]
        ),
    ],
    ids=["gpt_oss", "deepseek_v3"],
)
def test_gradients_of_experts_that_products_add(cases):
    """To sums in float64, so that they have another dtype than the products. Some ranks receive no token."""
    for case, errors in zip(cases, launch(compare, 4, cases, each_expert_adds_in_a_product), strict=True):
        assert errors.within_rounding(), f"{case}: {errors}"


def _in_bfloat16(rank, world, family, ep_size):
    """(loss, gradients) under the default mixed precision."""
    case = Case(family, MeshConfig(ep_size=ep_size), config=replace(FSDP2, mp_policy=MixedPrecision()))
    mesh = build_mesh(case.mesh.resolve(world), "cpu")
    stages = build_stages(case, mesh)
    recorder = Recorder(stages.parts)
    result = train_step(stages, batches_of(mesh.dp_rank, MICROBATCHES), SFT(), recorder, mesh, max_grad_norm=None)
    return result.loss.item(), recorder.gradients


@pytest.mark.parametrize("family", ["deepseek_v3", *nightly("gpt_oss")])
def test_mixed_precision_rounds_as_it_does_without_expert_parallelism(family):
    """DeepSeek-V3 weighs its experts in float32: casting that with the experts' inputs costs 7e-2 of the gradient.
    Either way is 0.11 from float64 in its worst entry, and they differ by up to 1.5e-2 in the order of sums."""
    (want_loss, want), (loss, got) = (launch(_in_bfloat16, 2, family, ep_size) for ep_size in (1, 2))
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert tiny.gradient_error(want, got) < 2e-2


def _prefetched(rank, world):
    """Names of the units that each unit of a part gathers ahead, in forward."""
    mesh = build_mesh(EP2.resolve(world), "cpu")
    part = tiny_part("qwen3_moe")
    ahead, plain = {}, FSDPModule.set_modules_to_forward_prefetch
    FSDPModule.set_modules_to_forward_prefetch = lambda self, modules: (
        ahead.update({self: modules}) or plain(self, modules)
    )
    try:
        parallelize(part, mesh, PREFETCH)
    finally:
        FSDPModule.set_modules_to_forward_prefetch = plain
    names = {module: name for name, module in part.named_modules()}
    return {names[unit]: [names[module] for module in modules] for unit, modules in ahead.items()}


@pytest.mark.nightly
def test_experts_are_gathered_ahead_with_their_layer():
    ahead = launch(_prefetched, 4)
    layers = [name for name in ahead if "layers." in name]
    assert ahead[""] == ["model.model.embed_tokens"]
    assert ahead["model.model.embed_tokens"] == [layers[0], f"{layers[0]}.mlp.experts"]
    for layer, following in itertools.pairwise(layers):
        assert ahead[layer] == [following, f"{following}.mlp.experts"]
    check(4, [Case("qwen3_moe", EP2, config=PREFETCH)])


def _frozen_experts(rank, world):
    """Names of parameters with a gradient where only adapters are trained, and the norm of all gradients."""
    mesh = build_mesh(MeshConfig(ep_size=world).resolve(world), "cpu")
    config = ModelConfig(config=tiny.tiny_fields("qwen3_moe"), lora=LoRAConfig(rank=2))
    part = build_part(config)
    module = parallelize(part, mesh, FSDP2)
    load_weights(part, config, device="cpu", seed=3)
    recorder = Recorder([part])
    mine = [microbatch(i, packed=True) for i in range(4)][rank::world]
    result = train_step(SingleStage(module), mine, SFT(), recorder, mesh, max_grad_norm=None)
    return recorder.gradients, result.grad_norm.item()


def test_adapters_beside_frozen_experts():
    want, want_norm = launch(_frozen_experts, 1)
    got, norm = launch(_frozen_experts, 2)
    assert want and all("lora_" in name for name in want)
    assert tiny.gradient_error(want, got) <= tolerance() and norm == pytest.approx(want_norm, rel=tolerance())


def _refused(rank, world, family):
    mesh = build_mesh(MeshConfig(ep_size=world).resolve(world), "cpu")
    part = nn.Module()
    with torch.device("meta"):
        fields = LLAMA4 if family == "llama4_text" else tiny.tiny_fields(family)
        part.model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**fields))
    with pytest.raises(ConfigError) as caught:
        apply_expert_parallel(part, mesh)
    return caught.value


LLAMA4 = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_local_experts": 4}


@pytest.mark.parametrize(
    ("family", "ep", "code", "values"),
    [
        ("qwen3_moe", 3, "not_divisible", (8, "Qwen3MoeExperts")),
        ("llama", 2, "not_supported_by_model", ("LlamaForCausalLM",)),
        ("llama4_text", 2, "not_supported_by_model", ("Llama4ForCausalLM", "Llama4TextExperts")),
    ],
)
def test_models_whose_experts_cannot_be_distributed_are_rejected(family, ep, code, values):
    error = launch(_refused, ep, family)
    assert_error(error, code, "mesh.ep_size", values=(f"mesh.ep_size={ep}", *values), fix="mesh.ep_size=1")


def sum_experts_over_ep_too():
    """The mistake of treating experts like every other parameter."""
    original = Recorder.step

    def step(self, closure=None):
        mesh = build_mesh(EP2.resolve(dist.get_world_size()), "cpu")
        for part in self.parts:
            for name, param in part.named_parameters():
                if ".experts." in name:
                    dist.all_reduce(param.grad.to_local(), group=mesh.ep.get_group())
        original(self)

    patch.object(Recorder, "step", step).start()


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", [sum_experts_over_ep_too])
def test_sabotage_is_noticed(sabotage):
    (errors,) = launch(compare, 4, [Case("qwen3_moe", EP2)], sabotage)
    assert errors.gradient > CLEARLY_WRONG
