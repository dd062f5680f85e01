"""8-bit products on several ranks: the numbers of one process that multiplies so too.

Casts of almost equal numbers may round to different neighbours, a sixteenth apart; so where sums differ in their last
bits, as under tensor parallelism, single layers are compared in float64, where no such pair is met.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from automodel_cli.distributed import fp8_linear
from automodel_cli.distributed.config import DDPConfig, FSDP2Config
from automodel_cli.distributed.fp8 import RECIPES, Arithmetic
from automodel_cli.distributed.layout import MeshConfig
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.models.config import Fp8Config, LoRAConfig
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.batches import step_batches
from automodel_cli.parity.compare import Recorder, build_stages
from automodel_cli.parity.reference import Original
from automodel_cli.parity.rows import FP32, Row
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.training.step import train_step
from tests import tiny
from tests.dist.harness import launch

NUM_MICROBATCHES = 4
ONE = Row(num_microbatches=NUM_MICROBATCHES, fp8=Fp8Config(emulate=True))
LORA = replace(ONE, lora=LoRAConfig(rank=4))


def over(row=ONE, *, pipeline=None, sequence_parallel=False, recompute=False, **sizes):
    config = FSDP2Config(mp_policy=FP32, sequence_parallel=sequence_parallel, activation_checkpointing=recompute)
    return replace(row, mesh=MeshConfig(**{"dp_size": 1, **sizes}), parallelizer=config, pipeline=pipeline)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return Original.write(folder, tiny.build_hf("llama"), SFT(), kinds=(True,), counts=(NUM_MICROBATCHES,))


def steps(rank, world, original, rows):
    """(loss, norm, gradients that this rank has) of one real step for each row."""
    found = []
    for row in rows:
        mesh = build_mesh(row.mesh.resolve(world), "cpu")
        every = step_batches(packed=True, count=row.num_microbatches)
        count = len(every) // mesh.dp_size
        stages = build_stages(original, row, mesh)
        recorder = Recorder(*stages.parts)
        mine = every[mesh.dp_rank * count :][:count]
        result = train_step(stages, mine, row.objective, recorder, mesh, max_grad_norm=None)
        found.append((result.loss.item(), result.grad_norm.item(), recorder.gradients))
    return found


def relative(got, want):
    worst = max(abs(a - b) / abs(b) for a, b in zip(got[:2], want[:2], strict=True))
    return max(worst, tiny.gradient_error(want[2], got[2], [name for name in want[2] if name in got[2]]))


def test_shards_stages_and_recomputation_have_the_numbers_of_one_process(original):
    plain, want, adapted = launch(steps, 1, original, [replace(ONE, fp8=None), ONE, LORA])
    assert 1e-3 < relative(plain, want) < 0.2, "it is another arithmetic"
    rows = [over(dp_size=2), over(pp_size=2, pipeline=PipelineConfig()), over(dp_size=2, recompute="selective")]
    rows.append(replace(over(dp_size=2), parallelizer=DDPConfig()))
    for row, got in zip(rows, launch(steps, 2, original, rows), strict=True):
        assert relative(got, want) < 1e-6, f"{row}: {relative(got, want)}"
    (got,) = launch(steps, 2, original, [over(LORA, dp_size=2)])
    assert relative(got, adapted) < 1e-6 and all("lora" in name for name in got[2])


@pytest.mark.slow
def test_linear_layers_beside_distributed_experts_have_the_numbers_of_one_process(tmp_path):
    original = Original.write(
        tmp_path, tiny.build_hf("qwen3_moe"), SFT(), kinds=(True,), counts=(NUM_MICROBATCHES,)
    )
    (want,) = launch(steps, 1, original, [ONE])
    (got,) = launch(steps, 2, original, [over(dp_size=2, ep_size=2)])
    assert relative(got, want) < 1e-6


def test_tensor_parallel_models_differ_by_single_roundings_only(original):
    (want,) = launch(steps, 1, original, [ONE])
    rows = [over(tp_size=2), over(tp_size=2, sequence_parallel=True)]
    for row, got in zip(rows, launch(steps, 2, original, rows), strict=True):
        assert relative(got, want) < 2e-3, f"{row}: {relative(got, want)}"


def numbers(*shape, seed):
    rows = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return rows * torch.logspace(-5, 2, shape[-1], dtype=torch.float64)[torch.randperm(shape[-1])]


def products(layer, mesh, style):
    x, grad = numbers(2, 8, 64, seed=1), numbers(2, 8, 96, seed=2)
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
            layer = nn.Linear(64, 96, dtype=torch.float64)
            with torch.no_grad():
                layer.weight *= torch.logspace(-4, 1, 96)[:, None] * torch.logspace(3, -2, 64)
            fp8_linear.convert(layer, Arithmetic(RECIPES[recipe], emulate=True))
            found.append(products(layer, mesh, style))
        worst[recipe] = max(
            ((got - want).abs().max() / want.abs().max()).item()
            for one in found[1:]
            for got, want in zip(one, found[0], strict=True)
        )
    return worst


def test_a_cut_layer_casts_as_a_whole_one():
    """Largest magnitudes are on one of the ranks only."""
    assert all(worst < 1e-12 for worst in launch(layers_over_tp, 2).values())
