"""The agent `command` with real programs: variables, ends, limits, outcomes, what is left."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from command_world import CALL, eventually, living, made, play, play_all, python
from pydantic import ValidationError
from rollout_world import World

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError
from ludus.core.types import Message, Score, Spec, Status, Task
from ludus.rollout.command.base import filled
from ludus.rollout.workflow import Agent
from ludus.train.batches.samples import rows

TASK = Task(id="q", prompt=[Message(role="user", content="red ?")], answer="blue", data={"n": 3})


async def test_a_program_plays_an_episode(world: World) -> None:
    code = "said = call(sys.stdin.read())\noutcome(reward=0.5, success=said == 'blue',"
    code += " scores={'form': 1}, metrics={'n': 2}, explanation=said)"
    played = await play(world, python(code), task=TASK)
    assert (played.status, played.reward, played.error) == (Status.COMPLETED, 0.5, None)
    assert played.metrics["success"] == 1.0
    assert (played.scores, played.metrics["n"]) == ({"form": 1.0}, 2.0)
    assert len(rows(played, 1.0)) == 1


async def test_variables_point_sdks_to_the_gateway(world: World) -> None:
    code = """
found = {name: os.environ[name] for name in os.environ if name.startswith(("OPENAI", "ANTHROPIC"))}
task = json.load(open(os.environ["LUDUS_TASK"]))
outcome(reward=1, explanation=json.dumps([found, task, sys.argv[1:], os.environ["OWN"], os.getcwd(),
                                          os.environ["NO_PROXY"], os.listdir()]))
call("red")
"""
    args = python(code, variables={"OWN": "{model}!"})
    args["command"] += ["{prompt}", "{task}", "{base_url}", "{other} {x", "$HOME"]
    played = await play(world, args, task=TASK)
    found, task, argv, own, folder, no_proxy, files = json.loads(played.explanation)
    url, key = found["OPENAI_BASE_URL"], found["OPENAI_API_KEY"]
    assert url.endswith("/v1")
    assert found == {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_BASE": url,
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": "policy",
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_AUTH_TOKEN": key,
        "ANTHROPIC_MODEL": "policy",
    }
    assert argv[0] == "red ?"
    assert argv[2:] == [url, "{other} {x", "$HOME"]
    assert own == "policy!"
    assert "127.0.0.1" in no_proxy.split(",")
    assert files == []
    assert (task["id"], task["data"]) == ("q", {"n": 3})
    assert "answer" not in task  # the model may be able to read files
    assert not Path(folder).exists()


def test_placeholders_are_replaced_once() -> None:
    assert filled("{prompt} {x}", {"prompt": "{model}", "model": "m"}) == "{model} {x}"


async def test_the_answer_on_demand(world: World) -> None:
    code = "call('red')\noutcome(reward=1, explanation=json.load(open(os.environ['LUDUS_TASK']))"
    played = await play(world, python(f"{code}['answer'])", answer=True), task=TASK)
    assert played.explanation == "blue"


async def test_the_prompt_on_standard_input_and_in_the_command(world: World) -> None:
    args = python("call('red')\noutcome(reward=1, explanation=sys.stdin.read() + sys.argv[1])")
    args["command"].append("/{prompt}")
    assert (await play(world, args, task=TASK)).explanation == "/red ?"
    both = await play(world, {**args, "stdin": True}, task=TASK)
    assert both.explanation == "red ?/red ?"


async def test_a_folder_is_copied_for_each_episode(world: World, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/agent.sh").write_text("#!/bin/sh\ncat deep/data > copy && exec ./deep/x\n")
    (tmp_path / "deep/data").write_text("d")
    (tmp_path / "deep/x").write_text(f"#!{sys.executable}\n{CALL}\ncall('red')\noutcome(reward=1)")
    for name in ("agent.sh", "x"):
        (tmp_path / "deep" / name).chmod(0o755)
    played = await play(world, {"command": ["./deep/agent.sh"], "folder": tmp_path})
    assert (played.reward, played.error) == (1.0, None)
    assert not (tmp_path / "copy").exists()
    assert not (tmp_path / "outcome.json").exists()


async def test_a_script_of_the_folder_where_ludus_was_started(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.py").write_text(f"{CALL}\ncall('red')\noutcome(reward=1)")
    monkeypatch.chdir(tmp_path)
    assert (await play(world, {"command": [sys.executable, "agent.py"]})).reward == 1.0


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_a_shell_script_with_curl(world: World) -> None:
    script = """
message="{\\"role\\": \\"user\\", \\"content\\": \\"$(cat)\\"}"
body="{\\"model\\": \\"$OPENAI_MODEL\\", \\"messages\\": [$message]}"
curl -sSf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \\
     -H "Content-Type: application/json" -d "$body" > reply
grep -q '"content": *"blue"' reply && echo '{"reward": 1}' > outcome.json
"""
    played = await play(world, {"command": ["bash", "-c", script]}, task=TASK)
    assert (played.reward, played.error) == (1.0, None)


CLIENT = """
import json, os, openai
with openai.OpenAI() as client:
    messages = [{"role": "user", "content": "red ?"}]
    for _ in range(2):
        reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
        messages += [reply.choices[0].message.model_dump(exclude_none=True),
                     {"role": "user", "content": "and now ?"}]
json.dump({"reward": 1}, open("outcome.json", "w"))
"""


async def test_openais_client(world: World) -> None:
    played = await play(world, {"command": [sys.executable, "-c", CLIENT]})
    assert (played.reward, played.num_turns, len(rows(played, 1.0))) == (1.0, 2, 1)


class Says:
    async def __call__(self, task, trajectory) -> Score:
        return Score(value=0.75)

    async def close(self) -> None: ...


async def test_without_an_outcome_the_judge_scores(world: World) -> None:
    assert (await play(world, python("call('red')"), judge=Says())).reward == 0.75
    hacks = python("call('red')\noutcome(reward=100)", outcome=False)
    assert (await play(world, hacks, judge=Says())).reward == 0.75


FLOOD = "call('red')\nfor _ in range(1000): sys.stdout.write('x' * 100_000)"
HANGS = "call('red')\nimport time; time.sleep(600)"


@pytest.mark.parametrize(
    ("code", "args", "status", "error"),
    [
        ("call('red')\nprint('on it')\nsys.exit('no such file')", {}, Status.ERROR_ENV,
         "the command ended with exit code 1:\nno such file"),
        ("call('red')\nraise ValueError('x')", {}, Status.ERROR_ENV, "ValueError: x"),
        ("call('red')\nprint('told here')\nsys.exit(3)", {}, Status.ERROR_ENV,
         "exit code 3:\ntold here"),
        ("call('red')\nos._exit(3)", {}, Status.ERROR_ENV, "exit code 3, and wrote nothing"),
        ("call('red')\nos.kill(os.getpid(), 11)", {}, Status.ERROR_ENV, "killed by signal 11"),
        ("outcome(reward=1)\ncall('red')\nsys.exit(1)", {}, Status.ERROR_ENV, "exit code 1"),
        (FLOOD, {"max_output_mb": 1}, Status.ERROR_ENV, "wrote more than 1 MB to stdout"),
        (FLOOD.replace("stdout", "stderr"), {"max_output_mb": 1}, Status.ERROR_ENV, "to stderr"),
        (HANGS, {"timeout_s": 1.0}, Status.ERROR_TIMEOUT, "longer than agent.timeout_s = 1 s"),
        ("call('red')", {}, Status.UNSCORABLE, "no reward"),
        ("while True: call('red')", {}, Status.TRUNCATED_TURNS, "the limit is 5"),
        ("call('red ' * 400)", {}, Status.TRUNCATED_LENGTH, "the context has 256"),
    ],
)  # fmt: skip
async def test_ends(world: World, code, args, status, error) -> None:
    played = await play(world, python(code, **args), max_turns=5)
    assert error in (played.error or "")
    assert played.status is status
    # A fault of the program is never a reward of 0.
    assert played.reward == (0.0 if status is Status.TRUNCATED_TURNS else None)


async def test_a_flood_within_the_limit_is_no_fault(world: World) -> None:
    args = python(f"{FLOOD}\noutcome(reward=1)", max_output_mb=200)
    assert (await play(world, args)).reward == 1.0


async def test_only_the_end_of_the_errors_is_told(world: World) -> None:
    code = "for i in range(9999): print('line', i, file=sys.stderr)\ncall('x')\nsys.exit(1)"
    played = await play(world, python(code))
    assert (played.error or "").splitlines()[1:] == [f"line {i}" for i in range(9991, 9999)]


async def test_a_program_that_never_calls_gives_no_row_and_says_why(world: World) -> None:
    played = await play(world, python("outcome(reward=1)"))
    assert played.dropped == "nothing was sampled: the agent made no call that trains"


async def test_another_attempt_has_a_key_and_a_folder_of_its_own(
    world: World, tmp_path: Path
) -> None:
    code = f"""
with open({str(tmp_path / "seen")!r}, "a") as file:
    print(os.getcwd(), os.environ["OPENAI_API_KEY"], file=file)
call("red")
outcome(reward=1)
sys.exit(len(open({str(tmp_path / "seen")!r}).readlines()) == 1)
"""
    played = await play(world, python(code), max_retries=1)
    assert (played.status, played.metrics["retries"]) == (Status.COMPLETED, 1.0)
    one, two = (tmp_path / "seen").read_text().splitlines()
    assert set(one.split()).isdisjoint(two.split())


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "outcome.json: it is no JSON"),
        ("[" * 100_000, "outcome.json: it is no JSON"),
        ("[]", "outcome.json: it: Input should be"),
        ('{"reward": "1"}', "outcome.json: reward: Input should be a valid number"),
        ('{"reward": NaN}', "has to be finite"),
        ('{"rewards": 1}', "outcome.json: rewards: Extra inputs"),
        ('{"scores": {"a": null}}', "outcome.json: scores.a"),
        (" " * 1_000_001, "more than 1,000,000 bytes"),
    ],
)
async def test_an_outcome_file_that_is_wrong(world: World, text: str, error: str) -> None:
    code = f"call('red')\nopen('outcome.json', 'w').write({text!r})"
    if len(text) > 1000:
        code = f"call('red')\nopen('outcome.json', 'w').write({text[0]!r} * {len(text)})"
    played = await play(world, python(code))
    assert played.status is Status.UNSCORABLE
    assert error in (played.error or "")


@pytest.mark.parametrize("make", ["os.mkdir", "os.mkfifo", "lambda n: os.symlink('/dev/zero', n)"])
async def test_an_outcome_that_is_no_file_is_none(world: World, make: str) -> None:
    played = await play(world, python(f"call('red')\n({make})('outcome.json')"), judge=Says())
    assert played.reward == 0.75


# Leftovers


FAMILY = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
children = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
if not os.fork():
    os.fork()
    open(PIDS, "a").write(f"{os.getpid()} ")
    time.sleep(600)
open(PIDS, "a").write("".join(f"{pid} " for pid in [os.getpid(), *(c.pid for c in children)]))
while len(open(PIDS).read().split()) < 6: time.sleep(0.01)
"""


def family(path: Path, last: str) -> dict[str, object]:
    return python(f"PIDS = {str(path)!r}\n{FAMILY}\n{last}")


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    return tmp_path / "pids"


def folders() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("ludus-agent-")}


@pytest.mark.parametrize(
    ("last", "status"),
    [("call('red')\noutcome(reward=1)", Status.COMPLETED), ("os._exit(1)", Status.ERROR_ENV)],
)
async def test_children_end_with_their_program(world: World, pids: Path, last, status) -> None:
    played = await play(world, family(pids, last))
    assert played.status is status
    eventually(lambda: not living(pids))


async def test_the_deadline_ends_a_program_that_ignores_sigterm(world: World, pids: Path) -> None:
    before = folders()
    args = family(pids, "call('red')\ntime.sleep(600)")
    played = await play(world, args, episode_deadline_s=2.5)
    assert played.status is Status.ERROR_TIMEOUT
    eventually(lambda: len(pids.read_text().split()) == 6 and not living(pids))
    eventually(lambda: folders() <= before)


async def test_a_stopped_run_ends_its_programs(world: World, pids: Path) -> None:
    playing = asyncio.ensure_future(play(world, family(pids, "time.sleep(600)")))
    while not (pids.exists() and len(pids.read_text().split()) == 6):
        await asyncio.sleep(0.01)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    eventually(lambda: not living(pids))


async def test_a_daemon_ends_with_the_run(world: World, pids: Path) -> None:
    code = f"""
call("red")
outcome(reward=1)
if not os.fork():
    os.setsid()
    open({str(pids)!r}, "w").write(str(os.getpid()))
    import time; time.sleep(600)
import time
while not os.path.exists({str(pids)!r}) or not open({str(pids)!r}).read(): time.sleep(0.01)
"""
    assert (await play(world, python(code))).reward == 1.0
    eventually(lambda: not living(pids))


def test_programs_end_with_ludus(world: World, pids: Path, tmp_path: Path) -> None:
    """The interpreter does not wait for the threads of agents when it ends."""
    args = family(pids, "time.sleep(600)")
    code = f"""
import asyncio, sys, threading, time
from pathlib import Path
from ludus.core.types import Task
from ludus.rollout.command.agent import CommandAgent
from types import SimpleNamespace as Named
model = Named(name="policy", api_key="k", base_url="http://127.0.0.1:9/v1")
agent = CommandAgent(**{args!r})
act = lambda: asyncio.run(agent(Task(id="q"), model))
threading.Thread(target=act, daemon=True).start()
path = Path({str(pids)!r})
while not path.exists() or len(path.read_text().split()) < 6: time.sleep(0.01)
"""
    own = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=own)
    eventually(lambda: not living(pids))
    assert list(tmp_path.glob("ludus-agent-*")) == []


async def test_a_call_after_the_end_is_refused(world: World, tmp_path: Path) -> None:
    """A process that has left its group goes on; the second episode waits for what it is told."""
    told = str(tmp_path / "told")
    code = f"""
import time, urllib.error
call("red")
outcome(reward=1)
if json.load(open(os.environ["LUDUS_TASK"]))["data"]["seed"] == 1:
    while not os.path.exists({told!r}): time.sleep(0.01)
elif not os.fork():
    os.setsid()
    while True:
        try: call("red")
        except urllib.error.HTTPError as error:
            open({told!r}, "w").write(error.read().decode())
            break
"""
    tasks = [Task(id=f"q{n}", data={"seed": n}) for n in range(2)]
    groups = await play_all(world, python(code), "blue", tasks=tasks, concurrency=1)
    assert [group.trajectories[0].reward for group in groups] == [1.0, 1.0]
    assert "has ended" in Path(told).read_text()


# Settings


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({"command": ["nosuch-program"]}, "command.0: there is no program 'nosuch-program'"),
        ({"command": ["./nosuch.sh"]}, "command.0: there is no program './nosuch.sh'"),
        ({"command": [" "]}, "command.0: it is empty"),
        ({"command": ["sh", "a\0b"]}, "has a NUL character"),
        ({"command": ["sh"], "variables": {"A B": "x"}}, "agent.variables: 'A B' is no"),
        ({"command": ["sh"], "folder": Path("/nosuch")}, "there is no folder /nosuch"),
        ({"command": ["sh"], "memory_mb": 100}, "agent.memory_mb: it is a setting of the sandbox"),
        ({"command": ["sh"], "packages": []}, "agent.packages: it is a setting of the sandbox"),
    ],
)
def test_settings_that_are_refused(args, error) -> None:
    with pytest.raises(ConfigError, match=error):
        made(args)


def config(**agent: object) -> RunConfig:
    rollout = {"deterministic": False, "max_tokens_per_turn": 8}
    tasks = {"train": {"name": "jsonl", "args": {"path": "x.jsonl"}}}
    model = {"architecture": "qwen3", "tokenizer": {"name": "words"}}
    return RunConfig.model_validate(
        {"model": model, "tasks": tasks, "rollout": rollout, "agent": agent}
    )


def test_the_agent_of_a_configuration() -> None:
    args = {"command": ["sh", "-c", "x"], "timeout_s": 5, "variables": {"A": "{model}"}}
    spec = config(**args).agent
    assert spec == Spec(name="command", args=args)
    agent = Agent.build(spec)
    assert (agent.names, agent.blocks, agent.needs_socket) == ({"task", "model"}, False, False)
    for args, error in [
        ({"command": []}, "command"),
        ({"command": "sh"}, "command"),
        ({"command": ["sh"], "timeout": 5}, "did you mean agent.args.timeout_s"),
        ({"command": ["sh"], "timeout_s": 0}, "timeout_s"),
    ]:
        with pytest.raises((ConfigError, ValidationError), match=error):
            Agent.build(config(**args).agent)
