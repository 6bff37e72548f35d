"""Addresses, exit codes and faults of jobs, without a cluster."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ludus.cli import jobs as commands
from ludus.cluster import entry, jobs
from ludus.core.errors import ConfigError

if TYPE_CHECKING:
    from harness import Ludus

RECIPE = str(Path(__file__).parents[1] / "recipes" / "babyai.yaml")


def info(status: str, code: int | None = None, message: str = "") -> Any:
    value = SimpleNamespace(value=status)
    return SimpleNamespace(status=value, driver_exit_code=code, message=message)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        ("SUCCEEDED", 0, 0),
        ("FAILED", 3, 3),
        ("FAILED", None, 1),
        ("FAILED", -9, 137),
        ("STOPPED", None, 130),
    ],
)
def test_exit_codes(status: str, code: int | None, expected: int) -> None:
    assert jobs.exit_code(info(status, code)) == expected


@pytest.mark.parametrize(
    ("logs", "said"),
    [
        ("Error while finding module: No module named 'ludus'\n", "has no package ludus"),
        ("noise\nludus: r.yaml: a\nr.yaml: b\n", "r.yaml: a\nr.yaml: b"),
        ("bash: python: command not found\n", "python: command not found"),
    ],
)
def test_a_job_that_does_not_start_says_why(logs: str, said: str) -> None:
    assert said in jobs.start_fault(info("FAILED", 1), logs)


@pytest.mark.parametrize(
    ("code", "kind", "exit_code"), [(2, ConfigError, 2), (1, jobs.ClusterError, 1)]
)
def test_what_the_head_refuses_ends_submit_as_a_refusal(
    code: int, kind: type[Exception], exit_code: int
) -> None:
    client = SimpleNamespace(
        get_job_info=lambda job: info("FAILED", code),
        get_job_logs=lambda job: "ludus: runs_dir: 'runs' would be removed\n",
    )
    with pytest.raises(kind, match="job a: runs_dir: 'runs' would be removed") as caught:
        jobs.Jobs("http://head", client, "2").await_start("a", 5)
    assert getattr(caught.value, "exit_code") == exit_code  # noqa: B009


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("resume with: ludus train --resume a-1 --runs-dir /data/runs", "--resume /data/runs/a-1"),
        ("resume with: ludus train --resume a-1", "--resume a-1"),
    ],
)
def test_a_stopped_job_says_how_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str, words: str
) -> None:
    stopped = SimpleNamespace(
        address="http://head:8265",
        stop=lambda job, timeout: info("STOPPED"),
        logs=lambda job: f"Ctrl-C; {said}\n",
    )
    monkeypatch.setattr(commands, "_jobs", lambda address: stopped)
    commands.stop("a", 1.0, None)
    assert f"ludus submit {words} --address http://head:8265" in capsys.readouterr().out


def test_addresses() -> None:
    assert jobs.url_of("head:8265") == "http://head:8265"
    assert jobs.url_of("https://head/") == "https://head"
    for wrong in ("ray://head:10001", "ftp://head"):
        with pytest.raises(ConfigError, match="http://HEAD:8265"):
            jobs.url_of(wrong)


class OtherServer(BaseHTTPRequestHandler):
    """A server of the path's first part: its status code, or no JSON."""

    def do_GET(self) -> None:
        code = self.path.split("/")[1]
        self.send_response(int(code))
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def other_server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), OtherServer) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_a_server_that_is_no_cluster_is_told(ludus: Ludus, other_server: str) -> None:
    pytest.importorskip("ray")
    token = {"RAY_AUTH_TOKEN_PATH": "/no/token"}
    for path, said in [
        ("404", "not as Ray's job API (404)"),
        ("200", "not as Ray's job API"),
        ("401", "needs its token: copy ~/.ray/auth_token"),
    ]:
        done = ludus("logs", "x", "--address", f"{other_server}/{path}", env=token)
        done.refused(1, said)


def test_no_ray_at_the_address(ludus: Ludus) -> None:
    pytest.importorskip("ray")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        for command in (["logs", "x"], ["stop", "x"], ["attach", "x"], ["submit", RECIPE]):
            done = ludus(*command, "--address", address)
            done.refused(1, f"there is no Ray at http://{address}")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["submit"], "give either a recipe or --resume RUN"),
        (["submit", RECIPE, "--resume", "a-1"], "give either a recipe or --resume RUN"),
        (["submit", "no.yaml"], "no such file"),
        (["submit", RECIPE, "sead=1"], "sead is not a key"),
        (["submit", RECIPE, "--working-dir", "nowhere"], "no such folder"),
        (["cluster", "up", "no.yaml"], "no such file"),
        (["cluster", "down", RECIPE], "head is required"),
    ],
)
def test_wrong_calls_are_refused(ludus: Ludus, argv: list[str], said: str) -> None:
    ludus(*argv).refused(2, said)


def test_another_version_of_ray_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    at = jobs.Jobs("http://head:8265", None, "2.1.0")
    with pytest.raises(ConfigError, match=r"has Ray 2\.1\.0, and this machine .*ray==2\.1\.0"):
        at.submit("a", ["r.yaml"], tmp_path, jobs.SubmitOptions())


# The program of a job


def test_runs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    # The check takes seconds.
    monkeypatch.setattr("ludus.pipeline.parts.checks.check", lambda config: None)
    monkeypatch.delenv("LUDUS_RUNS_DIR", raising=False)
    assert entry.command_of([RECIPE, "runs_dir=/data"])[-1] == "runs_dir=/data"
    assert entry.command_of([RECIPE, "mirror=s3://a/b"])[-1] == "runs_dir=runs"
    with pytest.raises(ConfigError, match="'runs' would be removed with the job's folder"):
        entry.command_of([RECIPE])
    monkeypatch.setenv("LUDUS_RUNS_DIR", "/shared")
    assert entry.command_of([RECIPE, "seed=1"]) == ["train", RECIPE, "seed=1", "runs_dir=/shared"]
    assert entry.command_of([RECIPE, "runs_dir=mine"])[-1] == "runs_dir=/shared/mine"
    assert entry.command_of(["--resume", "/data/a-1/", "seed=1"]) == [
        *("train", "--resume", "a-1", "seed=1", "--runs-dir", "/data")
    ]
    assert entry.command_of(["--resume", "a-1"]) == [
        *("train", "--resume", "a-1", "--runs-dir", "/shared")
    ]


def test_another_version_of_ludus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(entry.SUBMITTED_WITH, "0.0.1")
    with pytest.raises(ConfigError, match=r"the job comes from ludus 0\.0\.1: install the same"):
        entry.command_of([RECIPE])
