"""A program for a machine without namespaces: code that takes too much of it, and code that reaches other processes."""

from __future__ import annotations

import os
import tempfile

from automodel_cli.rollout.rewards.sandbox.host import Limits, run_python, run_test

_TAKES = """
import ctypes, os, time
lib, n, kept = ctypes.CDLL(None), 0, []
attr, thread = ctypes.create_string_buffer(64), ctypes.c_ulong()
lib.pthread_attr_init(attr)
lib.pthread_attr_setstacksize(attr, ctypes.c_size_t(16384))
def once(i):
    {once}
try:
    while n < {most}:
        once(n)
        n += 1
except OSError:
    pass
time.sleep(0.2)
print(n * {unit}, flush=True)
os._exit(0)
"""
_THREAD = (
    "if lib.pthread_create(ctypes.byref(thread), attr, ctypes.cast(lib.pause, ctypes.c_void_p), None): raise OSError"
)
TAKES = {  # what, how much of it at most: what it does once, how often, how much that is
    ("threads", 256): (_THREAD, 3000, 1),
    ("empty files", 1024): ("os.mknod(f'f{i}')", 20_000, 1),
    ("MiB of files", 64): ("open(f'f{i}', 'wb').write(bytes(8 << 20))", 20, 8),
    ("MiB of removed files", 64): (
        "kept.append(open('f', 'wb')); os.unlink('f'); kept[-1].write(bytes(8 << 20))",
        20,
        8,
    ),
    ("MiB of files without a name", 64): (
        "kept.append(open(os.open('.', os.O_TMPFILE | os.O_RDWR, 0o600), 'wb')); kept[-1].write(bytes(8 << 20))",
        20,
        8,
    ),
    ("folders in each other", 1024): ("os.mkdir('d'); os.chdir('d')", 3000, 1),
    ("locked folders", 1024): ("os.mkdir(f'd{i}', 0)", 3000, 1),
}
_OTHERS = f"import os, resource, fcntl, ctypes\np = os.getppid() or {os.getpid()}\n"
REACHES = (
    "resource.prlimit(p, resource.RLIMIT_CPU, (1, 1))",
    "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
    "os.setpriority(os.PRIO_PROCESS, p, 19)",
    "os.sched_setaffinity(p, {0})",
    "os.sched_setscheduler(p, os.SCHED_BATCH, os.sched_param(0))",
    "fcntl.fcntl(0, fcntl.F_SETOWN, p)",
    "fcntl.ioctl(0, 0x8901, p.to_bytes(4, 'little'))",
    "assert ctypes.CDLL(None).syscall(251 if os.uname().machine == 'x86_64' else 30, 1, p, 0) == 0",
)
HONEST = """
import os, resource, threading, tempfile
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
os.sched_setaffinity(0, os.sched_getaffinity(0))
thread = threading.Thread(target=print, args=(1,))
thread.start(); thread.join()
with tempfile.TemporaryFile() as f: f.write(b"x" * 1000)
with tempfile.NamedTemporaryFile() as f: f.write(b"x")
with tempfile.TemporaryDirectory() as d: open(d + "/x", "w").close()
"""


def main() -> None:
    tempfile.tempdir = tempfile.mkdtemp(prefix="greedy-")  # tests of other workers use the default folder
    os.chmod(tempfile.tempdir, 0o755)
    for (what, most), (once, often, unit) in TAKES.items():
        found = run_python(_TAKES.format(once=once, most=often, unit=unit), limits=Limits(seconds=20))
        assert found.returncode == 153 or int(found.stdout) <= most, (what, found)  # 128 + SIGXFSZ
    assert not os.listdir(tempfile.tempdir), "something stays behind"
    for code in REACHES:
        found = run_python(_OTHERS + code)
        assert found.returncode == 1 and ("PermissionError" in found.stderr or "Assertion" in found.stderr), found
    found = run_python(HONEST)
    assert found.stdout == "1\n" and found.returncode == 0, found
    assert run_test("def f(x): return x + 1", "assert f(1) == 2").passed
    assert not run_test("def f(x): return x", "assert f(1) == 2").passed
    os.rmdir(tempfile.tempdir)
    print("held")


if __name__ == "__main__":
    main()
