"""Pins the installed dependencies of `ludus-rl[dev]` in constraints.txt.

`make constraints` runs this after the tests passed with these versions. Packages that ludus does
not depend on are left out. So is a build's local label (`+cpu`): a pin accepts any build of its
version. NVIDIA's packages and Triton are left out too: torch's CUDA builds pin them, each its own
versions; the extra `kernels` fixes the minor version of NVIDIA's. With arguments, prints the pins
of these requirements, roots included, on one line.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HEADER = """\
# Versions that the tests passed with: `pip install -c constraints.txt 'ludus-rl[all]'`.
# Written by `make constraints`. A plain torch pin takes whichever build pip's configuration offers:
# see docs/installation.md for the CPU build.
"""


def closure(root: Requirement) -> tuple[dict[str, Version], set[str]]:
    """Returns name to installed version of `root` and all that it needs, and the absent names."""
    pins: dict[str, Version] = {}
    absent: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [root]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            absent.add(name)
            continue
        pins[name] = Version(found.version)
        for line in found.requires or []:
            needed = Requirement(line)
            environments = [{"extra": extra} for extra in ("", *requirement.extras)]
            if needed.marker is None or any(map(needed.marker.evaluate, environments)):
                waiting.append(needed)
    return pins, absent


def main() -> None:
    roots = sys.argv[1:] or ["ludus-rl[dev]"]
    pins = {key: value for root in roots for key, value in closure(Requirement(root))[0].items()}
    pins.pop("ludus-rl", None)
    lines = [f"{name}=={version.public}" for name, version in sorted(pins.items())]
    if sys.argv[1:]:
        print(*lines)
    else:
        lines = [line for line in lines if not line.startswith(("nvidia-", "triton=="))]
        Path("constraints.txt").write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
