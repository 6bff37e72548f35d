"""Attacks on a sandbox: `ludus doctor --attack`. Each tries what a layer shall stop.

Code that succeeds prints ESCAPED, or the secret of a file that it must not read. Most attacks have
a control: without isolation they succeed, so a sandbox that stops them does something.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ludus.core.errors import ToolError, described
from ludus.sandbox.base import Code, Limits, RunResult, Sandbox

OVERTIME_S = 5.0
"""Seconds that a run may take beyond its limit. Attacks that are not stopped go on for 30 s and
more; on a busy machine, the start and the end of a jail took 1.3 s more than the limit."""
ESCAPED = "ESCAPED"


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack. In its code SECRET, PORT, ABSTRACT, VICTIM are replaced by the bait's.

    `control`: it succeeds without isolation, and does no harm there. `cgroup`: only a cgroup
    stops it.
    """

    name: str
    code: str
    language: str = "python"
    limits: Limits = field(default_factory=lambda: Limits(run_s=5, compile_s=10))
    fetch: Sequence[str] = ()
    control: bool = True
    cgroup: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an attack; `seconds` of the whole call."""

    attack: Attack
    held: bool
    detail: str
    seconds: float


@dataclass(slots=True)
class Bait:
    """Targets of attacks: a file, a port of this host, an abstract socket, a process."""

    secret: str
    path: Path
    port: int
    abstract: str
    victim: subprocess.Popen[bytes]

    def code(self, text: str) -> str:
        """An attack's code with the bait's names."""
        names = {
            "SECRET": str(self.path),
            "PORT": str(self.port),
            "ABSTRACT": self.abstract,
            "VICTIM": str(self.victim.pid),
        }
        for name, value in names.items():
            text = text.replace(name, value)
        return text


@asynccontextmanager
async def bait() -> AsyncIterator[Bait]:
    """Lay out bait for the time of the attacks."""
    token, name = secrets.token_hex(16), f"ludus-{secrets.token_hex(4)}"
    with (
        tempfile.TemporaryDirectory(prefix="ludus-bait-") as folder,
        socket.create_server(("", 0)) as listening,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        abstract.bind(f"\0{name}")
        abstract.listen()
        os.chmod(folder, 0o755)
        path = Path(folder) / "secret"
        path.write_text(f'"{token}"\n')
        path.chmod(0o644)
        victim = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
        try:
            yield Bait(token, path, listening.getsockname()[1], name, victim)
        finally:
            victim.kill()
            victim.wait()


async def attack_all(
    sandbox: Sandbox,
    attacks: Sequence[Attack] | None = None,
    begins: Callable[[str], object] = lambda _: None,
) -> list[Outcome]:
    """Attack a sandbox, one attack after another."""
    outcomes = []
    async with bait() as laid:
        for item in ATTACKS if attacks is None else attacks:
            begins(item.name)
            outcomes.append(await attack(sandbox, item, laid))
    return outcomes


async def attack(sandbox: Sandbox, item: Attack, laid: Bait) -> Outcome:
    """Run one attack, and look at what it did."""
    code = Code(laid.code(item.code), item.language, fetch=item.fetch)
    empty = Code("", "python")
    await sandbox.run(empty)  # the slot is there: it is not what is measured
    began = time.monotonic()
    await sandbox.run(empty)
    own_s = time.monotonic() - began  # the start of gVisor, which the limit does not count
    before, began = len(set(descendants())), time.monotonic()
    try:
        result = await sandbox.run(code, item.limits)
    except ToolError as error:  # a sandbox that ends is no way out
        return Outcome(item, True, described(error), time.monotonic() - began)
    seconds = time.monotonic() - began
    await asyncio.sleep(0)
    problem = _problem(item, result, laid, seconds - own_s) or _left(before)
    return Outcome(item, not problem, problem or _told(result), seconds)


def _problem(item: Attack, result: RunResult, laid: Bait, seconds: float) -> str:
    seen = result.stdout + result.stderr + "".join(map(str, result.files.values()))
    if laid.secret in seen:
        return "read the secret"
    if ESCAPED in result.stdout:
        return next(line for line in result.stdout.splitlines() if ESCAPED in line)[:200]
    if laid.victim.poll() is not None:
        laid.victim = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
        return "ended a process of the host"
    if max(len(result.stdout), len(result.stderr)) > item.limits.output_bytes:
        return "printed more than output_bytes"
    limit = item.limits.run_s + (item.limits.compile_s if item.language == "c" else 0)
    return f"ran {seconds - limit:.2f} s too long" if seconds > limit + OVERTIME_S else ""


def _left(before: int) -> str:
    """Processes that the run left; they get a moment to be gone."""
    ends = time.monotonic() + 1
    while (more := len(set(descendants())) - before) > 0:
        if time.monotonic() > ends:
            return f"left {more} processes"
        time.sleep(0.01)
    return ""


def _told(result: RunResult) -> str:
    last = (result.stderr.strip().splitlines() or result.stdout.strip().splitlines() or [""])[-1]
    return f"{result.status.value}: {last[:100]}" if last else str(result.status.value)


def descendants(pid: int | None = None) -> Iterator[int]:
    """Process ids below a process, by default this one."""
    parents: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                text = Path(entry.path, "stat").read_text()
            except OSError:  # it ended
                continue
            fields = text.rpartition(")")[2].split()
            if fields[0] != "Z":
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    waiting = [os.getpid() if pid is None else pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        waiting += children
        yield from children


CALLS = """
import ctypes, os, platform, errno
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == 'x86_64'
def call(*numbers_and_args):
    number = numbers_and_args[0] if x86 else numbers_and_args[1]
    result = libc.syscall(number, *numbers_and_args[2:])
    return ctypes.get_errno() if result < 0 else 0
def stopped(error):
    return error in (errno.EPERM, errno.ENOSYS, errno.EACCES)
"""

SMALL = Limits(run_s=5, memory_mb=64, num_processes=16, disk_mb=8)
QUICK = Limits(run_s=1, output_bytes=100_000)

ATTACKS = (
    Attack(
        "network",
        """
import socket, subprocess
addresses = ['127.0.0.1', '::1', '10.0.2.2', '169.254.169.254']
try: addresses += [i[4][0] for i in socket.getaddrinfo(socket.gethostname(), None)]
except OSError: pass
for address in addresses:
    try:
        socket.create_connection((address, PORT), timeout=0.3)
        print('ESCAPED: connected to', address)
    except OSError as error: print(error)
""",
    ),
    Attack(
        "abstract Unix socket",
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0ABSTRACT')\n"
        "print('ESCAPED')",
    ),
    Attack("host files", "print(open('SECRET').read())"),
    Attack(
        "symbolic links", "import os\nos.symlink('SECRET', 'out')", fetch=("out",), control=False
    ),
    Attack(
        "/proc of the host",
        """
import glob
for path in ['/proc/VICTIM/cmdline', *glob.glob('/proc/*/' + 'root/SECRET')]:
    try: print('ESCAPED', open(path).read()) if open(path).read() else None
    except OSError as error: print(error)
""",
    ),
    Attack(
        "kernel settings",
        """
import glob
for path in ['/proc/sys/kernel/core_pattern', '/proc/sys/vm/drop_caches', '/proc/sysrq-trigger',
             '/sys/kernel/uevent_helper', *glob.glob('/sys/fs/cgroup/**/cgroup.procs')]:
    try:
        open(path, 'a'); print('ESCAPED: may write', path)
    except OSError as error: print(error)
""",
        control=False,
    ),
    Attack(
        "ptrace",
        CALLS + "child = os.fork()\nif not child:\n import time; time.sleep(5); os._exit(0)\n"
        "error = call(101, 117, 16, child, 0, 0)\n"
        "print(error if stopped(error) else 'ESCAPED')\nos.kill(child, 9)",
    ),
    Attack(
        "mount",
        CALLS + "for numbers in ((165, 40), (428, 428), (430, 430), (442, 442)):\n"
        " error = call(*numbers, b'tmpfs', b'/tmp', b'tmpfs', 0, b'')\n"
        " print(error if stopped(error) else 'ESCAPED: mount')",
        control=False,
    ),
    Attack(
        "user namespaces",
        CALLS + "for number, arm, flags in ((272, 97, 0x10000000), (56, 220, 0x10000011)):\n"
        " error = call(number, arm, flags, 0, 0, 0, 0)\n"
        " print(error if stopped(error) else 'ESCAPED', flush=True)",
    ),
    Attack(
        "kernel interfaces",
        CALLS + "calls = {'io_uring': (425, 425, 8, ctypes.create_string_buffer(256)),\n"
        " 'bpf': (321, 280, 0, 0, 0), 'userfaultfd': (323, 282, 1),\n"
        " 'memfd': (319, 279, b'x', 0), 'keyctl': (250, 219, 0, -3, 1),\n"
        " 'clone3': (435, 435, 0, 0), 'shmget': (29, 194, 0, 1 << 20, 0o1600),\n"
        " 'perf_event_open': (298, 241, 0, 0, -1, -1, 0)}\n"
        "for name, args in calls.items():\n error = call(*args)\n"
        " print(name, error if stopped(error) else 'ESCAPED')",
    ),
    Attack(
        "capabilities",
        "for line in open('/proc/self/status'):\n"
        " name, _, value = line.partition(':')\n"
        " if name in ('CapEff', 'CapPrm', 'CapBnd') and int(value, 16): print('ESCAPED', line)\n"
        " if name in ('Seccomp', 'NoNewPrivs') and value.strip() == '0': print('ESCAPED', line)",
    ),
    Attack(
        "fork bomb",
        "import os, time\nn = 0\ntry:\n for n in range(1000):\n"
        "  if not os.fork(): time.sleep(60)\n"
        "except OSError as error: print(error)\nif n > 16: print('ESCAPED', n)",
        limits=SMALL,
        control=False,
    ),
    Attack(
        "memory of one process",
        "import mmap\nkept = []\nfor i in range(64):\n"
        " m = mmap.mmap(-1, 1 << 23, mmap.MAP_SHARED if i % 2 else mmap.MAP_PRIVATE)\n"
        " m.write(b'x' * (1 << 23)); kept.append(m)\nprint('ESCAPED: 512 MB')",
        limits=SMALL,
        control=False,
    ),
    Attack(
        "memory of many processes",
        "import os, time\nchildren = []\nfor i in range(12):\n pid = os.fork()\n if not pid:\n"
        "  kept = b'x' * (48 << 20); time.sleep(2); os._exit(0)\n children.append(pid)\n"
        "codes = [os.waitpid(pid, 0)[1] for pid in children]\nprint(codes)\n"
        "if not any(codes): print('ESCAPED: 12 times 48 MB')",
        limits=SMALL,
        control=False,
        cgroup=True,
    ),
    Attack(
        "disk",
        "import os\nn = 0\nfor folder in ('/work', '/tmp', '/dev/shm', '/dev', '/var/tmp'):\n"
        " for i in range(20):\n  try:\n   open(f'{folder}/{i}', 'wb').write(bytes(1 << 20))\n"
        "   n += 1\n  except OSError as error: print(error)\nif n > 8: print('ESCAPED', n, 'MB')",
        limits=SMALL,
        control=False,
    ),
    Attack(
        "files that are shared by calls",
        "import os\nfor folder in ('/', '/usr', '/dev', '/packages', '/agent', '/etc', '/bin',\n"
        " '/proc', '/usr/local', '/agent/ludus/sandbox/inside'):\n try:\n"
        "  open(f'{folder}/attack', 'w'); print('ESCAPED: wrote', folder)\n"
        " except OSError as error: print(error)",
        control=False,
    ),
    Attack("output flood", "while True: print('x' * 9999)", limits=QUICK, control=False),
    Attack("endless loop", "while True: pass", limits=QUICK, control=False),
    Attack(
        "sleep that ignores signals",
        "import signal, time\nfor n in range(1, 32):\n try: signal.signal(n, signal.SIG_IGN)\n"
        " except OSError: pass\ntime.sleep(60)",
        limits=QUICK,
        control=False,
    ),
    Attack(
        "daemon",
        "import os, time\nfor _ in range(2):\n if os.fork(): os._exit(0)\n os.setsid()\n"
        "for fd in (0, 1, 2): os.close(fd)\ntime.sleep(30)",
        control=False,
    ),
    Attack(
        "signals",
        "import os\nfor pid in (VICTIM, 1, os.getppid(), -1):\n try: os.kill(pid, 9)\n"
        " except OSError as error: print(pid, error)",
        control=False,
    ),
    Attack(
        "memory of init",
        "open('/proc/1/mem', 'rb+').close(); print('ESCAPED')",
        control=False,
    ),
    Attack("compiler: #include", '#include "SECRET"\nint main(void) { return 0; }', "c"),
    Attack(
        "compiler: .incbin",
        '#include <stdio.h>\n__asm__(".data\\nx: .incbin \\"SECRET\\"\\n.byte 0\\n.text");\n'
        "extern char x[]; int main(void) { puts(x); }",
        "c",
    ),
)
