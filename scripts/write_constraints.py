"""Pins in constraints.txt what `ludus-rl[dev]` needs, directly or not, as installed here.

Run by `make constraints`, after the tests passed with these versions. Only the packages that ludus
brings are pinned, whatever else the environment holds; a build's local label (`+cpu`) is left out,
so that a pin takes any build of its version.
"""

from __future__ import annotations

from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HEADER = """\
# Versions that the tests passed with: `pip install -c constraints.txt 'ludus-rl[all]'`.
# Written by `make constraints`. A plain torch pin takes whichever build pip's configuration offers:
# see docs/installation.md for the CPU build.
"""


def installed(name: str) -> Distribution | None:
    """The installed distribution of that name, or None."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def closure(root: Requirement) -> dict[str, Version]:
    """Name to version of everything that `root` brings here, itself left out."""
    pins: dict[str, Version] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [root]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        found = installed(name)
        if key in seen or found is None:
            continue
        seen.add(key)
        pins[name] = Version(found.version)
        for line in found.requires or []:
            needed = Requirement(line)
            environments = [{"extra": extra} for extra in ("", *requirement.extras)]
            if needed.marker is None or any(map(needed.marker.evaluate, environments)):
                waiting.append(needed)
    del pins[canonicalize_name(root.name)]
    return pins


def main() -> None:
    pins = closure(Requirement("ludus-rl[dev]"))
    lines = [f"{name}=={version.public}" for name, version in sorted(pins.items())]
    Path("constraints.txt").write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
