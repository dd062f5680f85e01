"""Writes into a folder where somebody else has put links, pipes and second names."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from automodel_cli.config.errors import RunError
from automodel_cli.config.security.safe_files import open_own, read_regular, replace


@pytest.mark.parametrize("mode", ["w", "a", "a+"])
@pytest.mark.parametrize("kind", ["link", "dangling", "hard", "pipe", "device"])
def test_only_a_file_of_its_own_is_opened(tmp_path: Path, kind: str, mode: str) -> None:
    victim, path = tmp_path / "victim", tmp_path / "path"
    victim.write_text("mine")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "hard":
        os.link(victim, path)
    else:
        path.symlink_to({"link": victim, "dangling": tmp_path / "new", "device": Path("/dev/null")}[kind])
    with pytest.raises(RunError) as error:
        open_own(path, mode)
    assert error.value.fix is not None and error.value.fix.startswith(f"rm {path} ")
    assert victim.read_text() == "mine" and not (tmp_path / "new").exists()


def test_modes_are_those_of_open(tmp_path: Path) -> None:
    path = tmp_path / "path"
    for mode, expected in (("w", "1"), ("a", "12"), ("a+", "123"), ("w", "4")):
        with open_own(path, mode) as file:
            file.write(expected[-1])
            assert file.name == str(path)
        assert path.read_text() == expected
    with open_own(path, "a", binary=True) as file:
        file.write(b"\xff")
    assert read_regular(path) == b"4\xff"


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "path"
    victim.write_text("mine")
    path.symlink_to(victim)
    (tmp_path / "path.tmp").symlink_to(victim)
    replace(path, "new\n", durable=True)
    assert victim.read_text() == "mine" and path.read_text() == "new\n" and not path.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["path", "path.tmp", "victim"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "path").mkdir()
    with pytest.raises(OSError):
        replace(tmp_path / "path", b"x")
    assert os.listdir(tmp_path) == ["path"]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done: list[OSError] = []

    def read() -> None:
        try:
            read_regular(tmp_path / "pipe")
        except OSError as error:
            done.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(10)
    assert done
