"""Hooks of mkdocs: pages of the Python reference, and files outside of docs/ that pages link to."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]

REFERENCE = {
    "Public names": "ludus",
    "Carriers": "ludus.core.types",
    "Errors": "ludus.core.errors",
    "Environments": "ludus.envs.base",
    "Agents": "ludus.rollout.workflow",
    "Judges": "ludus.judges.base",
    "Tools": "ludus.tools.base",
    "Readers": "ludus.tasks.readers",
    "Samplers": "ludus.models.samplers.base",
    "Algorithms": "ludus.train.algorithms.base",
    "Losses": "ludus.train.algorithms.losses",
    "Back ends": "ludus.backends.base",
    "Run store": "ludus.store",
}
"""Title and module of each page of the reference."""

LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append what is listed by folder to the navigation."""
    assert config.nav is not None
    pages = [{title: f"reference/{module}.md"} for title, module in REFERENCE.items()]
    measured = sorted(path.name for path in (ROOT / "docs" / "benchmarks").glob("*.md"))
    decided = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    config.nav += [
        {"Python reference": pages},
        {"Measurements": [f"benchmarks/{name}" for name in measured]},
        {"Decisions": [f"decisions/{name}" for name in decided]},
        {"Log of experiments": "log.md"},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference, and what the pages link to outside of docs/."""
    for title, module in REFERENCE.items():
        text = f"# {title}\n\n::: {module}\n"
        files.append(File.generated(config, f"reference/{module}.md", content=text))
    known: set[str] = set()
    for file in [file for file in files if file.src_path.endswith(".md")]:
        for path in _outside(file, file.content_string):
            if path not in known and (ROOT / path).is_file():
                known.add(path)
                target = _place(path)
                files.append(File.generated(config, target, content=_content(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links out of docs/ to the copies; those to folders lose their link."""
    here = posixpath.dirname(page.file.src_path)

    def place(found: re.Match[str]) -> str:
        path = _path(here, found[1])
        if not path.startswith("../"):
            return found[0]
        target = _place(path.removeprefix("../"))
        if files.get_file_from_path(target) is None:
            return "]"
        return f"]({posixpath.relpath(target, here or '.')}{found[2] or ''})"

    return LINK.sub(place, markdown)


def _outside(file: File, text: str) -> list[str]:
    """The paths in the repository that a page links to outside of docs/."""
    here = posixpath.dirname(file.src_path)
    paths = (_path(here, found[1]) for found in LINK.finditer(text))
    return [path.removeprefix("../") for path in paths if path.startswith("../")]


def _path(here: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(here, link))


def _place(path: str) -> str:
    """The page or file of the site that shows a file of the repository."""
    return f"project/{path}" if path.endswith(".md") else f"project/{path}.md"


def _content(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return re.sub(r"\]\((?!https?:|#)[^)]*\)", "]", text)  # links of another folder
    kind = {".py": "python", ".yaml": "yaml", ".toml": "toml"}.get(os.path.splitext(path)[1], "")
    return f"# `{path}`\n\n```{kind}\n{text}\n```\n"
