"""Network interfaces of this host, and the interface that reaches another host. Torch-free."""

from __future__ import annotations

import ctypes
import ipaddress
import socket


class _Address(ctypes.Structure):
    _fields_ = (("family", ctypes.c_uint16), ("data", ctypes.c_uint8 * 26))


class _Entry(ctypes.Structure):
    pass


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_Address)),
]
"""The beginning of `struct ifaddrs` (getifaddrs(3)) on Linux."""


def interface_names() -> list[str]:
    """Return the names of all interfaces."""
    return [name for _, name in socket.if_nameindex()]


def addresses() -> dict[str, str]:
    """Return the interface of each address of this host. Linux only; elsewhere nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Entry)()
    try:
        failed = libc.getifaddrs(ctypes.byref(first))
    except AttributeError:
        return {}
    if failed:
        return {}
    by_name: dict[str, str] = {}
    entry = first
    while entry:
        if (address := _read(entry.contents.address)) is not None:
            by_name.setdefault(address, entry.contents.name.decode())
        entry = entry.contents.next
    libc.freeifaddrs(first)
    return by_name


def source_address(host: str) -> str | None:
    """Return the address from which this host reaches `host`, or None if the name or the route is unknown.

    Connecting a datagram socket selects a route and sends no packet.
    """
    try:
        resolved = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, where in resolved:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def is_loopback(address: str) -> bool:
    """Return whether only this host reaches `address`."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _read(pointer: ctypes._Pointer[_Address]) -> str | None:
    if not pointer:
        return None
    address = pointer.contents
    if address.family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, bytes(address.data[2:6]))
    if address.family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, bytes(address.data[6:22]))
    return None
