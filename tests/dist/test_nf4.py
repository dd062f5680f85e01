"""QLoRA over ranks: three steps of adapters on a 4-bit base, against one process."""

from __future__ import annotations

import pytest
import torch

from automodel_cli.distributed.config import DDPConfig, FSDP2Config
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.checkpoint_io.weight_stream import iter_hf_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.batches import step_batches
from automodel_cli.parity.cases import FP32
from automodel_cli.pipelining.build_stages import build_stages
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.training.stages import SingleStage
from automodel_cli.training.step import train_step
from tests import tiny
from tests.dist.harness import launch

pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
FSDP2 = FSDP2Config(mp_policy=FP32)
LAYOUTS = {
    "fsdp2": (MeshConfig(), FSDP2),
    "hsdp": (MeshConfig(dp_replicate_size=2), FSDP2),
    "ddp": (MeshConfig(), DDPConfig()),
    "pp2 x fsdp2": (MeshConfig(pp_size=2), FSDP2),
    "cp2 x fsdp2": (MeshConfig(cp_size=2), FSDP2),
    "recompute": (MeshConfig(), FSDP2Config(mp_policy=FP32, activation_checkpointing="full")),
}


def _run(rank, world, sizes, parallelizer, family):
    """Losses and norms of three steps, and the weights that are exported then."""
    mesh = build_mesh(sizes.resolve(world), "cpu")
    lora = LoRAConfig(rank=4, alpha=8.0, quantization="nf4")
    config = ModelConfig(config=tiny.tiny_fields(family), lora=lora)
    every = step_batches(packed=True)
    mine = every[mesh.dp_rank :: mesh.dp_size]
    part = build_part(config)
    if mesh.layout.pp > 1:
        pipeline = PipelineConfig(schedule="1f1b")
        stages = build_stages(part, mesh, pipeline, parallelizer, num_microbatches=len(mine))
    else:
        stages = SingleStage(parallelize(part, mesh, parallelizer))
    for own in stages.parts:
        load_weights(own, config, device="cpu", seed=3)
    params = [param for own in stages.parts for param in own.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.5)
    seen = []
    for _ in range(3):
        result = train_step(stages, mine, SFT(), optimizer, mesh, max_grad_norm=None)
        seen.append((result.loss.item(), result.grad_norm.item()))
    group = mesh.pp.get_group() if mesh.layout.pp > 1 else None
    weights = {n: t.clone() for bucket in iter_hf_weights(stages.parts, pp_group=group) for n, t in bucket}
    return seen, weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_and_exports_like_one_process(layout: str):
    family = "qwen3_moe" if layout == "fsdp2" else "llama"
    sizes, parallelizer = LAYOUTS[layout]
    want, weights = launch(_run, 1, MeshConfig(), FSDP2, family)
    got, exported = launch(_run, 4 if sizes != MeshConfig() else 2, sizes, parallelizer, family)
    assert want[0][0] > want[-1][0], "it learns"
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2e-6, atol=0)
    assert exported.keys() == weights.keys()
    assert all(torch.allclose(exported[name], weights[name], rtol=0, atol=1e-5) for name in weights)
