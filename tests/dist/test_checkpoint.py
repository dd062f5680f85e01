"""Checkpoints of several ranks: DDP, FSDP2 and HSDP, saved on some ranks and loaded on others, against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from automodel_cli.config.errors import RunError
from automodel_cli.distributed.config import DDPConfig, FSDP2Config, MixedPrecision
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.objectives.sft import SFT
from automodel_cli.training.checkpoint.checkpointer import Checkpointer
from automodel_cli.training.config import CheckpointConfig
from automodel_cli.training.optimizers import newton_schulz
from automodel_cli.training.optimizers.lr_scheduler import Cosine
from automodel_cli.training.optimizers.nodes import AdamW, Muon
from automodel_cli.training.stages import SingleStage
from automodel_cli.training.step import train_step
from tests.dist.harness import launch, launch_all
from tests.errors import assert_error
from tests.tiny import packed_batch, tiny_fields, token_row

NODES = {
    "adamw": AdamW(lr=1e-2, weight_decay=0.1),
    "muon": Muon(lr=1e-2, ns_dtype="bfloat16"),
    "muon32": Muon(lr=1e-2, ns_dtype="float32"),
}
FLOAT32 = MixedPrecision(param_dtype="float32", reduce_dtype="float32")
ROWS = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.proj(x).relu())


class Model(nn.Module):
    """Sizes that two and four ranks cannot share evenly are among the parameters (the 13 tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(13, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(8, 13, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(hidden)


def parallelise(model: nn.Module, layout: str, world: int) -> nn.Module:
    """The layouts by torch's own API: the checkpoint must not depend on ours."""
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    modules = [*model.layers] if layout == "mixed" else [*model.layers, model]
    for module in modules:  # "mixed" leaves embedding and head plain
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


class Run:
    def __init__(self, rank: int, world: int, layout: str, node: str, folder: str, async_save: bool = False):
        torch.manual_seed(0)
        self.rank, self.world, self.layout = rank, world, layout
        self.part = parallelise(Model(), layout, world) if layout != "plain" else Model()
        self.optimizer = NODES[node].build([self.part])
        self.scheduler = Cosine(warmup_steps=1).build(self.optimizer, 20)
        self.checkpointer = Checkpointer(Path(folder), CheckpointConfig(async_save=async_save, resume="auto"))
        torch.manual_seed(50 + rank)

    def step(self, number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(13, (ROWS, 6), generator=generator)
        mine = ids[self.rank * ROWS // self.world : (self.rank + 1) * ROWS // self.world]
        loss = nn.functional.cross_entropy(self.part(mine).flatten(0, 1), mine.roll(1, 1).flatten(), reduction="sum")
        loss = loss / ids.numel() * (self.world if self.layout == "ddp" else 1)  # DDP's own hook averages
        loss.backward()
        if self.layout == "mixed":
            for param in self.part.parameters():
                if not isinstance(param, DTensor):
                    dist.all_reduce(param.grad)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        total = loss.detach() / (self.world if self.layout == "ddp" else 1)
        if self.world > 1:
            dist.all_reduce(total)
        return total.item()

    def save(self, step: int) -> Path:
        return self.checkpointer.save(step, [self.part], self.optimizer, self.scheduler, extra={"row": step * ROWS})

    def load(self) -> int:
        path = self.checkpointer.latest()
        assert path is not None
        return self.checkpointer.load(path, [self.part], self.optimizer, self.scheduler).step

    def local_state(self) -> dict[str, torch.Tensor]:
        """This rank's parameters and optimizer state."""
        state = {}
        for name, param in self.part.named_parameters():
            tensors = {"": param, **self.optimizer.state[param]}
            for key, value in tensors.items():
                local = value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)
                state[f"{name}#{key}"] = local.detach().clone()
        return state


def _train(rank, world, layout, node, folder, save_after, last, async_save=False):
    """Losses of steps 1..last, saving after `save_after`; the run continues while an asynchronous save is written."""
    run = Run(rank, world, layout, node, folder, async_save)
    losses = []
    for number in range(1, last + 1):
        losses.append(run.step(number))
        if number == save_after:
            run.save(number)
    run.checkpointer.close()
    return losses, run.local_state(), torch.rand(3)


def _resume(rank, world, layout, node, folder, last):
    run = Run(rank, world, layout, node, folder)
    torch.manual_seed(100 + rank)
    start = run.load()
    return [run.step(number) for number in range(start + 1, last + 1)], run.local_state(), torch.rand(3)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("layout", "world", "node"),
    [("fsdp", 2, "adamw"), ("fsdp", 2, "muon32"), ("ddp", 2, "adamw"), ("hsdp", 4, "muon"), ("mixed", 2, "adamw")],
)
def test_resume_on_the_same_layout_is_bitwise(tmp_path, layout, world, node):
    straight = launch_all(_train, world, layout, node, str(tmp_path), 2, 4)
    resumed = launch_all(_resume, world, layout, node, str(tmp_path), 4)
    for (losses, state, random), (extra_losses, more_state, more_random) in zip(straight, resumed, strict=True):
        assert extra_losses == losses[2:]
        assert state.keys() == more_state.keys()
        assert [key for key in state if not torch.equal(state[key], more_state[key])] == []
        assert torch.equal(random, more_random)
    assert not torch.equal(straight[0][2], straight[1][2])


@pytest.mark.parametrize(
    ("saved", "loaded", "node"),
    [
        pytest.param(("fsdp", 4), ("fsdp", 2), "adamw", marks=pytest.mark.slow),
        (("fsdp", 2), ("hsdp", 4), "adamw"),
        (("ddp", 2), ("fsdp", 4), "adamw"),
        (("hsdp", 4), ("plain", 1), "adamw"),
        (("mixed", 2), ("ddp", 2), "adamw"),
        pytest.param(("fsdp", 2), ("plain", 1), "muon", marks=pytest.mark.slow),
        (("hsdp", 4), ("plain", 1), "muon32"),
    ],
    ids=str,
)
def test_resume_on_another_layout_continues_the_same_run(tmp_path, saved, loaded, node):
    want, _, _ = launch(_train, 1, "plain", node, str(tmp_path / "reference"), 0, 4)
    (layout, world), (other, other_world) = saved, loaded
    first, _, _ = launch(_train, world, layout, node, str(tmp_path), 2, 2)
    rest, _, _ = launch(_resume, other_world, other, node, str(tmp_path), 4)
    assert [*first, *rest] == pytest.approx(want, abs={"muon": 5e-3, "muon32": 2e-6}.get(node, 5e-7))


def test_an_asynchronous_save_is_of_the_step_it_was_asked_for(tmp_path):
    straight, state, _ = launch(_train, 2, "fsdp", "adamw", str(tmp_path), 2, 4, True)
    losses, more_state, _ = launch(_resume, 2, "fsdp", "adamw", str(tmp_path), 4)
    assert losses == straight[2:]
    assert [key for key in state if not torch.equal(state[key], more_state[key])] == []


def _muon_matrices(rank, world, layout, node, folder):
    run = Run(rank, world, layout, node, folder)
    for number in (1, 2):
        run.step(number)
    params = dict(run.part.named_parameters())
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in params.items()}


@pytest.mark.parametrize(("node", "tolerance"), [("muon", 2e-4), ("muon32", 1e-7)])
def test_muon_on_shards_is_muon_on_the_whole_matrix(tmp_path, node, tolerance):
    want = launch(_muon_matrices, 1, "plain", node, str(tmp_path))
    got = launch(_muon_matrices, 2, "fsdp", node, str(tmp_path))
    # Gradients differ by 1e-8; a product in bfloat16 can round the other way once in a while.
    worst = max((got[name] - want[name]).abs().max().item() for name in want)
    assert worst < tolerance, worst


def _dtype_where_one_rank_emulates(rank, world):
    seconds = {torch.bfloat16: 10.0 if rank == 1 else 1.0, torch.float32: 1.0}
    newton_schulz._seconds = lambda dtype, size, device: seconds[dtype]
    return newton_schulz.measured_dtype(torch.device("cpu"))


def test_all_ranks_orthogonalize_in_one_dtype():
    assert launch_all(_dtype_where_one_rank_emulates, 2) == [torch.float32] * 2
    assert launch_all(_dtype_where_one_rank_emulates, 1) == [torch.bfloat16]


class _FailsOnOneRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


def _full_disk_on_rank1(rank, world, folder):
    part = _FailsOnOneRank()
    optimizer = AdamW(lr=1e-2).build([part])
    checkpointer = Checkpointer(Path(folder), CheckpointConfig())
    scheduler = Cosine().build(optimizer, 5)
    good = checkpointer.save(1, [part], optimizer, scheduler)
    if rank == 1:
        import torch.distributed.checkpoint as dcp

        def write_data(*_):
            raise OSError(28, "No space left on device")

        dcp.FileSystemWriter.write_data = write_data
    try:
        checkpointer.save(2, [part], optimizer, scheduler)
    except RunError as error:
        return error.full_text, checkpointer.latest() == good, [p.name for p in Path(folder, "checkpoints").iterdir()]
    return None


def test_a_disk_that_is_full_for_one_rank_stops_all_with_the_same_message(tmp_path):
    for message, kept, names in launch_all(_full_disk_on_rank1, 2, str(tmp_path)):
        assert_error(message, "disk_full", values=("No space left on device", "step-000001"))
        assert kept and names == ["step-000001"]


def _real_run(rank: int, world: int, folder: str, parallelizer: str, lora: bool, resume: bool):
    """The project's own model, parallelizer and step, with recompute and (LoRA) a frozen base; losses of steps 1..4."""
    config = ModelConfig(config=tiny_fields("llama"), lora=LoRAConfig(rank=2) if lora else None)
    strategy = {
        "fsdp2": FSDP2Config(mp_policy=FLOAT32, activation_checkpointing=True),
        "ddp": DDPConfig(activation_checkpointing=True),
    }[parallelizer]
    mesh = build_mesh(MeshConfig().resolve(world), "cpu")
    part = build_part(config)
    if parallelizer == "ddp":
        load_weights(part, config, device="cpu", seed=3)
        stage = parallelize(part, mesh, strategy)
    else:
        stage = parallelize(part, mesh, strategy)
        load_weights(part, config, device="cpu", seed=3)
    stages = SingleStage(stage)
    optimizer = AdamW(lr=1e-2).build(stages.parts)
    scheduler = Cosine().build(optimizer, 10)
    checkpointer = Checkpointer(Path(folder), CheckpointConfig())
    first = 1
    if resume:
        latest = checkpointer.latest()
        assert latest is not None
        first += checkpointer.load(latest, stages.parts, optimizer, scheduler).step
    losses = []
    for number in range(first, 5):
        rows = [
            [[token_row(9, seed=100 * number + 2 * r), token_row(5, seed=100 * number + 2 * r + 1)]] for r in range(4)
        ]
        mine = [packed_batch(row) for row in rows[rank * 4 // world : (rank + 1) * 4 // world]]
        losses.append(train_step(stages, mine, SFT(), optimizer, mesh, max_grad_norm=1.0).loss.item())
        scheduler.step()
        if number == 2 and not resume:
            checkpointer.save(number, stages.parts, optimizer, scheduler)
    latest = checkpointer.latest()
    assert latest is not None
    return losses, sorted(FileSystemReader(latest).read_metadata().state_dict_metadata)


_TO_DDP, _FROM_DDP = (("fsdp2", 2), ("ddp", 2)), (("ddp", 2), ("fsdp2", 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded", "lora"),
    [
        (*_TO_DDP, True),
        (*_FROM_DDP, False),
        *(pytest.param(*rest, marks=pytest.mark.slow) for rest in ((*_TO_DDP, False), (*_FROM_DDP, True))),
    ],
    ids=str,
)
def test_our_own_parts_resume_under_another_parallelizer(tmp_path, saved, loaded, lora):
    want, keys = launch(_real_run, saved[1], str(tmp_path), saved[0], lora, False)
    rest, _ = launch(_real_run, loaded[1], str(tmp_path), loaded[0], lora, True)
    assert rest == pytest.approx(want[2:], abs=5e-7)
    assert not [key for key in keys if "_checkpoint_wrapped_module" in key or ".module." in key]
    assert all("lora" in key or key.startswith("rng.") for key in keys) == lora
