"""The documentation as a site: every page is in it, and reading it needs no network."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from engines import ROOT, engine_python

pytestmark = pytest.mark.engine("site")

FOREIGN = re.compile(r'(?:src|href)="(https?://[^"]+)"[^>]*(?:rel="stylesheet"|></script>)')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [engine_python("site"), "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_it(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    for page in pages:
        name = page.parent if page.name in ("index.md", "README.md") else page.with_suffix("")
        assert (site / name / "index.html").exists(), page


def test_the_search_finds_docs_and_reference(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    places = {entry["location"] for entry in found if "publish_weights" in entry["text"]}
    assert any(place.startswith("reference/ludus.backends.base/") for place in places)
    assert any(entry["location"].startswith("ray/") for entry in found)


def test_it_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not FOREIGN.findall(page.read_text()), page


def test_links_out_of_the_docs_lead_to_copies(site: Path) -> None:
    assert ">def<" in (site / "project/examples/agents/werewolves.py/index.html").read_text()
    assert (
        'href="../project/examples/agents/werewolves.py/"'
        in (site / "werewolves" / "index.html").read_text()
    )
