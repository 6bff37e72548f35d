"""System calls that Python has no function for."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWUTS = 0x20000000, 0x40000000, 0x04000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWUTS
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
LAST_CAPABILITY = 63

libc = ctypes.PyDLL(None, use_errno=True)  # holds the lock: a fork within a call stays consistent


def check(result: int, what: str) -> int:
    """Returns the result of a system call; raises OSError with `what` if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def clone(flags: int) -> int:
    """Fork into new namespaces."""
    if not flags:
        return os.fork()
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = libc.syscall(SYS_CLONE[os.uname().machine], flags | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return check(pid, "clone into new namespaces")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount a file system, or change a mount."""
    result = libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()
    )
    check(result, f"mount {target}")


def loopback_up() -> None:
    """Switch on the loopback device of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


def open_process(pid: int) -> int | None:
    """Returns a handle that is readable when the process has ended; None where there are none."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        return None


def drop_capabilities(uid: int | None = None) -> None:
    """Give up all capabilities for good, and become a user if one is given."""
    if uid is not None:
        os.setresuid(0, 0, 0)  # back to the rights that its real user has
    for number in range(LAST_CAPABILITY + 1):
        libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)  # EINVAL above the kernel's last one
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    if uid is not None:
        os.setresuid(uid, uid, uid)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    check(libc.capset(header, (ctypes.c_uint32 * 6)()), "drop capabilities")


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_char_p)]


def filter_calls(lines: bytes) -> None:
    """Install a system-call filter: an array of `struct sock_filter`."""
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    program = _Program(len(lines) // 8, lines)
    check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "system-call filter")
