"""New tokens over ranks: the rows and three steps of training, against one process."""

from __future__ import annotations

from pathlib import Path

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
from automodel_cli.models.tokenizer import PretrainedTokenizer
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.cases import FP32
from automodel_cli.pipelining.build_stages import build_stages
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.training.stages import SingleStage
from automodel_cli.training.step import train_step
from tests.dist.harness import launch
from tests.marks import nightly
from tests.tiny import packed_batch
from tests.unit.models.test_new_tokens import PLAIN, SIZE, SPECIAL, model_folder

pytestmark = pytest.mark.slow

FSDP2 = FSDP2Config(mp_policy=FP32)
LAYOUTS = {
    "fsdp2": (MeshConfig(), FSDP2),
    "ddp": (MeshConfig(), DDPConfig()),
    "tp2": (MeshConfig(tp_size=2), FSDP2),
    "pp2": (MeshConfig(pp_size=2), FSDP2),
    "cp2": (MeshConfig(cp_size=2), FSDP2),
    "ep2": (MeshConfig(ep_size=2), FSDP2),
}
FAMILIES = {"ep2": "qwen3_moe"}  # else llama
MULTIPLES = {True: 64, False: 1}  # `tp` shards the one and replicates the other: 1 makes the number of rows odd


def _run(rank, world, folder, sizes, parallelizer, multiple, lora=None):
    """Losses and norms of three steps, and the tables before and after them."""
    mesh = build_mesh(sizes.resolve(world), "cpu")
    node = PretrainedTokenizer(add_tokens=PLAIN, add_special_tokens=SPECIAL, pad_to_multiple_of=multiple)
    config = ModelConfig(pretrained=folder, tokenizer=node, lora=lora)
    new = torch.tensor([SIZE, 3, SIZE + 1, 9, SIZE + 2, SIZE, 11, 40, SIZE + 1, 7])
    mine = [packed_batch([[new.roll(i), new.flip(0)]]) for i in range(4)][mesh.dp_rank :: mesh.dp_size]
    part = build_part(config)
    if mesh.layout.pp > 1:
        stages = build_stages(part, mesh, PipelineConfig(schedule="1f1b"), parallelizer, num_microbatches=len(mine))
    else:
        stages = SingleStage(parallelize(part, mesh, parallelizer))
    for own in stages.parts:
        load_weights(own, config, device="cpu", seed=3)
    group = mesh.pp.get_group() if mesh.layout.pp > 1 else None
    before = {name: value.clone() for bucket in iter_hf_weights(stages.parts, pp_group=group) for name, value in bucket}
    params = [param for own in stages.parts for param in own.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.1 if lora else 0.5)
    seen = []
    for _ in range(3):
        result = train_step(stages, mine, SFT(), optimizer, mesh, max_grad_norm=None)
        seen.append((result.loss.item(), result.grad_norm.item()))
    after = {name: value.clone() for bucket in iter_hf_weights(stages.parts, pp_group=group) for name, value in bucket}
    return seen, before, after


@pytest.mark.parametrize("tied", [True, *nightly(False)])
@pytest.mark.parametrize("layout", [*nightly("fsdp2"), *nightly("ddp"), "tp2", "pp2", *nightly("cp2", "ep2")])
def test_a_grown_vocabulary_trains_like_one_process(layout: str, tied: bool, tmp_path: Path):
    fields = {"num_hidden_layers": 2, "tie_word_embeddings": tied}
    folder = model_folder(tmp_path, SIZE + SIZE % 2, FAMILIES.get(layout, "llama"), **fields)
    multiple = MULTIPLES[tied]
    want, before, after = launch(_run, 1, folder, MeshConfig(), FSDP2, multiple)
    steps, started, ended = launch(_run, 2, folder, *LAYOUTS[layout], multiple)
    assert torch.allclose(torch.tensor(steps), torch.tensor(want), rtol=1e-5)
    assert before.keys() == started.keys() and ("lm_head.weight" in before) != tied
    for name, value in before.items():
        assert torch.equal(value, started[name]), name
        assert torch.allclose(after[name], ended[name], atol=1e-5), name
    table = "model.embed_tokens.weight"
    assert (len(before[table]) % 2 == 0) == tied
    assert (after[table][SIZE : SIZE + 3] - before[table][SIZE : SIZE + 3]).abs().amax(1).min() > 1e-3


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        ("tp2", True),
        *(
            pytest.param(layout, tied, marks=pytest.mark.nightly)
            for layout, tied in (("fsdp2", True), ("ddp", True), ("ep2", True))
        ),
        *(pytest.param(layout, False, marks=pytest.mark.nightly) for layout in ("tp2", "pp2", "cp2")),
    ],
)
def test_new_rows_beside_adapters_train_like_one_process(layout: str, tied: bool, tmp_path: Path):
    fields = {"num_hidden_layers": 2, "tie_word_embeddings": tied}
    folder, lora = model_folder(tmp_path, SIZE, FAMILIES.get(layout, "llama"), **fields), LoRAConfig(rank=4)
    want, before, after = launch(_run, 1, folder, MeshConfig(), FSDP2, 64, lora)
    steps, started, ended = launch(_run, 2, folder, *LAYOUTS[layout], 64, lora)
    assert torch.allclose(torch.tensor(steps), torch.tensor(want), rtol=1e-5)
    assert before.keys() == started.keys() and ("lm_head.weight" in before) != tied
    for name, value in before.items():
        assert torch.equal(value, started[name]), name
        assert torch.allclose(after[name], ended[name], atol=1e-5), name
    for table in ["model.embed_tokens.weight", *([] if tied else ["lm_head.weight"])]:
        change = (after[table] - before[table]).abs().amax(1)
        assert change[:SIZE].max() == 0 and change[SIZE : SIZE + 3].min() > 1e-3
