"""Fake quantization on several ranks: the numbers of one process, and those of a model whose weights torchao rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from automodel_cli.distributed.config import DDPConfig, FSDP2Config
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.models.checkpoint_io.weight_stream import iter_hf_weights
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.qat_config import QATConfig
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity import lora_reference
from automodel_cli.parity.batches import step_batches
from automodel_cli.parity.cases import FP32, Case
from automodel_cli.parity.compare import GradientRecorder, build_parity_stages
from automodel_cli.parity.reference import Original, one_process
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.training.step import train_step
from tests import tiny
from tests.dist.harness import launch

pytestmark = pytest.mark.slow

NUM_MICROBATCHES = 2
INT4 = Case(num_microbatches=NUM_MICROBATCHES, qat=QATConfig(group_size=16, export="plain"))
FORMATS = {
    "int4": INT4,
    "int8": replace(INT4, qat=QATConfig("int8", "int8", export="plain")),
    "fp8": replace(INT4, qat=QATConfig("fp8", "fp8", export="plain")),
    "mxfp4": replace(INT4, qat=QATConfig("mxfp4", export="plain")),
    "nvfp4": replace(INT4, qat=QATConfig("nvfp4", export="plain")),
}

ADAPTERS = {
    f"{name}, lora": replace(FORMATS[name], lora=LoRAConfig(rank=4, alpha=6.0)) for name in ("int4", "mxfp4", "nvfp4")
}
MOE = replace(INT4, qat=QATConfig(group_size=16, export="plain"))
ADAPTED_MOE = replace(MOE, qat=QATConfig("mxfp4", export="plain"), lora=LoRAConfig(rank=4, alpha=6.0))


def over(row, *, pipeline=None, sequence_parallel=False, recompute=False, **sizes):
    config = FSDP2Config(mp_policy=FP32, sequence_parallel=sequence_parallel, activation_checkpointing=recompute)
    return replace(row, mesh=MeshConfig(**{"dp_size": 1, **sizes}), parallelizer=config, pipeline=pipeline)


SHARED = {
    "fsdp2": ("int4", over(INT4, dp_size=2)),
    "fsdp2, recomputed": ("int4", over(INT4, dp_size=2, recompute="selective")),
    "fsdp2, inputs": ("int8", over(FORMATS["int8"], dp_size=2, recompute="full")),
    "fsdp2, one factor": ("nvfp4", over(FORMATS["nvfp4"], dp_size=2)),
    "ddp": ("int4", replace(over(INT4, dp_size=2), parallelizer=DDPConfig())),
    "pp": ("int4", over(INT4, pp_size=2, pipeline=PipelineConfig())),
    "pp, split backward": ("int4", over(INT4, pp_size=2, pipeline=PipelineConfig(schedule="zb_h1"))),
    "cp": ("int4", over(INT4, cp_size=2)),
    "tp": ("int4", over(INT4, tp_size=2)),
    "tp, sequences too": ("nvfp4", over(FORMATS["nvfp4"], tp_size=2, sequence_parallel=True)),
    "tp, rows in two shards": ("int8 weights", over(replace(INT4, qat=QATConfig("int8", export="plain")), tp_size=2)),
    "lora, fsdp2, recomputed": ("int4, lora", over(ADAPTERS["int4, lora"], dp_size=2, recompute="full")),
    "lora, ddp": ("int4, lora", replace(over(ADAPTERS["int4, lora"], dp_size=2), parallelizer=DDPConfig())),
    "lora, pp, split backward": (
        "int4, lora",
        over(ADAPTERS["int4, lora"], pp_size=2, pipeline=PipelineConfig(schedule="zb_h1")),
    ),
    "lora, cp": ("mxfp4, lora", over(ADAPTERS["mxfp4, lora"], cp_size=2)),
    "lora, tp": ("int4, lora", over(ADAPTERS["int4, lora"], tp_size=2)),
    "moe, fsdp2": ("int4, moe", over(MOE, dp_size=2)),
    "moe, ep, recomputed": ("int4, moe", over(MOE, dp_size=2, ep_size=2, recompute="full")),
    "moe, tp": ("int4, moe", over(MOE, tp_size=2)),
    "moe, lora, ep": ("mxfp4, moe, lora", over(ADAPTED_MOE, dp_size=2, ep_size=2)),
    "lora, tp, sequences too": ("nvfp4, lora", over(ADAPTERS["nvfp4, lora"], tp_size=2, sequence_parallel=True)),
}
"""Layouts of two ranks: the row of one process, and their own."""
FLIPS = {
    "tp, inputs": ("int8", over(FORMATS["int8"], tp_size=2)),
    "tp, fp8 inputs": ("fp8", over(FORMATS["fp8"], tp_size=2)),
    "cp, inputs": ("fp8", over(FORMATS["fp8"], cp_size=2)),
}
"""The same with inputs that differ in their last bits and may round to the next code."""
ALONE = {
    **FORMATS,
    **ADAPTERS,
    "int4, moe": MOE,
    "mxfp4, moe, lora": ADAPTED_MOE,
    "int8 weights": SHARED["tp, rows in two shards"][1],
    "without": replace(INT4, qat=None),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    made = {
        "llama": tiny.build_hf("llama", num_hidden_layers=2),
        "moe": tiny.build_hf("qwen3_moe", num_hidden_layers=2, moe_intermediate_size=64),
    }
    folders = {name: tmp_path_factory.mktemp(name) for name in made}
    options = {"kinds": (True,), "counts": (NUM_MICROBATCHES,)}
    return {name: Original.write(folders[name], model, SFT(), **options) for name, model in made.items()}


def of_row(originals, name):
    return originals["moe" if "moe" in name else "llama"]


def steps(rank, world, originals, rows):
    """(loss, norm, gradients of this rank, exported tensors) of one step for each row."""
    found = {}
    for name, row in rows.items():
        mesh = build_mesh(row.mesh.resolve(world), "cpu")
        every = step_batches(packed=True, count=row.num_microbatches)
        count = len(every) // mesh.dp_size
        stages = build_parity_stages(of_row(originals, name), row, mesh)
        adapters = {} if row.lora is None else lora_reference.put_in(stages.parts)
        streamed = {}
        if row.qat is not None:
            for bucket in iter_hf_weights(stages.parts, device="cpu", pp_group=stages.pp_group, quantized=True):
                streamed |= {key: tensor.contiguous().view(torch.uint8).numpy().tobytes() for key, tensor in bucket}
        recorder = GradientRecorder(*stages.parts)
        result = train_step(
            stages, every[mesh.dp_rank * count :][:count], row.objective, recorder, mesh, max_grad_norm=None
        )
        found[name] = result.loss.item(), result.grad_norm.item(), recorder.gradients, streamed, adapters
    return found


@pytest.fixture(scope="module")
def found(originals):
    one = {name: over(row) for name, row in ALONE.items()}
    alone = launch(steps, 1, originals, one)
    return alone, launch(steps, 2, originals, {name: row for name, (_, row) in (SHARED | FLIPS).items()})


def relative(got, want):
    worst = max(abs(a - b) / abs(b) for a, b in zip(got[:2], want[:2], strict=True))
    return max(worst, tiny.gradient_error(want[2], got[2], [name for name in want[2] if name in got[2]]))


@pytest.mark.parametrize("name", FORMATS)
def test_it_is_another_arithmetic(name, found):
    alone, _ = found
    assert 1e-3 < relative(alone[name], alone["without"]) < 2


@pytest.mark.parametrize("name", SHARED)
def test_two_ranks_have_the_numbers_of_one_process(name, found):
    alone, shared = found
    assert relative(shared[name], alone[SHARED[name][0]]) < 2e-5


@pytest.mark.parametrize("name", FLIPS)
def test_inputs_may_round_to_the_next_code(name, found):
    alone, shared = found
    assert relative(shared[name], alone[FLIPS[name][0]]) < 0.05


@pytest.mark.parametrize("name", SHARED | FLIPS)
def test_the_export_does_not_depend_on_the_layout(name, found):
    alone, shared = found
    want, got = alone[(SHARED | FLIPS)[name][0]][3], shared[name][3]
    assert got.keys() == want.keys()
    assert any(key.endswith("weight_scale") for key in got)
    assert got == want


def rounded(weight):
    """Round every row with torchao in fp32."""
    from torchao.quantization.qat.utils import _fake_quantize_per_channel_group
    from torchao.quantization.utils import get_group_qparams_symmetric

    rows = weight.float().flatten(0, -2)
    scales, zeros = get_group_qparams_symmetric(rows, 4, 16, torch.bfloat16)
    read = _fake_quantize_per_channel_group(rows, scales.float(), zeros.float(), -8, 7, 16)
    return read.view(weight.shape).to(weight.dtype)


class Rounded(torch.nn.Linear):
    """Rounds its weight, and the update of an adapter with it."""

    adapter = None

    def forward(self, x):
        weight = self.weight
        if self.adapter is not None:
            weight = weight + self.adapter.scale * self.lora_B["default"].weight @ self.lora_A["default"].weight
        return F.linear(x, rounded(weight))

    def add(self, adapter):
        """Add an adapter, and subtract its update from the weight as the parity rows do."""
        self.adapter = adapter
        for name, matrix in (("lora_A", adapter.a), ("lora_B", adapter.b)):
            layer = torch.nn.Linear(*matrix.shape[::-1], bias=False)
            layer.weight = torch.nn.Parameter(matrix)
            setattr(self, name, torch.nn.ModuleDict({"default": layer}))
        with torch.no_grad():
            self.weight -= (adapter.b.double() @ adapter.a.double() * adapter.scale).float()


class RoundedExperts(Qwen3MoeExperts):
    """Rounds its weights."""

    def forward(self, *inputs):
        own = dict(self._parameters)
        try:
            self._parameters = {name: rounded(weight) for name, weight in own.items()}
            return super().forward(*inputs)
        finally:
            self._parameters = own


@pytest.mark.parametrize("name", ["int4", "int4, lora", "int4, moe"])
def test_one_process_has_the_gradients_of_a_model_whose_weights_torchao_rounds(name, found, originals):
    pytest.importorskip("torchao")
    from transformers import AutoModelForCausalLM

    alone, _ = found
    adapters = alone[name][4]
    model = AutoModelForCausalLM.from_pretrained(of_row(originals, name).folder, attn_implementation="eager").train()
    model.requires_grad_(not adapters)
    for path, module in list(model.model.layers.named_modules(prefix="model.layers")):
        if type(module) is torch.nn.Linear:
            module.__class__ = Rounded
            if adapters:
                module.add(adapters[path])
        elif type(module) is Qwen3MoeExperts:
            module.__class__ = RoundedExperts
    model.set_experts_implementation("eager")
    want = one_process(model.double(), step_batches(packed=True, count=NUM_MICROBATCHES), SFT())
    assert relative(alone[name], (want.loss, want.grad_norm, want.gradients)) < 2e-5
