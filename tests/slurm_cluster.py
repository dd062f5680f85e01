"""A real Slurm cluster of two nodes on this machine, in a folder of its own: nothing of the system's Slurm is touched.

Two slurmd daemons (`n1`, `n2`) and a controller share one host, with a munge of their own. Signals, `scontrol requeue`,
`srun` on two nodes and node lists behave as on a cluster. The one thing outside the folder is a line of /etc/hosts that
gives the nodes' names an address, taken away again at the end.

    python -m tests.slurm_cluster        starts one, prints the variable to export, stops it on Ctrl-C
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

NODES = ("n1", "n2")
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
_HOSTS = Path("/etc/hosts")
_HOSTS_LINE = f"127.0.0.1 {' '.join(NODES)}  # two-node Slurm of a test\n"
_CONF = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
ReturnToService=2
MpiDefault=none
KillWait=20
FirstJobId={first}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=debug Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why no cluster can be started here, or None."""
    if os.geteuid() != 0:
        return "a Slurm cluster needs root"
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install -y slurm-wlm munge"
    if not os.access(_HOSTS, os.W_OK):
        return f"{_HOSTS} cannot be written: the nodes need an address"
    return None


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Start it, yield the variables that commands need to find it, stop it again."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/var/tmp"))
    daemons: list[subprocess.Popen[bytes]] = []
    before = _HOSTS.read_text()
    try:
        _HOSTS.write_text(before + _HOSTS_LINE)
        yield _start(folder, daemons)
    finally:
        if daemons:
            _end_jobs(folder)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        _HOSTS.write_text(_HOSTS.read_text().replace(_HOSTS_LINE, ""))
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, daemons: list[subprocess.Popen[bytes]]) -> dict[str, str]:
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    folder.chmod(0o755)  # clients of other users would reach the socket
    conf = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    first = random.randrange(1, 10**6)  # rendezvous ports come from job ids: two clusters here must not share them
    conf.write_text(_CONF.format(host=host, folder=folder, ports=_free_ports(3), first=first))
    found = {"SLURM_CONF": str(conf)}
    munge = [f"--{name}={folder}/munge.{end}" for name, end in (("socket", "socket"), ("key-file", "key"))]
    munge += [f"--{name}={folder}/munge.{end}" for name, end in (("pid-file", "pid"), ("log-file", "log"))]
    munge += [f"--seed-file={folder}/munge.seed"]
    for command in (
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", node] for node in NODES),
    ):
        log = (folder / f"{command[0]}-{len(daemons)}.out").open("wb")
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")} | found
        daemons.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
        log.close()
        if command[0] == "munged":
            _wait(folder, "munged", (folder / "munge.socket").exists)
    _wait(folder, "both nodes", lambda: idle_nodes(found) == len(NODES))
    return found


def _end_jobs(folder: Path) -> None:
    """What a failed test left running would outlive the daemons."""
    found = {"SLURM_CONF": str(folder / "slurm.conf")}
    for command in (["scancel", "--full", "--signal=KILL", "--user=root"], ["scancel", "--user=root"]):
        subprocess.run(command, env=os.environ | found, capture_output=True, timeout=60)
    deadline = time.monotonic() + 20
    while idle_nodes(found) < len(NODES) and time.monotonic() < deadline:
        time.sleep(0.1)


def idle_nodes(found: Mapping[str, str] | None = None) -> int:
    """How many nodes have nothing left to do or to clean up."""
    command = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
    answer = subprocess.run(command, env={**os.environ, **(found or {})}, capture_output=True, text=True)
    return int(answer.stdout or 0)


def _wait(folder: Path, what: str, ready: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            logs = [f"{path.name}: {path.read_text(errors='replace')[-800:]}" for path in folder.glob("*.out")]
            raise RuntimeError("\n".join([f"Slurm: {what} not ready within {seconds:g} s", *logs]))
        time.sleep(0.1)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


if __name__ == "__main__":
    if reason := missing():
        raise SystemExit(reason)
    with cluster() as variables:
        print(*(f"export {name}={value}" for name, value in variables.items()), sep="\n", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            print("stopped")
