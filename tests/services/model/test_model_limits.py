"""Clients of the model service that read slowly, and clients that want more than their share."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from model_world import CONTEXT, make_folder, served, slowly
from service_world import until

from ludus.services.server.connections import ConnectionLimits

openai = pytest.importorskip("openai", reason="the openai client is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "wild", 1)


def turns(url: str) -> int:
    return int(httpx.get(f"{url}/health").json()["turns"])


def num_cancelled(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    name = 'ludus_model_turns_total{end="gone"}'
    return next((float(line.split()[1]) for line in lines if line.startswith(name)), 0.0)


def unread(url: str, **more: Any) -> socket.socket:
    """A stream of long events that is requested and not read."""
    asked = {"model": "tiny", "prompt": "go", "stream": True, "ignore_eos": True, "logprobs": 20}
    body = json.dumps({**asked, "max_tokens": CONTEXT - 8, "n": 16, **more}).encode()
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def test_client_that_does_not_read_is_disconnected(folder: Path) -> None:
    limits = ConnectionLimits(send_s=0.5)
    with served(folder, rigged=slowly, connections=limits) as url, unread(url):
        until(lambda: turns(url) > 0)
        until(lambda: turns(url) == 0)
        assert num_cancelled(url) == 16


@pytest.mark.slow
def test_unsent_tokens_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.services.model.generation.MAX_UNSENT", 64)
    monkeypatch.setattr("ludus.services.model.generation.SLOW_S", 0.1)
    with served(folder, rigged=slowly) as url, unread(url) as connection:
        until(lambda: turns(url) > 0)
        until(lambda: turns(url) == 0)
        assert num_cancelled(url) == 16
        connection.settimeout(30)
        told = b""
        while b"slow_client" not in told[-2000:]:
            told += connection.recv(2**20)


def test_each_token_has_a_share_of_the_turns(folder: Path) -> None:
    tokens = ("a-clients-own-token", "another-clients-token")
    with served(folder, tokens=tokens, rigged=slowly, max_turns=8) as url:

        def ask(token: str, number: int) -> Any:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0, timeout=60)
            given: Any = {"model": "tiny", "prompt": "go", "n": number, "stream": True}
            given |= {"max_tokens": CONTEXT - 8, "extra_body": {"ignore_eos": True}}
            return client.completions.create(**given)

        with ask(tokens[0], 4):
            until(lambda: turns(url) == 4)
            with pytest.raises(openai.RateLimitError, match="your share"):
                ask(tokens[0], 1)
            with ask(tokens[1], 4):
                until(lambda: turns(url) == 8)
