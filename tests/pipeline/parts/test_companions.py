"""Processes beside a run: what a service plays, and how it is reached."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from ludus.core.errors import ConfigError, LudusError, MissingDependency
from ludus.core.types import Spec, Task
from ludus.pipeline.parts import companions
from ludus.pipeline.parts.companions import (
    PLAIN,
    Companion,
    Companions,
    EnvService,
    check_options,
    find_service,
)
from ludus.rollout.collect import Collector

URL = "http://127.0.0.1:8123"
BABYAI = Spec(name="babyai", args={"level": "GoToObj"})
MIXTURE = Spec(
    name="mixture",
    args={"envs": {"walk": BABYAI.model_dump(), "craft": "textcraft", "make": "textcraft"}},
)


def test_the_environment_of_a_recipe_is_served_with_its_arguments() -> None:
    service = find_service(BABYAI, "babyai")
    command = service.command(7.0)
    assert command[3:] == [
        "serve", "env", "babyai", 'level="GoToObj"', "--port", "0", "--step-deadline", "7"
    ]  # fmt: skip
    assert service.reached(BABYAI, URL) == Spec(name="remote", args={"url": URL, "env": "babyai"})


def test_a_part_of_a_mixture_is_served() -> None:
    service = find_service(MIXTURE, "babyai")
    assert (service.part, service.served) == ("walk", BABYAI)
    reached = service.reached(MIXTURE, URL)
    assert reached is not None
    assert reached.args["envs"] == {
        "walk": {"name": "remote", "args": {"url": URL, "env": "babyai"}},
        "craft": "textcraft",
        "make": "textcraft",
    }


def test_a_remote_environment_is_served_at_its_address() -> None:
    env = Spec(name="remote", args={"url": URL, "env": "babyai"})
    service = find_service(env, "babyai")
    assert service.command(30.0)[3:8] == ["serve", "env", "babyai", "--port", "8123"]
    assert service.reached(env, URL) == env


@pytest.mark.parametrize(
    ("env", "name", "said"),
    [
        (None, "babyai", "the recipe has no `env`"),
        (BABYAI, "babyia", r"does not play 'babyia' \(did you mean babyai\?\)"),
        (MIXTURE, "babyia", r"does not play 'babyia' \(did you mean babyai\?\)"),
        (MIXTURE, "textcraft", "craft and make are both textcraft"),
        (Spec(name="my/env.py:Env"), "my/env.py:Env", "use module:Class"),
        (Spec(name="remote", args={"url": "http://far:80"}), "a", "http://127.0.0.1:PORT"),
        (Spec(name="remote", args={"url": "http://127.0.0.1"}), "a", "http://127.0.0.1:PORT"),
        (Spec(name="remote", args={"url": URL, "env": "b"}), "a", "env.args.env is b"),
    ],
)
def test_other_names_are_refused(env: Spec | None, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--with-env-service {name}: .*{said}"):
        find_service(env, name)


def test_absent_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str, extra: str, purpose: str) -> None:
        raise MissingDependency(package, extra, purpose)

    monkeypatch.setattr(companions, "require", absent)
    check_options(PLAIN, BABYAI)
    with pytest.raises(MissingDependency, match="--with-env-service needs the package uvicorn"):
        check_options(companions.LaunchOptions(env_service="babyai"), BABYAI)


def collector(env: Spec | None) -> Collector:
    made: Any = Collector.__new__(Collector)
    for name in Collector.__slots__:
        setattr(made, name, None)
    made.env = env
    return made  # type: ignore[no-any-return]


def test_a_task_with_arguments_of_its_own_is_refused() -> None:
    beside = Companions(EnvService(BABYAI), URL)
    plain = Task(id="t1", env=Spec(name="textcraft"))
    attached = beside.attach(collector(BABYAI), [plain])
    assert attached.env == Spec(name="remote", args={"url": URL, "env": "babyai"})
    with pytest.raises(ConfigError, match="task t2 has its own arguments of babyai"):
        beside.attach(collector(BABYAI), [plain, Task(id="t2", env=BABYAI)])
    unchanged = collector(BABYAI)
    assert Companions().attach(unchanged, [plain]) is unchanged


def test_a_companion_that_ends_or_is_silent_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    ends = Companion("a service", [sys.executable, "-c", "print('no room'); exit(3)"], log)
    with pytest.raises(LudusError, match="a service ended with exit code 3: no room"):
        ends.address()
    ends.stop()
    monkeypatch.setattr(companions, "START_S", 0.2)
    silent = Companion("a service", ["sleep", "600"], log)
    with pytest.raises(LudusError, match=r"did not answer within 0\.2 s"):
        silent.address()
    silent.stop()


def test_a_stubborn_companion_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companions, "END_S", 0.2)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\n"
    child = Companion("x", [sys.executable, "-c", f"{code}time.sleep(600)"], tmp_path / "log")
    while "up" not in (tmp_path / "log").read_text():
        pass
    child.stop()


def test_the_page_takes_another_port_where_its_own_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert companions._port(taken.getsockname()[1]) == 0
    assert companions._port(0) == 0
