"""The wheel holds what it must, and the declared dependencies are those that the code imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from email import message_from_string
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ludus
from ludus.telemetry.sinks import SINKS

ROOT = Path(ludus.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


COMES_WITH = {
    "httpx2": "mcp",
    "markupsafe": "jinja2",
    "pydantic-core": "pydantic",
    "pydevd": "debugpy",
    "referencing": "jsonschema",
    "requests": "ray",
}
"""Packages that are part of another: imported as such, declared through it."""

NOT_IMPORTED = {
    "accelerate": "peft needs it",
    "agentscope": "an agent of the examples",
    "greenlet": "SQLAlchemy needs it",
    "langchain-openai": "an agent of the examples",
    "langgraph": "an agent of the examples",
    "openai-agents": "an agent of the examples",
    "nvidia-cuda-cccl": "headers of kernels",
    "nvidia-cuda-crt": "headers of kernels",
    "nvidia-cuda-nvrtc": "a library that is loaded in the sandbox",
    "nvidia-cuda-runtime": "headers of kernels",
    "httptools": "uvicorn parses HTTP with it",
    "opentelemetry-sdk": "imported as opentelemetry.sdk, a package of several distributions",
    "psycopg": "SQLAlchemy loads it for a postgresql:// URL",
    "renderers": "looked up by name",
    "smolagents": "an agent of the examples",
    "s3fs": "fsspec loads it for an s3:// URL",
    "textarena": "games of the examples",
    "tensorboard": "torch.utils.tensorboard needs it",
    "uvloop": "uvicorn's event loop",
}
"""Declared packages that no import statement names, and why they are declared."""


APART = {
    "agents", "alfworld", "debug", "games", "inspect", "kernels", "notify", "otel", "qlora",
    "ray",
    "reasoning", "renderers", "s3", "scienceworld", "textworldexpress", "triton",
}  # fmt: skip
"""Extras that `all` leaves out: they need Java or a compiler, or bring many packages along."""


def declared(extra: str | None = None) -> set[str]:
    """Canonical names of the core's dependencies, or of one extra's."""
    if extra is None:
        lines: list[str] = PROJECT["dependencies"]
    else:
        lines = PROJECT["optional-dependencies"][extra]
    return {canonicalize_name(Requirement(line).name) for line in lines}


EXTRAS = [name for name in PROJECT["optional-dependencies"] if name not in ("all", "dev")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [path] = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "ludus"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "ludus/py.typed" in listed
    assert set(listed) <= set(wheel.namelist())


def test_wheel_holds_the_recipes(wheel: zipfile.ZipFile) -> None:
    recipes = {path.name: path.read_bytes() for path in (ROOT / "recipes").glob("*.yaml")}
    held = [name for name in wheel.namelist() if name.startswith("ludus/recipes/")]
    assert {Path(name).name: wheel.read(name) for name in held} == recipes


def test_wheel_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    outside = [
        name
        for name in wheel.namelist()
        if not name.startswith("ludus/") and ".dist-info/" not in name
    ]
    assert not outside
    assert not [name for name in wheel.namelist() if "__pycache__" in name]


def test_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    folder = f"ludus_rl-{ludus.__version__}.dist-info"
    metadata = message_from_string(wheel.read(f"{folder}/METADATA").decode())
    assert metadata["Name"] == "ludus-rl"
    assert metadata["Version"] == ludus.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert wheel.read(f"{folder}/entry_points.txt").decode().split() == [
        "[console_scripts]", "ludus", "=", "ludus.__main__:main",
    ]  # fmt: skip
    licences = {f"{folder}/licenses/LICENSE", f"{folder}/licenses/NOTICE"}
    assert licences <= set(wheel.namelist())


def test_wheel_works_where_the_source_is_not(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import ludus; print(ludus.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(tmp_path / "ludus" / "__init__.py")


def third_party(folder: Path, *, on_import: bool = False) -> Mapping[str, set[str]]:
    """Distribution to the files that import it; `on_import`: not inside functions.

    Files that run in an environment of their own, such as vLLM's (`vllm_side`), are left out.
    """
    owners = packages_distributions()
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        if path.parent.name.endswith("_side"):  # vllm_side, verifiers_side, appworld_side
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body if on_import else ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            for imported in names:
                top = imported.partition(".")[0]
                if top == "ludus" or top in sys.stdlib_module_names:
                    continue
                [owner, *_] = owners.get(top, [top])
                name = canonicalize_name(owner)
                name = COMES_WITH.get(name, name)
                found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


@pytest.mark.slow
def test_every_import_is_declared() -> None:
    known = declared().union(*map(declared, EXTRAS))
    undeclared = {
        name: sorted(files)
        for name, files in third_party(ROOT / "ludus").items()
        if name not in known
    }
    assert not undeclared


def test_every_dependency_is_used() -> None:
    used = third_party(ROOT / "ludus").keys() | NOT_IMPORTED.keys()
    assert not declared().union(*map(declared, EXTRAS)) - used


def test_the_core_needs_only_the_light_dependencies() -> None:
    """On import; plug-ins that an extra brings aside."""
    targets = {SINKS.row(name).target.partition(":")[0] for name in SINKS if SINKS.row(name).extra}
    plugins = {f"{target.replace('.', '/')}.py" for target in targets}
    found = third_party(ROOT / "ludus" / "core", on_import=True).items()
    heavy = {name: files - plugins for name, files in found if name not in declared()}
    assert not {name: files for name, files in heavy.items() if files}


def test_all_means_all() -> None:
    [everything] = [Requirement(line) for line in PROJECT["optional-dependencies"]["all"]]
    assert everything.extras | APART == set(EXTRAS)


def test_errors_name_extras_that_exist() -> None:
    """A MissingDependency("package", "extra", ...) or a Row("...", "extra") names a real extra."""
    for path in (ROOT / "ludus").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                wanted = {"MissingDependency": 1, "Row": 1}.get(node.func.id)
                if wanted is None or len(node.args) <= wanted:
                    continue
                extra = node.args[wanted]
                if isinstance(extra, ast.Constant) and extra.value:
                    unknown = set(extra.value.split(",")) - set(EXTRAS)
                    assert not unknown, f"{path.name}:{node.lineno}: {extra.value}"


def test_constraints_pin_every_dependency_within_its_range() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line), line
            name, _, version = line.partition("==")
            pins[name] = version
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()):
        for line in group:
            requirement = Requirement(line)
            if requirement.name.startswith(("nvidia-", "triton")):  # see write_constraints
                assert "<" in str(requirement.specifier), line
            elif requirement.name != "ludus-rl":
                name = canonicalize_name(requirement.name)
                assert name in pins, f"{name} is not pinned: run `make constraints`"
                assert requirement.specifier.contains(pins[name], prereleases=True), line


def test_constraints_keep_torch_apart_from_its_companions() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert re.search(r"^torch==", text, re.M)
    assert not re.search(r"^(torchvision|torchaudio|nvidia|triton)", text, re.M)
