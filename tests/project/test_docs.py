"""The docs are tested: what exists is described, what is described exists."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import ludus
from ludus.config.registry import Registry
from ludus.config.schema import RunConfig
from ludus.core.modules import load_module

ROOT = Path(ludus.__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")])
GENERATOR = load_module(str(ROOT / "scripts" / "generate_docs.py"))
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*\ssrc=\"([^\"]+)\"")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)
HEADING = re.compile(r"^#+ (.*)$", re.M)

PRIVATE = re.compile(
    r"(/root/|/home/\w+/|/work/|/opt/wheels|\.pyenv|--(extra-)?index-url|--find-links"
    r"|https?://\S*(pypi|pythonhosted|npmjs|debian|pytorch\.org/whl)\S*)"
)
"""Paths of one machine, and addresses of package registries: no tracked file names one."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tracked() -> list[Path]:
    """The repository's text files."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    binary = {".png", ".gz", ".zst", ".parquet", ".safetensors"}
    return [
        ROOT / name
        for name in listed
        if Path(name).suffix not in binary and (ROOT / name).is_file()
    ]


def documented() -> str:
    """All that stands between backticks in docs/ and README.md, a fenced block included."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    blocks = [match[2] for match in FENCE.finditer(text)]
    return "\n".join([*re.findall(r"`([^`\n]+)`", text), *blocks])


def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A config section and all that it holds."""
    yield model
    for field in model.model_fields.values():
        for part in (field.annotation, *get_args(field.annotation)):
            if (
                isinstance(part, type)
                and issubclass(part, BaseModel)
                and part.__module__ == (RunConfig.__module__)
            ):
                yield from sections(part)


def registries() -> list[Registry[Any]]:
    """Every plug-in table of ludus."""
    found: dict[int, Registry[Any]] = {}
    for path in sorted((ROOT / "ludus").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "Registry(" not in text or path.name == "registry.py":
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        for value in vars(module).values():
            if isinstance(value, Registry):
                found[id(value)] = value
    return list(found.values())


def test_every_config_key_is_documented() -> None:
    reference = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for section in sections(RunConfig):
        for key in section.model_fields:
            assert re.search(rf"`[\w.]*\b{key}`", reference), f"{section.__name__}.{key}"


def test_every_plugin_is_documented() -> None:
    words = documented()
    tables = registries()
    assert {table.kind for table in tables} >= {"env"}
    missing = [
        f"{table.kind} {name}"
        for table in tables
        for name in table._rows
        if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", words)
    ]
    assert not missing


@pytest.mark.parametrize("name", GENERATOR.PAGES)
def test_generated_pages_are_up_to_date(name: str, request: pytest.FixtureRequest) -> None:
    page, printed = (ROOT / "docs" / name).read_text(encoding="utf-8"), []
    if name == "configuration.md":
        printed.append(request.getfixturevalue("ludus")("config", "--markdown").ok().out)
    try:
        expected = GENERATOR.PAGES[name](*printed)
    except LookupError as error:
        pytest.skip(str(error))
    assert page == expected, "run `make docs`"


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    paths = [path for path, command in GENERATOR.commands() if command.params]
    assert "ludus train" in paths
    assert not [path for path in paths if f"`{path}" not in page]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for match in LINK.finditer(text):
        target = match[1] or match[2]
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target}: no such file"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{target}: no such heading"


def anchors(page: Path) -> set[str]:
    """The anchors that a forge makes from a page's headings."""
    headings = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_reached_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked, waiting = set(), [index]
    while waiting:
        page = waiting.pop()
        if page in linked or page.suffix != ".md" or not page.exists():
            continue
        linked.add(page)
        for match in LINK.finditer(page.read_text(encoding="utf-8")):
            if match[1] and not re.match(r"[a-z]+:|#", match[1]):
                waiting.append((page.parent / match[1].partition("#")[0]).resolve())
    orphans = {name_of(page) for page in (ROOT / "docs").rglob("*.md")} - {
        name_of(page) for page in linked
    }
    assert not orphans


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_blocks_are_valid(page: Path) -> None:
    import yaml

    for language, code in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            compile(code, name_of(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif language == "yaml":
            yaml.safe_load(code)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_in_the_docs_exist(page: Path) -> None:
    """A `ludus.module.name` or a `ludus/file.py` in the text is there."""
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`(ludus(?:\.\w+)+)", text):
        resolve(name)
    for name in re.findall(
        r"`((?:ludus|tests|docs|examples|recipes|benchmarks|scripts)/[\w./-]+\.\w+)`", text
    ):
        assert (ROOT / name).exists(), f"{name}: no such file"


def resolve(name: str) -> Any:
    """The object of a dotted name; fails the test where there is none."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            assert hasattr(found, part), f"{name}: {found!r} has no {part}"
            found = getattr(found, part)
        return found
    pytest.fail(f"{name} does not exist")


def test_no_file_names_this_machine_or_a_registry() -> None:
    found = [
        f"{name_of(path)}:{number}: {line.strip()[:100]}"
        for path in tracked()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert not found


def test_invariants_name_their_tests() -> None:
    text = (ROOT / "INVARIANTS.md").read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.M)]
    assert numbers == list(range(1, 11))
    for item in re.split(r"^\d+\. ", text, flags=re.M)[1:]:
        assert re.search(r"`tests/[\w/]+\.py`", item), f"names no test: {item[:60]}"
