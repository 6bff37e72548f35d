"""The files of deploy/, as far as a machine without Docker can tell."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

import ludus

ROOT = Path(ludus.__file__).parents[1]
DEPLOY = ROOT / "deploy"
TRAIN, UPDATE = DEPLOY / "train.sh", DEPLOY / "update.sh"
DOCKERFILES = sorted(DEPLOY.glob("*.Dockerfile"))
BIN = Path(sys.executable).parent
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


def tool(name: str) -> str:
    found = BIN / name
    path = str(found) if found.exists() else shutil.which(name)
    return path or pytest.skip(f"{name} is not installed")


def context() -> list[str]:
    """Files that .dockerignore lets into the build."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines, "everything is left out, but for what is named"
    return [line[1:] for line in lines if line.startswith("!")]


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, its continued lines joined."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.M)
    lines = text.replace("\\\n", " ").splitlines()
    return [(head, rest) for head, _, rest in (line.partition(" ") for line in lines) if head]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_lint(path: Path) -> None:
    done = subprocess.run([tool("hadolint"), path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "path",
    [*sorted(DEPLOY.glob("*.sh")), *sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"],
    ids=lambda path: path.name,
)
def test_scripts_lint(path: Path) -> None:
    done = subprocess.run([tool("shellcheck"), path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert os.access(path, os.X_OK)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_name_what_exists(path: Path) -> None:
    known = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))
    for head, rest in instructions(path):
        if head == "COPY" and "--from" not in rest and rest != ". .":
            source = next(part for part in rest.split() if not part.startswith("--"))
            assert (ROOT / source).exists(), source
            assert any(fnmatch(source, allowed) for allowed in context()), source
        if head == "ARG" and rest.startswith("EXTRAS="):
            assert set(rest.partition("=")[2].split(",")) <= known
    heads = [head for head, _ in instructions(path)]
    assert ("USER", "10001") in instructions(path), "it does not run as root"
    assert heads[-2:] == ["ENTRYPOINT", "CMD"]


def test_the_build_context_is_enough_for_the_wheel(tmp_path: Path) -> None:
    for name in context():
        source, target = ROOT / name, tmp_path / "src" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, target)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path / "src", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("*.whl"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_commands_of_the_images_exist(path: Path) -> None:
    lines = dict(instructions(path))
    entry = yaml.safe_load(lines["ENTRYPOINT"])
    if entry == ["train.sh"]:
        assert "deploy/train.sh /usr/local/bin/train.sh" in lines["COPY"]
        [recipe] = yaml.safe_load(lines["CMD"])
        assert (ROOT / recipe).exists()
        return
    command = [str(BIN / entry[0]), *entry[1:], "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for option in (part for part in entry if part.startswith("--")):
        assert option in done.stdout


def test_compose_file() -> None:
    services = COMPOSE["services"]
    assert set(services) == {"env", "model", "train"}
    for name, service in services.items():
        file = ROOT / service["build"]["dockerfile"]
        assert file in DOCKERFILES
        assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
        for other in service.get("depends_on", {}):
            assert other in services
            built = ROOT / services[other]["build"]["dockerfile"]
            assert "HEALTHCHECK" in dict(instructions(built)), "it waits for the health of it"
        for volume in service.get("volumes", []):
            source = volume.rpartition(":/")[0]
            assert source.startswith("${") or source in COMPOSE["volumes"], volume
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} is open to the world"
            assert port.endswith(":8000")
    used = set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text(encoding="utf-8")))
    named = set(re.findall(r"^(\w+)=", (DEPLOY / ".env.example").read_text(encoding="utf-8"), re.M))
    assert named <= used
    assert {name for name in used if name.startswith("LUDUS")} <= named


def test_units(tmp_path: Path) -> None:
    """systemd's own check, with the paths of this machine in place of /opt/ludus."""
    systemd = shutil.which("systemd-analyze") or pytest.skip("systemd-analyze is not installed")
    files = []
    for path in DEPLOY.glob("*.service"):
        text = path.read_text(encoding="utf-8").replace("/opt/ludus/.venv/bin/ludus", "/bin/true")
        file = tmp_path / path.name.replace("@", "@x")
        file.write_text(text.replace("/opt/ludus", str(ROOT)))
        files.append(file)
    assert len(files) == 3
    done = subprocess.run(
        [systemd, "verify", "--man=no", *files], capture_output=True, text=True, timeout=60
    )
    own = [line for line in done.stderr.splitlines() if "ludus-" in line]
    assert not own, done.stderr
    wrong = tmp_path / "ludus-wrong.service"
    wrong.write_text("[Service]\nExecStart=/no/such/program\n")
    done = subprocess.run([systemd, "verify", "--man=no", wrong], capture_output=True, text=True)
    assert "ludus-wrong" in done.stderr, "the check above would pass anything"


# train.sh


def shell(
    *argv: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, argv)),
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        timeout=120,
    )


def stand_in(tmp_path: Path, body: str) -> dict[str, str]:
    """A program in place of ludus that notes how it was called: here the script is tested."""
    program = tmp_path / "ludus"
    program.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" >"{tmp_path}/called"\n{body}\n')
    program.chmod(0o755)
    return {"LUDUS": str(program), "LUDUS_MIRROR": "s3://bucket/run", "LUDUS_RUNS_DIR": "/tmp/r"}


@pytest.mark.parametrize(("code", "given"), [(0, 0), (3, 0), (130, 75), (2, 2), (1, 1), (137, 137)])
def test_exit_codes_tell_whether_to_start_again(tmp_path: Path, code: int, given: int) -> None:
    done = shell(TRAIN, "some.yaml", "a.b=c d", env=stand_in(tmp_path, f"exit {code}"))
    assert done.returncode == given, done.stderr
    called = (tmp_path / "called").read_text().splitlines()
    expected = ["train", "some.yaml", "a.b=c d", "mirror=s3://bucket/run", "runs_dir=/tmp/r"]
    assert called == expected
    assert ("the budget is spent" in done.stdout) is (code == 3)


@pytest.mark.parametrize(
    ("argv", "env", "said"),
    [
        ([], {}, "give a recipe"),
        (["seed=1"], {}, "give a recipe"),
        (["--wrong"], {}, "give a recipe"),
        (["x.yaml"], {"LUDUS_MIRROR": ""}, "LUDUS_MIRROR is not set"),
        (["x.yaml"], {"LUDUS_GRACE_S": "soon"}, "not 'soon'"),
    ],
)
def test_wrong_calls_are_refused(
    tmp_path: Path, argv: list[str], env: dict[str, str], said: str
) -> None:
    done = shell(TRAIN, *argv, env={**stand_in(tmp_path, "exit 0"), **env})
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("stubborn", [False, True])
def test_a_signal_lets_the_run_save(tmp_path: Path, number: signal.Signals, stubborn: bool) -> None:
    """The run hears SIGINT at once, and again after the grace period if it has not ended."""
    body = f"""
count=0
on_int() {{ count=$((count + 1)); echo "$count" >"{tmp_path}/heard"
    [[ $count -ge {2 if stubborn else 1} ]] && exit 130; }}
trap on_int INT
touch "{tmp_path}/ready"
for _ in {{1..600}}; do sleep 0.1; done"""
    env = {**os.environ, **stand_in(tmp_path, body), "LUDUS_GRACE_S": "1" if stubborn else "60"}
    process = subprocess.Popen([str(TRAIN), "x.yaml"], env=env, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(50) == 75
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert (tmp_path / "heard").read_text().strip() == ("2" if stubborn else "1")


@pytest.mark.slow
def test_a_dry_run_reads_the_recipe_and_starts_nothing(tmp_path: Path) -> None:
    env = {"LUDUS": str(BIN / "ludus"), "LUDUS_MIRROR": f"file://{tmp_path}/copy"}
    recipe = ROOT / "tests" / "recipes" / "babyai.yaml"
    done = shell(TRAIN, "--dry-run", recipe, "seed=3", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"train {recipe} seed=3 mirror=file://{tmp_path}/copy runs_dir=runs" in done.stdout
    wrong = shell(TRAIN, "--dry-run", recipe, "sead=3", env=env, cwd=tmp_path)
    assert wrong.returncode == 2
    assert "sead is not a key" in wrong.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_real_run_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """train.sh over ludus itself: SIGTERM, the disk lost, the same command."""
    env = {
        **os.environ,
        "LUDUS": str(BIN / "ludus"),
        "LUDUS_MIRROR": f"file://{tmp_path}/copy",
        "LUDUS_GRACE_S": "60",
        "OMP_NUM_THREADS": "1",
    }
    command = [str(TRAIN), str(ROOT / "tests" / "recipes" / "babyai.yaml"), "sft.steps=2000"]
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=out, stderr=out)
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("copy/snapshots/00000003.json")):
            assert time.monotonic() < deadline, log.read_text()
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 75, log.read_text()
    assert "finishing this step" in log.read_text()
    shutil.rmtree(tmp_path / "runs")
    command += ["sft.steps=8", "budget.max_tokens=1"]
    done = shell(*command, env=env, cwd=tmp_path)
    assert "fetched snapshot" in done.stdout + done.stderr
    assert "resuming after step" in done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train.sh: the budget is spent" in done.stdout


# update.sh


GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b")


def commit(repository: Path, message: str) -> None:
    subprocess.run(
        [*GIT, "-C", repository, "commit", "-q", "--allow-empty", "-m", message], check=True
    )


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """A clone of `origin`, and programs that note their calls in `called`, one argument a line in
    `arguments`; the environment of update.sh."""
    origin, clone, programs = tmp_path / "origin", tmp_path / "clone", tmp_path / "bin"
    subprocess.run(["git", "init", "-q", "-b", "main", origin], check=True)
    commit(origin, "one")
    subprocess.run(["git", "clone", "-q", origin, clone], check=True)
    (clone / ".venv" / "bin").mkdir(parents=True)
    programs.mkdir()
    for program in (clone / ".venv/bin/python", clone / ".venv/bin/ludus", programs / "systemctl"):
        program.write_text(
            f'#!/bin/sh\necho "{program.name} $*" >>"{tmp_path}/called"\n'
            f'printf "%s\\n" "$@" >"{tmp_path}/arguments"\n'
        )
        program.chmod(0o755)
    return {"LUDUS_HOME": str(clone), "PATH": f"{programs}:{os.environ['PATH']}"}


def test_update_pulls_installs_and_restarts(tmp_path: Path, machine: dict[str, str]) -> None:
    origin, clone, called = tmp_path / "origin", tmp_path / "clone", tmp_path / "called"
    assert "nothing is new" in shell(UPDATE, env=machine).stdout
    assert not called.exists()
    commit(origin, "2")
    dry = shell(UPDATE, "--dry-run", env=machine)
    assert "git pull --ff-only" in dry.stdout
    assert not called.exists()
    assert shell(UPDATE, env=machine).returncode == 0
    lines = called.read_text().splitlines()
    assert lines[0].startswith("python -m pip install")
    assert shlex.split(lines[0])[-2:] == ["-e", ".[all,s3]"]
    assert lines[1:] == ["ludus --version", "systemctl try-restart ludus-*.service"]
    called.unlink()
    assert "nothing is new" in shell(UPDATE, env=machine).stdout

    commit(origin, "3")
    commit(clone, "x")
    assert shell(UPDATE, env=machine).returncode != 0, "local commits are not merged over"
    assert not called.exists()
    wrong = shell(UPDATE, env={**machine, "LUDUS_HOME": str(tmp_path)})
    assert wrong.returncode == 2
    assert "is no git clone" in wrong.stderr
    assert shell(UPDATE, "--wrong", env=machine).returncode == 2


@pytest.mark.parametrize("broken", ["clone/.venv/bin/python", "clone/.venv/bin/ludus"])
def test_a_failed_installation_is_tried_again(
    tmp_path: Path, machine: dict[str, str], broken: str
) -> None:
    called, program = tmp_path / "called", tmp_path / broken
    assert "nothing is new" in shell(UPDATE, env=machine).stdout
    commit(tmp_path / "origin", "2")
    works = program.read_text()
    program.write_text("#!/bin/sh\nexit 1\n")
    assert shell(UPDATE, env=machine).returncode == 1
    assert "systemctl" not in (called.read_text() if called.exists() else "")
    program.write_text(works)
    again = shell(UPDATE, env=machine)
    assert again.returncode == 0, again.stderr
    assert called.read_text().splitlines()[-1].startswith("systemctl try-restart")
    assert "nothing is new" in shell(UPDATE, env=machine).stdout


def test_units_are_arguments_of_their_own(tmp_path: Path, machine: dict[str, str]) -> None:
    machine["LUDUS_UNITS"] = "ludus-env.service ludus-model.service"
    shell(UPDATE, env=machine)
    commit(tmp_path / "origin", "2")
    assert shell(UPDATE, env=machine).returncode == 0
    told = (tmp_path / "arguments").read_text().splitlines()
    assert told == ["try-restart", "ludus-env.service", "ludus-model.service"]
