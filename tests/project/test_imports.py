"""Imports point down, never in circles, and `import ludus` stays light."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ludus

PACKAGE = Path(ludus.__file__).parent

FLOORS = (
    "core",
    "config",
    "telemetry",
    "tasks",
    "sandbox",
    "kernels",
    "tools",
    "store",
    "models",
    "judges",
    "evaluate",
    "envs",
    "rollout.hosts",
    "rollout.sessions",
    "rollout",
    "report",
    "train",
    "data",
    "backends",
    "services.server",
    "services.envs",
    "services.model",
    "services",
    "loop",
    "pipeline.monitoring",
    "pipeline.parts",
    "pipeline",
    "diagnostics",
    "coevolve",
    "cluster",
    "cli",
)
"""Folders from the ground up; a dotted name is an inner floor of its folder.

A file imports from its own folder and from the folders before it.
"""

SIBLINGS = {"services.envs", "services.model"}
"""Floors at the same height: they do not import each other."""

ENTRANCES = {"ludus", "ludus.__main__"}
"""Stand above all floors: the public names, and `python -m ludus`."""

HEAVY = {
    "accelerate", "datasets", "fastapi", "gymnasium", "inspect_ai", "minigrid", "numpy", "pandas",
    "peft", "playwright", "prometheus_client", "psycopg", "pyarrow", "ray", "renderers", "scipy",
    "sqlalchemy", "statsmodels", "tensorboard", "tokenizers", "torch", "transformers", "vllm",
    "wandb",
}  # fmt: skip
"""Packages that `import ludus` and `ludus --help` must not load."""


def unit_of(module: str) -> str:
    """The row of FLOORS that a module belongs to: the longest that its name begins with.

    Raises LookupError for a module that belongs to none.
    """
    name = module.removeprefix("ludus.")
    rows = [row for row in FLOORS if name == row or name.startswith(f"{row}.")]
    if not rows:
        raise LookupError(f"{module} stands on no floor: add its folder to FLOORS")
    return max(rows, key=len)


def allowed(importer: str, imported: str) -> bool:
    """True if the rule of the floors lets `importer` import `imported`."""
    if importer in ENTRANCES:
        return True
    if imported in ENTRANCES:
        return False
    own, other = unit_of(importer), unit_of(imported)
    if own != other and {own, other} <= SIBLINGS:
        return False
    return own == other or FLOORS.index(other) < FLOORS.index(own)


@cache
def sources() -> dict[str, Path]:
    """Module name to file, for every file of ludus."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(
    module: str, text: str, known: set[str], rows: bool = True
) -> Iterator[tuple[int, str]]:
    """Line and name of each module of ludus that a source imports.

    Those inside functions and under TYPE_CHECKING count. With `rows`, so do the strings that name a
    plug-in ("ludus.envs.babyai.env:BabyAI").
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name != "ludus"]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ludus":
            names = [f"ludus.{node.attr}"]  # the facade, which `import ludus` alone gives
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}:{node.lineno}: write imports in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif rows and isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            names = [name] if "." in name and name in known else []
        else:
            continue
        for name in names:
            target = name
            while target and target not in known:
                target = target.rpartition(".")[0]
            if target and name != "ludus.__version__":
                yield node.lineno, target


def graph(rows: bool = True) -> dict[str, list[tuple[int, str]]]:
    """Module to the (line, module) pairs that it imports, itself left out."""
    known = set(sources())
    return {
        module: [
            (line, target)
            for line, target in imports_of(module, path.read_text(encoding="utf-8"), known, rows)
            if target != module
        ]
        for module, path in sources().items()
    }


def test_imports_point_down() -> None:
    upward = [
        f"{module}:{line} imports {target}"
        for module, targets in graph().items()
        for line, target in targets
        if not allowed(module, target)
    ]
    assert not upward


def test_no_import_circles() -> None:
    # A table names its plug-ins and they may import the table's folder: rows load later.
    sorter = TopologicalSorter(
        {module: {target for _, target in targets} for module, targets in graph(rows=False).items()}
    )
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(f"circle: {' <- '.join(error.args[1])}")


def test_every_module_stands_on_a_floor() -> None:
    for module in set(sources()) - ENTRANCES:
        unit_of(module)


@pytest.mark.parametrize(
    ("importer", "statement", "fault"),
    [
        ("ludus.core.types", "from ludus.train import losses", True),
        ("ludus.core.types", "import ludus.envs.base", True),
        ("ludus.tasks.readers", "def f():\n    from ludus.envs.base import Env", True),
        ("ludus.rollout.episode", "if TYPE_CHECKING:\n    from ludus import loop", True),
        ("ludus.rollout.episode", "from ludus import Env", True),
        ("ludus.rollout.episode", "import ludus\nenv = ludus.Env", True),
        ("ludus.tasks.readers", 'ROW = "ludus.envs.base:Env"', True),
        ("ludus.services.model", "from ludus.services.envs import api", True),
        ("ludus.services.server", "from ludus.services.envs import api", True),
        ("ludus.services.envs", "from ludus.services.server import app", False),
        ("ludus.envs.base", "from ludus.core.types import Task", False),
        ("ludus.envs.babyai.env", "from ludus.envs.base import Env", False),
        ("ludus.cli", "from ludus import __version__", False),
        ("ludus.core.types", "import ludus\nversion = ludus.__version__", False),
        ("ludus.cli", "import torch", False),
    ],
)
def test_the_rule_tells_faults_from_good_imports(
    importer: str, statement: str, fault: bool
) -> None:
    known = {
        "ludus",
        "ludus.train",
        "ludus.envs",
        "ludus.envs.base",
        "ludus.loop",
        "ludus.tasks",
        "ludus.services.envs",
        "ludus.services.server",
    }
    known |= {"ludus.core.types", "ludus.tasks.readers"}
    targets = [target for _, target in imports_of(importer, statement, known)]
    assert any(not allowed(importer, target) for target in targets) is fault


def loaded_by(code: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter has loaded after `code`."""
    program = f"import json, sys\n{code}\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_import_is_light() -> None:
    assert not loaded_by("import ludus") & (HEAVY | {"pydantic", "rich", "typer", "yaml"})


def test_help_is_light() -> None:
    call = "from ludus.cli import main\nsys.argv = ['ludus', '--help']\n"
    catch = "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code"
    assert not loaded_by(call + catch) & HEAVY


def test_public_names_resolve() -> None:
    for name in ludus.__all__:
        assert getattr(ludus, name) is not None
    assert set(ludus.__all__) <= set(dir(ludus))
    with pytest.raises(AttributeError, match="no attribute 'Environ'"):
        ludus.Environ  # noqa: B018


def test_public_names_are_declared_to_type_checkers() -> None:
    tree = ast.parse(Path(ludus.__file__).read_text(encoding="utf-8"))
    declared = {
        alias.asname: f"{node.module}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ludus.")
        for alias in node.names
    }
    assert declared == ludus._EXPORTS


def test_public_names_say_where_they_live() -> None:
    for name, module in ludus._EXPORTS.items():
        assert hasattr(importlib.import_module(module), name)


def test_no_folder_of_tests_has_the_name_of_an_absent_package() -> None:
    """pytest puts the parents of test folders on the path, where child processes would take the
    folder for the package: torch asks for `triton`."""
    tests = Path(__file__).parents[1]
    names = {folder.name for folder in tests.rglob("*") if folder.is_dir()}
    assert not names & {"flash_attn", "torchaudio", "torchvision", "triton", "xformers"}
