"""Isolation of an untrusted process on Linux: namespaces, an empty root, Landlock (`seccomp.py` has seccomp).

Each function removes permissions of the calling process and returns whether it succeeded. Uses only the standard
library, because it runs in processes of the sandbox before they execute the code.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 0x1000, 0x4000, 1 << 18
_MOUNT_SETATTR, _PIVOT_ROOT = 442, 41 if platform.machine() == "aarch64" else 155  # numbers of system calls
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 2, -100, 0x8000, 1
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_FIRST_UID = 2_000_000_000  # plus the process id: a separate user for each process
_UIDS = 20_000  # the highest id in a namespace with fewer ids, as in rootless containers
_NOBODY = 65534
MAX_FILES = 1024
_NUM_CAPABILITIES = 64  # more than exist; the kernel ignores the others
_SIGKILL = 9

libc = ctypes.CDLL(None, use_errno=True)


def leave_namespaces(own_user: int | None) -> set[str]:
    """Leave the network, processes and mounts of the machine, as far as possible. `own_user` is the result of that
    function."""
    uid, gid = os.getuid(), os.getgid()
    achieved = set()
    if uid != 0 or own_user is None:  # the second: root of a namespace without other users
        if libc.unshare(_CLONE_NEWUSER) != 0:
            return set()
        achieved.add("userns")
        inside, group = uid or _NOBODY, gid or _NOBODY
        for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1"), ("gid_map", f"{group} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    flags = {"netns": _CLONE_NEWNET, "pidns": _CLONE_NEWPID, "mountns": _CLONE_NEWNS, "ipcns": _CLONE_NEWIPC}
    return achieved | {name for name, flag in flags.items() if libc.unshare(flag) == 0}


def own_user() -> int | None:
    """Return a user id without other processes, for root to switch to. None if the user namespace has none."""
    users, groups = _mapped("uid_map"), _mapped("gid_map")
    candidates = [_FIRST_UID + os.getpid()]
    candidates += [end - 1 - os.getpid() % (_UIDS // 2) for begin, end in users if end - begin >= _UIDS]
    return next((uid for uid in candidates if all(any(a <= uid < b for a, b in ids) for ids in (users, groups))), None)


def _mapped(name: str) -> list[tuple[int, int]]:
    """The ranges of ids of this process's user namespace."""
    with open(f"/proc/self/{name}") as file:
        lines = [line.split() for line in file]
    return [(int(begin), int(begin) + int(length)) for begin, _, length in lines]


def counts_threads(achieved: set[str]) -> bool:
    """Return whether RLIMIT_NPROC counts only threads of this process. It counts threads of a user, which is unique
    here, or since Linux 5.14 of its user namespace."""
    if "userns" not in achieved:
        return os.getuid() != 0 and "owner" in achieved
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)


def empty_root(folder: str, visible: list[str], num_bytes: int) -> bool:
    """Make a new root of which only the `visible` paths of the machine are part, read-only, and a writable `/work` of
    `num_bytes` in memory. Needs a mount namespace. No /proc, no /sys, no /tmp, no socket of the machine."""
    if _mount(None, "/", None, _MS_REC | _MS_PRIVATE) or _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV):
        return False
    for path in visible:
        inside = folder + path
        os.makedirs(os.path.dirname(inside), 0o755, exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
        else:
            os.mkdir(inside, 0o755) if os.path.isdir(path) else open(inside, "x").close()
            if _mount(path, inside, None, _MS_BIND | _MS_REC):
                return False
    os.mkdir(f"{folder}/work", 0o755)
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    where = (_AT_FDCWD, folder.encode(), _AT_RECURSIVE, ctypes.byref(attributes), size)
    if libc.syscall(_MOUNT_SETATTR, *where) != 0:
        return False
    if _mount(
        "tmpfs", f"{folder}/work", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={num_bytes},nr_inodes={MAX_FILES},mode=0777"
    ):
        return False
    os.chdir(folder)
    if libc.syscall(_PIVOT_ROOT, b".", b".") != 0 or libc.umount2(b".", _MNT_DETACH) != 0:
        return False
    os.chdir("/work")
    return True


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> bool:
    """Whether it failed."""
    words = [word.encode() if word is not None else None for word in (source, target, kind)]
    return bool(libc.mount(*words, flags, options.encode() if options else None) != 0)


def end_with_parent() -> None:
    """Be killed when the parent ends."""
    libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def drop_rights() -> None:
    """No capability by any later program, no setuid program, and the end of the parent is ours."""
    for capability in range(_NUM_CAPABILITIES):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    end_with_parent()  # again, because setuid resets it
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same on all architectures
_FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # ABI -> number of rights; 16 since 5
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1, 2, 4, 8, 1 << 14
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE


def landlock(readable: list[str], writable: list[str]) -> bool:
    """Restrict file access to these paths, for machines without mount namespaces. Also protects other processes from
    ptrace."""
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 3:  # before it, files can be emptied by truncate()
        return False
    rights = (1 << _FS_RIGHTS.get(version, 16)) - 1
    content = struct.pack("QQQ", rights, 0, 3 if version >= 6 else 0)[: 24 if version >= 6 else 8]
    ruleset = libc.syscall(_LANDLOCK_CREATE, content, ctypes.c_size_t(len(content)), 0)
    if ruleset < 0:
        return False
    for paths, directory, file in (
        (readable, _EXECUTE | _READ_FILE | _READ_DIR, _EXECUTE | _READ_FILE),
        (writable, rights, rights & _FILE_RIGHTS),
    ):
        for path in filter(os.path.exists, paths):
            descriptor = os.open(path, os.O_PATH)
            allowed = directory if os.path.isdir(path) else file
            rule = struct.pack("=Qi", allowed, descriptor)
            if libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0) != 0:
                return False
            os.close(descriptor)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return bool(libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0)
