"""Lists of a fleet's hosts, and which host takes which key."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ludus.core.errors import ConfigError
from ludus.envs.remote.ask import Description
from ludus.envs.remote.env import RemoteEnv
from ludus.envs.remote.hosts import HostList, check_url, weight
from ludus.envs.remote.wire import Health, Schema
from ludus.telemetry.hosts import Hosts

URLS = [f"http://10.0.0.{number}:8000" for number in range(1, 9)]


def test_urls_have_one_form() -> None:
    assert check_url("http://Host:80/") == "http://host:80"
    assert check_url("https://[::1]:8000/envs/") == "https://[::1]:8000/envs"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("localhost:8000", "does not start with http://"),
        ("http://", "has no host"),
        ("http://a:port", "is not a URL"),
        ("http://a:99999", "is not a URL"),
        ("http://a b:8000", "has no host, or a wrong one"),
        ("http://user:secret@a:8000", "must not have a user"),
        (["http://a:1", "b:2"], r"url\[1\]: 'b:2' does not start"),
        (["http://a:1", "http://A:1/"], "http://a:1 is listed twice"),
        ([], "the list is empty"),
        ("dns+https://a:1", "a certificate names no address"),
        ("dns+a:1", "does not start with http://"),
    ],
)
def test_wrong_lists_are_refused(url: str | list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RemoteEnv(url=url)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("# none yet\n", "is empty"),
        ("http://a:1\nb:2\n", "hosts.txt:2: 'b:2' does not start"),
        ("http://a:1\nhttp://a:1\n", "http://a:1 is listed twice"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "hosts.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        HostList.of(f"file:{path}").read()


def test_a_file_lists_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("# ours\nhttp://a:1/  # the first\n\nhttp://b:2\n")
    hosts = HostList.of(f"file:{path}")
    assert hosts.read() == ("http://a:1", "http://b:2")
    assert hosts.changes


def test_dns_lists_addresses() -> None:
    assert "http://127.0.0.1:81" in HostList.of("dns+http://localhost:81").read()


def test_keys_are_spread_and_another_host_moves_only_its_own() -> None:
    keys = [f"rl-000001/g{number:04d}/0" for number in range(4000)]

    def hosts(urls: list[str]) -> dict[str, str]:
        return {key: max(urls, key=lambda url: weight(url, key)) for key in keys}

    before, after = hosts(URLS[:7]), hosts(URLS)
    moved = [key for key in keys if before[key] != after[key]]
    assert {after[key] for key in moved} == {URLS[7]}
    assert 400 < len(moved) < 600
    assert min(Counter(after.values()).values()) > 400


def described(url: str, version: str = "1.0", turns: int = 20) -> Description:
    schema = Schema(tools=[], score_range=(0, 1), success_at=1, max_turns=turns, args={})
    return Description(url, "textcraft", Health(status="ok", version=version), schema)


def test_other_hosts_are_named_with_the_difference() -> None:
    first = described("http://a:1")
    assert first.difference(described("http://b:2")) is None
    assert first.difference(described("http://b:2", version="1.1")) == (
        "http://a:1 and http://b:2 do not serve the same environment: version is '1.0' at "
        "http://a:1, '1.1' at http://b:2"
    )
    told = first.difference(described("http://b:2", turns=5))
    assert told is not None
    assert told.endswith("max_turns is 20 at http://a:1, 5 at http://b:2")


def test_metrics_count_since_the_last_call() -> None:
    hosts = Hosts()
    assert hosts.metrics() == {}
    hosts.states = {"http://a:1": "up", "http://b:2": "draining"}
    hosts.open("http://a:1", wait_s=0.5)
    hosts.sessions["http://a:1"] += 1
    hosts.count("lost")
    told = hosts.metrics()
    assert (told["hosts/up"], told["hosts/draining"], told["hosts/sessions"]) == (1, 1, 1)
    assert (told["hosts/opened_a-1"], told["hosts/opened_b-2"]) == (1, 0)
    assert (told["hosts/lost"], told["hosts/wait_s"]) == (1, 0.5)
    assert (hosts.metrics()["hosts/opened"], hosts.metrics()["hosts/lost"]) == (0, 0)
