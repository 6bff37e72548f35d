"""The sandbox service: the package sandbox-fusion as its client, and ludus' own."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import sandbox_fusion
from raw_server import CLOSE, RawServer, answer
from service_world import command

from ludus.core.errors import ConfigError, ToolError
from ludus.core.types import Spec, ToolCall
from ludus.sandbox import SANDBOXES
from ludus.sandbox.base import Code, Limits, RunStatus
from ludus.tools.toolbox import Toolbox


@pytest.fixture(scope="module")
def url(layers: None) -> Iterator[str]:
    with command("packages=[]", verb="sandbox") as running:
        yield running.url


def fused(url: str, **fields: object) -> sandbox_fusion.RunCodeResponse:
    request = sandbox_fusion.RunCodeRequest(**fields)
    return sandbox_fusion.run_code(request, endpoint=url, max_attempts=1, client_timeout=60)


def test_sandbox_fusions_client_runs_code(url: str) -> None:
    code = "import sys; print(sys.stdin.read(), open('a').read()); open('b', 'w').write('y')"
    code += "; import os; assert not os.path.exists('null')"
    files = {"a": base64.encodebytes(b"x").decode(), "null": None}  # encodebytes ends lines
    found = fused(
        url, code=code, language="python", stdin="in", files=files, fetch_files=["b", "none"]
    )
    assert found.status == sandbox_fusion.RunStatus.Success
    assert found.run_result is not None
    assert (found.run_result.stdout, found.run_result.return_code) == ("in x\n", 0)
    assert {name: base64.b64decode(data) for name, data in found.files.items()} == {"b": b"y"}


@pytest.mark.parametrize(
    ("language", "code", "summary"),
    [
        ("python", "raise SystemExit(3)", "run failed"),
        ("python", "while True: pass", "run timeout"),
        ("python", "while True: print('x' * 9999)", "run failed"),
        ("cpp", "int main( {", "compile failed"),
        ("bash", "echo $((6 * 7))", "success"),
    ],
)
def test_sandbox_fusions_summary(url: str, language: str, code: str, summary: str) -> None:
    found = fused(url, code=code, language=language, run_timeout=1)
    mapping = sandbox_fusion.SummaryMapping(
        Success="success",
        Failed="failed",
        CompileFailed="compile failed",
        CompileTimeout="compile timeout",
        RunFailed="run failed",
        RunTimeout="run timeout",
    )
    assert sandbox_fusion.summary_run_code_result(found, mapping) == summary


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"language": "cobol"}, "there is no language 'cobol'"),
        ({"files": {"../x": ""}}, "files: '../x' is not a path within the working folder"),
        ({"files": {"/etc/x": ""}}, "files: '/etc/x' is not a path within the working folder"),
        ({"files": {"\ud800": ""}}, "files: '\\ud800' is not a path"),
        ({"files": {"x": "?"}}, "files.x: it is not base64: send the file's bytes encoded"),
        ({"files": {"\ud800": "?"}}, "files.?: it is not base64"),
        ({"files": {"\ud800": 3}}, ": must be text, or null, got 3"),
        ({"files": ["x"]}, "files: must be an object, at most 1000 of them, got "),
        ({"files": {"a": "", "a/b": ""}}, "files.a/b: File exists: the files of a call need"),
        ({"files": {"x" * 256: ""}}, "File name too long: the files of a call need"),
        (
            {"files": {str(i): "" for i in range(1001)}},
            "files: must be an object, at most 1000 of them, got ",
        ),
        ({"fetch_files": ["/tmp/x"]}, "fetch_files: '/tmp/x' is not a path"),
        ({"run_timeout": 1e9}, "run_timeout: at most 120 on this service"),
        ({"memory_limit_MB": 10**6}, "memory_limit_MB: at most 4096"),
        ({"code": 3}, "code: "),
    ],
)
def test_a_wrong_request_is_told(url: str, fields: dict[str, object], told: str) -> None:
    body = {"code": "", "language": "python", **fields}
    kind = {"content-type": "application/json"}
    answer = httpx.post(f"{url}/run_code", content=json.dumps(body), headers=kind, timeout=30)
    assert answer.status_code == 422
    assert told in answer.json()["error"]["message"]


def jupyter(url: str, cells: list[str], **fields: object) -> sandbox_fusion.RunJupyterResponse:
    request = sandbox_fusion.RunJupyterRequest(cells=cells, **fields)
    return sandbox_fusion.run_jupyter(request, endpoint=url, max_attempts=1, client_timeout=60)


def test_sandbox_fusions_client_runs_cells(url: str) -> None:
    cells = ["a = open('f').read()", "a", "a;", "import sys; print(a); sys.stderr.write('e');"]
    cells += ["def f():\n    1 / 0\nf()", "int main(", "exit()", "open('o', 'w').write(a) and None"]
    found = jupyter(
        url, cells, files={"f": base64.b64encode(b"x").decode()}, fetch_files=["o", "none"]
    )
    assert found.status == sandbox_fusion.RunStatus.Success
    assert [cell.display for cell in found.cells] == [[], [{"text/plain": "'x'"}], *[[]] * 6]
    assert (found.cells[3].stdout, found.cells[3].stderr) == ("x\n", "e")
    assert [e["ename"] for cell in found.cells for e in cell.error] == [
        "ZeroDivisionError", "SyntaxError", "SystemExit",
    ]  # fmt: skip
    assert found.cells[4].error[0]["evalue"] == "division by zero"
    told = "".join(found.cells[4].error[0]["traceback"])
    assert told.startswith('Traceback (most recent call last):\n  File "<cell 5>", line 3, in <mod')
    assert 'File "<cell 5>", line 2, in f\n    1 / 0\n' in told
    assert told.endswith("ZeroDivisionError: division by zero\n")
    assert {name: base64.b64decode(data) for name, data in found.files.items()} == {"o": b"x"}
    fresh = jupyter(url, ["a"])
    assert [e["ename"] for e in fresh.cells[0].error] == ["NameError"]


@pytest.mark.parametrize(
    ("cells", "fields", "end", "num_cells"),
    [
        (["1", "while True: pass", "2"], {"total_timeout": 1}, "TimeLimitExceeded", 2),
        (["while True: pass"], {"cell_timeout": 0.5}, "TimeLimitExceeded", 1),
        (["import os; os._exit(3)", "1"], {}, "Finished", 1),
        (["print('x' * 600_000)"] * 3, {}, "Finished", 2),
        (["'x' * 2_000_000", "1"], {}, "Finished", 1),
    ],
)
def test_cells_that_end_the_interpreter(
    url: str, cells: list[str], fields: dict[str, object], end: str, num_cells: int
) -> None:
    found = jupyter(url, cells, **fields)
    assert found.driver is not None
    assert (found.status.value, found.driver.status.value) == ("Failed", end)
    assert len(found.cells) == num_cells
    assert httpx.get(f"{url}/health").json()["runs"] == 0


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"cells": "a"}, "cells: must be a list (of text)"),
        ({"cells": ["a"], "total_timeout": 1e9}, "total_timeout: at most 120 on this service"),
        ({"cells": ["a"], "files": {"x": "?"}}, "files.x: it is not base64"),
        ({"cells": ["a"], "files": {"../x": ""}}, "files: '../x' is not a path"),
        ({"cells": ["a"], "kernel": "ir"}, "kernel: must be python3, got 'ir'"),
    ],
)
def test_a_wrong_request_for_cells_is_told(url: str, fields: dict[str, object], told: str) -> None:
    answer = httpx.post(f"{url}/run_jupyter", json=fields, timeout=30)
    assert answer.status_code == 422
    assert told in answer.json()["error"]["message"]


def test_health_ping_and_metrics(url: str) -> None:
    assert httpx.get(f"{url}/v1/ping").json() == "pong"
    assert httpx.get(f"{url}/health").json()["runs"] == 0
    assert "ludus_http_seconds" in httpx.get(f"{url}/metrics").text


async def test_the_remote_sandbox_gives_the_jails_results(url: str) -> None:
    async with SANDBOXES.build(Spec(name="remote", args={"url": url}), "sandbox") as remote:
        code = Code("print(input()); open('o', 'wb').write(b'\\xff')", stdin=b"hi", fetch=["o"])
        result = await remote.run(code)
        assert (result.status, result.stdout, result.files) == ("finished", "hi\n", {"o": b"\xff"})
        spun = await remote.run(Code("while True: pass"), Limits(run_s=0.5))
        assert spun.status == RunStatus.TIME_LIMIT
        big = await remote.run(Code("x = bytearray(10**9)"), Limits(memory_mb=100))
        assert big.status == RunStatus.MEMORY_LIMIT
        flood = await remote.run(Code("print('x' * 9999)"), Limits(output_bytes=100))
        assert (flood.status, len(flood.stdout)) == (RunStatus.OUTPUT_LIMIT, 100)
        half = await remote.run(Code("print('\ud800')"))
        assert half.stdout == "?\n"
        wrong = await remote.run(Code("int main( {", "c"))
        assert wrong.compile_failed
        assert "main.c" in wrong.stderr
        with pytest.raises(ConfigError, match="there is no language"):
            await remote.run(Code("", "cobol"))
        with pytest.raises(ConfigError, match="remote has no sessions"):
            await remote.run(Code(""), session="e")


async def test_a_lost_server_is_an_error_of_the_tool() -> None:
    args = {"url": "http://127.0.0.1:1", "deadline_s": 0.1}
    remote = SANDBOXES.build(Spec(name="remote", args=args), "sandbox")
    with pytest.raises(ToolError, match=r"sandbox http://127.0.0.1:1"):
        await remote.run(Code(""), Limits(run_s=0.1, compile_s=0.1))
    await remote.close()


def python_on(url: str, **args: Any) -> Spec:
    sandbox = {"name": "remote", "args": {"url": url, "deadline_s": 0.1}}
    return Spec(name="python", args={"sandbox": sandbox, **args})


async def test_the_python_tool_refuses_a_server_that_does_not_answer_at_its_start(url: str) -> None:
    with pytest.raises(
        ToolError, match=r"tools\.0: sandbox http://127\.0\.0\.1:1/run_code.*serve sandbox"
    ):
        await Toolbox.open([python_on("http://127.0.0.1:1")])
    with pytest.raises(ConfigError, match=rf"sandbox {url}/nowhere/run_code: answered 404"):
        await Toolbox.open([python_on(f"{url}/nowhere")])
    async with await Toolbox.open(
        [Spec(name="python", args={"sandbox": {"name": "remote", "args": {"url": url}}})]
    ) as box:
        (result,) = await box.call([ToolCall(name="python", arguments={"code": "print(2)"})], "e")
    assert result.content == "2"


async def test_a_stateful_tool_refuses_a_sandbox_without_sessions() -> None:
    with pytest.raises(ConfigError, match=r"tools\.0\S*: the sandbox 'remote' keeps no"):
        await Toolbox.open([python_on("http://127.0.0.1:1", stateful=True)])


GOOD = {"status": "Success", "run_result": {"status": "Finished", "stdout": "2\n"}}
BROKEN = {"status": "SandboxError", "message": "no worker"}


async def test_a_server_that_fails_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with RawServer() as server:
        server.script = [answer({}, 500), answer(BROKEN), CLOSE, answer({}, 503), answer(GOOD)]
        remote = SANDBOXES.build(Spec(name="remote", args={"url": server.url}), "sandbox")
        assert (await remote.run(Code(""))).stdout == "2\n"
        assert len(server.bodies) == 5
        server.script = [answer(BROKEN)]
        monkeypatch.setattr(remote, "_deadline_s", 0.3)
        with pytest.raises(ToolError, match=r"sandbox .*/run_code gave no answer .*no worker"):
            await remote.run(Code(""), Limits(run_s=0.1, compile_s=0.1))
        await remote.close()


async def test_calls_wait_while_the_server_is_down() -> None:
    async with RawServer() as server:
        server.script = [CLOSE]
        args = {"url": server.url, "deadline_s": 1.5}
        remote = SANDBOXES.build(Spec(name="remote", args=args), "sandbox")
        calls = [remote.run(Code(""), Limits(run_s=0.1, compile_s=0.1)) for _ in range(20)]
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert all("after failures in a row" in str(error) for error in done), done
        assert len(server.bodies) == 20  # one each, then the breaker is open for 2 s
        await remote.close()


NO_BASE64 = b'{"status": "Success", "run_result": {"status": "Finished"}, "files": {"o": "a"}}'


@pytest.mark.parametrize(
    "rubbish", [b"", b"[]", b'{"status": "Success"}', b"\xff", b"[" * 99999, NO_BASE64]
)
async def test_rubbish_is_an_error_of_the_tool(rubbish: bytes) -> None:
    async with RawServer() as server:
        server.script = [answer(rubbish)]
        spec = Spec(name="remote", args={"url": server.url, "deadline_s": 5})
        remote = SANDBOXES.build(spec, "sandbox")
        with pytest.raises(ToolError, match="sandbox"):
            await remote.run(Code(""), Limits(run_s=0.1, compile_s=0.1))
        await remote.close()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"url": "nowhere"}, "must have the form http"),
        ({"url": "http://t:port"}, "is not a URL: Invalid port"),
        ({"url": "http://"}, "must have the form http"),
        ({"url": "http://u:p@t"}, "a URL with a password"),
        ({"url": "http://t", "token_env": "NO_"}, "not set"),
        ({"url": "http://t", "token_env": "WRONG"}, "WRONG must be printable ASCII"),
    ],
)
def test_wrong_arguments_are_told(
    args: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WRONG", "schlüssel")
    with pytest.raises(ConfigError, match=told):
        SANDBOXES.build(Spec(name="remote", args=args), "sandbox")
