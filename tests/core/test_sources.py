"""The files of a user's plug-in: its own and those that it imports, found without running them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ludus.core.sources import own_sources


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / (name.replace("__in", "/__in").replace("_S_", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(folder: Path, file: str) -> list[str]:
    return [str(path.relative_to(folder)) for path in own_sources(folder / file)]


def test_imports_are_followed_and_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path,
        plug="import json, numpy\nimport one\nfrom pack.inner import thing\nimport ludus.envs",
        one="import two.deep as d\nraise SystemExit",
        two__init__="raise SystemExit",
        two_S_deep="import one\ndef f():\n    import late",
        late="",
        pack__init__="from . import inner",
        pack_S_inner="from .. import nothing\nfrom .side import x\nfrom . import other",
        pack_S_side="x = 1",
        pack_S_other="",
        unrelated="",
    )
    modules = set(sys.modules)
    assert names(tmp_path, "plug.py") == [
        "late.py",
        "one.py",
        "pack/__init__.py",
        "pack/inner.py",
        "pack/other.py",
        "pack/side.py",
        "plug.py",
        "two/__init__.py",
        "two/deep.py",
    ]
    assert set(sys.modules) == modules


def test_a_package_s_own_init_belongs_to_its_modules(tmp_path: Path) -> None:
    write(tmp_path, pack__init__="from .b import y", pack_S_a="x = 1", pack_S_b="y = 1")
    assert names(tmp_path, "pack/a.py") == ["pack/__init__.py", "pack/a.py", "pack/b.py"]


def test_installed_packages_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "venv" / "site-packages"
    write(site, third="")
    write(tmp_path / "src", mine="")
    write(tmp_path, plug="import third, mine")
    monkeypatch.setattr(sys, "path", [str(site), str(tmp_path / "src"), *sys.path])
    assert names(tmp_path, "plug.py") == ["plug.py", "src/mine.py"]


def test_a_file_that_is_not_python_has_no_imports(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_bytes(b"\xff\xfe(")
    write(tmp_path, broken="def")
    assert names(tmp_path, "odd.py") == ["odd.py"]
    assert names(tmp_path, "broken.py") == ["broken.py"]
