"""The evaluation service: judges by name, limits, deadlines, bad input."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from served_judges import Opens

from ludus.core.errors import ConfigError
from ludus.services.evaluation.config import check_judges, served_judges
from ludus.services.evaluation.evaluator import EvaluationLimits
from ludus.services.evaluation.service import evaluation_service
from ludus.services.server.app import Settings

LOOPS = r"\boxed{9^{9^{9^9}}}"


@asynccontextmanager
async def served(
    judges: str = "answer,choice,math,qa",
    config: str | None = None,
    tokens: tuple[str, ...] = (),
    **limits: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service in this event loop."""
    app = evaluation_service(
        served_judges(judges, config), Settings(tokens=tokens), EvaluationLimits(**limits)
    )
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            yield client


async def evaluate(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    answer = await client.post("/evaluate", json=body)
    assert answer.status_code == 200, answer.text
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


async def refusal(client: httpx.AsyncClient, body: Any, status: int = 422) -> str:
    answer = await client.post("/evaluate", json=body)
    assert answer.status_code == status, answer.text
    message: str = answer.json()["error"]["message"]
    return message


async def test_one_output_by_mathematics() -> None:
    async with served() as client:
        [result] = await evaluate(client, output=r"It is \boxed{\frac{14}{2}}", truth="7", id="a")
        [wrong] = await evaluate(client, output=r"It is \boxed{8}", truth="7")
    assert result == {
        "status": "scored",
        "value": 1.0,
        "success": True,
        "parts": {"correct": 1.0, "found": 1.0, "in_time": 1.0},
        "explanation": r"'\\frac{14}{2}', equal to '7'",
        "error": None,
        "id": "a",
    }
    assert (wrong["status"], wrong["value"], wrong["success"]) == ("scored", 0.0, False)


async def test_many_outputs_are_answered_in_order() -> None:
    items = [{"output": f"Answer: {i % 7}", "truth": 3, "id": str(i)} for i in range(500)]
    async with served() as client:
        results = await evaluate(client, items=items, judge="answer")
    assert [result["id"] for result in results] == [str(i) for i in range(500)]
    assert [result["value"] for result in results] == [float(i % 7 == 3) for i in range(500)]


@pytest.mark.parametrize(
    ("judge", "item", "value"),
    [
        ("choice", {"output": "So (B).", "truth": "Rome"}, 1.0),
        (
            {"name": "qa", "args": {"metric": "f1"}},
            {"output": "the Rome", "truth": "Rome now"},
            2 / 3,
        ),
        (
            {"name": "answer", "args": {"extract": "number"}},
            {"output": "6 or 7", "truth": [7]},
            1.0,
        ),
        ({"name": "answer", "args": {"tolerance": 0.1}}, {"output": "7.3", "truth": 7}, 1.0),
    ],
)  # fmt: skip
async def test_judges_and_their_arguments(judge: Any, item: dict[str, Any], value: float) -> None:
    options = {"data": {"options": ["Paris", "Rome"]}} if judge == "choice" else {}
    async with served() as client:
        [result] = await evaluate(client, judge=judge, **item, **options)
    assert result["value"] == pytest.approx(value)
    assert result["success"] == (value == 1)


async def test_messages_as_output() -> None:
    said = [
        {"role": "assistant", "content": r"Perhaps \boxed{8}", "thinking": "hm"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": r"\boxed{7}"},
    ]
    async with served() as client:
        assert (await evaluate(client, output=said, truth="7"))[0]["value"] == 1.0
        assert (await evaluate(client, output=said[:2], truth="7"))[0]["value"] == 0.0
        [none] = await evaluate(client, output=said[1:2], truth="7")
    assert (none["status"], none["value"]) == ("unscorable", None)
    assert "no assistant message" in none["error"]


@pytest.mark.parametrize("truth", [None, "", [], {}, [None]])
async def test_without_a_truth_there_is_no_score(truth: Any) -> None:
    async with served() as client:
        [result] = await evaluate(client, output="7", truth=truth, judge="answer")
    assert (result["status"], result["value"], result["success"]) == ("unscorable", None, None)
    assert "has to be" in result["error"] or "its judge compares" in result["error"]


async def test_a_loop_ends_at_the_deadline_and_what_is_scored_stays(tmp_path: Path) -> None:
    config = tmp_path / "judges.yaml"
    config.write_text("judges: {math: {name: math, args: {limit_s: 600, workers: 2}}}")
    items = [
        {"output": r"\boxed{7}", "truth": "7"},
        {"output": LOOPS, "truth": "7"},
        {"output": r"\boxed{8}", "truth": "7"},
    ]
    async with served(config=str(config)) as client:
        await evaluate(client, items=items[::2])  # starts the worker processes
        results = await evaluate(client, items=items, deadline_s=2)
        metrics = (await client.get("/metrics")).text
    assert [result["status"] for result in results] == ["scored", "deadline", "scored"]
    assert [result["value"] for result in results] == [1.0, None, 0.0]
    assert results[1]["error"] == "not scored within 2 s"
    assert 'ludus_evaluation_scores_total{judge="math",status="deadline"} 1.0' in metrics
    assert 'ludus_evaluation_requests_total{end="partial",judge="math"} 1.0' in metrics


async def test_a_comparison_that_takes_too_long_is_a_score_of_the_judge(tmp_path: Path) -> None:
    config = tmp_path / "judges.yaml"
    config.write_text("judges: {math: {name: math, args: {limit_s: 1, workers: 1}}}")
    async with served(config=str(config)) as client:
        [result] = await evaluate(client, output=LOOPS, truth="7")
    assert (result["status"], result["value"], result["parts"]["in_time"]) == ("scored", 0.0, 0.0)


async def test_failures_of_a_judge_are_never_scores() -> None:
    expected = {
        "Raises": ("failed", "the judge raised ZeroDivisionError"),
        "LosesItsSandbox": ("failed", "the sandbox is lost"),
        "Leaves": ("failed", "the judge raised SystemExit"),
        "NotANumber": ("unscorable", "the value nan"),
    }
    async with served(",".join(f"served_judges:{name}" for name in expected)) as client:
        for name, (status, told) in expected.items():
            judge = f"served_judges:{name}"
            [result] = await evaluate(client, output="7", truth="7", judge=judge)
            assert (result["status"], result["value"]) == (status, None)
            assert told in result["error"]
        assert (await client.get("/health")).json()["evaluations"] == 0


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "give `output` (one output) or `items`"),
        ({"output": "7", "items": []}, "`output` stands beside `items`"),
        ({"output": "7", "judge": "mth"}, "judge: 'mth' is not served here (served: answer, "),
        ({"output": "7", "judge": "model"}, "judge: 'model' is not served here"),
        ({"output": "7", "judge": "code"}, "judge: 'code' is not served here"),
        ({"output": "7", "judge": "os:system"}, "judge: 'os:system' is not served here"),
        (
            {"output": "7", "judge": {"name": "math", "args": {"workers": 64}}},
            "judge.args.workers: set by the operator of this service (clients may set: digits, ",
        ),
        (
            {"output": "7", "judge": {"name": "math", "args": {"memory_mb": 65536}}},
            "judge.args.memory_mb: set by the operator",
        ),
        (
            {"output": "7", "judge": {"name": "math", "args": {"dgits": 3}}},
            "judge.args.dgits: not an argument of 'math' (did you mean digits?)",
        ),
        (
            {"output": "7", "judge": {"name": "math", "args": {"digits": 99}}},
            "judge.args.digits must be a whole number",
        ),
        (
            {"output": "7", "judge": {"name": "answer", "args": {"markers": ["a" * 10_000, "b"]}}},
            "judge.args: ",
        ),
        ({"output": "7", "judge": {"nam": "math"}}, "judge.name: is required: text"),
        ({"output": "7", "judge": {"name": "math", "args": 3}}, "judge.args: must be an object, "),
        ({"output": "7", "judge": 3}, "judge: must be a plug-in (a name, or {name: ..., args: "),
        ({"output": "7", "deadline_s": 0}, "deadline_s: must be a number > 0, or null, got 0"),
        ({"output": "7", "deadline_s": 301}, "deadline_s: 301, at most 300 on this service"),
        ({"output": 7}, "output: must be text, or a list (of an object), or null, got 7"),
        ({"output": "7", "id": "i" * 257}, "id: must be text of at most 256 characters, or null"),
        ({"output": "7", "trut": "7"}, "trut: is not a field (did you mean truth?)"),
        (
            {"output": [{"role": "assistent", "content": "7"}]},
            "output.0.role: must be one of system, user, assistant, tool, got 'assistent' (did you "
            "mean assistant?)",
        ),
        ({"items": "7"}, "items: must be a list (of an object), or null, got '7'"),
        ({"items": [7]}, "items.0: must be an object, got 7"),
        ({"items": [{"truth": 7}]}, "items.0.output: is required: text, or a list (of an object)"),
        ({"items": [{"output": "7", "jugde": "math"}]}, "items.0.jugde: is not a field (known: "),
        ([7], "the body: must be an object, got [7]"),
        ({"items": [{"output": "7"}] * 9}, "items: 9 of them, at most 8 in a request"),
    ],
)  # fmt: skip
async def test_a_wrong_request_is_refused_with_its_key(body: Any, told: str) -> None:
    async with served(max_items=8) as client:
        assert told in await refusal(client, body)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"output": "a\\ud800", "truth": "b\\udfff", "judge": "answer", "id": "c"}', 200),
        ('{"output": "a", "truth": NaN, "judge": "answer"}', 200),
        ('{"output": "a", "truth": [Infinity], "judge": "qa"}', 200),
        ('{"output": "a", "truth": 1e999, "judge": "math"}', 200),
        ('{"output": "a", "deadline_s": NaN}', 422),
        ('{"output": "a", "deadline_s": 1e400}', 422),
        ('{"output": "a", "truth": ' + "[" * 500 + "]" * 500 + ', "judge": "answer"}', 200),
        ('{"output": "a", "data": ' + '{"a":' * 900 + "1" + "}" * 900 + ', "judge": "qa"}', 200),
        ('{"output": "a", "truth": ' + "[" * 100_000 + "]" * 100_000 + "}", 400),
        ('{"output": "a", "truth": ' + "9" * 100_000 + "}", 400),
        ('{"output": "a", "judge": {"name": "qa", "args": {"metric": ' + "[" * 900 + "]" * 900
         + "}}}", 422),
        ('{"output": "a", "judge": {"name": "a\\ud800"}}', 422),
        ('{"output": "a", "\\ud800": 1}', 422),
        ('{"output": "a", "id": ["\\ud800"]}', 422),
        ('{"output": ' + '{"a":' * 900 + "1" + "}" * 900 + "}", 422),
        ("{", 400),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
async def test_hostile_json(body: str, status: int) -> None:
    async with served() as client:
        headers = {"content-type": "application/json"}
        answer = await client.post("/evaluate", content=body, headers=headers)
        assert answer.status_code == status, answer.text[:500]
        if status == 200:
            value = answer.json()["results"][0]
            assert value["status"] == ("scored" if "ud800" in body else "unscorable")


async def test_an_item_above_the_limit_does_not_spoil_the_batch() -> None:
    items = [
        {"output": "7" * 200, "truth": "7"},
        {"output": "Answer: 7", "truth": "7"},
        {"output": "7", "truth": ["7"] * 60},
        {"output": "7", "truth": "7", "data": {"a": [["b" * 50], ["c" * 50]]}},
        {"output": "7", "truth": "7", "prompt": [{"role": "user", "content": "?" * 100}]},
    ]
    async with served(max_chars=100) as client:
        results = await evaluate(client, items=items, judge="answer")
    assert [result["status"] for result in results] == ["unscorable", "scored", *["unscorable"] * 3]
    assert results[0]["error"] == "the item has 201 characters, at most 100 are scored"


@pytest.mark.parametrize(
    ("judge", "item"),
    [
        ("answer", {"output": "\ufdfa" * 2_000, "truth": ["a"] * 40_000}),
        ("qa", {"output": "a " * 25_000, "truth": ["b"] * 20_000}),
        (
            "choice",
            {
                "output": "answer is " * 5_000,
                "truth": "A",
                "data": {"options": ["\ufdfa" * 1_500] * 26},
            },
        ),
    ],
)  # fmt: skip
async def test_long_inputs_cost_no_more_than_their_length(judge: str, item: Any) -> None:
    """Each took minutes where a text was normalised once for each accepted answer or option."""
    async with served(judges="answer,qa,choice") as client:
        async with asyncio.timeout(60):
            [result] = await evaluate(client, judge=judge, **item)
    assert result["status"] == "scored"


async def test_judges_with_many_arguments_are_closed(tmp_path: Path) -> None:
    """A judge in use is closed after its use, the others when they are too many."""
    config = tmp_path / "judges.yaml"
    config.write_text(
        "judges: {opens: {name: 'served_judges:Opens', args: {}, client_args: [number]}}"
    )
    Opens.open.clear()
    async with served("answer", str(config), max_judges=3) as client:

        async def ask(number: int, seconds: float = 0) -> float:
            judge = {"name": "opens", "args": {"number": number}}
            [result] = await evaluate(client, output="7", truth=seconds, judge=judge)
            value: float = result["value"]
            return value

        slow = asyncio.create_task(ask(-1, 1.0))
        await asyncio.sleep(0.1)
        assert [await ask(number) for number in range(10)] == [1.0] * 10
        assert sorted(Opens.open) == [-1, 8, 9]
        assert "ludus_evaluation_judges 3.0" in (await client.get("/metrics")).text
        assert await slow == 1.0
        assert await ask(10) == 1.0
        await asyncio.sleep(0.1)
        assert sorted(Opens.open) == [8, 9, 10]
    assert Opens.open == []


async def test_a_pattern_is_the_operators() -> None:
    """One of 300 characters takes seconds to compile, and the service waits."""
    args = {"pattern": "(?i)" + r"[\x00-\uffff]" * 20}
    async with served("format") as client:
        told = await refusal(client, {"output": "7", "judge": {"name": "format", "args": args}})
    assert told.startswith("judge.args.pattern: set by the operator")


@pytest.mark.parametrize(("tokens", "most"), [((), 2), (("a" * 32, "b" * 32), 1)])
async def test_no_more_judges_are_built_than_may_be_in_use(
    tmp_path: Path, tokens: tuple[str, ...], most: int
) -> None:
    """Each judge may have processes: many arguments at once must not start more of them."""
    config = tmp_path / "judges.yaml"
    config.write_text(
        "judges: {opens: {name: 'served_judges:Opens', args: {}, client_args: [number]}}"
    )
    Opens.open.clear()
    async with served("answer", str(config), tokens, max_judges=2) as client:
        if tokens:
            client.headers["Authorization"] = f"Bearer {tokens[0]}"

        async def ask(number: int) -> httpx.Response:
            judge = {"name": "opens", "args": {"number": number}}
            return await client.post("/evaluate", json={"output": "7", "truth": 1, "judge": judge})

        answers = await asyncio.gather(*(ask(number) for number in range(9)))
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200] * most + [429] * (9 - most)
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["error"]["type"] == "too_many_judges"
        assert len(Opens.open) == most
        assert (await ask(20)).status_code == 200


def workers_with(*arguments: str) -> set[int]:
    """The worker processes of this process with these arguments in their command."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode().split("\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == os.getpid() and set(arguments) <= set(command):
            found.add(int(folder.name))
    return found


async def test_judges_of_other_arguments_share_worker_processes(tmp_path: Path) -> None:
    config = tmp_path / "judges.yaml"
    args = "{limit_s: 7.5, workers: 2, memory_mb: 1500}"
    config.write_text(f"judges: {{math: {{name: math, args: {args}}}}}")
    workers = "ludus.judges.workers.math", "7.5", "1500"
    async with served("answer", str(config), max_judges=4) as client:

        async def ask(**own: object) -> float:
            judge = {"name": "math", "args": own}
            [result] = await evaluate(client, output="So 0.50004", truth="0.5", judge=judge)
            value: float = result["value"]
            return value

        assert await asyncio.gather(*(ask(digits=digits) for digits in (2, 3, 5))) == [1, 1, 0]
        first = workers_with(*workers)
        assert 1 <= len(first) <= 2
        # More sets of arguments than are kept: closing a judge leaves the workers of the others.
        assert [await ask(digits=digits) for digits in range(2, 8)] == [1, 1, 1, 0, 0, 0]
        assert [await ask(extract=extract) for extract in ("auto", "boxed")] == [0, 0]
        assert workers_with(*workers) == first
    assert not workers_with(*workers)


@pytest.mark.slow
async def test_a_batch_of_a_client_does_not_hold_up_another(tmp_path: Path) -> None:
    config = tmp_path / "judges.yaml"
    config.write_text("judges: {waits: {name: 'served_judges:Waits', concurrent: 2}}")
    async with served("answer", str(config), tokens=("a" * 16, "b" * 16)) as client:
        many = {"items": [{"output": "7", "truth": 0.2}] * 200, "judge": "waits", "deadline_s": 4}
        headers = [{"authorization": f"Bearer {token * 16}"} for token in "ab"]
        batch = asyncio.create_task(client.post("/evaluate", json=many, headers=headers[0]))
        await asyncio.sleep(0.5)
        body = {"output": "7", "truth": 0, "judge": "waits"}
        answer = await client.post("/evaluate", json=body, headers=headers[1])
        assert answer.json()["results"][0]["value"] == 1.0
        assert not batch.done()
        statuses = [result["status"] for result in (await batch).json()["results"]]
    assert {"scored", "deadline"} == set(statuses)
    assert statuses == sorted(statuses, reverse=True)  # in their order


async def test_a_token_is_needed_and_has_a_share() -> None:
    items = [{"output": "7" * 1_000, "truth": "1"}] * 10
    async with served(
        "served_judges:Waits", tokens=("a" * 16, "b" * 16), max_pending_chars=24_000
    ) as c:
        assert (await c.post("/evaluate", json={"output": "7"})).status_code == 401
        assert (await c.get("/health")).status_code == 200

        async def post(token: str) -> int:
            headers = {"authorization": f"Bearer {token * 16}"}
            body = {"items": items, "judge": "served_judges:Waits", "deadline_s": 2}
            answer = await c.post("/evaluate", json=body, headers=headers)
            return answer.status_code

        assert sorted(await asyncio.gather(post("a"), post("a"), post("b"))) == [200, 200, 429]
        assert await post("a") == 200


async def test_the_configured_judges(tmp_path: Path) -> None:
    config = tmp_path / "judges.yaml"
    config.write_text(
        "judges:\n"
        "  both: {name: sum, args: {parts: {right: answer, form: {name: format, args: {thinking: "
        "forbidden}}}}}\n"
        "  exact: {name: answer, args: {tolerance: 0}, client_args: [extract]}\n"
    )
    async with served("qa", str(config)) as client:
        names = {one["name"]: one for one in (await client.get("/judges")).json()}
        assert list(names) == ["both", "exact", "qa"]
        assert list(names["exact"]["args"]["properties"]) == ["extract"]
        assert names["both"]["args"]["properties"] == {}
        [result] = await evaluate(client, output="7", truth=7, judge="both")
        assert (result["value"], result["parts"]["right/correct"]) == (2.0, 1.0)
        exact = {"name": "exact", "args": {"tolerance": 0.5}}
        assert "judge.args.tolerance: set by the operator" in await refusal(
            client, {"output": "7", "judge": exact}
        )
        nested = {"name": "both", "args": {"parts": {"m": {"name": "model", "args": {}}}}}
        assert "(clients may set: none)" in await refusal(client, {"output": "7", "judge": nested})
        assert "not served here" in await refusal(client, {"output": "7", "judge": "answer"})


@pytest.mark.parametrize(
    ("names", "text", "told"),
    [
        ("answr", None, "--judges: 'answr' is not a known judge (did you mean answer?)"),
        ("model", None, "--judges: model needs the argument 'base_url': give it in a file"),
        ("", None, "--judges: name at least one judge"),
        ("answer", "judges: {a: {nme: answer}}", "judges.a.name: Field required"),
        ("answer", "judges: {a: {name: answr}}", "judges.a.name: 'answr' is not a known judge"),
        ("answer", "judges: {a: {name: answer, args: {tolerance: 2}}}", "judges.a.args.tolerance"),
        (
            "answer",
            "judges: {a: {name: answer, client_args: [extrat]}}",
            "judges.a.client_args: 'extrat' is no argument of 'answer' (did you mean extract?)",
        ),
        ("answer", "jugdes: {}", "judges: Field required"),
        ("answer", "judges: [", "judges.yaml"),
    ],
)  # fmt: skip
async def test_a_wrong_configuration_is_refused(
    names: str, text: str | None, told: str, tmp_path: Path
) -> None:
    config = tmp_path / "judges.yaml"
    config.write_text(text or "")
    with pytest.raises(ConfigError) as caught:
        await check_judges(served_judges(names, str(config) if text else None))
    assert told in str(caught.value)


async def test_the_description_has_examples_that_work() -> None:
    async with served() as client:
        described = (await client.get("/openapi.json")).json()
        content = described["paths"]["/evaluate"]["post"]["requestBody"]["content"]
        examples = content["application/json"]["examples"]
        assert len(examples) == 3
        for example in examples.values():
            results = await evaluate(client, **example["value"])
            assert results[0]["value"] == 1.0
        assert "swagger" in (await client.get("/docs")).text
    assert json.dumps(described)
