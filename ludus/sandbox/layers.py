"""The layers between untrusted code and this machine: their state, and how to get them.

A layer is `needed`, or makes the jail stronger. Each is tried for real, not looked up.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ludus.core.errors import ConfigError
from ludus.sandbox.bubblewrap import NOBODY
from ludus.sandbox.cgroups import CgroupError, make_cgroup
from ludus.sandbox.gvisor import runsc
from ludus.sandbox.seccomp import ARCHITECTURES

TIMEOUT_S = 10.0
PR_GET_SECCOMP = 21
NAMESPACES_FIX = (
    "sysctl -w kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000 "
    "kernel.apparmor_restrict_unprivileged_userns=0 (those that exist); in a container: "
    "--security-opt seccomp=unconfined --security-opt systempaths=unconfined"
)

GVISOR_FIX = "apt install runsc, or https://gvisor.dev/docs/user_guide/install"


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's state; `fix` says how to get it."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    needed: bool = True


def layers() -> list[Layer]:
    """Returns the state of all layers, the needed ones first."""
    checks: Sequence[Callable[[], Layer]] = (check_user, check_bubblewrap, check_namespaces)
    checks = (check_platform, *checks, check_filter, check_cgroup, check_gvisor)
    return [check() for check in checks]


def require_layers(isolation: str = "jail") -> None:
    """Refuse to run code where a layer that an isolation (`jail`, `gvisor`) needs is missing.

    Errors: ConfigError.
    """
    checks: Sequence[Callable[[], Layer]] = (check_bubblewrap, check_namespaces)
    if isolation == "gvisor":
        checks = (check_gvisor,)
    for check in (check_platform, check_user, *checks, check_filter):
        layer = check()
        if not layer.ok:
            raise ConfigError(
                f"sandbox: {layer.name}: {layer.detail}. To get it: {layer.fix}. For code that you "
                "trust, and only for it, there is isolation=none"
            )


def check_platform() -> Layer:
    """Check that this is Linux on a processor that the filter knows."""
    system, machine = platform.system(), platform.machine()
    ok = system == "Linux" and machine in ARCHITECTURES
    fix = "" if ok else "run `ludus serve sandbox` on Linux, and use the sandbox `remote`"
    return Layer("platform", ok, f"{system} on {machine}", fix)


def check_user() -> Layer:
    """Check that code will not run as root."""
    if os.geteuid() != 0:
        return Layer("unprivileged user", True, f"user {os.geteuid()}")
    done = _run(["/bin/true"])
    if done is None:
        return Layer("unprivileged user", True, f"root, which drops to user {NOBODY}")
    detail = f"root cannot drop to user {NOBODY}: {done}"
    return Layer("unprivileged user", False, detail, "start ludus as an ordinary user")


def check_bubblewrap() -> Layer:
    """Check that bubblewrap is installed."""
    path = shutil.which("bwrap")
    if path is None:
        return Layer("bubblewrap", False, "bwrap is not installed", "apt install bubblewrap")
    return Layer("bubblewrap", True, path)


def check_namespaces() -> Layer:
    """Check that an unprivileged user may make namespaces, one within another."""
    name, path = "namespaces", shutil.which("bwrap")
    if path is None:
        return Layer(name, False, "bwrap is not installed", "apt install bubblewrap")
    outer = [path, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    inner = [path, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    problem = _run([*outer, *inner])
    if problem is None:
        return Layer(name, True, "user, mount, pid, net, ipc and uts, one within another")
    return Layer(name, False, problem, NAMESPACES_FIX)


def check_gvisor() -> Layer:
    """Check that gVisor runs a program: the stronger layer of `isolation: gvisor`."""
    if shutil.which("runsc") is None:
        detail = "runsc is not installed; it gives code a kernel of its own (isolation=gvisor)"
        return Layer("gvisor", False, detail, GVISOR_FIX, needed=False)
    with tempfile.TemporaryDirectory(prefix="ludus-gvisor-") as state:
        if os.geteuid() == 0:
            os.chown(state, NOBODY, NOBODY)
        problem = _run(runsc("do", "/bin/true", state=state))
    if problem:
        return Layer("gvisor", False, f"runsc fails: {problem}", NAMESPACES_FIX, needed=False)
    return Layer("gvisor", True, "a kernel of its own for code, with isolation=gvisor")


def check_filter() -> Layer:
    """Check that the kernel has system-call filters."""
    try:
        ok = ctypes.CDLL(None).prctl(PR_GET_SECCOMP, 0, 0, 0, 0) >= 0
    except OSError:
        ok = False
    detail = "seccomp" if ok else "the kernel has no seccomp"
    fix = "" if ok else "a kernel with CONFIG_SECCOMP_FILTER"
    return Layer("system-call filter", ok, detail, fix)


def check_cgroup() -> Layer:
    """Check that the memory of a run's processes together can be limited."""
    name = "cgroup"
    try:
        group = make_cgroup(f"{os.getpid()}-check")
    except CgroupError as error:
        detail = f"memory is limited for each process, not for a run's together: {error}"
        fix = "systemd-run --user --scope -p Delegate=yes ludus ..., or start ludus as root"
        return Layer(name, False, detail, fix, needed=False)
    group.remove()
    return Layer(name, True, f"memory of a run's processes together, version {group.version}")


def _run(command: Sequence[str]) -> str | None:
    """Run a command as the jail's user; returns what went wrong, or None."""
    try:
        root = os.geteuid() == 0
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            cwd="/",
            user=NOBODY if root else None,
            group=NOBODY if root else None,
            extra_groups=[] if root else None,
        )
    except subprocess.TimeoutExpired:
        return f"no answer after {TIMEOUT_S:g} s"
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
