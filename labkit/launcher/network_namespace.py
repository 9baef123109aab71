"""A network of its own for each run, for shared machines: set LABKIT_NETWORK=own.

All users share the machine's loopback, and neither torch's store nor gloo authenticates those who
connect. In a network namespace a run has a loopback that no other process can reach, and nothing
else: its ranks cannot download anything either, so it is not the default. Only Linux has network
namespaces. Root may create one; other users may if the system allows user namespaces.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

from labkit.environment import ENV_NETWORK, read_choice
from labkit.errors import LabError, ParameterError

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
INTERFACE_FLAGS = struct.Struct("16sh22x")


def is_namespace_requested() -> bool:
    """Tell whether runs should have networks of their own; raise ParameterError if none can."""
    is_requested = bool(read_choice(ENV_NETWORK, "own (a network of its own for each run)"))
    if is_requested and sys.platform != "linux":
        rule = f"needs Linux, and this is {sys.platform}: unset it"
        raise ParameterError(f"{ENV_NETWORK}=own {rule}")
    return is_requested


def enter_namespace() -> None:
    """Give this process, of one thread, a network with only a loopback; LabError if refused."""
    try:
        if not _call_unshare(CLONE_NEWNET):
            _enter_as_unprivileged_user()
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, INTERFACE_FLAGS.pack(b"lo", IFF_UP))
    except OSError as error:
        fix = "have user namespaces allowed (man 7 user_namespaces), or unset it"
        what = f"this system gives no network of its own ({error.strerror})"
        raise LabError(f"{ENV_NETWORK}=own: {what}: {fix}") from error


def _enter_as_unprivileged_user() -> None:
    # Inside a user namespace this user has the right to do so. The user id stays the same.
    user, group = os.geteuid(), os.getegid()
    if not _call_unshare(CLONE_NEWUSER | CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    me = Path("/proc/self")
    (me / "setgroups").write_text("deny")
    (me / "uid_map").write_text(f"{user} {user} 1")
    (me / "gid_map").write_text(f"{group} {group} 1")


def _call_unshare(flags: int) -> bool:
    return bool(ctypes.CDLL(None, use_errno=True).unshare(flags) == 0)
