"""Virtual environments that hold the wheel and some extras of it, made offline in a second.

Their packages are links to those installed beside the tests: whatever else is installed there is
absent, as it is for a user who asked pip for these extras only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import venv
from collections import Counter
from collections.abc import Sequence, Set
from functools import cache
from importlib.metadata import distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from write_constraints import closure

import ludus

ROOT = Path(ludus.__file__).parents[1]

DRIVER = """
import json, os, sys, tempfile
sys.dont_write_bytecode = True
import ludus.cli

def call(argv):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
            sys.argv = ["ludus", *argv]
            try:
                ludus.cli.main()
                code = 0
            except SystemExit as stop:
                code = stop.code or 0
            except BaseException:
                import traceback
                traceback.print_exc()
                code = 1
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0), err.seek(0)
        return [code, out.read(), err.read()]

print(json.dumps([call(argv) for argv in json.loads(sys.argv[1])]))
"""
"""Calls the command line in a child of one process: Python and typer start once, not per call."""


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def extras() -> list[str]:
    """The extras that are not collections of others."""
    return [name for name in PROJECT["optional-dependencies"] if name not in ("all", "dev")]


def requirements(extra: str) -> list[str]:
    """Canonical names of the packages that an extra lists."""
    lines = PROJECT["optional-dependencies"][extra]
    return [canonicalize_name(Requirement(line).name) for line in lines]


def build_wheel(folder: Path) -> Path:
    """Build the wheel with hatchling, as `pip wheel` does."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [path] = folder.glob("*.whl")
    return path


def make_env(folder: Path, wheel: Path, extras: tuple[str, ...] = ()) -> Path:
    """Make an environment of the wheel with `extras`; returns its Python."""
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    [site] = folder.glob("lib/python3*/site-packages")
    names, _ = closure(Requirement(f"ludus-rl[{','.join(extras)}]" if extras else "ludus-rl"))
    _link(names.keys() - {"ludus-rl"}, site)
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "--python", str(python), *install], check=True, capture_output=True)
    return python


def run_verbs(
    python: Path, calls: Sequence[Sequence[str]], folder: Path
) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of each `ludus` call, run in `folder`."""
    done = subprocess.run(
        [str(python), "-I", "-c", DRIVER, json.dumps(calls)],
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [(code, out, err) for code, out, err in json.loads(done.stdout)]


@cache
def _tops() -> Counter[str]:
    """Number of packages that own a file or folder of site-packages: namespaces have several."""
    return Counter(top for item in distributions() for top in _top_files(item))


def _top_files(item: object) -> set[str]:
    return {file.parts[0] for file in getattr(item, "files", None) or () if file.parts[0] != ".."}


def _link(names: Set[str], site: Path) -> None:
    for name in names:
        item = distribution(name)
        for top in _top_files(item):
            if _tops()[top] == 1 and top != "__pycache__":
                (site / top).symlink_to(Path(str(item.locate_file(top))))
        for file in item.files or ():
            if file.parts[0] != ".." and _tops()[file.parts[0]] > 1:
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                if not (site / file).exists():
                    (site / file).symlink_to(Path(str(file.locate())))
