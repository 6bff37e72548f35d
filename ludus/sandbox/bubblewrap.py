"""Paths of this machine that code may see, and the command that starts the jail: bubblewrap."""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePath
from tempfile import mkdtemp

from packaging.requirements import Requirement

from ludus.core.errors import ConfigError
from ludus.sandbox.languages import PATH

NOBODY = 65534
INSIDE = Path(__file__).parent / "inside"
AGENT_DIR, PACKAGES_DIR = "/agent", "/packages"
FORWARD_DIR = "/forward"
SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
ENVIRONMENT = {
    "PATH": PATH,
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
    "PYTHONPATH": PACKAGES_DIR,
    "PYTHONHASHSEED": "0",  # the same code prints a set in the same order in each run
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONNOUSERSITE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
START_ENVIRONMENT = {**ENVIRONMENT, "PYTHONSAFEPATH": "1"}


@dataclass(frozen=True, slots=True)
class Jailed:
    """The user in the jail, and the packages visible there.

    `packages`: the files and folders of Python packages, by name. `absent`: the packages that
    are not installed, or that the user of the jail may not read.
    """

    uid: int
    gid: int
    python: str
    packages: Mapping[str, Path] = field(default_factory=dict)
    absent: Sequence[str] = ()


def jailed(packages: Sequence[str]) -> Jailed:
    """Find the user, the Python and the packages of the jail.

    Errors: ConfigError without a Python that the user may execute.
    """
    root = os.geteuid() == 0
    uid, gid = (NOBODY, NOBODY) if root else (os.geteuid(), os.getegid())
    found: dict[str, Path] = {}
    absent = []
    for name in packages:
        entries = dict(_entries(name))
        if entries and all(is_readable(path, root) for path in entries.values()):
            found |= entries
        else:
            absent.append(name)
    return Jailed(uid, gid, _python(root), found, absent)


def command(who: Jailed, bwrap: str, forwarded: Path | None = None) -> list[str]:
    """The command of a zygote; the number of its socket is to be appended.

    `forwarded`: a folder that is FORWARD_DIR in the jail.
    """
    arguments = [bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    arguments += ["--uid", str(who.uid), "--gid", str(who.gid), "--hostname", "sandbox"]
    for path, source in links().items():
        arguments += ["--symlink", source, path]
    for path in SETTINGS:
        arguments += ["--ro-bind-try", path, path]
    arguments += ["--dir", PACKAGES_DIR]
    for path, source in shown(who).items():
        arguments += ["--ro-bind", source, path]
    if forwarded is not None:
        arguments += ["--ro-bind", str(forwarded), FORWARD_DIR]
    arguments += ["--dev", "/dev", "--proc", "/proc", "--dir", "/tmp", "--dir", "/work"]
    arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/work"]
    for name, value in START_ENVIRONMENT.items():
        arguments += ["--setenv", name, value]
    return [*arguments, "--", *agent(who, "zygote.py")]


def agent(who: Jailed, script: str) -> list[str]:
    """The command that starts ludus' own program in the jail."""
    return [who.python, "-X", "utf8", f"{AGENT_DIR}/ludus/sandbox/inside/{script}"]


def links() -> dict[str, str]:
    """Symbolic links of the system's folders, such as /bin to usr/bin."""
    return {path: os.readlink(path) for path in SYSTEM if os.path.islink(path)}


def shown(who: Jailed) -> dict[str, str]:
    """Paths that code sees, all read-only: in the jail, and here."""
    paths = ["/usr", *(path for path in SYSTEM if os.path.isdir(path) and not os.path.islink(path))]
    prefix = Path(who.python).parents[1]
    if Path("/usr") not in (prefix, *prefix.parents):
        paths.append(str(prefix))
    packages = {f"{PACKAGES_DIR}/{name}": str(source) for name, source in who.packages.items()}
    return {
        **{path: path for path in paths},
        f"{AGENT_DIR}/ludus/sandbox/inside": str(_inside()),
        **packages,
    }


def is_readable(path: Path, root: bool) -> bool:
    """True if the jail's user may read a path: anybody, where `root` starts it."""
    if not root:
        return os.access(path, os.R_OK)
    resolved = path.resolve()
    try:
        if any(not parent.stat().st_mode & stat.S_IXOTH for parent in resolved.parents):
            return False
        return bool(resolved.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


@cache
def _inside() -> Path:
    """The program of the jail, where the jail's user may read it: in a copy if need be, for ludus
    may be installed in a folder of root's. The copy ends with this process."""
    root = os.geteuid() == 0
    if all(is_readable(path, root) for path in INSIDE.glob("*.py")):
        return INSIDE
    copy = Path(mkdtemp(prefix="ludus-sandbox-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    copy.chmod(0o755)
    for path in INSIDE.glob("*.py"):
        shutil.copy(path, copy)
        (copy / path.name).chmod(0o644)
    return copy


def _python(root: bool) -> str:
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for folder in (Path(sys.base_prefix) / "bin", Path("/usr/local/bin"), Path("/usr/bin")):
        path = folder / name
        if path.exists() and is_readable(path, root) and os.access(path, os.X_OK):
            return str(path.resolve())
    raise ConfigError(
        f"sandbox: it needs a {name} that other users may execute, and {sys.base_prefix} is not "
        f"readable for them: apt install {name}, or start ludus as an ordinary user"
    )


def _entries(package: str, seen: tuple[str, ...] = ()) -> Iterator[tuple[str, Path]]:
    """Top-level files and folders of a distribution and of those that it requires."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return
    for name in {file.parts[0] for file in found.files or () if _is_code(file)}:
        if name not in ("..", "/", "__pycache__"):
            yield name, Path(str(found.locate_file(name)))
    for line in found.requires or ():
        requirement = Requirement(line)
        needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if needed and requirement.name not in seen:
            yield from _entries(requirement.name, (*seen, package))


def _is_code(file: PurePath) -> bool:
    """True for what stands in a folder, and for modules that are one file."""
    return len(file.parts) > 1 or file.suffix in (".py", ".so")
