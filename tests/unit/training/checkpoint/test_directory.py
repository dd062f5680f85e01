"""A checkpoint that is no longer what was written: every file of it, every kind of damage, on one rank and on two."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from automodel_cli.config.errors import RunError
from automodel_cli.training.checkpoint.checkpointer import Checkpointer
from automodel_cli.training.checkpoint.directory import read_meta
from automodel_cli.training.config import CheckpointConfig
from automodel_cli.training.optimizers.lr_scheduler import Constant
from automodel_cli.training.optimizers.nodes import AdamW
from tests.dist.harness import launch_all
from tests.errors import assert_error, raises

SHARD, METADATA, META = "__0_0.distcp", ".metadata", "meta.json"


class Run:
    """A module that is set to the number of its step before each save."""

    def __init__(self, run_dir: Path, **config):
        self.model = nn.Linear(64, 64)
        self.optimizer = AdamW(lr=1e-2).build([self.model])
        self.scheduler = Constant().build(self.optimizer, 10)
        options = {"resume": "auto", "keep_latest_k": None, **config}
        self.checkpointer = Checkpointer(run_dir, CheckpointConfig(**options))

    def save(self, step: int) -> Path:
        nn.init.constant_(self.model.weight, step)
        return self.checkpointer.save(
            step, [self.model], self.optimizer, self.scheduler, metrics={"val_loss": 1 / step}
        )

    def resume(self) -> float | None:
        """The value of the weights afterwards; None where there is nothing to resume from."""
        path = self.checkpointer.resume_path()
        if path is None:
            return None
        self.checkpointer.load(path, [self.model], self.optimizer, self.scheduler)
        return self.model.weight.unique().item()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def remove(path: Path) -> None:
    path.unlink()


DAMAGE = [
    (SHARD, cut, r"__0_0\.distcp has [\d,]+ bytes, not [\d,]+"),
    (SHARD, flip, r"__0_0\.distcp .*XXH3-128"),
    (SHARD, remove, r"__0_0\.distcp is missing"),
    (METADATA, cut, r"\.metadata has [\d,]+ bytes, not"),
    (METADATA, flip, r"\.metadata .*XXH3-128"),
    (METADATA, remove, r"\.metadata is missing"),
    (META, cut, r"meta\.json cannot be read"),
    (META, remove, r"meta\.json is missing"),
]


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGE, ids=[f"{n} {d.__name__}" for n, d, _ in DAMAGE])
def test_damage_is_named_and_auto_takes_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture, name: str, damage: Callable[[Path], None], said: str
) -> None:
    run = Run(tmp_path)
    run.save(1)
    newest = run.save(2)
    damage(newest / name)
    with pytest.raises(RunError, match=said) as caught:
        Run(tmp_path, resume=str(newest)).resume()
    assert_error(caught.value, "checkpoint_incomplete", "checkpoint.resume", values=(newest,))
    assert caught.value.fix.startswith(f"mv {newest} ")
    assert Run(tmp_path).resume() == 1
    printed = capsys.readouterr().err
    assert f"{newest} " in printed and "step-000002.damaged" in printed
    assert (newest.parent / "step-000002.damaged").is_dir(), "nothing is removed"
    Run(tmp_path, keep_latest_k=1).save(3)  # what is damaged is none of the kept, and no longer the best
    assert Run(tmp_path).resume() == 3


def test_a_changed_value_in_the_metadata_is_noticed(tmp_path: Path) -> None:
    path = Run(tmp_path).save(1)
    meta = json.loads((path / META).read_text())
    (path / META).write_text(json.dumps({**meta, "step": 7}))
    with raises(RunError, "checkpoint_incomplete", values=(META, "checksum")):
        read_meta(path)


def test_when_no_checkpoint_is_whole_the_run_does_not_start_over_silently(tmp_path: Path) -> None:
    cut(Run(tmp_path).save(1) / SHARD)
    with raises(RunError, "checkpoint_incomplete", keys=("checkpoint.resume",), values=("step 0",)):
        Run(tmp_path).resume()


def test_the_hashes_are_of_the_files_and_no_crc_is_computed(tmp_path: Path) -> None:
    """Against the plain library; torch's own reader and its converter still read the folder."""
    path = Run(tmp_path).save(3)
    files = read_meta(path)["files"]
    assert files.keys() == {entry.name for entry in path.iterdir()} - {META}
    for name, note in files.items():
        content = (path / name).read_bytes()
        assert note == {"bytes": len(content), "xxh3": xxhash.xxh3_128(content).hexdigest()}
    weight = torch.full((64, 64), 3.0)
    assert zlib.crc32(weight.numpy().tobytes()).to_bytes(4, "little") not in (path / SHARD).read_bytes()
    dcp_to_torch_save(path, tmp_path / "plain.pt")
    assert torch.equal(torch.load(tmp_path / "plain.pt")["model.weight"], weight)
    assert torch.serialization.get_crc32_options(), "other users of torch.save keep theirs"


def _two_ranks(rank: int, world: int, folder: Path) -> tuple[float | None, str]:
    run = Run(folder)
    run.save(1)
    newest = run.save(2)
    torch.distributed.barrier()
    if rank == 0:
        flip(newest / "__1_0.distcp")
    torch.distributed.barrier()
    try:
        Run(folder, resume=str(newest)).resume()
    except RunError as error:
        said = str(error)
    return Run(folder).resume(), said


def test_ranks_share_the_reading_and_agree(tmp_path: Path) -> None:
    for resumed, said in launch_all(_two_ranks, 2, tmp_path):
        assert resumed == 1 and "step-000002 " in said and "__1_0.distcp " in said and "XXH3-128" in said
