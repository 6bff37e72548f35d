"""Programs on hosts: over a real sshd on loopback, and here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ssh_server import SshServer, start_sshd

import ludus
from ludus.cluster import shell
from ludus.cluster.hosts import ClusterConfig
from ludus.cluster.node import CLUSTER, processes
from ludus.cluster.shell import HostError, ask, check_ssh
from ludus.cluster.token import own_token
from ludus.core.errors import ConfigError

ROOT = str(Path(ludus.__file__).parents[1])


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    server = start_sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.close()


def config(**keys: Any) -> ClusterConfig:
    keys = {"head": "127.0.0.1", "python": sys.executable, "env": {"PYTHONPATH": ROOT}, **keys}
    return ClusterConfig.model_validate(keys)


def look(of: ClusterConfig) -> dict[str, Any]:
    return ask(of, of.head, "look", {"name": "none@here", "folders": [], "ports": []})


def test_a_program_answers_here() -> None:
    of = config()
    assert look(of)["processes"] == 0
    assert ask(of, of.head, "probe")["python"] == sys.version.split()[0]


@pytest.mark.slow
def test_a_program_answers_over_ssh(sshd: SshServer) -> None:
    of = config(head={"address": "127.0.0.1", "ssh": "127.0.0.2"}, ssh=sshd.ssh)
    assert look(of)["raylet"] is False
    assert ask(of, of.head, "probe")["ludus"] == ludus.__version__


def test_the_environment_is_made_before_the_program(tmp_path: Path) -> None:
    """Of `setup`, exports hold; what it prints and reads is no part of the answer."""
    seen = tmp_path / "seen"
    setup = ["echo chatter; cat", "export GIVEN='a b'", f'echo "$GIVEN $SECRET" >{seen}']
    of = config(setup=setup, env={"PYTHONPATH": ROOT, "SECRET": "it's $HOME"})
    assert look(of)["processes"] == 0
    assert seen.read_text() == "a b it's $HOME\n"


def test_values_are_in_no_list_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    real = subprocess.run

    def run(command: list[str], **keys: Any) -> Any:
        commands.append(command)
        return real(command, **keys)

    monkeypatch.setattr(shell.subprocess, "run", run)
    look(config(env={"PYTHONPATH": ROOT, "KEY": "very-secret"}))
    assert commands == [["bash", "-s"]]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"python": "/no/such/python"}, "there is no /no/such/python: set `python`"),
        ({"setup": ["true", "echo no room >&2; false"]}, "`setup.1` (echo no room"),
        ({"setup": ["if"]}, "syntax error"),
    ],
)
def test_a_host_that_fails_is_named(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(HostError) as failed:
        look(config(**keys))
    assert str(failed.value).startswith("127.0.0.1: ")
    assert said in str(failed.value)


def test_a_python_without_ludus_is_named(tmp_path: Path) -> None:
    """An environment of its own has neither ludus nor Ray; its probe still answers."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    of = config(python=python, env={"PYTHONPATH": ""})
    assert ask(of, of.head, "probe")["ray"] is None
    with pytest.raises(HostError, match=r"has no package ludus: pip install 'ludus-rl\[ray\]'"):
        look(of)


def test_setup_that_fails_does_not_keep_a_cluster_alive() -> None:
    of = config(setup=["false"])
    assert ask(of, of.head, "stop", {"name": "none@here", "grace_s": 1})["ended"] == 0


def wrong_key(sshd: SshServer, folder: Path) -> dict[str, Any]:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "k"], check=True)
    return {**sshd.ssh, "key": str(folder / "k")}


def test_faults_of_ssh_say_what_to_do(sshd: SshServer, tmp_path: Path) -> None:
    options = [*sshd.ssh["options"][:1], f"UserKnownHostsFile={tmp_path}/none"]
    cases = [
        ({**sshd.ssh, "port": 1}, "no ssh server listens at its port"),
        (wrong_key(sshd, tmp_path), "ssh refuses the login"),
        ({**sshd.ssh, "options": options}, "its host key is unknown: log in once by hand"),
        ({**sshd.ssh, "options": ["Nonsense=1"]}, "an option that ssh does not know"),
    ]
    for ssh, said in cases:
        of = config(head={"address": "127.0.0.1", "ssh": "127.0.0.1"}, ssh=ssh)
        with pytest.raises(HostError) as failed:
            look(of)
        assert said in str(failed.value)


def test_a_key_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ssh.key: /no/key: no such file"):
        check_ssh(config(ssh={"key": "/no/key"}))


def test_stop_ends_the_processes_of_its_cluster_only() -> None:
    """Also those that a child has left behind, in a session of their own."""
    mine = {**os.environ, CLUSTER: "mine@127.0.0.1"}
    other = {**os.environ, CLUSTER: "other@127.0.0.1"}
    sleep = shutil.which("sleep")
    subprocess.run(["bash", "-c", f"setsid {sleep} 600 &"], env=mine, check=True)
    with subprocess.Popen(["sleep", "600"], env=other) as stranger:
        try:
            of = config(name="mine")
            assert ask(of, of.head, "stop", {"name": "mine@127.0.0.1", "grace_s": 5})["ended"] == 1
            assert not processes("mine@127.0.0.1")
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_a_token_is_made_once(tmp_path: Path) -> None:
    """By many threads at once too: two hosts with two tokens would be no cluster."""
    with ThreadPoolExecutor(16) as pool:
        tokens = set(pool.map(lambda _: own_token(create=True), range(64)))
    assert tokens == {(tmp_path / "token").read_text()}
    look(config())
    assert tokens == {own_token()}
    assert len(tokens.pop()) == 64
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
