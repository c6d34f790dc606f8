"""Which process of this machine an actor is.

A process number alone proves nothing. Each pid namespace counts anew (containers do, also those that share the host's
address), and a number is given again when its process has ended. The proof is a socket: the process with that number
must hold the one that listens at the address in the actor's row of the table.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import socket
import struct

#: A worker has its server among its first thirty descriptors, and looking at one takes 3 us.
MOST_DESCRIPTORS = 4096

# sock_diag(7) is asked which socket listens at one address. The kernel looks that up directly; for /proc/net/tcp it
# would walk all connections of the host, which takes up to 10 ms.
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_ALL_STATES = 0xFFFFFFFF
_REQUEST = struct.Struct("=IHHII BBxxI")  # nlmsghdr, then the head of inet_diag_req_v2
_SOCKET_ID = struct.Struct("!HH16s16s")  # inet_diag_sockid up to the interface
_ANY_INTERFACE_NO_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_SIZE = _REQUEST.size + _SOCKET_ID.size + len(_ANY_INTERFACE_NO_COOKIE)
_ANSWER = struct.Struct("=IHxxxxxxxxxx BB")  # nlmsghdr, then the head of inet_diag_msg: family, state
_INODE = struct.Struct("=I")
_INODE_AT = 16 + 68
_LISTENS = 10

# Where the last proof was found: workers of one Ray open the same descriptors in the same order.
_likely = 0


def proven_start(pid: int, ip: str, port: int) -> int:
    """When process `pid` began, in clock ticks since boot, if it listens at that address; 0 where that is not proven.

    The number means a process only together with that time, so the code that opens the process later compares it.
    Nothing is proven either if we may not look: at another user's process, at another namespace's, or on a kernel
    without sock_diag.
    """
    try:
        # Where the /proc of another namespace is mounted, its numbers are not ours.
        if os.readlink("/proc/self") != str(os.getpid()) or _namespace(str(pid)) != _namespace("self"):
            return 0
        # Before the proof: a process that took the number over meanwhile began later than this one.
        start = _start(pid)
        inode = _listener(ip, port)
        return start if inode and _holds(pid, f"socket:[{inode}]") else 0
    except (OSError, ValueError):
        return 0


def _namespace(process: str) -> str:
    return os.readlink(f"/proc/{process}/ns/pid")


def _start(pid: int) -> int:
    descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
    # The name, field 2, may contain anything; after its last parenthesis follows field 3.
    return int(text.rpartition(b")")[2].split()[22 - 3])


def _listener(ip: str, port: int) -> int:
    """The inode of the socket that listens there, in this network namespace; 0: none does."""
    address = ipaddress.ip_address(ip)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    request = (
        _REQUEST.pack(_SIZE, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0, family, socket.IPPROTO_TCP, _ALL_STATES)
        + _SOCKET_ID.pack(port, 0, address.packed, b"")
        + _ANY_INTERFACE_NO_COOKIE
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as netlink:
        netlink.sendto(request, (0, 0))
        # Answered before `sendto` returns; an error otherwise.
        answer = netlink.recv(4096, socket.MSG_DONTWAIT)
    if len(answer) < _INODE_AT + _INODE.size:
        return 0
    _, kind, _, state = _ANSWER.unpack_from(answer)
    if kind != _SOCK_DIAG_BY_FAMILY or state != _LISTENS:
        return 0
    return int(_INODE.unpack_from(answer, _INODE_AT)[0])


def _holds(pid: int, sought: str) -> bool:
    """Whether a descriptor of the process is that socket."""
    global _likely
    folder = f"/proc/{pid}/fd/"
    if _target(f"{folder}{_likely}") == sought:
        return True
    with os.scandir(folder) as descriptors:
        for descriptor in itertools.islice(descriptors, MOST_DESCRIPTORS):
            if _target(descriptor.path) == sought:
                _likely = int(descriptor.name)
                return True
    return False


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        # Closed since it was listed.
        return ""
