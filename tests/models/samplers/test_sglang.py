"""SGLang sampler: its protocol with answers made here."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_helpers import tiny, tokenizer_of

from ludus.core.errors import ConfigError, ContextOverflow, LudusError, SamplerError, TrainingError
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.models.samplers.served import ServedSampler
from ludus.models.samplers.server_process import require_package
from ludus.models.samplers.sglang import SglangSampler, SglangServer, add_older_names
from ludus.models.samplers.vllm import VllmSampler
from ludus.models.samplers.weights import write_model

CONTEXT = 64
PROMPT = [5, 6, 7]
UPDATE = {"type": "abort", "message": "Aborted", "status_code": None}
STOP, LENGTH = {"type": "stop", "matched": 8}, {"type": "length", "length": 4}


def answer(
    ids: list[int], end: dict[str, Any], version: str = "3", logprob: float = -1.0
) -> dict[str, Any]:
    rows = [[logprob, id, None] for id in ids]
    facts = {"finish_reason": end, "weight_version": version, "output_token_logprobs": rows}
    return {"text": "", "meta_info": facts}


class Fake:
    """A server that gives the answers listed, one a request of a turn."""

    alive = True

    def __init__(self, *answers: Any) -> None:
        self._answers = iter(answers)
        self.asked: list[dict[str, Any]] = []
        self.aborted: list[str] = []

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self._reply), base_url="http://s")

    async def _reply(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        if request.url.path == "/abort_request":
            self.aborted.append(body["rid"])
            return httpx.Response(200)
        if request.url.path != "/generate":
            return httpx.Response(200)
        self.asked.append(body)
        reply = next(self._answers)
        if reply == "never":
            await asyncio.sleep(600)
        if isinstance(reply, httpx.Response):
            return reply
        return httpx.Response(200, json=reply)

    def stop(self) -> None:
        self.alive = False

    def explain(self, message: str) -> str:
        return message


@pytest.fixture(autouse=True)
def any_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every interpreter has the engine, but in the test of that."""
    monkeypatch.setattr("ludus.models.samplers.served.require_package", lambda *_: None)


def sampler(folder: Path, server: Fake, ids: Any = range(61)) -> SglangSampler:
    made = SglangSampler(tiny(), tokenizer_of(list(ids)), folder, CONTEXT)
    made.server = server
    made.open("a")
    return made


async def turn(
    folder: Path, server: Fake, params: SamplingParams | None = None, ids: Any = range(61)
) -> Completion:
    made = sampler(folder, server, ids)
    return await made.sample(PROMPT, params or SamplingParams(4), session="a")


async def test_a_turn_goes_on_after_an_update(tmp_path: Path) -> None:
    server = Fake(
        answer([10, 11], UPDATE, "3"),
        {"meta_info": {"finish_reason": UPDATE, "weight_version": "3"}},  # before its first token
        answer([12], UPDATE, "4"),
        answer([13], LENGTH, "5"),
    )
    done = await turn(tmp_path, server)
    assert done.token_ids == [10, 11, 12, 13]
    assert (done.policy_version, done.version_runs) == (3, [(3, 2), (4, 1), (5, 1)])
    assert done.finish_reason == "length"
    assert [body["input_ids"] for body in server.asked] == [
        PROMPT,
        [*PROMPT, 10, 11],
        [*PROMPT, 10, 11],
        [*PROMPT, 10, 11, 12],
    ]
    lengths = [body["sampling_params"]["max_new_tokens"] for body in server.asked]
    assert lengths == [4, 2, 2, 1]


async def test_only_ids_asked_for_end_a_turn(tmp_path: Path) -> None:
    """SGLang also stops at the model's own end, which is an ordinary id here."""
    server = Fake(answer([10, 8], STOP), answer([11, 9], STOP))
    done = await turn(tmp_path, server, SamplingParams(9, stop_token_ids=(9,)))
    assert (done.token_ids, done.finish_reason) == ([10, 8, 11, 9], "stop")
    assert [body["sampling_params"]["ignore_eos"] for body in server.asked] == [False, False]
    server = Fake(answer([8], LENGTH))
    assert (await turn(tmp_path, server, SamplingParams(1))).finish_reason == "length"
    assert server.asked[0]["sampling_params"]["ignore_eos"] is True


async def test_a_stop_string_may_begin_before_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Fake(answer([10, 11], UPDATE, "3"), answer([12, 13], LENGTH, "4"))
    made = sampler(tmp_path, server)
    letters = {10: "a", 11: "b", 12: "c", 13: "d"}
    decode = lambda ids: "".join(letters[id] for id in ids)  # noqa: E731
    monkeypatch.setattr(made, "_tokenizer", type("T", (), {"decode": staticmethod(decode)}))
    done = await made.sample(PROMPT, SamplingParams(4, stop=("bc",)), session="a")
    assert (done.token_ids, done.finish_reason) == ([10, 11, 12], "stop")
    assert done.version_runs == [(3, 2), (4, 1)]
    assert server.asked[0]["sampling_params"]["stop"] == ["bc"]


@pytest.mark.parametrize(("ids", "never"), [(range(59), ["59", "60"]), (range(61), None)], ids=str)
async def test_ids_without_a_token_are_not_sampled(
    ids: Any, never: list[str] | None, tmp_path: Path
) -> None:
    server = Fake(answer([10], LENGTH))
    await turn(tmp_path, server, SamplingParams(1), ids)
    expected = None if never is None else dict.fromkeys(never, -1e9)
    assert server.asked[0]["sampling_params"].get("logit_bias") == expected


@pytest.mark.parametrize(
    ("reply", "error", "told"),
    [
        (httpx.Response(200, text="<html>"), SamplerError, "answered a turn with '<html>'"),
        ({"text": "no facts"}, SamplerError, "answered a turn with .*no facts"),
        ([1], SamplerError, r"answered a turn with '\[1\]'"),
        (answer([10**6] * 4, LENGTH), SamplerError, "ids that the model does not have"),
        (answer(["a"], UPDATE), SamplerError, "ids that the model does not have"),  # type: ignore[list-item]
        (answer([1, 2], LENGTH), SamplerError, "ended a turn after 2 of 4 tokens"),
        (answer([1] * 5, LENGTH), SamplerError, "at most 4 tokens with 5"),
        (
            httpx.Response(200, text=json.dumps(answer([1] * 4, LENGTH, logprob=-1e999))),
            SamplerError,
            "not finite",
        ),
        (answer([1] * 4, LENGTH, "default"), LudusError, "labels an answer with .*'default'"),
        (
            answer([], {"type": "abort", "message": "out of memory", "status_code": 500}),
            SamplerError,
            "aborted a turn: out of memory",
        ),
        (
            httpx.Response(400, json={"error": {"message": "no such id"}}),
            LudusError,
            "refused a turn: no such id",
        ),
        (httpx.Response(500, text="a fault"), SamplerError, "failed during a turn: a fault"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_answers_that_cannot_be_are_refused(
    reply: Any, error: type[LudusError], told: str, tmp_path: Path
) -> None:
    last = answer([1] * 4, LENGTH)  # after an abort, the rest of the turn
    with pytest.raises(error, match=told):
        await turn(tmp_path, Fake(reply, last))


async def test_a_server_that_aborts_for_ever(tmp_path: Path) -> None:
    with pytest.raises(SamplerError, match=r"after 0 of 4 tokens \(abort\)"):
        await turn(tmp_path, Fake(*[answer([], UPDATE)] * 200))


async def test_a_cancelled_turn_is_aborted(tmp_path: Path) -> None:
    server = Fake("never")
    made = sampler(tmp_path, server)
    running = asyncio.create_task(made.sample(PROMPT, SamplingParams(4), session="a"))
    while not server.asked:
        await asyncio.sleep(0)
    made.close("a")
    with pytest.raises(asyncio.CancelledError):
        await running
    while not server.aborted:
        await asyncio.sleep(0)
    assert server.aborted == [server.asked[0]["rid"]]


@pytest.mark.parametrize(
    ("params", "error", "told"),
    [
        (SamplingParams(4, top_p=0.9), ConfigError, "top_p is 0.9: SGLang's log-probabilities"),
        (SamplingParams(4, top_k=5), ConfigError, "top_k is 5: .* set it to 0"),
        (SamplingParams(4, grammar="x"), ConfigError, "does not constrain"),
        (SamplingParams(CONTEXT), ContextOverflow, "exceed"),
    ],
    ids=str,
)
async def test_turns_that_sglang_cannot_sample_are_refused(
    params: SamplingParams, error: type[Exception], told: str, tmp_path: Path
) -> None:
    server = Fake()
    with pytest.raises(error, match=told):
        await turn(tmp_path, server, params)
    assert not server.asked


def test_weights_of_another_model_are_refused_before_sglang_is_asked(tmp_path: Path) -> None:
    made = sampler(tmp_path, Fake())
    made._write_first_model()
    with torch.no_grad():
        made._model.resize_token_embeddings(70)
    with pytest.raises(TrainingError, match=r"refuses weights 2: lm_head\.weight is"):
        made.publish(2)
    assert made.policy_version == 0


def test_the_folder_is_readable_with_transformers_4(tmp_path: Path) -> None:
    write_model(tiny(), tmp_path)
    tokenizer_of(range(61)).save_pretrained(tmp_path)
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    add_older_names(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == rope["rope_theta"]
    assert (config["torch_dtype"], "rope_scaling" in config) == ("float32", False)
    tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_cache_below_one_conversation_is_refused() -> None:
    assert "fewer than one conversation of model.context_length = 64" in refusal(cache_gib=1e-6)


def test_deterministic_mode_is_refused() -> None:
    assert "not possible with the sglang sampler" in refusal(deterministic=True)


def test_a_python_without_sglang_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludus.models.samplers.served.require_package", require_package)
    assert "has no SGLang; `make sglang`" in refusal(python=sys.executable)
    assert "No such file" in refusal(python=str(tmp_path / "python"))


def refusal(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        SglangSampler(tiny(), tokenizer_of(range(61)), Path("unused"), CONTEXT, **options)
    return str(caught.value)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program in the place of the interpreter."""
    path = tmp_path / "python"
    path.touch(0o755)
    return path


@pytest.mark.parametrize(
    ("script", "deadline_s", "told"),
    [
        ("echo ImportError: torch; exit 3", 60, r"SGLang exited during startup \(code 3\)"),
        ("echo ImportError: torch; exit 3", 60, "ImportError: torch"),
        ("sleep 600", 0.2, r"did not respond within sampler\.args\.startup_deadline_s = 0\.2 s"),
    ],
    ids=["exits", "its log", "hangs"],
)
def test_a_server_that_does_not_start(
    script: str, deadline_s: float, told: str, program: Path, tmp_path: Path
) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n")
    server = SglangServer(str(program), [], {}, tmp_path / "log")
    with pytest.raises(LudusError, match=told):
        server.wait_until_up(deadline_s, threading.Event())
    assert not server.alive


def test_progress_bars_are_no_part_of_an_error(program: Path, tmp_path: Path) -> None:
    bars = ["Loading shards: 100% Completed | 1/1 [00:00, 9it/s]", "Load:  50%|##   | 1/2", ""]
    program.write_text("#!/bin/sh\nexit 3\n")
    server = SglangServer(str(program), [], {}, tmp_path / "log")
    server.stop()
    server.log.write_text("\n".join(["out of memory", *bars * 9]))
    assert server.explain("died").splitlines()[1:] == ["    out of memory"]


@pytest.mark.parametrize("engine", [SglangSampler, VllmSampler])
async def test_a_server_that_dies_at_its_probe(
    engine: type[ServedSampler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log is in the error: the first passes of a model are where memory ends."""
    process = engine.process

    class Dying(Fake):
        engine = process.engine

        def __init__(self, *_: Any) -> None:
            super().__init__()

        def wait_until_up(self, *_: Any) -> None:
            pass

        def post(self, *_: Any) -> None:
            raise httpx.ReadError("gone")

    monkeypatch.setattr(engine, "process", Dying)
    made = engine(tiny(), tokenizer_of(range(61)), tmp_path, CONTEXT)  # type: ignore[call-arg, arg-type]
    made.open("a")
    with pytest.raises(LudusError, match=f"{made.engine} died after its startup"):
        await made.sample(PROMPT, SamplingParams(4), session="a")
    assert made.server is None


@pytest.mark.parametrize("engine", [SglangSampler, VllmSampler])
async def test_a_probe_answered_with_nonsense(
    engine: type[ServedSampler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(tiny(), tokenizer_of(range(61)), tmp_path, CONTEXT)  # type: ignore[call-arg, arg-type]
    made._probe = [0.0] * 31
    for nonsense in ({}, {"meta_info": None}, [], {"prompt_logprobs": [None, {}]}):
        server = type("Server", (), {"post": lambda *_, given=nonsense: given})()
        with pytest.raises(LudusError, match="did not answer the probe"):
            made._require_probe(server)
