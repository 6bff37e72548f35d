"""The sandbox of the model's code: AppWorld's interpreter in bubblewrap, with nothing to steal.

The code sees the system's programs, Python, and the packages of AppWorld's environment, read-only.
No task, database or ground truth is there, no network, no other process. Beyond that, the layers
are those of `ludus.sandbox`: each episode has namespaces, limits and a system-call filter.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ludus.core.errors import ConfigError
from ludus.sandbox.bubblewrap import (
    AGENT_DIR,
    INSIDE,
    PACKAGES_DIR,
    SETTINGS,
    START_ENVIRONMENT,
    is_readable,
    jailed,
    links,
    shown,
)
from ludus.sandbox.layers import require_layers
from ludus.sandbox.seccomp import filter_program

ENGINE = Path(__file__).parent / "appworld_side"
PROGRAM = "ludus.envs.appworld.appworld_side.shell"
CODE = {"ludus/envs/appworld/appworld_side": ENGINE, "ludus/sandbox/inside": INSIDE}
"""The parts of ludus that run in AppWorld's environment, by their place below a folder of code."""

ENVIRONMENT = {
    **START_ENVIRONMENT,
    "PYTHONPATH": f"{AGENT_DIR}:{PACKAGES_DIR}/appworld",
    "HOME": "/tmp",
    "APPWORLD_ROOT": "/tmp",
    "APPWORLD_CACHE": "/tmp",
    "IPYTHONDIR": "/tmp/ipython",
}


DROP = "import os, sys; os.setgroups([]); os.setresgid(*[{gid}] * 3); os.setresuid(*[{uid}] * 3); "
DROP += "os.execv(sys.argv[1], sys.argv[1:])"


def settings(isolated: bool, memory_mb: int) -> dict[str, Any]:
    """Settings of the zygote. Errors: ConfigError where a layer of the sandbox is missing."""
    if not isolated:
        return {"isolated": False}
    require_layers()
    who = jailed(())
    limits = {"memory_mb": memory_mb, "num_processes": 16, "disk_mb": 64, "reserves": False}
    return {
        "isolated": True,
        "uid": who.uid,
        "gid": who.gid,
        "filter": filter_program().hex(),
        "environment": ENVIRONMENT,
        "limits": limits,
    }


def command(packages: Path, version: str, folder: Path) -> list[str]:
    """The command of the zygote in bubblewrap; the number of its socket is to be appended.

    Args:
        packages: the folder of AppWorld's environment that holds its packages.
        version: of that environment's Python, such as `3.11`.
        folder: of this process, for what the jail's user could not read elsewhere.

    Errors: ConfigError for a Python that the jail does not have.
    """
    who, bwrap = jailed(()), shutil.which("bwrap") or "bwrap"
    if not who.python.endswith(f"python{version}"):
        raise ConfigError(
            f"appworld: its environment has Python {version}, and the sandbox {who.python}: make "
            "it with the same Python as that of ludus (`make appworld` does)"
        )
    places = {f"{AGENT_DIR}/{place}": source for place, source in CODE.items()}
    places |= {f"{PACKAGES_DIR}/appworld": packages}
    before: list[str] = []
    if os.geteuid() == 0:
        places, before = _shown_to_nobody(places, folder, bwrap)
        drop = DROP.format(gid=who.gid, uid=who.uid)
        before += [who.python, "-c", drop]
    arguments = [*before, bwrap, "--unshare-all", "--die-with-parent", "--new-session"]
    arguments += ["--clearenv", "--uid", str(who.uid), "--gid", str(who.gid)]
    arguments += ["--hostname", "sandbox"]
    for path, source in links().items():
        arguments += ["--symlink", source, path]
    for path in SETTINGS:
        arguments += ["--ro-bind-try", path, path]
    system = {
        place: source for place, source in shown(who).items() if not place.startswith(AGENT_DIR)
    }
    for path, source in {**system, **{place: str(path) for place, path in places.items()}}.items():
        arguments += ["--ro-bind", source, path]
    arguments += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--dir", "/work"]
    arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/work"]
    for name, value in ENVIRONMENT.items():
        arguments += ["--setenv", name, value]
    return [*arguments, "--", who.python, "-X", "utf8", "-m", PROGRAM]


def _shown_to_nobody(
    places: Mapping[str, Path], folder: Path, bwrap: str
) -> tuple[dict[str, Path], list[str]]:
    """Mounts of the sources that root may read and nobody may not: in `folder`, in a namespace of
    root's.

    Returns the places with their new sources, and the command that mounts these.
    """
    folder.chmod(0o711)
    sources, mounts = dict(places), ["--dev-bind", "/", "/"]
    for number, (place, source) in enumerate(places.items()):
        if not is_readable(source, root=True):
            sources[place] = folder / f"shown-{number}"
            sources[place].mkdir(exist_ok=True)
            mounts += ["--ro-bind", str(source), str(sources[place])]
    return sources, [bwrap, *mounts, "--die-with-parent", "--"] if len(mounts) > 3 else []
