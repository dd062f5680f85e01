"""Checkpoints of one process: bitwise resume after kill -9, atomic publication, keep-k, best, full disk, freezing."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from automodel_cli.config.errors import RunError
from automodel_cli.training.checkpoint import rng
from automodel_cli.training.checkpoint.checkpointer import Checkpointer
from automodel_cli.training.checkpoint.directory import CheckpointDir, read_meta
from automodel_cli.training.config import CheckpointConfig
from automodel_cli.training.optimizers.lr_scheduler import Cosine
from automodel_cli.training.optimizers.nodes import AdamW, AdamW8bit, Muon
from tests.errors import assert_error, raises


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(13, 8)
        self.proj = nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, 13, bias=False)
        self.register_buffer("router_bias", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.proj(self.embed_tokens(ids)), 0.2)
        return nn.functional.cross_entropy(self.lm_head(hidden), ids.roll(1))


class Run:
    """The loop in small: model, optimizer, schedule and random data, all from one seed."""

    def __init__(self, run_dir: Path, node=None, **config):
        rng.seed(5, 0)
        self.model = Model()
        self.optimizer = (node or AdamW(lr=1e-2)).build([self.model])
        self.scheduler = Cosine(warmup_steps=1).build(self.optimizer, 10)
        self.checkpointer = Checkpointer(run_dir, CheckpointConfig(**{"resume": "auto", **config}))
        self.done = 0

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            ids = torch.randint(13, (6,)) + np.random.randint(1) + random.randrange(1)
            loss = self.model(ids)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.model.router_bias += torch.randn(3)
            self.done += 1
            losses.append(loss.item())
        return losses

    def save(self, **metrics: float) -> Path:
        extra = {"loader": {"position": self.done}}
        return self.checkpointer.save(
            self.done, [self.model], self.optimizer, self.scheduler, extra=extra, metrics=metrics
        )

    def load(self, path: Path | None = None):
        path = path or self.checkpointer.resume_path()
        assert path is not None
        resumed = self.checkpointer.load(path, [self.model], self.optimizer, self.scheduler)
        self.done = resumed.step
        return resumed

    def everything(self) -> dict[str, torch.Tensor]:
        state = {f"model.{k}": v.clone() for k, v in self.model.state_dict().items()}
        for name, param in self.model.named_parameters():
            state |= {f"{name}.{k}": torch.as_tensor(v).clone() for k, v in self.optimizer.state[param].items()}
        return state


def assert_bitwise(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [key for key in want if not torch.equal(got[key], want[key])] == []


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("node", [AdamW(lr=1e-2), Muon(lr=1e-2)], ids=["adamw", "muon"])
def test_two_steps_saved_and_two_more_are_four_steps_bitwise(tmp_path, node, async_save):
    straight = Run(tmp_path / "straight", node)
    want = straight.steps(4)
    first = Run(tmp_path / "run", node, async_save=async_save)
    first.steps(2)
    first.save()
    first.steps(1)  # an asynchronous save must not see these updates
    first.checkpointer.close()
    torch.manual_seed(99)
    second = Run(tmp_path / "run", node)
    torch.manual_seed(99)
    resumed = second.load()
    assert (resumed.step, resumed.extra) == (2, {"loader": {"position": 2}})
    assert second.steps(2) == want[2:]
    assert_bitwise(second.everything(), straight.everything())


class WideModel(Model):
    """Matrices of at least 4096 numbers: 8-bit libraries leave smaller ones alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.proj = nn.Embedding(13, 64), nn.Linear(64, 128)
        self.lm_head = nn.Linear(128, 13, bias=False)


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
def test_8_bit_moments_resume_bitwise(tmp_path, monkeypatch, library):
    pytest.importorskip(library, reason=f"pip install {library}")
    monkeypatch.setitem(globals(), "Model", WideModel)
    node = AdamW8bit(lr=1e-2, library=library)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step: minutes on CPU
        straight = Run(tmp_path / "straight", node)
        want = straight.steps(6)
        first = Run(tmp_path / "run", node)
        first.steps(2)
        first.save()
        second = Run(tmp_path / "run", node)
        second.load()
        assert second.steps(4) == want[2:]
    assert_bitwise(dict(second.model.named_parameters()), dict(straight.model.named_parameters()))
    kinds = [{k: type(v) for k, v in run.optimizer.state[run.model.proj.weight].items()} for run in (straight, second)]
    assert kinds[0] == kinds[1]


def test_resume_after_kill_9_in_the_middle_of_the_next_save_is_bitwise(tmp_path):
    code = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parents[4])!r})
        import torch
        torch.set_num_threads(1)
        from pathlib import Path
        from tests.unit.training.checkpoint.test_checkpointer import Run
        from automodel_cli.training.checkpoint.directory import CheckpointDir
        run = Run(Path({str(tmp_path)!r}))
        run.steps(2)
        run.save()
        run.steps(1)
        CheckpointDir.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)   # all is written, nothing published
        run.save()
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    names = sorted(p.name.partition("-")[2] for p in (tmp_path / "checkpoints").iterdir())
    assert names[0] == "000002" and names[1].startswith("000003.tmp-")
    torch.set_num_threads(1)
    straight = Run(tmp_path / "straight")
    want = straight.steps(4)
    resumed = Run(tmp_path)
    assert resumed.load().step == 2
    assert resumed.steps(2) == want[2:]
    assert_bitwise(resumed.everything(), straight.everything())
    resumed.save()
    assert [p.name for p in CheckpointDir(tmp_path / "checkpoints").complete()] == ["step-000002", "step-000004"]
    assert not list((tmp_path / "checkpoints").glob("*.tmp-*"))


def test_keep_the_newest_and_the_best(tmp_path):
    run = Run(tmp_path, keep_latest_k=2)
    for val_loss in (3.0, 1.0, 2.0, 4.0, float("nan")):
        run.steps(1)
        run.save(val_loss=val_loss)
    folder = CheckpointDir(tmp_path / "checkpoints")
    assert [p.name for p in folder.complete()] == ["step-000002", "step-000004", "step-000005"]
    assert os.readlink(folder.path / "best") == "step-000002"
    assert folder.latest() == folder.path / "step-000005" == run.checkpointer.latest()
    run.steps(1)
    run.save(val_loss=0.5)
    assert [p.name for p in folder.complete()] == ["step-000005", "step-000006"]
    assert folder.best() == (folder.path / "step-000006").resolve()


def test_saving_a_step_again_replaces_it(tmp_path):
    run = Run(tmp_path)
    run.steps(1)
    run.save()
    run.optimizer.step()
    with torch.no_grad():
        run.model.proj.weight.fill_(7)
    path = run.save()
    other = Run(tmp_path)
    other.load(path)
    assert other.model.proj.weight.eq(7).all()
    assert [p.name for p in path.parent.iterdir()] == ["step-000001"]


def test_only_final_names_are_checkpoints(tmp_path):
    run = Run(tmp_path)
    assert run.checkpointer.latest() is None and run.checkpointer.resume_path() is None
    run.steps(1)
    whole = run.save()
    for name in ("step-000009.tmp-1234", "step-000008.old-77", "step-7", "notes"):
        shutil.copytree(whole, whole.with_name(name))
    assert run.checkpointer.latest() == whole
    with raises(RunError, "no_checkpoint", keys=("checkpoint.resume",), values=("step-000009.tmp-1234",)):
        run.load(whole.with_name("step-000009.tmp-1234"))


def test_an_older_checkpoint_of_the_same_run_is_refused(tmp_path):
    run = Run(tmp_path)
    paths = []
    for _ in range(2):
        run.steps(1)
        paths.append(run.save())
    with raises(RunError, "resume_conflict", keys=("checkpoint.resume",), values=paths):
        Run(tmp_path, resume=str(paths[0])).checkpointer.resume_path()
    assert Run(tmp_path, resume=str(paths[1])).checkpointer.resume_path() == paths[1]
    assert Run(tmp_path / "branch", resume=str(paths[0])).checkpointer.resume_path() == paths[0]
    assert Run(tmp_path, resume=None).checkpointer.resume_path() is None


def test_another_model_or_optimizer_is_refused_by_name(tmp_path):
    run = Run(tmp_path)
    run.steps(1)
    run.save()
    with raises(RunError, "checkpoint_mismatch", keys=("optimizer",), values=("AdamW", "MuonWithAdamW")):
        Run(tmp_path, Muon(lr=1e-2)).load()
    other = Run(tmp_path)
    other.model.proj = nn.Linear(8, 9)
    with raises(RunError, "checkpoint_mismatch", keys=("model",), values=("model.proj.weight", "[8, 8]", "[9, 8]")):
        other.load()


def test_a_changed_learning_rate_acts_after_resume(tmp_path):
    run = Run(tmp_path)
    run.steps(2)
    run.save()
    faster = Run(tmp_path, AdamW(lr=3e-2))
    faster.load()
    rates = [group["lr"] for group in faster.optimizer.param_groups]
    assert rates == [pytest.approx(3 * group["lr"]) for group in run.optimizer.param_groups]


def test_frozen_parameters_are_not_stored(tmp_path):
    def frozen() -> Run:
        run = Run(tmp_path)
        for name, param in run.model.named_parameters():
            param.requires_grad_(name.startswith("proj"))
        run.optimizer = AdamW(lr=1e-2).build([run.model])
        run.scheduler = Cosine().build(run.optimizer, 10)
        return run

    run = frozen()
    run.steps(2)
    path = run.save()
    keys = torch.distributed.checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
    moments = {f"optim.proj.{w}#{k}" for w in ("weight", "bias") for k in ("step", "exp_avg", "exp_avg_sq")}
    assert set(keys) == {"model.proj.weight", "model.proj.bias", "model.router_bias", "rng.0", *moments}
    other = frozen()
    other.load()
    assert_bitwise(other.everything(), run.everything())
    with raises(RunError, "checkpoint_mismatch", keys=("model",), values=("model.embed_tokens.weight", "missing")):
        Run(tmp_path).load()


def test_parameters_without_a_gradient_have_no_state_after_resume_either(tmp_path):
    run = Run(tmp_path)
    run.model.proj(torch.ones(8)).sum().backward()
    run.optimizer.step()
    run.save()
    other = Run(tmp_path)
    other.load(tmp_path / "checkpoints" / "step-000000")
    assert set(other.optimizer.state) == {other.model.proj.weight, other.model.proj.bias}


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 256 KiB; where mounting is not allowed, the limit on file size that the test then sets."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_full_disk_is_named_and_the_good_checkpoint_kept(tiny_disk, async_save):
    run = Run(tiny_disk, async_save=async_save)
    run.steps(2)
    good = run.save()
    run.checkpointer.wait()
    before = run.everything()
    (tiny_disk / "filler").write_bytes(b"x" * (shutil.disk_usage(tiny_disk).free - 8192))
    run.steps(1)
    with pytest.raises(RunError) as caught:
        run.save()
        run.checkpointer.wait()
    values = ("step-000003", "No space left on device", "0.00 GiB", good)
    assert_error(caught.value, "disk_full", "output_dir", values=values, fix="checkpoint.keep_latest_k=1")
    assert [p.name for p in good.parent.iterdir()] == ["step-000002"]
    other = Run(tiny_disk)
    assert other.load().step == 2
    assert_bitwise(other.everything(), before)


@pytest.mark.slow
def test_a_file_size_limit_is_a_run_error_too(tmp_path):
    code = f"""
        import resource, sys
        sys.path.insert(0, {str(Path(__file__).parents[4])!r})
        from pathlib import Path
        from tests.unit.training.checkpoint.test_checkpointer import Run
        from automodel_cli.config.errors import RunError
        run = Run(Path({str(tmp_path)!r}))
        run.steps(1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            run.save()
        except RunError as error:
            sys.exit(0 if "File too large" in str(error) else str(error))
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr.decode()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_generators_are_restored_and_metadata_is_readable(tmp_path):
    rng.seed(3, 1)
    saved = rng.capture()
    want = (random.random(), np.random.rand(), torch.rand(1))
    rng.restore_rng(saved)
    assert (random.random(), np.random.rand(), torch.rand(1)) == want
    run = Run(tmp_path)
    run.steps(1)
    meta = read_meta(run.save(val_loss=1.5))
    assert meta["step"] == 1 and meta["metrics"] == {"val_loss": 1.5} and meta["world_size"] == 1
    assert json.dumps(meta)
