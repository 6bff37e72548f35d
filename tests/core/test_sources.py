"""Python source without running it: from threads, and the files of a user's plug-in."""

from __future__ import annotations

import ast
import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ludus.core.sources import own_sources, parse_expression, parse_module


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / (name.replace("__in", "/__in").replace("_S_", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(folder: Path, file: str) -> list[str]:
    return [str(path.relative_to(folder)) for path in own_sources(folder / file)]


class Cyclic:
    """Garbage whose finalizer lets another thread run in the middle of a parse."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        for _ in range(100):
            pass


def test_many_threads_parse_at_once() -> None:
    """`ast.parse` of Python 3.11.7 fails here in one of some thousand calls."""

    def parse(number: int) -> tuple[str, str]:
        Cyclic()
        tree = parse_module(f"x = 12 * 7 + {number}")
        return ast.unparse(tree), ast.unparse(parse_expression(f"12 * 7 + {number}"))

    before = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(20)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(parse, range(20_000)))
    finally:
        gc.set_threshold(*before[0])
        sys.setswitchinterval(before[1])
    assert found == [(f"x = 12 * 7 + {i}", f"12 * 7 + {i}") for i in range(20_000)]


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
