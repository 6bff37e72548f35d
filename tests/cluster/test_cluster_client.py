"""Servers that are no cluster, or one that hangs: an error in time, and no token for others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler

import pytest
from threaded_server import reply, serving

from ludus.cluster import client, jobs
from ludus.cluster.client import ClusterError, job_client, ray_version, told

pytest.importorskip("ray")

VERSION = b'{"ray_version": "2.60.0", "version": "4", "ray_commit": "x"}'


def test_a_redirect_is_not_followed_with_the_token() -> None:
    asked: list[str] = []

    def elsewhere(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.path)
        reply(request, 200, VERSION)

    with serving(elsewhere) as other:
        place = f"http://127.0.0.1:{other}/x"
        said = f"redirects to '{place}': give that address"
        with (
            serving(lambda request: reply(request, 302, b"", Location=place)) as port,
            pytest.raises(ClusterError, match=said),
        ):
            ray_version(f"http://127.0.0.1:{port}", "secret")
    assert not asked


@pytest.mark.parametrize("begins", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_an_answer_without_an_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch, begins: bytes
) -> None:
    over = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(begins)
        with suppress(OSError):
            while not over.wait(0.05):
                request.wfile.write(b" " if begins else b"")

    monkeypatch.setattr(client, "VERSION_S", 0.5)
    with serving(drip) as port:
        try:
            with pytest.raises(ClusterError, match=r"no complete answer within 0\.5 s"):
                ray_version(f"http://127.0.0.1:{port}", "")
        finally:
            over.set()


@pytest.mark.parametrize(
    "body", [b"hello", b"[1]", b'{"ray_version": ["2"]}', b'{"ray_version": "?"}', b" " * 100_000]
)
def test_another_answer_is_no_version(body: bytes) -> None:
    said = "answers, but not as Ray's job API"
    with (
        serving(lambda request: reply(request, 200, body)) as port,
        pytest.raises(ClusterError, match=said),
    ):
        ray_version(f"http://127.0.0.1:{port}", "")


@contextmanager
def hanging() -> Iterator[str]:
    """The address of a head that tells its version, and then answers no more."""
    over = threading.Event()

    def hang(request: BaseHTTPRequestHandler) -> None:
        if request.path == "/api/version":
            reply(request, 200, VERSION)
        else:
            over.wait(20)

    with serving(hang) as port:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            over.set()


def test_a_head_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SILENCE_S", 0.5)
    with hanging() as address:
        own = job_client(address, "")
        said = r"has not answered within 0\.5 s; a job may run"
        with pytest.raises(ClusterError, match=said), told(address, "; a job may run"):
            own.get_job_info("a")


@pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning")  # Ray's client
def test_a_head_that_hangs_while_a_log_is_followed_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "SILENCE_S", 0.5)
    monkeypatch.setattr(jobs, "QUIET_S", 0.5)
    with hanging() as address, pytest.raises(ClusterError, match=r"not answered within 0\.5 s"):
        jobs.Jobs(address, job_client(address, ""), "2.60.0").follow("a", print)


def test_answers_of_another_form_are_told() -> None:
    body = b'{"what": 1}'

    def answer(request: BaseHTTPRequestHandler) -> None:
        reply(request, 200, VERSION if request.path == "/api/version" else body)

    with serving(answer) as port:
        address = f"http://127.0.0.1:{port}"
        own = job_client(address, "")
        for call in (
            lambda: own.submit_job(entrypoint="x"),
            lambda: own.get_job_info("a"),
            lambda: own.get_job_logs("a"),
        ):
            with pytest.raises(ClusterError, match="not as Ray's job API"), told(address):
                call()
