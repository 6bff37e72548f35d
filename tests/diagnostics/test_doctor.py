"""The doctor finds what is there, what is absent and what is broken, on real parts."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from rich.console import Console

import ludus
from ludus.diagnostics import doctor, probes
from ludus.diagnostics.doctor import exit_code, render_checks, run_doctor
from ludus.diagnostics.probes import Check, probe
from ludus.models.decoders import native

CORE = (
    "ludus-rl", "alembic", "annotated-types", "greenlet", "jinja2", "mako", "markdown-it-py",
    "markupsafe", "mdurl", "packaging", "pydantic", "pydantic-core", "pygments", "pyyaml", "rich",
    "sqlalchemy", "typer", "typing-extensions", "typing-inspection",
)  # fmt: skip
"""Packages that `pip install ludus-rl` installs without an extra."""


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Check]:
    begun: list[str] = []
    found = run_doctor(tmp_path_factory.mktemp("here") / "runs", begun.append)
    assert begun[0] == "Python"
    assert {"torch", "transformers", "the machine"} <= set(begun), "each check is told at its start"
    return {c.name: c for c in found}


def printed(checks: list[Check]) -> str:
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(render_checks(checks))
    return capture.get()


def test_this_machine_is_well(checks):
    assert exit_code(list(checks.values())) == 0
    assert checks["python"].detail.startswith(".".join(map(str, sys.version_info[:3])))
    assert f"torch {version('torch')}" in checks["extra train"].detail
    assert checks["torch"].detail.startswith(f"{version('torch')}, ")
    assert checks["torch"].detail.endswith("; float32 and bfloat16 products are correct")
    assert checks["native code"].detail == "compiled: sampler and learner use it on a CPU"
    assert checks["transformers"].detail == f"{version('transformers')}, imports its models"
    assert checks["run store"].detail.endswith("readable while written")
    assert checks["OMP_WAIT_POLICY"].detail == "PASSIVE, set before torch is loaded"
    assert "libpq" in checks["PostgreSQL client"].detail
    assert "`wandb sync`" in checks["wandb"].detail
    assert "GiB of memory" in checks["machine"].detail
    layers = ("platform", "unprivileged user", "bubblewrap", "namespaces", "system-call filter")
    assert {f"sandbox: {name}" for name in (*layers, "cgroup", "gvisor")} <= set(checks)


def test_a_machine_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", str(tmp_path / "missing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check = probes.check_native("torch")
    assert not check.ok
    assert not check.essential
    assert check.detail.startswith("none, torch computes on a CPU: ")
    assert "missing" in check.detail
    assert check.fix == native.REMEDY


def test_the_doctor_leaves_nothing_behind(tmp_path):
    doctor.check_sqlite(tmp_path / "runs")
    doctor.check_disk(tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the core's packages only."""
    folder = tmp_path_factory.mktemp("bare")
    for name in CORE:
        found = distribution(name)
        tops = {Path(file).parts[0] for file in found.files or [] if ".." not in Path(file).parts}
        for top in tops - {"__pycache__", "tests", "ludus"}:
            target = Path(str(found.locate_file(top)))
            if target.exists() and target.suffix != ".pth" and not (folder / top).exists():
                (folder / top).symlink_to(target)
    (folder / "ludus").symlink_to(Path(ludus.__file__).parent)
    return folder


def test_without_torch_it_says_what_to_install(bare, tmp_path):
    code = (
        "from ludus.diagnostics.doctor import *\nfrom rich.console import Console\n"
        "checks = run_doctor('runs')\nConsole(width=200).print(render_checks(checks))\n"
        "raise SystemExit(exit_code(checks))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(bare), "PATH": os.environ["PATH"]},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    (train,) = [index for index, line in enumerate(lines) if "extra train" in line]
    assert lines[train].startswith("note ")
    assert "torch" in lines[train]
    assert lines[train + 1].strip() == "-> pip install 'ludus-rl[train]'"
    assert "products" not in done.stdout


def package(folder: Path, name: str, code: str) -> None:
    """An installed package, as importlib finds one."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    info = folder / f"{name}-0.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.9\n")


@pytest.mark.parametrize("name", ["torchvision", "torchaudio"])
def test_a_mismatched_companion_of_torch_is_found(tmp_path, monkeypatch, name):
    package(tmp_path, name, "raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (check,) = probes.if_installed(name, probes.check_companion)
    assert check == Check(
        name,
        False,
        f"0.9 beside torch {version('torch')} does not import: "
        "RuntimeError: operator torchvision::nms does not exist",
        f"pip uninstall {name} (ludus does not need it)",
        essential=True,
    )
    assert exit_code([check]) == 1


def test_what_is_not_installed_is_not_tried():
    assert probes.if_installed("no-such-package", lambda name: pytest.fail(name)) == []


def test_an_old_package_is_found(tmp_path, monkeypatch):
    package(tmp_path, "pebble", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    (envs,) = [check for check in doctor.check_packages() if check.name == "extra envs"]
    assert not envs.ok
    assert envs.detail == "absent: pebble 0.9 (needs >=5.1)"
    assert envs.fix == "pip install 'ludus-rl[envs]'"


def test_a_spinning_thread_policy_is_told(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    check = probes.check_threads("torch")
    assert (check.ok, check.detail) == (False, "ACTIVE: idle threads spin")
    assert check.fix == "export OMP_WAIT_POLICY=PASSIVE"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder no one can write to")
def test_a_folder_that_cannot_be_written_is_told():
    check = doctor.check_sqlite(Path("/proc/self/runs"))
    assert not check.ok
    assert check.essential
    assert "cannot write to /proc/self/runs" in check.detail


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "killed by signal 9"),
        ("raise ImportError('libgomp.so.1: missing')", "ImportError: libgomp.so.1: missing"),
        ("raise SystemExit(3)", "failed"),
    ],
)
def test_a_probe_survives_what_it_tries(script, problem):
    assert probe(script).problem == problem


def test_a_probe_that_hangs_is_ended():
    assert probe("import time\ntime.sleep(60)", 0.2).problem == "no answer after 0.2 s"


def test_the_table_tells_broken_from_absent():
    shown = printed(
        [
            Check("a", True, "fine"),
            Check("b", False, "absent: x", "pip install x"),
            Check("c", False, "no", "mend it", essential=True),
        ]
    )
    assert [line.split() for line in shown.splitlines()] == [
        ["ok", "a", "fine"],
        ["note", "b", "absent:", "x"],
        ["->", "pip", "install", "x"],
        ["broken", "c", "no"],
        ["->", "mend", "it"],
    ]
