"""Who killed a process: a real kill by the kernel for memory, one by hand, and a container's own counter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from automodel_cli.launch import kill_diagnosis
from automodel_cli.launch.kill_diagnosis import MemoryWatch


def test_a_process_that_the_kernel_killed_for_memory_is_found_in_its_log(small_group: Path) -> None:
    watch = MemoryWatch()
    code = "import os; open(os.environ['GROUP'], 'w').write(str(os.getpid())); print(len(b'x' * (200 << 20)))"
    victim = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"GROUP": str(small_group / "cgroup.procs")}
    )
    assert victim.wait(60) == -signal.SIGKILL
    evidence = watch.why(victim.pid)
    if "cannot be read" in evidence.by:
        pytest.skip("this machine does not let us read the kernel's log")
    assert evidence.out_of_memory and f"illed process {victim.pid} " in evidence.source
    assert watch.why(victim.pid) == evidence
    assert not MemoryWatch().why(victim.pid).out_of_memory  # of a later run, in which the number may be another's


def test_a_process_that_somebody_killed_is_not_called_out_of_memory() -> None:
    watch = MemoryWatch()
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    victim.kill()
    victim.wait()
    assert not watch.why(victim.pid).out_of_memory


def test_the_counter_of_a_container_is_evidence_where_the_log_is_not_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kill_diagnosis, "_CGROUPS", tmp_path)
    monkeypatch.setattr(kill_diagnosis, "_KERNEL_LOG", tmp_path / "none")
    (tmp_path / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
    (tmp_path / "memory.max").write_text(str(3 << 30))
    watch = MemoryWatch()
    assert not watch.why(7).out_of_memory
    (tmp_path / "memory.events").write_text("low 0\noom 2\noom_kill 3\n")
    evidence = watch.why(7)
    assert evidence.out_of_memory and evidence.source.endswith("oom_kill rose from 2 to 3, its limit is 3.0 GiB")
