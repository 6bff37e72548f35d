"""The wheel in an environment of the core, or of one extra: each absence is one sentence."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from bare_envs import build_wheel, extras, make_env, requirements, run_verbs

from ludus.config.load import dump_config, load_config
from ludus.store import RunStore

pytestmark = pytest.mark.slow

RECIPE = "textcraft-tiny"
ENDPOINT = ["--model", "m", "--base-url", "http://127.0.0.1:9/v1"]

NEEDS = {
    ("train", RECIPE): "train",
    ("debug", RECIPE): "train",
    ("profile", RECIPE): "train",
    ("verify", RECIPE): "train",
    ("plan", RECIPE): "train",
    ("evaluate", "demo-1"): "train",
    ("rollout", "textcraft", *ENDPOINT): "remote",
    ("rollout", "alfworld", *ENDPOINT): "remote",
    ("generate-data", "data", "babyai"): "remote",
    ("check-env", "babyai"): "envs",
    ("check-env", "webshop"): "webshop",
    ("check-env", "remote", "url=http://127.0.0.1:9"): "remote",
    ("check-env", "scienceworld"): "scienceworld",
    ("check-env", "textworldexpress"): "textworldexpress",
    ("check-env", "alfworld"): "alfworld",
    ("check-env", "reasoning"): "reasoning",
    ("checkpoint", "export", "demo-1", "folder"): "train",
    ("checkpoint", "push", "demo-1", "me/model"): "train",
    ("export", "demo-1", "a.parquet", "--format", "parquet"): "data",
    ("runs", "--store", "postgresql://u:p@127.0.0.1:9/d"): "postgres",
    ("serve", "env", "textcraft"): "serve",
    ("serve", "model", "demo-1"): "serve,train",
    ("serve", "tools", "calculator"): "serve",
}
"""Calls of the command line, and the extras that the core alone asks for."""

THEN = {
    ("train", RECIPE): "envs",
    ("debug", RECIPE): "envs",
    ("profile", RECIPE): "envs",
    ("verify", RECIPE): "envs",
    ("rollout", "alfworld"): "alfworld",
    ("generate-data", "data"): "envs",
}
"""The extras that these ask for next."""

LONG = {("train", "plan"), ("serve", "serve"), ("data", "export")} | {
    (extra, "check-env") for extra in extras()
}
"""Calls that need this one extra, and would then measure, serve, write or play."""

WORKS = [
    ("--help",), ("--version",), ("config",), ("config", "env"), ("doctor",),
    ("recipes",), ("recipes", "babyai-tiny"),
    ("runs",), ("show", "demo-1"), ("export", "demo-1", "/dev/null", "--format", "jsonl"),
    ("checkpoint", "list", "demo-1"), ("check-env", "textcraft", "--tasks", "1"),
]  # fmt: skip
"""Calls that the core alone can do."""

ADVICE = re.compile(
    r"ludus: .* needs the package \S+, which is not installed: pip install 'ludus-rl\[(\S+)\]'\n"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a run and its store."""
    folder = tmp_path / "work"
    (folder / "runs" / "demo-1").mkdir(parents=True)
    config = load_config(RECIPE)
    (folder / "runs" / "demo-1" / "config.yaml").write_text(dump_config(config))
    with RunStore.open(None, folder / "runs") as store:
        store.create_run("demo-1", "demo", {}, {})
    return folder


def files(folder: Path) -> set[Path]:
    """Every file, but for SQLite's own beside an open store."""
    return {path for path in folder.rglob("*") if not path.name.startswith("ludus.db-")}


def test_the_core_alone_names_the_extra_of_every_verb(wheel: Path, work: Path) -> None:
    python, before = make_env(work.parent / "env", wheel), files(work)
    calls = [*NEEDS, *WORKS]
    answers = dict(zip(calls, run_verbs(python, calls, work), strict=True))
    for call, extra in NEEDS.items():
        code, _, errors = answers[call]
        advice = ADVICE.fullmatch(errors)
        assert advice, f"{call}: {errors}"
        assert (code, advice[1]) == (2, extra), call
    for call in WORKS:
        assert answers[call][0] == 0, (call, answers[call])
    assert files(work) == before


FIRST = {"serve", "kernels"}
"""Extras that are tried always; the others by `make test-long`."""


@pytest.mark.parametrize(
    "extra",
    [
        extra if extra in FIRST else pytest.param(extra, marks=pytest.mark.long)
        for extra in extras()
    ],
)
def test_an_extra_alone_names_what_is_still_absent(extra: str, wheel: Path, work: Path) -> None:
    for name in requirements(extra):
        try:
            distribution(name)
        except PackageNotFoundError:
            pytest.skip(f"{name} is not installed here")
    python, before = make_env(work.parent / "env", wheel, (extra,)), files(work)
    calls = [
        call for call, needed in NEEDS.items() if (extra, call[0]) not in LONG or needed != extra
    ]
    for call, (code, _, errors) in zip(calls, run_verbs(python, calls, work), strict=True):
        assert "Traceback" not in errors, (call, errors)
        assert "No module named" not in errors, (call, errors)
        if advice := ADVICE.search(errors):
            assert advice[0] == errors, call
            assert code == 2, call
            assert set(advice[1].split(",")) - {extra}, f"{call}: {extra} is installed"
            assert NEEDS[call] != extra or advice[1] == THEN.get(call[:2]), call
    assert files(work) == before


def test_a_run_of_the_extras_that_its_messages_name(wheel: Path, work: Path) -> None:
    """Follow the advice from the core on, until the recipe trains."""
    small = ["demonstrations.num_episodes=8", "sft.steps=2", "rl=null", "tasks.heldout=null"]
    call, installed = ("train", RECIPE, *small), set[str]()
    while True:
        python = make_env(
            work.parent / "-".join(["env", *sorted(installed)]), wheel, tuple(installed)
        )
        [(code, out, errors)] = run_verbs(python, [call], work)
        if (advice := ADVICE.search(errors)) is None:
            break
        assert advice[1] not in installed
        installed |= {advice[1]}
    assert code == 0, errors
    assert installed == {"train", "envs"}
    assert "is complete" in out
