"""Filter of system calls (seccomp). Uses only the standard library, like `linux_isolation.py`."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterator

_CLONE_THREAD = 0x00010000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_EPERM, _EAGAIN, _ENOSYS, _EOPNOTSUPP = 1, 11, 38, 95
_LIBC = ctypes.CDLL(None, use_errno=True)
_MACHINE = platform.machine()
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name: (x86_64, aarch64); None if the architecture lacks the call
_CALLS: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "socketpair": (53, 199),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "open": (2, None),
    "openat": (257, 56),
    "openat2": (437, 437),
}
_OF_ONE_PROCESS = ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
"""Calls whose first argument is a process. 0 is the caller."""
_OF_THE_CALL = {"fcntl": (8, 10, 15), "ioctl": (0x8901, 0x8902, 0x5412, 0x541C)}
"""Rejected second arguments: signals to other processes on input (F_SETOWN, F_SETSIG, F_SETOWN_EX, FIOSETOWN,
SIOCSPGRP), and input into a terminal (TIOCSTI, TIOCLINUX)."""
_TMPFILE = 0x400000  # files without a name, which the file limit would miss
# calls that computing code does not need: sockets, other processes, kernel objects outside the memory limit, mounts,
# and calls that have often been the way out of a sandbox
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "connect": (42, 203),
    "accept": (43, 202),
    "accept4": (288, 242),
    "bind": (49, 200),
    "listen": (50, 201),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "process_mrelease": (448, 448),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "fanotify_init": (300, 262),
    "reboot": (169, 142),
    "personality": (135, 92),
}
# Landlock does not cover these: they change files by path without opening them
_REFUSED_WITHOUT_A_ROOT: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}


def _number(name: str) -> int | None:
    return (_CALLS.get(name) or _REFUSED[name])[_MACHINE == "aarch64"]


def filter_calls(*, own_root: bool, own_processes: bool) -> bool:
    """Reject system calls from now on (seccomp): only socket pairs, one process (with threads), no access to other
    processes. Without a process namespace no signals to others. Without a private root no changes of attributes."""
    if _MACHINE not in _AUDIT_ARCH:
        return False
    program = b"".join(_program(own_root, own_processes))
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return bool(_LIBC.prctl(_PR_SET_SECCOMP, 2, header, 0, 0) == 0)


def _program(own_root: bool, own_processes: bool) -> Iterator[bytes]:
    """Return classic BPF over `struct seccomp_data`: number at 0, architecture at 4, arguments (low words) at 16, 24,
    ..."""
    load, equal, greater, both, back = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000, 0x80000000

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    def when(name: str, *then: bytes) -> Iterator[bytes]:
        number = _number(name)
        if number is not None:
            yield step(equal, number, 0, len(then))
            yield from then

    yield from (step(load, 4), step(equal, _AUDIT_ARCH[_MACHINE], 1), step(back, kill), step(load, 0))
    if _MACHINE == "x86_64":
        yield from (step(greater, 0x40000000, 0, 1), step(back, kill))  # the x32 calls have other numbers
    refused = {**_REFUSED, **({} if own_root else _REFUSED_WITHOUT_A_ROOT)}
    for number in sorted(
        {number_here for pair in refused.values() if (number_here := pair[_MACHINE == "aarch64"]) is not None}
    ):
        yield from (step(equal, number, 0, 1), step(back, refuse | _EPERM))
    for name in ("fork", "vfork"):
        yield from when(name, step(back, refuse | _EAGAIN))
    yield from when("clone3", step(back, refuse | _ENOSYS))  # its flags lie in memory: libraries fall back to clone
    again = step(back, refuse | _EAGAIN)
    yield from when("clone", step(load, 16), step(both, _CLONE_THREAD, 1), again, step(back, allow))
    stream = (step(load, 24), step(0x54, 0xF), step(equal, 1, 1), step(back, refuse | _EPERM), step(back, allow))
    yield from when("socketpair", *stream)  # SOCK_STREAM: a datagram socket could send to a path
    no, yes = step(back, refuse | _EPERM), step(back, allow)
    for name in _OF_ONE_PROCESS:
        yield from when(name, step(load, 16), step(equal, 0, 2), step(equal, os.getpid(), 1), no, yes)
    for name, values in _OF_THE_CALL.items():
        chain = (part for value in values for part in (step(equal, value, 0, 1), no))
        yield from when(name, step(load, 24), *chain, yes)
    if not own_root:
        for name, flags in (("open", 24), ("openat", 32)):
            yield from when(name, step(load, flags), step(both, _TMPFILE, 0, 1), step(back, refuse | _EOPNOTSUPP), yes)
        yield from when("openat2", step(back, refuse | _ENOSYS))
    if not own_processes:
        for name in ("kill", "tgkill"):
            own = (step(load, 16), step(equal, os.getpid(), 1), step(back, refuse | _EPERM), step(back, allow))
            yield from when(name, *own)
    yield step(back, allow)
