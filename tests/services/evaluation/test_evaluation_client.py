"""`ludus serve evaluation` as a process, with its clients and the judge `remote`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import Ludus
from judged import said
from raw_server import CLOSE, HANG, RawServer, answer
from service_world import Command, command, until

from ludus import AsyncEvaluationClient, EvaluationClient
from ludus.core.errors import ConfigError, DataError, ToolError, Unscorable
from ludus.core.types import Message, Spec, Task
from ludus.judges import JUDGES
from ludus.judges.remote.wire import EvaluationStatus

TOKEN = "token-of-the-evaluation"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    config = tmp_path_factory.mktemp("evaluation") / "judges.yaml"
    config.write_text("judges: {waits: {name: 'served_judges:Waits', concurrent: 4}}")
    with command("--config", str(config), "--max-items", "64", verb="evaluation") as started:
        yield started


def test_the_client(running: Command) -> None:
    with EvaluationClient(running.url) as client:
        result = client.evaluate(r"14/2 = \boxed{7}", "7")
        assert (result.status, result.value, result.success) == ("scored", 1.0, True)
        assert result.score().parts["correct"] == 1.0
        said = [Message(role="assistant", content="(B)")]
        data = {"options": ["Paris", "Rome"]}
        assert client.evaluate(said, "Rome", "choice", data=data).value == 1.0
        qa = Spec(name="qa", args={"metric": "f1"})
        assert client.evaluate("Rome now", "Rome", qa).value == pytest.approx(2 / 3)
        none = client.evaluate("7", None)
        assert (none.status, none.value, none.success) == ("unscorable", None, None)
        with pytest.raises(Unscorable, match="has no answer"):
            none.score()
    with EvaluationClient(running.url, deadline_s=0.2) as client:
        late = client.evaluate("7", 5, "waits")
        assert late.status is EvaluationStatus.DEADLINE
        with pytest.raises(ToolError, match=r"not scored within 0\.2 s"):
            late.score()


def test_many_outputs_in_batches(running: Command) -> None:
    outputs = [f"Answer: {i}" for i in range(150)]
    with EvaluationClient(running.url, batch=64) as client:
        results = client.evaluate_many(outputs, [i - i % 2 for i in range(150)], "answer")
        assert [result.value for result in results] == [1.0, 0.0] * 75
        assert client.evaluate_many([], []) == []
        with pytest.raises(DataError, match="truth: 1 of them for 2 outputs"):
            client.evaluate_many(["a", "b"], ["a"])
    with (
        EvaluationClient(running.url, batch=65) as client,
        pytest.raises(ConfigError, match="items: 65 of them, at most 64 in a request"),
    ):
        client.evaluate_many(["a"] * 65, ["a"] * 65)


@pytest.mark.parametrize(
    ("output", "truth", "told"),
    [
        ("7", float("nan"), r"the item\.truth: nan is no number of JSON"),
        ("7", {"a": object()}, r"the item\.truth\.a: a object is no value of JSON"),
        ("7", b"7", r"the item\.truth: a bytes is no value of JSON"),
    ],
)
def test_what_json_cannot_hold(output: str, truth: Any, told: str, running: Command) -> None:
    with EvaluationClient(running.url) as client, pytest.raises(DataError, match=told):
        client.evaluate(output, truth)


def test_half_a_surrogate_pair_and_deep_nesting(running: Command) -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with EvaluationClient(running.url) as client:
        assert client.evaluate("Answer: a\ud800", "a?", "answer").value == 1.0
        with pytest.raises(DataError, match="nested too deeply"):
            client.evaluate("a", deep)
    while deep:
        deep = deep.pop()


@pytest.mark.parametrize(
    ("judge", "told"),
    [
        ("mth", "judge: 'mth' is not served here"),
        (Spec(name="math", args={"workers": 9}), "judge.args.workers: set by the operator"),
    ],
)
def test_a_wrong_judge_is_a_mistake_of_the_caller(judge: Any, told: str, running: Command) -> None:
    with EvaluationClient(running.url) as client:
        for call in (lambda: client.evaluate("7", "7", judge),
                     lambda: client.evaluate_many(["7"], ["7"], judge)):  # fmt: skip
            with pytest.raises(ConfigError) as caught:
                call()
            assert told in str(caught.value)


async def test_the_client_works_where_an_event_loop_runs(running: Command) -> None:
    with EvaluationClient(running.url) as client:
        assert client.evaluate("Answer: 7", "7", "answer").value == 1.0
    with pytest.raises(ConfigError, match="the EvaluationClient is closed"):
        client.evaluate("Answer: 7", "7", "answer")
    async with AsyncEvaluationClient(running.url) as several:
        results = await asyncio.gather(*(several.evaluate("7", 7, "answer") for _ in range(40)))
    assert [result.value for result in results] == [1.0] * 40


async def test_a_service_that_is_down_is_not_a_score_of_0() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    async with AsyncEvaluationClient(url, deadline_s=0.2, patience_s=0.3) as client:
        with pytest.raises(ToolError, match="gave no answer within"):
            await client.evaluate("7", "7")
        results = await client.evaluate_many(["7"] * 3, ["7"] * 3)
    assert [(result.status, result.value) for result in results] == [("failed", None)] * 3
    judge: Any = JUDGES.build(
        Spec(name="remote", args={"url": url, "deadline_s": 0.2, "patience_s": 0.3})
    )
    with pytest.raises(ToolError, match="gave no answer within"):
        await judge(Task(id="q", answer="7"), said("7"))
    await judge.close()


@pytest.mark.parametrize(
    "sent", [HANG, b"HTTP/1.1 200 X\r\ncontent-length: 9\r\n\r\n{"], ids=["nothing", "half"]
)
async def test_a_service_that_hangs_is_not_a_score_of_0(sent: bytes) -> None:
    seconds: Any = {"deadline_s": 0.2, "patience_s": 0.3}
    async with RawServer() as server:
        server.script = [lambda _: sent, lambda _: HANG]
        told = rf"{server.url}/evaluate gave no answer within 0\.5 s"
        async with AsyncEvaluationClient(server.url, **seconds) as client:
            with pytest.raises(ToolError, match=told):
                await client.evaluate("7", "7")
            results = await client.evaluate_many(["7"] * 3, ["7"] * 3)
        assert [(result.status, result.value) for result in results] == [("failed", None)] * 3
        assert "gave no answer within 0.5 s" in str(results[0].error)
        with EvaluationClient(server.url, **seconds) as blocking, pytest.raises(ToolError):
            await asyncio.to_thread(blocking.evaluate, "7", "7")
        judge: Any = JUDGES.build(Spec(name="remote", args={"url": server.url, **seconds}))
        with pytest.raises(ToolError, match=told):
            await judge(Task(id="q", answer="7"), said("7"))
        await judge.close()


async def test_the_start_of_a_run_does_not_wait_for_a_service_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ludus.judges.remote.judge.START_S", 0.5)
    async with RawServer() as server:
        server.script = [HANG]
        judge: Any = JUDGES.build(Spec(name="remote", args={"url": server.url}))
        with pytest.raises(ToolError, match=r"no answer within 0\.5 s: start it with `ludus serve"):
            await judge.check()
        await judge.close()


async def test_a_connection_that_hangs_is_given_up_and_the_request_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ludus.judges.remote.client.GRACE_S", 0.1)
    whole = {"results": [{"status": "scored", "value": 1.0}], "judge": "math", "seconds": 1}
    async with RawServer() as server:
        server.script = [HANG, answer(whole)]
        async with AsyncEvaluationClient(server.url, deadline_s=0.2) as client:
            assert (await client.evaluate("7", "7")).value == 1.0
    assert len(server.bodies) == 2


async def test_the_judge_remote(running: Command) -> None:
    args = {"url": running.url, "judge": {"name": "answer", "args": {"extract": "number"}}}
    judge: Any = JUDGES.build(Spec(name="remote", args=args))
    await judge.check()
    task = Task(id="q", prompt=[Message(role="user", content="?")], answer=7)
    here = JUDGES.build(Spec.model_validate(args["judge"]))
    for text in ("It is 7", "It is 8", "no"):
        assert await judge(task, said("a", text)) == (await here(task, said("a", text))).model_copy(
            update={"success": text == "It is 7"}
        )
    with pytest.raises(Unscorable, match="has no answer"):
        await judge(Task(id="q"), said("7"))
    with pytest.raises(Unscorable, match="no assistant message"):
        await judge(task, said())
    await judge.close()


async def test_the_check_of_the_judge_remote(running: Command) -> None:
    async def check(**args: Any) -> None:
        judge: Any = JUDGES.build(Spec(name="remote", args={"url": running.url, **args}))
        try:
            await judge.check()
        finally:
            await judge.close()

    with pytest.raises(ConfigError, match="'rubric' is not served here"):
        await check(judge="rubric")
    with pytest.raises(ConfigError, match=r"404.*is it a `ludus serve evaluation`"):
        await check(url=running.url + "/v1")
    with pytest.raises(ConfigError, match=r"must have the form"):
        await check(url="ftp://x")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"results": [], "judge": "math", "seconds": 1}, "0 results for 1 outputs"),
        ({"results": [{"status": "fine"}], "judge": "math", "seconds": 1}, "results.0.status"),
        ({"scores": [1.0]}, "not an evaluation's answer"),
        (b"<html>", "not JSON"),
    ],
    ids=["none", "another status", "another server", "no JSON"],
)
async def test_another_servers_answer_is_no_score(body: Any, told: str) -> None:
    async with RawServer() as server, AsyncEvaluationClient(server.url) as client:
        server.script = [answer(body)]
        with pytest.raises(ToolError) as caught:
            await client.evaluate("7", "7")
        assert told in str(caught.value)


async def test_a_service_that_is_busy_is_asked_again() -> None:
    result = {"status": "scored", "value": 1.0, "success": True}
    whole = {"results": [result], "judge": "math", "seconds": 1}
    async with RawServer() as server, AsyncEvaluationClient(server.url) as client:
        server.script = [answer({}, 503), answer({}, 429, "retry-after: 0.1"), CLOSE, answer(whole)]
        assert (await client.evaluate("7", "7")).value == 1.0
        assert len(server.bodies) == 4


def test_a_client_that_leaves_cancels_its_work(running: Command) -> None:
    def in_flight() -> float:
        text = httpx.get(f"{running.url}/metrics").text
        [line] = [one for one in text.splitlines() if one.startswith("ludus_evaluation_in_flight")]
        return float(line.split()[1])

    body = {"items": [{"output": "7", "truth": 100}] * 50, "judge": "waits", "deadline_s": 200}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{running.url}/evaluate", json=body, timeout=1.0)
    until(lambda: in_flight() == 0, 20)
    gone = 'ludus_evaluation_requests_total{end="gone",judge="waits"} 1.0'
    assert gone in httpx.get(f"{running.url}/metrics").text


@pytest.mark.slow
def test_tokens_and_several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALUATION_TOKEN", TOKEN)
    words = ("--judges", "answer", "--workers", "2")
    with command(*words, verb="evaluation", env={"LUDUS_TOKENS": TOKEN}) as started:
        with EvaluationClient(started.url, token_env="EVALUATION_TOKEN", batch=10) as client:
            results = client.evaluate_many(["7"] * 100, [7] * 100, "answer")
            assert [result.value for result in results] == [1.0] * 100
        with EvaluationClient(started.url) as client, pytest.raises(ConfigError, match="401"):
            client.evaluate("7", 7, "answer")
        headers = {"authorization": f"Bearer {TOKEN}"}
        metrics = httpx.get(f"{started.url}/metrics", headers=headers).text
        assert 'worker="1"' in metrics
        assert httpx.get(f"{started.url}/health").json()["workers"] == 2


@pytest.mark.slow
def test_a_signal_ends_the_service_while_a_grader_loops() -> None:
    with command("--judges", "math", verb="evaluation") as started:
        body = {"output": r"\boxed{9^{9^{9^9}}}", "truth": "7", "deadline_s": 300}

        def ask() -> None:
            with suppress(httpx.HTTPError):
                httpx.post(f"{started.url}/evaluate", json=body, timeout=60)

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(1.0)
        os.kill(started.process.pid, signal.SIGTERM)
        assert started.process.wait(30) == 0
        asking.join(30)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--judges", "mth"], "--judges: 'mth' is not a known judge (did you mean math?)"),
        (["--judges", "rubric"], "--judges: rubric needs the argument 'base_url'"),
        (["--config", "nothing.yaml"], "--config: 'nothing.yaml' cannot be read"),
        (["--deadline", "60", "--max-deadline", "5"], "--deadline 60 exceeds --max-deadline, 5"),
        (["--host", "0.0.0.0"], "set a token in LUDUS_TOKENS"),
    ],
)  # fmt: skip
def test_a_wrong_command_is_told_before_the_service_listens(
    ludus: Ludus, words: list[str], told: str
) -> None:
    ludus("serve", "evaluation", *words).refused(2, told)


@pytest.mark.slow
def test_the_examples_of_the_page(tmp_path: Path) -> None:
    """The Python and curl examples of docs/evaluation-service.md run as they stand."""
    page = (Path(__file__).parents[3] / "docs" / "evaluation-service.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    [shell] = [
        block.split("```")[0] for block in page.split("```sh\n")[1:] if block.startswith("curl")
    ]
    [config] = [
        block.split("```")[0] for block in page.split("```yaml\n")[1:] if "judges:" in block[:8]
    ]
    (tmp_path / "judges.yaml").write_text(config)
    with command("--config", str(tmp_path / "judges.yaml"), verb="evaluation") as started:
        address = "http://127.0.0.1:8100"
        for block in blocks:
            assert address in block or "client" in block
            exec(compile(block.replace(address, started.url), "page", "exec"), {})
        for line in shell.replace("\\\n", " ").replace(address, started.url).splitlines():
            done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
            assert '"status":"scored","value":1.0' in done.stdout
