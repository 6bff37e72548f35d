"""The viewer's data: what it answers, to whom, and in bad states of the store."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from viewer_world import EVIL, OTHER, RUN, STEPS, make_runs, trajectory, viewer, write_live

from ludus.core.errors import StoreError
from ludus.core.types import Group, Segment, Task, Trajectory
from ludus.services.viewer import prepared
from ludus.services.viewer import rollout as view
from ludus.services.viewer.curves import Curves
from ludus.services.viewer.shell import is_local
from ludus.services.viewer.steps import verdict
from ludus.services.viewer.texts import token_texts
from ludus.store import RunStore

TOKEN = "a-token-of-many-characters"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    with viewer(folder) as url, httpx.Client(base_url=url, timeout=30) as made:
        yield made


def ok(client: httpx.Client, path: str, **query: Any) -> Any:
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(client: httpx.Client, code: int, kind: str, path: str, **query: Any) -> str:
    answer = client.get(path, params=query)
    assert (answer.status_code, answer.json()["error"]["type"]) == (code, kind), answer.text
    return str(answer.json()["error"]["message"])


def test_runs_newest_first(client: httpx.Client) -> None:
    found = ok(client, "/api/runs")
    assert [run["id"] for run in found["runs"]] == [OTHER, RUN]
    assert found["runs"][0]["status"] == "failed"
    assert found["runs"][0]["error"] == f"it broke {EVIL}"
    assert found["runs"][1]["stages"] == {"evaluate/before": 0, "rl": STEPS - 1}
    assert found["next"] is None
    assert ok(client, "/api/runs", before=found["runs"][0]["key"])["runs"][0]["id"] == RUN


def test_one_run(client: httpx.Client) -> None:
    found = ok(client, "/api/run", run=RUN)
    assert found["tools"] == ["python"]
    assert found["statuses"] == ["completed", "error_env"]
    assert found["config"] == {"seed": 1, "name": EVIL}
    assert found["metrics"]["rl"]["odd/nan"] == "nan"
    assert "did you mean tiny-1" in refused(client, 404, "unknown_name", "/api/run", run="tiny-2")


def test_curves_of_runs_beside_each_other(client: httpx.Client) -> None:
    found = ok(client, "/api/curves", run=[RUN, OTHER, "no-such-run"])
    assert found["missing"] == ["no-such-run"]
    assert (found["stage"], found["stages"]) == ("rl", ["rl"])
    charts = {chart["name"]: chart["series"] for chart in found["charts"]}
    assert [series["run"] for series in charts["train/loss"]] == [RUN, OTHER]
    assert charts["train/loss"][0]["points"] == [[s, 1.0 - s, 1.0 - s, 1.0 - s] for s in range(4)]
    assert charts["evaluate/success"][0]["points"] == [[0, 0.25, 0.25, 0.25]]
    thin = ok(client, "/api/curves", run=RUN, name="train/loss", points=2, x="time")["charts"]
    assert thin[0]["series"][0]["points"] == [[10.0, 0.5, 0.0, 1.0], [30.0, -1.5, -2.0, -1.0]]
    assert ok(client, "/api/curves", run=RUN, name="odd/nan")["charts"] == []


def test_curves_read_on_and_read_a_resumed_run_anew(tmp_path: Path) -> None:
    with RunStore.open(None, tmp_path) as store:
        store.create_run("r", "r", {}, {})
        curves = Curves()
        assert curves.of(store, "r") == {}
        store.record_step("r", "rl", 0, [], {"a": 1.0})
        store.record_step("r", "rl", 1, [], {"a": 2.0, "b": 5.0})
        assert list(curves.of(store, "r")["rl"].columns["a"]) == [1.0, 2.0]
        assert curves.of(store, "r")["rl"].points("b", "step", 9) == [[1, 5.0, 5.0, 5.0]]
        store.rewind("r", {"rl": 0})
        store.record_step("r", "rl", 1, [], {"a": 3.0})  # SQLite gives it the deleted step's key
        found = curves.of(store, "r")["rl"]
        assert (list(found.columns["a"]), found.steps) == ([1.0, 3.0], [0, 1])


def test_steps_with_and_without_a_gradient(client: httpx.Client) -> None:
    found = ok(client, "/api/steps", run=RUN)
    assert [(s["stage"], s["step"], s["gradient"]) for s in found["steps"]] == [
        ("rl", 3, False),
        ("rl", 2, True),
        ("rl", 1, True),
        ("rl", 0, True),
        ("evaluate/before", 0, None),
    ]
    assert len(ok(client, "/api/steps", run=RUN, stage="rl")["steps"]) == STEPS


def test_why_a_step_had_no_gradient(client: httpx.Client) -> None:
    found = ok(client, "/api/step", run=RUN, stage="rl", step=3)
    assert found["verdict"] == [
        "No gradient: no row was left to train on, so no optimizer step was taken.",
        "1 of 3 groups have no signal: their rewards are equal.",
        "5 of 12 rollouts were dropped.",
        "4 × no signal: all rewards of the group are 0.0",
        "1 × error_env: it raised",
    ]
    assert found["statuses"] == {"completed": 11, "error_env": 1}
    assert [group["signal"] for group in found["groups"]] == [True, False, True]
    assert len(found["groups"][0]["members"]) == 4
    message = refused(client, 422, "invalid", "/api/step", run=RUN, stage="rl", step=9)
    assert "has no step 9 of 'rl'" in message


def test_verdicts() -> None:
    idle = {"train/optimizer_steps": 1.0, "train/grad_norm": 0.0}
    assert "its norm is 0" in verdict("rl", idle, [], [])[0]
    assert verdict("evaluate/rl", idle, [], []) == ["This stage trains nothing."]
    assert verdict("rl", {}, [], []) == []


def test_rollouts_by_reward_status_and_tool(client: httpx.Client) -> None:
    found = ok(client, "/api/rollouts", run=RUN, sort="reward", limit=5)
    rewards = [row["reward"] for row in found["rows"]]
    assert rewards == sorted(rewards, reverse=True)
    assert found["rows"][0]["tools"] == {"python": 1}
    rest = ok(client, "/api/rollouts", run=RUN, sort="reward", limit=200, after=found["next"])
    assert len(rest["rows"]) == STEPS * 12 - 5
    assert [row["reward"] for row in rest["rows"][-STEPS:]] == [None] * STEPS
    failed = ok(client, "/api/rollouts", run=RUN, status="error_env")["rows"]
    assert {row["error"] for row in failed} == {f"the environment raised {EVIL}"}
    assert len(ok(client, "/api/rollouts", run=RUN, group="rl-000001/g0001")["rows"]) == 4
    assert ok(client, "/api/rollouts", run=RUN, text="onerror=")["rows"]
    message = refused(client, 422, "invalid", "/api/rollouts", run=RUN, status="done")
    assert message.startswith("status: must be")
    message = refused(client, 422, "invalid", "/api/rollouts", run=RUN, after="zzz")
    assert "not the `next` of a page" in message


def test_one_rollout_with_its_tokens(client: httpx.Client) -> None:
    found = ok(client, "/api/rollout", run=RUN, id="rl-000000/g0000/e000")
    assert found["trains"]
    assert found["why"] == []
    assert found["has"] == {"logprob": True, "entropy": True, "advantage": True, "text": True}
    assert found["leaves"] == [3, 4, 5]
    assert found["tree"][1] == [0, 3, True, "assistant"]
    turn = found["segments"][1]
    assert turn["texts"] == ["look", EVIL, " open"]
    assert (turn["logprobs"], turn["entropies"]) == ([-0.1, -0.7, -3.5], [0.1, 2.5, 0.9])
    assert turn["advantages"] == [-1.5] * 3
    assert turn["message"]["calls"] == [
        {"name": "python", "arguments": [["code", EVIL], ["n", "2"]]}
    ]
    assert found["segments"][0]["logprobs"] is None
    assert [member["id"][-4:] for member in found["group"]] == ["e000", "e001", "e002", "e003"]
    assert found["metrics"]["odd"] == "nan"
    assert found["next"] is None


def test_why_a_rollout_was_not_trained_on(client: httpx.Client) -> None:
    flat = ok(client, "/api/rollout", run=RUN, id="rl-000000/g0001/e001")
    assert not flat["trains"]
    assert flat["why"] == ["Dropped: no signal: all rewards of the group are 0.0"]
    failed = ok(client, "/api/rollout", run=RUN, id="rl-000000/g0002/e003")
    assert failed["why"] == [
        "Dropped: error_env: it raised",
        f"Error: the environment raised {EVIL}",
    ]


def test_a_huge_rollout_comes_in_parts(tmp_path: Path) -> None:
    num = 3 * view.MAX_TOKENS + 7
    ids = [n % 1000 for n in range(num)]
    segments = [Segment(-1, ids[:50]), Segment(0, ids, [-0.5] * num, policy_version=1)]
    segments += [Segment(1, []) for _ in range(view.MAX_SEGMENTS + 3)]
    big = Trajectory("big", "g", "t", segments, error="e" * 50_000)
    with RunStore.open(None, tmp_path) as store:
        store.create_run("r", "r", {}, {})
        store.record_step("r", "rl", 0, [Group("g", Task(id="t"), [big])], {})
    got: dict[int, list[int]] = {}
    with viewer(tmp_path) as url, httpx.Client(base_url=url, timeout=30) as client:
        part = ok(client, "/api/rollout", run="r", id="big")
        assert len(part["row"]["error"]) < 3000
        assert part["has"]["text"] is False
        while True:
            for segment in part["segments"]:
                assert segment["offset"] == len(got.setdefault(segment["index"], []))
                got[segment["index"]] += segment["ids"]
            assert sum(len(s["ids"]) for s in part["segments"]) <= view.MAX_TOKENS
            if part["next"] is None:
                break
            part = ok(client, "/api/rollout", run="r", id="big", **part["next"])
    assert got[0] == ids[:50]
    assert got[1] == ids
    assert len(got) == len(segments)


def test_texts_of_tokens_add_up() -> None:
    pieces = {0: "a", 1: " b"}
    whole = "é€".encode()  # five tokens of one byte each

    def decode(ids: list[int]) -> str:
        if any(id >= 100 for id in ids):
            raise OverflowError
        parts = b"".join(pieces[i].encode() if i < 2 else whole[i - 2 : i - 1] for i in ids)
        return parts.decode("utf-8", "replace").removeprefix(" ")  # as SentencePiece does

    assert token_texts(decode, [0, 1, 2, 3, 4, 5, 6, 1]) == ["a", " b", "", "é", "", "", "€", " b"]
    assert token_texts(decode, [0, 2]) == ["a", "�"]
    assert token_texts(decode, [100, 1]) == ["[100]", "b"]
    assert token_texts(decode, []) == []


def test_the_page_and_its_headers(client: httpx.Client) -> None:
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'" in policy
    assert "unsafe" not in policy
    assert client.get("/api/runs").headers["x-content-type-options"] == "nosniff"
    assert client.get("/static/app.js").headers["content-type"].startswith("text/javascript")
    for path in (
        "/static/nothing.js",
        "/static/../service.py",
        "/static/%2e%2e/service.py",
        "/docs",
    ):
        assert client.get(path).status_code == 404, path


def test_only_reads(client: httpx.Client) -> None:
    for path in ("/api/runs", "/api/run", "/api/rollout", "/"):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert client.request(method, path, json={}).status_code == 405


def test_a_token_guards_the_data_and_not_the_page(folder: Path) -> None:
    with viewer(folder, (TOKEN,)) as url, httpx.Client(base_url=url) as client:
        assert client.get("/").status_code == client.get("/static/app.js").status_code == 200
        refused(client, 401, "unauthorized", "/api/runs")
        refused(client, 401, "unauthorized", "/api/events")
        header = {"Authorization": f"Bearer {TOKEN}", "Host": "elsewhere.example"}
        assert client.get("/api/runs", headers=header).status_code == 200


def test_without_a_token_other_names_of_this_machine_are_refused(client: httpx.Client) -> None:
    answer = client.get("/api/runs", headers={"Host": "attacker.example:8300"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "wrong_host")
    for host in (b"localhost:8300", b"127.0.0.1", b"[::1]:8300", b"127.8.9.1:1", b"a.localhost"):
        assert is_local(host)
    for host in (
        b"",
        b"127.0.0.1.evil.example",
        b"10.0.0.1",
        b"[::2]:1",
        b"localhost.evil",
        b"\xff",
    ):
        assert not is_local(host)


def test_no_run_at_all_and_then_one(tmp_path: Path) -> None:
    with viewer(tmp_path / "none") as url, httpx.Client(base_url=url, timeout=30) as client:
        found = ok(client, "/api/runs")
        assert found["runs"] == []
        assert "holds no runs yet: start one with `ludus train RECIPE`" in found["message"]
        refused(client, 404, "no_runs", "/api/run", run="x")
        (tmp_path / "none").mkdir()
        make_runs(tmp_path / "none")
        assert len(ok(client, "/api/runs")["runs"]) == 2


def test_a_damaged_store_is_named(tmp_path: Path) -> None:
    make_runs(tmp_path)
    path = tmp_path / "ludus.db"
    data = bytearray(path.read_bytes())
    for page in range(8 * 4096, len(data), 4096):
        data[page : page + 64] = os.urandom(64)
    path.write_bytes(data)
    with viewer(tmp_path) as url, httpx.Client(base_url=url, timeout=30) as client:
        messages = [
            client.get("/api/rollouts", params={"run": RUN, "limit": 200, "sort": sort})
            for sort in ("time", "reward")
        ]
        messages += [client.get("/api/rollout", params={"run": RUN, "id": "rl-000002/g0000/e001"})]
        bad = [answer for answer in messages if answer.status_code != 200]
        assert bad
        for answer in bad:
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (503, "store")
            assert "damaged" in error["message"]


def test_no_database_at_all(tmp_path: Path) -> None:
    (tmp_path / "ludus.db").write_text("not a database" * 999)
    with viewer(tmp_path) as url, httpx.Client(base_url=url, timeout=30) as client:
        message = refused(client, 503, "store", "/api/runs")
        assert "not an SQLite database" in message
        (tmp_path / "ludus.db").unlink()
        make_runs(tmp_path)
        assert len(ok(client, "/api/runs")["runs"]) == 2


def test_a_run_being_written(tmp_path: Path) -> None:
    make_runs(tmp_path)
    with (
        viewer(tmp_path) as url,
        httpx.Client(base_url=url, timeout=30) as client,
        RunStore.open(None, tmp_path) as store,
    ):
        for step in range(STEPS, STEPS + 6):
            group = Group("g", Task(id="t"), [trajectory(step, 0, 0)])
            store.record_step(RUN, "rl", step, [group], {"train/loss": float(step)})
            newest = ok(client, "/api/rollouts", run=RUN, limit=1)["rows"][0]
            assert newest["step"] == step
            points = ok(client, "/api/curves", run=RUN, name="train/loss")["charts"][0]
            assert points["series"][0]["points"][-1][0] == step


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"time": "x"}', "[" * 50_000, "\xff"])
def test_a_damaged_live_record_is_none(tmp_path: Path, content: str) -> None:
    make_runs(tmp_path)
    (tmp_path / RUN / "live.json").write_text(content, encoding="latin-1")
    with viewer(tmp_path) as url, httpx.Client(base_url=url, timeout=30) as client:
        assert ok(client, "/api/run", run=RUN)["live"] is None


def events(client: httpx.Client, number: int, run: str = RUN) -> list[tuple[str, Any]]:
    """The first events of a stream."""
    found: list[tuple[str, Any]] = []
    with client.stream("GET", "/api/events", params={"run": run}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((name, json.loads(line.removeprefix("data: "))))
                if len(found) >= number:
                    return found
    return found


def test_events_of_a_running_step(tmp_path: Path) -> None:
    make_runs(tmp_path)
    write_live(tmp_path)
    with viewer(tmp_path) as url, httpx.Client(base_url=url, timeout=30) as client:
        first = dict(events(client, 2))
        assert first["news"] is None
        assert (first["live"]["step"], first["live"]["stale"]) == (4, False)
        write_live(tmp_path, age_s=300)
        stale = ok(client, "/api/run", run=RUN)["live"]
        assert stale["stale"]
        assert math.isclose(stale["age_s"], 300, abs_tol=60)


def test_an_open_stream_does_not_hold_up_the_end(folder: Path) -> None:
    with viewer(folder) as url, httpx.Client(base_url=url, timeout=30) as client:
        with client.stream("GET", "/api/events") as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: news"
            health = httpx.get(f"{url}/health").json()
            assert health["streams"] == 1
        deadline = time.monotonic() + 20
        while httpx.get(f"{url}/health").json()["streams"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_what_is_asked_first_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = prepared.Data.open(tmp_path, None)
    assert "holds no runs yet" in prepared.prepare(empty)
    data = prepared.Data.open(make_runs(tmp_path / "runs"), None)
    asked: list[str] = []
    for name in ("describe_run", "curves_of", "list_steps", "describe_step", "search"):
        told = getattr(prepared, name)
        noted = lambda *args, told=told, name=name: asked.append(name) or told(*args)  # noqa: E731
        monkeypatch.setattr(prepared, name, noted)
    assert prepared.prepare(data) == ""
    assert set(asked) == {"describe_run", "curves_of", "list_steps", "describe_step", "search"}
    data.source.close()


def test_a_fault_of_the_preparation_is_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise StoreError("damaged")

    monkeypatch.setattr(prepared, "describe_run", fails)
    assert prepared.prepare(prepared.Data.open(make_runs(tmp_path), None)) == ""
