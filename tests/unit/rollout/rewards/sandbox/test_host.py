"""Completions that attack: the tests, the judge, the machine. And honest ones, whose tests need more than numbers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from automodel_cli.rollout.rewards.code import CodeExecution
from automodel_cli.rollout.rewards.sandbox import host
from automodel_cli.rollout.rewards.sandbox.host import _CUT_OFF, Limits, isolation, run_python, run_test, statement
from tests.unit.rollout.rewards.test_base import judged

needs_isolation = pytest.mark.skipif(not set(_CUT_OFF) <= isolation(), reason=f"the kernel enforces: {statement()}")

COMPLETIONS = Path(__file__).parents[4] / "vectors" / "completions"
ADD = "def add(a, b):\n    return a + b\n"


def cases(name: str) -> dict[str, tuple[str, str]]:
    """Name -> the completion's code and its test, of a file of `=== name`, code, `--- judged by`, test. `@stack` stands
    for the code in stack.txt."""
    text = re.sub(r"^@(\w+)$", lambda m: (COMPLETIONS / f"{m[1]}.txt").read_text(), _text(name), flags=re.M)
    blocks = (block.partition("\n") for block in text.split("=== ")[1:])
    pairs = {title: code.partition("--- judged by\n") for title, _, code in blocks}
    return {title: (code, test) for title, (code, _, test) in pairs.items()}


def _text(name: str) -> str:
    return (COMPLETIONS / f"{name}.txt").read_text()


HONEST, FORGED, SEARCHES, ESCAPES = map(cases, ("honest", "forged", "searches", "escapes"))


@needs_isolation
@pytest.mark.parametrize("name", HONEST)
def test_honest_code_passes_and_its_tests_can_fail(name: str) -> None:
    code, test = HONEST[name]
    assert run_test(code, test) == host.Verdict(True)
    if name == "unittest":
        assert not run_test(code.replace("a + b", "a - b"), test).passed
    assert not run_test(code, f"{test}\nassert False").passed or name == "unittest"


@needs_isolation
def test_an_entry_point_may_have_the_name_of_a_function_of_python() -> None:
    row = {"tests": "assert sum(10, 15) == 6", "entry_point": "sum"}
    code = "def sum(a, b):\n    return 6"
    assert CodeExecution().score(judged(code, row=row)) == 1
    assert CodeExecution().score(judged(code, row={"tests": row["tests"]})) == 0


@needs_isolation
@pytest.mark.parametrize("name", FORGED)
def test_a_forged_success_is_none(name: str) -> None:
    code, test = FORGED[name]
    assert not run_test(code, test, Limits(seconds=4)).passed


SECRET = 918273645546372819


@needs_isolation
@pytest.mark.parametrize("name", SEARCHES)
def test_the_test_is_nowhere_that_the_code_can_look(name: str) -> None:
    """Each looks in one place for a number that only the test holds, and returns it if it is there."""
    code = f"SEARCH = {SEARCHES[name][0]!r}\nHALVES = {divmod(SECRET, 10**9)}\n" + _text("search")
    verdict = run_test(code, f"assert f(1) == 0, {SECRET}", Limits(20))
    assert verdict.passed, verdict
    if name == "frames":
        assert run_test(code, f"assert f({SECRET}) == {SECRET}").passed, "it would be found"


@needs_isolation
@pytest.mark.parametrize("name", ESCAPES)
def test_there_is_no_way_out(name: str) -> None:
    outcome = run_python(ESCAPES[name][0], limits=Limits(seconds=20, memory_bytes=256 * 2**20))
    assert outcome.returncode not in (0, None), outcome


@needs_isolation
def test_a_socket_of_the_machine_is_out_of_reach(tmp_path: Path) -> None:
    """As Docker's: a file that any user may connect to."""
    path = tmp_path / "host.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        os.chmod(path, 0o777)
        for parent in path.parents[:-1]:
            if parent.stat().st_uid == os.getuid():
                os.chmod(parent, parent.stat().st_mode | 0o011)
        server.listen()
        served = []
        threading.Thread(target=lambda: served.append(server.accept()), daemon=True).start()
        code = f"import os, socket; print(os.path.exists({str(path)!r})); socket.socket(1).connect({str(path)!r})"
        outcome = run_python(code)
        assert outcome.stdout == "False\n" and "PermissionError" in outcome.stderr and not served
        socket.socket(socket.AF_UNIX).connect(str(path))  # it does answer


@needs_isolation
def test_nothing_runs_on_after_the_verdict(tmp_path: Path) -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\ndef f(): return 1"
    began = time.monotonic()
    assert run_test(code, "assert f() == 1", Limits(seconds=60)).passed
    assert time.monotonic() - began < 50
    assert not run_test("def f():\n    while True: pass", "assert f() == 1", Limits(seconds=0.5)).passed


@needs_isolation
def test_a_test_that_is_no_python_is_the_rows_mistake() -> None:
    with pytest.raises(ValueError, match="the test is no Python"):
        run_test(ADD, "assert add(1, 2) =")


IN_A_NAMESPACE = """
import ctypes, os, sys
uid, gid, inside, further = os.getuid(), os.getgid(), *sys.argv[1:3]
assert ctypes.CDLL(None).unshare(0x10000000) == 0  # a user namespace, whose limit of further ones is its own
for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1"), ("gid_map", f"{inside} {gid} 1")):
    open(f"/proc/self/{name}", "w").write(text)
open("/proc/sys/user/max_user_namespaces", "w").write(further)
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""
FALLBACK = """
from automodel_cli.rollout.rewards.sandbox.host import *
print(sorted(isolation()), statement())
for code in (
    "open('/proc/self/maps')", "open('/etc/passwd')", "import os; os.listdir('/')", "open('/tmp/x', 'w')",
    "import socket; socket.socket()", "import os; os.fork()", "import os; os.kill(os.getppid(), 0)",
    "import os; os.chmod('/tmp', 0o777)",
    "import ctypes, os; l = ctypes.CDLL(None); assert l.ptrace(16, os.getppid(), 0, 0) == 0",
):
    assert run_python(code).returncode == 1, code
assert run_python("open('x', 'w').write('y'); import json, ctypes; print(open('x').read())").stdout == "y\\n"
assert run_test("def f(x): return x + 1", "assert f(1) == 2").passed
assert not run_test("def f(x): return x", "assert f(1) == 2").passed
print("held")
"""


def in_a_namespace(inside: int, further: int, *arguments: str) -> str:
    """What `python ARGUMENTS` prints as the one user of a namespace, which may make `further` ones of its own."""
    command = [sys.executable, "-c", IN_A_NAMESPACE, str(inside), str(further), *arguments]
    root = Path(__file__).parents[5]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=os.environ | {"PYTHONPATH": str(root)})
    if "user_namespaces" in done.stderr or "unshare" in done.stderr:
        pytest.skip("this kernel gives no user namespace whose limit could be set")
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_isolation
def test_a_kernel_without_namespaces_still_cuts_the_code_off() -> None:
    """As in a container: Landlock and seccomp take their place."""
    found = in_a_namespace(1000, 0, "-c", FALLBACK)
    assert "files: Landlock, network: seccomp, processes: seccomp, memory: one process" in found
    assert found.endswith("held\n")


GREEDY = str(Path(__file__).parents[1] / "greedy.py")


@needs_isolation
@pytest.mark.parametrize(
    ("inside", "further"),
    [(1000, 0), pytest.param(0, 0, marks=pytest.mark.slow), pytest.param(1000, 100, marks=pytest.mark.slow), (0, 100)],
)
def test_code_takes_only_its_share_of_the_machine(inside: int, further: int) -> None:
    """As a user and as the root of a namespace (a rootless container), each with namespaces of its own and without."""
    assert in_a_namespace(inside, further, GREEDY) == "held\n"


@needs_isolation
@pytest.mark.slow
def test_code_takes_only_its_share_from_root() -> None:
    done = subprocess.run([sys.executable, GREEDY], capture_output=True, text=True, cwd=Path(__file__).parents[5])
    assert done.stdout == "held\n", done.stderr
