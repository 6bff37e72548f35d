"""A model service with a challenger, over a socket."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from model_world import make_folder, slowly
from rollout_service import QUICK, challenged
from service_world import until
from variants import variants

from ludus.core.errors import SamplerError
from ludus.services.model.rollout.events import Variant
from ludus.services.model.rollout.replay import replay
from ludus.services.model.rollout.service import hashed

ASKED = {"model": "tiny", "prompt": "go", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "go"}], "max_tokens": 2}
IDLE = QUICK.model_copy(update={"shares": (0.5,), "min_samples": 500})
"""Settings with which nothing is decided."""

MANY = 40
"""Sessions of which both variants have some, but for a chance of 2e-12: the salt is random."""

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""httpx reads all certificates for each request where it is given none: 40 ms."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return make_folder(root / "one", 1), make_folder(root / "two", 2)


@pytest.fixture
def url(folders: tuple[Path, Path], tmp_path: Path) -> Iterator[str]:
    with challenged(*folders, tmp_path / "log.jsonl", settings=IDLE) as address:
        yield address


def post(url: str, path: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, headers=headers, timeout=60, verify=NO_TLS)


def complete(url: str, **body: Any) -> httpx.Response:
    return post(url, "/v1/completions", {**ASKED, **body})


def feedback(url: str, id: str, score: Any) -> httpx.Response:
    return post(url, "/feedback", {"id": id, "score": score})


def state(url: str) -> Any:
    return httpx.get(f"{url}/rollout").raise_for_status().json()


def after_requests(url: str, phase: str, **body: Any) -> Any:
    """The state in a phase, which requests lead to: 20 of each variant suffice."""
    for _ in range(400):
        complete(url, **body)
        if httpx.get(f"{url}/health", verify=NO_TLS).json()["rollout"]["phase"] == phase:
            break
    told = state(url)
    assert told["phase"] == phase
    return told


def slow(sampler: Any) -> None:
    slowly(None, SimpleNamespace(sampler=sampler))


def fails() -> Any:
    """A change of a sampler: all turns fail."""

    async def sample(*args: Any, **more: Any) -> Any:
        raise SamplerError("the device is gone")

    def change(sampler: Any) -> None:
        sampler.sample = sample

    return change


def test_answer_tells_its_variant(url: str) -> None:
    seen = set()
    for number in range(MANY):
        answer = complete(url, user=f"user-{number}", seed=1, return_token_ids=True)
        variant = answer.headers["x-ludus-variant"]
        body = answer.json()
        assert re.fullmatch(f"cmpl-{variant}-[0-9a-f]{{24}}", body["id"])
        seen.add((variant, tuple(body["choices"][0]["token_ids"])))
    assert len(seen) == 2  # each variant has its own model
    assert {variant for variant, _ in seen} == set(Variant)
    chat = post(url, "/v1/chat/completions", CHAT)
    assert chat.json()["id"].startswith(f"chatcmpl-{chat.headers['x-ludus-variant']}-")


def test_session_stays_with_its_variant(url: str) -> None:
    def variant(**body: Any) -> str:
        return complete(url, **body).headers["x-ludus-variant"]

    by_user = {f"user-{n}": variant(user=f"user-{n}") for n in range(MANY)}
    assert set(by_user.values()) == set(Variant)
    for user, told in list(by_user.items())[:10]:
        assert {variant(user=user) for _ in range(3)} == {told}
        assert variant(safety_identifier=user) == told
        header = {"x-session-id": user}
        got = post(url, "/v1/completions", {**ASKED, "user": "another"}, **header)
        assert got.headers["x-ludus-variant"] == told
    assert {variant() for _ in range(MANY)} == set(Variant)  # without a key: each request anew


def test_split_follows_the_share_and_only_moves_one_way() -> None:
    places = [hashed("salt", "", f"user-{n}")[1] for n in range(20_000)]
    for share in (0.05, 0.5):
        part = sum(place < share for place in places) / len(places)
        assert part == pytest.approx(share, abs=0.01)
    assert hashed("salt", "a", "b") != hashed("salt", "a\0b", "")
    assert hashed("salt", "a", "\udc80")[0] != hashed("other", "a", "\udc80")[0]


def test_sessions_of_tokens_are_apart(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tokens = ("token-of-one-client", "token-of-another-one")
    with challenged(*folders, tmp_path / "log", settings=IDLE, tokens=tokens) as url:
        told: list[list[str]] = []
        for token in tokens:
            headers = {"Authorization": f"Bearer {token}"}
            answers = [
                post(url, "/v1/completions", {**ASKED, "user": str(n)}, **headers)
                for n in range(MANY)
            ]
            told.append([answer.headers["x-ludus-variant"] for answer in answers])
        assert told[0] != told[1]
        assert httpx.get(f"{url}/rollout").status_code == 401
        assert feedback(url, "x", 1).status_code == 401


def test_scores_and_their_faults(url: str) -> None:
    id = complete(url, user="a").json()["id"]
    assert feedback(url, id, 0.25).json() == {"status": "counted"}
    assert feedback(url, id, 0.25).json() == {"status": "repeated"}
    other = complete(url, user="a").json()["id"]
    assert feedback(url, other, 1).json() == {"status": "same_session"}
    wrong = [
        (id, 0.5, 409, "conflict", "another score already"),
        ("cmpl-champion-0", 1, 404, "unknown", "no answer with this id"),
        (id, 1.5, 400, None, "score: "),
        (id, -0.1, 400, None, "score: "),
        (id, "good", 400, None, "score: "),
        (id, True, 400, None, "score: "),
        (id, None, 400, None, "score: "),
        ("", 1, 400, None, "id: "),
        ("x" * 300, 1, 400, None, "id: "),
    ]
    for given, score, status, code, said in wrong:
        answer = feedback(url, given, score)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["code"] == code
        assert said in answer.json()["error"]["message"]
    for body in ({"id": id}, {"score": 1}, {"id": id, "score": 1, "text": "x"}, []):
        assert post(url, "/feedback", body).status_code == 400
    nan = httpx.post(
        f"{url}/feedback",
        content=f'{{"id": "{id}", "score": NaN}}',
        headers={"Content-Type": "application/json"},
    )
    assert nan.status_code == 400
    told = state(url)
    assert sum(v["scores"] for v in told["variants"].values()) == 2
    assert sum(v["scored_sessions"] for v in told["variants"].values()) == 1


def test_late_score_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    settings = IDLE.model_copy(update={"feedback_s": 1e-6})
    with challenged(*folders, tmp_path / "log", settings=settings) as url:
        answer = feedback(url, complete(url).json()["id"], 1.0)
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "late")


@pytest.mark.parametrize("jump", [3.2e7, -3.2e7])
def test_clock_that_jumps_changes_no_step_and_no_age(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    log, clock = tmp_path / "log.jsonl", time.time
    settings = QUICK.model_copy(update={"step_s": 10_000.0, "min_samples": 1})
    with challenged(*folders, log, settings=settings) as url:
        before = complete(url).json()["id"]
        monkeypatch.setattr(time, "time", lambda: clock() + jump)
        ids = [complete(url).json()["id"] for _ in range(MANY)]
        assert feedback(url, before, 0.5).json() == {"status": "counted"}
        monkeypatch.undo()
        for id in ids:
            assert feedback(url, id, 0.5).json() == {"status": "counted"}
        assert [one["action"] for one in state(url)["decisions"]] == ["start"]
    assert 0 < replay(log).controller.step_seconds < 10_000
    times = [json.loads(line)["t"] for line in log.read_text().splitlines()]
    assert times == sorted(times)
    assert abs(times[-1] - clock()) < 10_000


def test_answer_under_way_cannot_be_scored(folders: tuple[Path, Path], tmp_path: Path) -> None:
    rigged = dict.fromkeys(Variant, slow)
    body = {**ASKED, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with challenged(*folders, tmp_path / "log", settings=IDLE, rigged=rigged) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
            variant = stream.headers["x-ludus-variant"]
            lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
            first = next(lines)
            id = json.loads(first.removeprefix("data: "))["id"]
            assert feedback(url, id, 1.0).json()["error"]["code"] == "unfinished"
        until(lambda: state(url)["variants"][variant]["gone"] == 1)
        assert feedback(url, id, 0.0).json() == {"status": "counted"}  # it was not liked


def test_stream_counts_when_it_ends(url: str) -> None:
    answer = complete(url, stream=True)
    variant, id = answer.headers["x-ludus-variant"], re.findall('"id":"([^"]+)"', answer.text)[0]
    until(lambda: state(url)["variants"][variant]["requests"] == 1)
    assert feedback(url, id, 1.0).json() == {"status": "counted"}


def test_refused_requests_are_no_failures(url: str) -> None:
    assert complete(url, temperature=-1).status_code == 400
    refused = complete(url, max_tokens=10_000)
    assert (refused.status_code, refused.headers["x-ludus-variant"] in set(Variant)) == (400, True)
    assert complete(url, model="gpt-9").status_code == 404
    assert all(v["requests"] == 0 for v in state(url)["variants"].values())


@pytest.mark.parametrize("stream", [False, True])
def test_failing_challenger_is_rolled_back(
    folders: tuple[Path, Path], tmp_path: Path, stream: bool
) -> None:
    log = tmp_path / "log.jsonl"
    with challenged(*folders, log, rigged={Variant.CHALLENGER: fails()}) as url:
        told = after_requests(url, "rolled_back", stream=stream)
        assert told["reason"].startswith("errors: ")
        assert [d["action"] for d in told["decisions"]] == ["start", "roll_back"]
        num = told["variants"]["challenger"]["requests"]
        assert told["variants"]["challenger"]["failed"] == num > 0
        for _ in range(5):
            answer = complete(url)
            assert (answer.status_code, answer.headers["x-ludus-variant"]) == (200, "champion")
        health = httpx.get(f"{url}/health").json()
        assert health["rollout"] == {"phase": "rolled_back", "share": 0.0}
    assert replay(log).decisions[-1].action == "roll_back"


def test_model_that_crashes_is_a_failure(folders: tuple[Path, Path], tmp_path: Path) -> None:
    def crash(sampler: Any) -> None:
        def broken(*args: Any, **more: Any) -> Any:
            raise RuntimeError("no kernel image is available")

        sampler.sample = broken

    rigged = {Variant.CHAMPION: crash, Variant.CHALLENGER: crash}
    with challenged(*folders, tmp_path / "log", rigged=rigged) as url:
        answer = complete(url)
        assert answer.status_code == 500
        assert answer.headers["x-ludus-variant"] in set(Variant)
        assert "kernel" not in answer.text
        told = after_requests(url, "holding")
        assert told["reason"] == "both variants fail"
        assert told["share"] == 0.5


@pytest.mark.timeout(120)  # requests, and the end of the service, waited for ever
@pytest.mark.parametrize("place", ["decoder", "sampler"])
def test_challenger_that_ends_its_thread_is_rolled_back(
    folders: tuple[Path, Path], tmp_path: Path, place: str
) -> None:
    def leave(*args: Any, **more: Any) -> Any:
        raise SystemExit("the driver is lost")

    def change(sampler: Any) -> None:
        if place == "decoder":
            sampler.decoder.forward = leave
        else:
            sampler.sample = leave

    log = tmp_path / "log.jsonl"
    with challenged(*folders, log, rigged={Variant.CHALLENGER: change}) as url:
        told = after_requests(url, "rolled_back")
        num = told["variants"]["challenger"]["requests"]
        assert told["variants"]["challenger"]["failed"] == num > 0
        assert told["variants"]["champion"]["failed"] == 0
        assert complete(url).status_code == 200


def test_better_challenger_is_promoted_and_stays_after_a_restart(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    with challenged(*folders, log) as url:
        before = httpx.get(f"{url}/v1/models").json()["data"][0]["checkpoint"]
        for _ in range(400):
            answer = complete(url).json()
            feedback(url, answer["id"], 1.0 if "challenger" in answer["id"] else 0.0)
            if httpx.get(f"{url}/health").json()["rollout"]["phase"] != "running":
                break
        told = state(url)
        assert told["phase"] == "promoted"
        assert [d["action"] for d in told["decisions"]] == ["start", "increase", "promote"]
        assert told["interval"][0] > 0
        assert told["p_values"]["better"] <= 0.05
        after = httpx.get(f"{url}/v1/models").json()["data"][0]["checkpoint"]
        assert (Path(before).name, Path(after).name) == ("one", "two")
        assert feedback(url, "cmpl-champion-0", 1.0).json() == {"status": "ended"}
        swap = post(url, "/admin/weights", {"checkpoint": "x"})
        assert (swap.status_code, swap.json()["error"]["code"]) == (409, "rollout")
    size = log.stat().st_size
    with challenged(*folders, log) as url:
        for _ in range(5):
            assert complete(url).headers["x-ludus-variant"] == "challenger"
        assert state(url)["decisions"] == told["decisions"]
    assert log.stat().st_size == size  # it has ended


def test_restart_goes_on_where_it_was(folders: tuple[Path, Path], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with challenged(*folders, log, settings=IDLE) as url:
        ids = [complete(url, user=f"u{n}").json()["id"] for n in range(10)]
        variants = [id.split("-")[1] for id in ids]
        feedback(url, ids[0], 1.0)
        before = state(url)
    with log.open("a") as file:
        file.write('{"kind": "scored", "t": 1')  # killed while it wrote
    with challenged(*folders, log, settings=IDLE) as url:
        assert state(url) == before
        again = [complete(url, user=f"u{n}").json()["id"].split("-")[1] for n in range(10)]
        assert again == variants
        assert feedback(url, ids[1], 0.5).json() == {"status": "counted"}
        assert feedback(url, ids[0], 1.0).json() == {"status": "repeated"}
    assert replay(log).num_events == 22


def test_lost_log_leaves_the_champion(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, lines: Any, *, flush: bool = False) -> None:
        raise OSError(28, "No space left on device")

    with challenged(*folders, tmp_path / "log", settings=IDLE) as url:
        id = complete(url).json()["id"]
        monkeypatch.setattr("ludus.services.model.rollout.log.RolloutLog._append", full)
        assert complete(url).status_code == 200
        for _ in range(8):
            assert complete(url).headers["x-ludus-variant"] == "champion"
        answer = feedback(url, id, 1.0)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "log_lost")
        told = state(url)
        assert told["share"] == 0.0
        assert "No space left on device" in told["log_error"]


def test_metrics_by_variant(url: str) -> None:
    ids = [complete(url, user=str(n)).json()["id"] for n in range(MANY)]
    feedback(url, ids[0], 1.0)
    feedback(url, "unknown", 1.0)
    text = httpx.get(f"{url}/metrics").text

    def value(name: str) -> float:
        return next((float(x.split()[-1]) for x in text.splitlines() if x.startswith(name)), 0.0)

    variant = ids[0].split("-")[1]
    requests = [
        value(f'ludus_rollout_requests_total{{end="ok",variant="{name}"}}') for name in Variant
    ]
    assert sum(requests) == MANY
    assert min(requests) > 0
    assert value(f'ludus_rollout_score_count{{variant="{variant}"}}') == 1
    assert value('ludus_rollout_feedback_total{receipt="counted"}') == 1
    assert value('ludus_rollout_feedback_total{receipt="unknown"}') == 1
    assert value('ludus_rollout_decisions_total{action="start"}') == 1
    assert value("ludus_rollout_share") == 0.5
    assert value('ludus_rollout_p_value{test="better"}') == 1
    assert value('ludus_model_tokens_total{kind="sampled"}') >= MANY
    assert value("ludus_model_policy_version") == 0


def test_log_holds_no_keys_and_no_texts(url: str, tmp_path: Path) -> None:
    post(url, "/v1/completions", {**ASKED, "prompt": "my secret", "user": "somebody"})
    text = (tmp_path / "log.jsonl").read_text()
    assert '"ended"' in text
    assert "somebody" not in text
    assert "secret" not in text


@pytest.mark.timeout(120)  # the challenger never answers, nor does its thread end
@pytest.mark.parametrize(
    ("place", "stream"),
    variants(product(["decoder", "sampler"], [False, True]), [("decoder", False)]),
)
def test_challenger_that_hangs_is_rolled_back(
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    stream: bool,
) -> None:
    freed = threading.Event()
    monkeypatch.setattr("ludus.services.model.engine.CLOSE_S", 0.5)

    async def never(*args: Any, **more: Any) -> Any:
        await asyncio.Event().wait()

    def change(sampler: Any) -> None:
        if place == "decoder":
            sampler.decoder.forward = lambda *args, **more: freed.wait()
        else:
            sampler.sample = never

    settings = QUICK.model_copy(update={"answer_s": 3.0})
    rigged = {Variant.CHALLENGER: change}
    with challenged(*folders, tmp_path / "log", settings=settings, rigged=rigged) as url:
        with ThreadPoolExecutor(20) as clients:
            answers = list(clients.map(lambda _: complete(url, stream=stream), range(80)))
        late = [answer for answer in answers if "no whole answer in 3 s" in answer.text]
        assert {answer.headers["x-ludus-variant"] for answer in late} == {"challenger"}
        assert {answer.status_code for answer in late} == {200 if stream else 504}
        told = state(url)
        assert (told["phase"], told["variants"]["champion"]["failed"]) == ("rolled_back", 0)
        assert httpx.get(f"{url}/health").json()["turns"] == 0
        assert complete(url).headers["x-ludus-variant"] == "champion"
    freed.set()
