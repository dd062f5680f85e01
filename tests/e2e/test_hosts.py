"""Two hosts made of network, host-name and mount namespaces, whose names resolve to 127.0.1.1 or to nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="namespaces need root and iproute2"),
]
ADDRESSES = ("10.79.0.1", "10.79.0.2")


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two network namespaces with a link between them."""
    names = [f"am{os.getpid()}-{number}" for number in (1, 2)]
    links = [f"v{os.getpid() % 10**6}-{number}" for number in (1, 2)]
    try:
        for name in names:
            if subprocess.run(["ip", "netns", "add", name]).returncode:
                pytest.skip("this machine lets us make no network namespace")
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _on(host: str, name: str, names: Path, *command: str) -> list[str]:
    """`command` on a host called `name` whose /etc/hosts is the file `names`."""
    inside = f'hostname {name}; mount --bind {names} /etc/hosts; exec "$@"'
    enter = ["nsenter", f"--net=/run/netns/{host}", "unshare", "--uts", "--mount", "sh", "-c", inside, "sh"]
    return [*enter, *command]


def _examine(hosts: list[str], folder: Path, resolved: tuple[str, str], **variables: str) -> list[tuple[int, str]]:
    """`doctor --nodes` by one torchrun on each host; `variables` are those of the second one."""
    started = []
    for number, (host, text) in enumerate(zip(hosts, resolved, strict=True)):
        names = folder / f"hosts-{number}"
        names.write_text(f"127.0.0.1 localhost\n{text}")
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"]
        command += [f"--master-addr={ADDRESSES[0]}", "--master-port=29500", "-m", "automodel_cli", "doctor", "--nodes"]
        env = environment(folder) | (variables if number else {})
        where = {"cwd": folder, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(_on(host, f"node{number + 1}", names, *command), **where))  # type: ignore[call-overload]
    output = [process.communicate(timeout=240)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, output, strict=True)]


@pytest.mark.parametrize(
    "resolved", [("127.0.1.1 node1\n", "127.0.1.1 node2\n"), ("", "")], ids=["loopback", "nothing"]
)
def test_hosts_find_each_other_whatever_their_names_resolve_to(
    tmp_path: Path, hosts: list[str], resolved: tuple[str, str]
) -> None:
    (code, said), (of_second, other) = _examine(hosts, tmp_path, resolved)
    assert code == of_second == 0, said + other
    assert re.search(r"ok +ranks +2 on 2 hosts: node1, node2 \(gloo\)", said), said


def test_a_wrong_interface_on_one_host_is_named_on_both(tmp_path: Path, hosts: list[str]) -> None:
    for code, said in _examine(hosts, tmp_path, ("", ""), GLOO_SOCKET_IFNAME="nope0"):
        assert code != 0 and "rank 1 on node2" in said and "GLOO_SOCKET_IFNAME=nope0" in said, said
