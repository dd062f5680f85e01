"""`doctor --nodes` on two gloo ranks: what agrees is said, what differs is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from automodel_cli.cli.main import run
from automodel_cli.run import shared_directory
from automodel_cli.run.commands import cluster_check
from tests.dist.harness import launch_all


def _examine(rank, world, folders, versions):
    os.environ["SLURMD_NODENAME"] = f"node{rank}"
    cluster_check.platform.python_version = lambda: versions[rank]
    shared_directory.SECONDS_TO_SEE = 0.5
    return list(cluster_check.examine_nodes(Path(folders[rank])))


def test_two_nodes_that_agree(tmp_path: Path) -> None:
    mine, of_rank_1 = launch_all(_examine, 2, [tmp_path] * 2, ["3.12.1"] * 2, process_group=False)
    found = {subject: (status, text) for status, subject, text, _ in mine}
    assert found["ranks"] == ("ok", "2 on 2 hosts: node0, node1 (gloo)")
    assert found["python"] == ("ok", "3.12.1 on all hosts") and found["torch"][0] == found["device"][0] == "ok"
    assert found["shared folder"] == ("ok", f"{tmp_path} is shared by all ranks")
    rate, micros = float(found["bandwidth"][1].split()[0]), float(found["latency"][1].split()[0])
    assert 0.01 < rate < 1000 and 1 < micros < 1e6
    assert of_rank_1 == mine, "every rank finds the same"
    assert not list(tmp_path.iterdir()), "nothing stays behind"


def test_nodes_with_other_software_and_folders_of_their_own(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    mine, _ = launch_all(_examine, 2, folders, ["3.12.1", "3.11.7"], process_group=False)
    found = {subject: (status, text) for status, subject, text, _ in mine}
    assert found["python"] == ("fail", "differs between hosts: 3.12.1 on node0, 3.11.7 on node1")
    status, text = found["shared folder"]
    assert status == "fail" and text.endswith("node1")


def test_outside_of_an_allocation_it_says_how_to_get_into_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert run(["doctor", "--nodes"]) == 2
    assert "srun --nodes 2 --ntasks-per-node 1 automodel doctor --nodes" in capsys.readouterr().err
