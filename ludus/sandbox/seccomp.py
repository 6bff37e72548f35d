"""The system-call filter: a BPF program for x86_64 and aarch64.

A list of denied calls, not of allowed ones: compilers, node and numpy need about 300 calls, and
the namespaces, dropped capabilities and limits hold without this layer. It denies what has been
the way out of containers (namespaces, mounts, ptrace, bpf, io_uring, keys), what hides memory from
the limits (memfd, System V memory), and all sockets but those of the Unix domain and, for programs
that have a loopback device, TCP and UDP over IPv4.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence

ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
X32 = 0x40000000
NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWUSER, NEWPID, NEWNET, NEWIPC, NEWUTS, NEWCGROUP, NEWNS, NEWTIME."""
AF_UNIX, AF_INET = 1, 2
PROTOCOLS = (0, 6, 17)
"""Of AF_INET: the socket type's own, TCP, UDP."""
TIOCSTI, TIOCLINUX = 0x5412, 0x541C

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

DENIED: dict[str, tuple[int | None, int | None]] = {
    # name: number on x86_64, number on aarch64
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_tree_attr": (467, 467),
    "unshare": (272, 97), "setns": (308, 268),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "io_setup": (206, 0), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "fanotify_init": (300, 262), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "personality": (135, 92), "syslog": (103, 116),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "swapon": (167, 224),
    "swapoff": (168, 225), "reboot": (169, 142), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "sethostname": (170, 161),
    "setdomainname": (171, 162), "vhangup": (153, 58), "modify_ldt": (154, None),
    "iopl": (172, None), "ioperm": (173, None), "ustat": (136, None), "vmsplice": (278, 75),
    "move_pages": (279, 239), "lookup_dcookie": (212, 18), "nfsservctl": (180, 42),
}  # fmt: skip
"""Calls that answer EPERM."""

CHECKED = {
    # name: numbers, then index of the argument
    "clone": ((56, 220), 0),
    "clone3": ((435, 435), 0),
    "socket": ((41, 198), 0),
    "socketpair": ((53, 199), 0),
    "ioctl": ((16, 29), 1),
}


def filter_program(machine: str | None = None, *, loopback: bool = False) -> bytes:
    """Returns the filter as an array of `struct sock_filter`, with IPv4 for `loopback`.

    Errors: KeyError for a machine that is not in ARCHITECTURES.
    """
    machine = machine or platform.machine()
    architecture, column = ARCHITECTURES[machine], list(ARCHITECTURES).index(machine)
    lines = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),  # 32-bit calls have other numbers
        (LOAD, 0, 0, NUMBER),
    ]
    if machine == "x86_64":
        lines += [(JUMP_AT_LEAST, 0, 1, X32), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    for name, (numbers, argument) in CHECKED.items():
        body = _check(name, ARGUMENTS + 8 * argument)
        if name == "socket" and loopback:
            body = _check_internet(ARGUMENTS)
        lines += _only_for(numbers[column], body)
    for numbers_or_none in DENIED.values():
        number = numbers_or_none[column]
        if number is not None:
            lines += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | errno.EPERM)]
    lines.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


Line = tuple[int, int, int, int]


def _only_for(number: int, body: Sequence[Line]) -> list[Line]:
    return [(JUMP_EQUAL, 0, len(body), number), *body]


def _check(name: str, low_word: int) -> list[Line]:
    """The lines for a call that some arguments make dangerous. They always return."""
    if name == "clone3":  # its flags are in memory, which a filter cannot read; libc falls back
        return [(RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    load = (LOAD, 0, 0, low_word)
    denied, allowed = (RETURN, 0, 0, ERRNO | errno.EPERM), (RETURN, 0, 0, ALLOW)
    if name == "clone":
        return [load, (JUMP_ANY_BIT, 0, 1, NEW_NAMESPACES), denied, allowed]
    if name == "ioctl":
        tests = [(JUMP_EQUAL, 1, 0, TIOCSTI), (JUMP_EQUAL, 0, 1, TIOCLINUX)]
        return [load, *tests, denied, allowed]
    return [load, (JUMP_EQUAL, 1, 0, AF_UNIX), (RETURN, 0, 0, ERRNO | errno.EACCES), allowed]


def _check_internet(arguments: int) -> list[Line]:
    """The lines for `socket(family, type, protocol)` where IPv4 is allowed too."""
    tests = [(JUMP_EQUAL, len(PROTOCOLS) - at, 0, p) for at, p in enumerate(PROTOCOLS)]
    return [
        (LOAD, 0, 0, arguments),
        (JUMP_EQUAL, 3 + len(tests) - 0, 0, AF_UNIX),
        (JUMP_EQUAL, 0, 1 + len(tests), AF_INET),
        (LOAD, 0, 0, arguments + 16),
        *tests,
        (RETURN, 0, 0, ERRNO | errno.EACCES),
        (RETURN, 0, 0, ALLOW),
    ]
