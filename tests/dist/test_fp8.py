"""8-bit products on several ranks: the numbers of one process that multiplies so too.

Casts of almost equal numbers may round to different neighbours, a sixteenth apart; so where sums differ in their last
bits, as under tensor parallelism, single layers are compared in float64, where no such pair is met.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from automodel_cli.distributed.config import DDPConfig, FSDP2Config
from automodel_cli.distributed.float8 import linear as float8_linear
from automodel_cli.distributed.float8.quantization import RECIPES, Arithmetic
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.tensor_parallel import sequence_parallel
from automodel_cli.models.fp8_config import Fp8Config
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.batches import packed_batch, step_batches, token_row
from automodel_cli.parity.cases import FP32, Case
from automodel_cli.parity.compare import GradientRecorder, build_parity_stages
from automodel_cli.parity.reference import Original
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.training.step import train_step
from tests import tiny
from tests.dist.harness import launch

pytestmark = pytest.mark.slow

NUM_MICROBATCHES = 2
ONE = Case(num_microbatches=NUM_MICROBATCHES, fp8=Fp8Config(emulate=True, experts=True))
LORA = replace(ONE, lora=LoRAConfig(rank=4))
BLOCKS = replace(ONE, fp8=Fp8Config("mxfp8", emulate=True))
EXACT = replace(ONE, fp8=Fp8Config("rowwise_with_gw_hp", emulate=True, experts=True))


def over(row=ONE, *, pipeline=None, sequence_parallel=False, recompute=False, **sizes):
    config = FSDP2Config(mp_policy=FP32, sequence_parallel=sequence_parallel, activation_checkpointing=recompute)
    return replace(row, mesh=MeshConfig(**{"dp_size": 1, **sizes}), parallelizer=config, pipeline=pipeline)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    counts = (NUM_MICROBATCHES,)
    return {
        family: Original.write(
            tmp_path_factory.mktemp(family),
            tiny.build_hf(family, num_hidden_layers=2),
            SFT(),
            kinds=(True,),
            counts=counts,
        )
        for family in ("llama", "qwen3_moe")
    }


def steps(rank, world, original, rows):
    """(loss, norm, gradients that this rank has) of one real step for each row."""
    return [step(world, original, row, step_batches(packed=True, count=row.num_microbatches)) for row in rows]


def step(world, original, row, every):
    mesh = build_mesh(row.mesh.resolve(world), "cpu")
    count = len(every) // mesh.dp_size
    stages = build_parity_stages(original, row, mesh)
    recorder = GradientRecorder(*stages.parts)
    mine = every[mesh.dp_rank * count :][:count]
    result = train_step(stages, mine, row.objective, recorder, mesh, max_grad_norm=None)
    return result.loss.item(), result.grad_norm.item(), recorder.gradients


def gathered_steps(rank, world, original, row, documents):
    """The step with gathers in float8 and in the original precision, and how many inputs and gradients were float8."""
    every = [packed_batch([[token_row(n, seed=10 * i + n) for n in one] for one in documents]) for i in range(2)]
    with (
        mock.patch.object(sequence_parallel, "gather_input", wraps=sequence_parallel.gather_input) as gather,
        mock.patch.object(sequence_parallel, "scatter_output", wraps=sequence_parallel.scatter_output) as scatter,
    ):
        found = step(world, original, row, every)
        counts = gather.call_count, scatter.call_count
        with mock.patch.object(sequence_parallel, "can_gather_input", lambda num_own, fp8: False):
            return found, step(world, original, row, every), counts


def relative(got, want):
    worst = max(abs(a - b) / abs(b) for a, b in zip(got[:2], want[:2], strict=True))
    return max(worst, tiny.gradient_error(want[2], got[2], [name for name in want[2] if name in got[2]]))


ALONE = {
    "without": ("llama", replace(ONE, fp8=None)),
    "dense": ("llama", ONE),
    "adapted": ("llama", LORA),
    "blocks": ("llama", BLOCKS),
    "experts": ("qwen3_moe", ONE),
    "experts, exact gradients": ("qwen3_moe", EXACT),
    "no experts": ("qwen3_moe", replace(ONE, fp8=Fp8Config(emulate=True))),
}
"""What one process runs."""
SHARED = {
    "shards": ("dense", over(dp_size=2)),
    "stages": ("dense", over(pp_size=2, pipeline=PipelineConfig())),
    "recomputed": ("dense", over(dp_size=2, recompute="selective")),
    "copies": ("dense", replace(over(dp_size=2), parallelizer=DDPConfig())),
    "adapted": ("adapted", over(LORA, dp_size=2)),
    "blocks": ("blocks", over(BLOCKS, dp_size=2, recompute="selective")),
    "experts here": ("experts", over(dp_size=2)),
    "experts here, recomputed": ("experts", over(dp_size=2, recompute="selective")),
    "experts elsewhere, exact gradients": ("experts, exact gradients", over(EXACT, dp_size=2, ep_size=2)),
}
"""Layouts of two ranks with the numbers of one process: which, and the row."""
NEAR = {
    "experts elsewhere": ("experts", over(dp_size=2, ep_size=2), 1e-5),
    "cut": ("dense", over(tp_size=2), 2e-3),
    "cut, sequences too": ("dense", over(tp_size=2, sequence_parallel=True), 2e-3),
}
"""Layouts of two ranks that differ by single roundings, and by how much: experts elsewhere get the tokens of all ranks
at once, and a power of two for all of them matters only to numbers below 2^-14 of the largest."""


GATHERED = {
    f"{recipe}, {len(documents)} sequences, {recompute or 'saved'}": (
        over(replace(ONE, fp8=Fp8Config(recipe, emulate=True)), tp_size=2, sequence_parallel=True, recompute=recompute),
        documents,
    )
    for recipe, documents, recompute in (
        ("rowwise", ((9, 7, 16), (20, 12)), False),
        ("rowwise", ((20, 12),), "selective"),
        ("tensorwise", ((9, 7, 16), (20, 12)), "full"),
        ("tensorwise", ((20, 12),), False),
    )
}
"""Row, and the documents of each sequence."""


def all_steps(rank, world, originals, cases):
    """And what cut layers of each recipe differ by."""
    found = {name: steps(rank, world, originals[family], [row])[0] for name, (family, row) in cases.items()}
    if world == 1:
        return found, {}, {}
    gathered = {name: gathered_steps(rank, world, originals["llama"], *case) for name, case in GATHERED.items()}
    return found, layers_over_tp(rank, world), gathered


@pytest.fixture(scope="module")
def found(originals):
    """Of one process, of two ranks, of cut layers, and of gathered inputs."""
    alone, *_ = launch(all_steps, 1, originals, ALONE)
    rows = {name: (ALONE[want][0], row) for name, (want, row, *_) in (SHARED | NEAR).items()}
    return alone, *launch(all_steps, 2, originals, rows)


def test_it_is_another_arithmetic_for_linear_layers_and_for_experts(found):
    alone, *_ = found
    assert 1e-3 < relative(alone["without"], alone["dense"]) < 0.2
    assert 1e-3 < relative(alone["without"], alone["blocks"]) < 0.2
    assert 1e-3 < relative(alone["no experts"], alone["experts"]) < 0.2
    assert 1e-3 < relative(alone["experts, exact gradients"], alone["experts"]) < 0.2


@pytest.mark.parametrize("name", SHARED)
def test_two_ranks_have_the_numbers_of_one_process(name, found):
    alone, shared, *_ = found
    assert relative(shared[name], alone[SHARED[name][0]]) < 1e-6


@pytest.mark.parametrize("name", NEAR)
def test_where_other_numbers_share_a_scale_or_sums_round_first_single_roundings_differ(name, found):
    alone, shared, *_ = found
    want, _, limit = NEAR[name]
    assert relative(shared[name], alone[want]) < limit


def test_adapters_are_all_that_has_gradients(found):
    _, shared, *_ = found
    assert all("lora" in name for name in shared["adapted"][2])


def test_a_cut_layer_casts_as_a_whole_one(found):
    """Largest magnitudes are on one of the ranks only."""
    *_, cut, _ = found
    assert cut and all(worst < 1e-12 for worst in cut.values())


@pytest.mark.parametrize("name", GATHERED)
def test_inputs_gathered_in_float8_change_no_bit(name, found):
    got, want, (inputs, outputs) = found[-1][name]
    assert inputs == (2 if "saved" in name else 4) * NUM_MICROBATCHES * 2  # blocks and layers
    assert outputs >= (2 * NUM_MICROBATCHES * 2 if "tensorwise" in name else 0)
    require_equal(got, want)


def require_equal(got, want):
    assert got[:2] == want[:2] and got[2].keys() == want[2].keys()
    assert all(torch.equal(got[2][key], want[2][key]) for key in want[2])


def test_gradients_gathered_in_float8_are_there_for_both_parts_of_a_split_backward(originals):
    fp8 = replace(ONE, fp8=Fp8Config("tensorwise", emulate=True))
    row = over(fp8, tp_size=2, pp_size=2, pipeline=PipelineConfig("zb_h1"), sequence_parallel=True)
    got, want, (_, outputs) = launch(gathered_steps, 4, originals["llama"], row, ((9, 7, 16), (20, 12)))
    assert outputs == 2 * NUM_MICROBATCHES  # of the only layer of a stage
    require_equal(got, want)


def numbers(*shape, seed):
    rows = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return rows * torch.logspace(-5, 2, shape[-1], dtype=torch.float64)[torch.randperm(shape[-1])]


def products(layer, mesh, style):
    x, grad = numbers(2, 8, 64, seed=1), numbers(2, 8, 128, seed=2)
    if style is not None:
        layer = parallelize_module(layer, mesh, style, src_data_rank=None)
    x.requires_grad_()
    y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad, *(tiny.full(param.grad) for param in layer.parameters())


def layers_over_tp(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    worst = {}
    for recipe in RECIPES:
        found = []
        gathered = ColwiseParallel(output_layouts=Replicate())
        split = RowwiseParallel(input_layouts=Replicate())
        for style in (None, gathered, split):
            torch.manual_seed(0)
            layer = nn.Linear(64, 128, dtype=torch.float64)
            with torch.no_grad():
                layer.weight *= torch.logspace(-4, 1, 128)[:, None] * torch.logspace(3, -2, 64)
            float8_linear.convert_to_float8(layer, Arithmetic(RECIPES[recipe], emulate=True))
            found.append(products(layer, mesh, style))
        worst[recipe] = max(
            ((got - want).abs().max() / want.abs().max()).item()
            for one in found[1:]
            for got, want in zip(one, found[0], strict=True)
        )
    return worst
