"""Checks of a config; tasks, conversations and tokenizer of a run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import ludus
from ludus.config.load import load_config
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, DataError, EnvError
from ludus.core.modules import load_module
from ludus.core.types import Message, Spec, Task
from ludus.data.conversations import read_conversations, replay_all
from ludus.data.demonstrations import Demonstration, run_expert
from ludus.data.splits import read_splits
from ludus.envs import ENVS as ENVIRONMENTS
from ludus.pipeline.build import build
from ludus.pipeline.registries import check, plugin_files
from ludus.pipeline.tokenizer import (
    environment_messages,
    make_renderer,
    make_tokenizer,
    tools_of,
)
from ludus.store.folders import RunFolder

ENVS = f"{Path(ludus.__file__).parents[1]}/tests/support/debugged_envs.py"
RECIPE = f"""
model:
  architecture: qwen3
  tokenizer: {{name: words}}
  context_length: 64
env: "{ENVS}:Count"
tasks:
  train: {{name: env, args: {{num_tasks: 20}}}}
  heldout: {{name: env, args: {{num_tasks: 5, first_seed: 20}}}}
rollout: {{max_tokens_per_turn: 8}}
rl: {{}}
"""


@pytest.fixture
def load(tmp_path: Path) -> Any:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return lambda *overrides: load_config(path, list(overrides))


def user(content: str) -> Message:
    return Message(role="user", content=content)


def assistant(content: str) -> Message:
    return Message(role="assistant", content=content)


def demonstration(task_id: str, *messages: Message) -> Demonstration:
    return Demonstration(
        task_id=task_id, tier=None, messages=list(messages), reward=1.0, success=True, num_turns=1
    )


def test_one_error_names_all_wrong_plug_ins(load: Any):
    check(load())
    with pytest.raises(ConfigError) as error:
        check(load("rl.algorithm=grpoo", "judge=anser", "tasks.train.args.num_taks=3"))
    for name in ("rl.algorithm", "did you mean grpo?", "judge", "answer", "num_taks"):
        assert name in str(error.value)


def test_rl_refuses_top_p_and_top_k(load: Any):
    with pytest.raises(ConfigError) as error:
        check(load("rollout.top_p=0.9", "rollout.top_k=20"))
    first, second = str(error.value).splitlines()
    assert first.startswith("rollout.top_p must be 1 where `rl` trains, got 0.9: the sampler's")
    assert second.startswith("rollout.top_k must be 0 where `rl` trains, got 20: the sampler's")
    assert "remove it" in first
    with pytest.raises(ConfigError, match=r"rollout\.top_k: nothing samples with it"):
        check(load("rollout.top_k=20", "rl=null", "sft={data: x.jsonl}"))


def test_verify_refuses_what_its_sampler_ignores(load: Any):
    ignored = "sampler.args={path: generic, cache_gib: 2, dtype: float32}"
    with pytest.raises(
        ConfigError, match=r"^sampler\.args\.path, sampler\.args\.cache_gib: .*verify"
    ):
        check(load("verify=true", ignored))
    check(load("verify=true", "sampler.args.dtype=float32"))
    check(load(ignored))


UNMEASURED = "tasks={train: {name: env, args: {num_tasks: 4}}}"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["evaluate.every=5"], "evaluate.every: there are no held-out tasks"),
        (
            ["evaluate={every: 5, num_tasks_between: 3, confidence: 0.9}"],
            "evaluate.num_tasks_between, evaluate.every, evaluate.confidence: there are no held-",
        ),
        (
            ["evaluate={samples_per_task: 4, temperature: 1}", "rl=null", "sft={data: x.jsonl}"],
            "evaluate.samples_per_task, evaluate.temperature: there are no held-out tasks",
        ),
    ],
)
def test_settings_of_evaluations_need_tasks(load: Any, overrides: list[str], told: str):
    with pytest.raises(ConfigError) as caught:
        check(load(UNMEASURED, *overrides))
    assert told in str(caught.value)
    assert "set tasks.heldout, to null to evaluate nothing" in str(caught.value)
    check(load("tasks.heldout=null", *overrides))  # one override switches evaluations off


def test_evaluations_that_a_quick_run_switches_off_may_keep_their_size(load: Any):
    check(load(UNMEASURED, "evaluate.num_tasks_between=3"))
    check(load(UNMEASURED, "evaluate.every=5", "rl=null", "sft={data: x.jsonl}"))


def test_demonstrations_that_nothing_reads_are_refused(load: Any, tmp_path: Path):
    tokenizer = f"model.tokenizer={tmp_path}"
    with pytest.raises(ConfigError, match="demonstrations: nothing reads them"):
        check(load("demonstrations={}", tokenizer))
    check(load("demonstrations={}"))  # they train the tokenizer


def test_splits_are_read_and_disjoint(load: Any):
    train, heldout, *_ = read_splits(load())
    assert (len(train), len(heldout)) == (20, 5)
    assert read_splits(load("tasks.heldout=null"))[1] == []
    shifted = read_splits(load("tasks.heldout.args.first_seed=19")).heldout
    assert [task.data["seed"] for task in shifted] == [24, 20, 21, 22, 23]


def test_a_tokenizer_has_the_words_of_demonstrations_and_openings(load: Any):
    config: RunConfig = load("rollout.system_prompt=be brief", "model.chat_template=plain")
    train = read_splits(config).train
    for messages, known in (([user("say red"), assistant("red")], "red"), ([], "count : 9")):
        tokenizer = make_tokenizer(config, train, messages)
        for text in (known, "be brief"):
            assert tokenizer.unk_token_id not in tokenizer.encode(text, add_special_tokens=False)
    renderer = make_renderer(config, tokenizer)
    assert tokenizer.decode(renderer.open([user("count : 9")])) == "<|user|>count : 9<|assistant|>"


def test_an_environment_that_fails_to_open(load: Any):
    config = load()
    tasks = [Task(id="x", data={})]
    with pytest.raises(EnvError, match=r"Count.* opens no episode: task x: .*KeyError: 'seed'"):
        environment_messages(config, tasks)
    assert [m.content for m in environment_messages(config, read_splits(config)[0][:2])] == [
        "count : 0",
        "count : 1",
    ]


def test_tools_need_an_environment_that_has_some(load: Any):
    assert tools_of(load()) == ()
    with pytest.raises(ConfigError, match="Count' has no tools; use plain or react"):
        tools_of(load("rollout.format=tools"))
    with pytest.raises(ConfigError, match=r"rollout\.format: `tools` needs an `env`"):
        tools_of(load("rollout.format=tools", "env=null", "judge=answer"))


def test_conversations_open_like_rollouts(load: Any):
    config = load("rollout.system_prompt=be brief", "demonstrations={}", "sft={}")
    task = Task(id="a", prompt=[user("you count .")], tier="easy")
    known, skipped = read_conversations(
        config,
        [
            demonstration("a", user("count : 1"), assistant("2")),
            demonstration("b", user("x"), assistant("y")),
        ],
        [task],
    )
    assert [m.content for m in known[0].messages] == ["be brief", "you count .", "count : 1", "2"]
    assert [m.content for m in known[1].messages] == ["be brief", "x", "y"]
    assert (known[0].task, known[0].reward, known[0].success) == (task, 1.0, True)
    assert skipped == []


def test_conversations_of_a_file(load: Any, tmp_path: Path):
    path = tmp_path / "data.jsonl"
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    system = {"role": "system", "content": "be brief"}
    path.write_text(
        json.dumps({"messages": turns, "reward": 0.5, "success": False})
        + "\nnot json\n"
        + json.dumps({"messages": [system, *turns]})
    )
    prompt = "rollout.system_prompt=be brief"
    config = load(f"sft.data={path}", prompt, "tasks.on_bad_line=skip")
    known, skipped = read_conversations(config, [], [])
    assert known[0].messages == known[1].messages
    assert [m.role for m in known[0].messages] == ["system", "user", "assistant"]
    assert [(c.reward, c.success) for c in known] == [(0.5, False), (None, None)]
    assert len(skipped) == 1
    assert "2" in skipped[0]
    with pytest.raises(DataError, match="line 2"):
        read_conversations(load(f"sft.data={path}"), [], [])


def test_conversations_longer_than_the_context_are_excluded_with_the_reason(load: Any):
    config = load("demonstrations={}", "sft={}", "model.chat_template=plain")
    demonstrations = [
        demonstration("fits", user("count : 1"), assistant("2")),
        demonstration("long", user("count : 1 " * 40), assistant("2")),
    ]
    known, _ = read_conversations(config, demonstrations, [])
    tokenizer = make_tokenizer(config, [], [m for c in known for m in c.messages])
    tasks, played, left_out = replay_all(known, make_renderer(config, tokenizer), 64)
    assert [t.id for t in tasks] == [t.task_id for t in played] == ["fits"]
    assert played[0].metrics["success"] == 1.0
    ((task_id, reason),) = left_out
    assert task_id == "long"
    assert "tokens exceed model.context_length = 64" in reason
    bad, _ = read_conversations(config, [demonstration("bad", assistant("2"))], [])
    with pytest.raises(DataError, match=r"^bad: a conversation needs"):
        replay_all(bad, make_renderer(config, tokenizer), 64)


def test_a_tokenizer_has_the_words_of_error_messages():
    """Demonstrations of an expert contain no error message."""
    spec = Spec(name="textcraft", args={"num_distractors": 1})
    config = RunConfig.model_validate(
        {
            "name": "craft",
            "model": {"architecture": "qwen3", "tokenizer": "words", "chat_template": "plain"},
            "env": spec,
            "tasks": {"train": {"name": "env", "args": {"tiers": ["depth-1"], "num_tasks": 20}}},
        }
    )
    train = read_splits(config).train
    shown = [
        m
        for task in train
        for m in asyncio.run(run_expert(ENVIRONMENTS.build(spec), task)).messages
    ]
    errors = [
        "there is no such recipe for cauldron",
        "no such action. use get, craft or inventory",
        "not enough. you have",
    ]
    tokenizer = make_tokenizer(config, train, shown)
    for error in errors:
        assert tokenizer.unk_token_id not in tokenizer.encode(error, add_special_tokens=False)


PART = "from ludus.envs.textcraft.env import TextCraft\nclass Own(TextCraft):\n    pass\n"


def test_the_code_of_plug_ins_is_theirs_and_that_of_their_imports(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("one.py").write_text("import own_lib\n" + PART)
    Path("two.py").write_text(PART)
    Path("own_lib.py").write_text("")
    Path("readers.py").write_text("def read(): return []\n")
    parts = "env={name: mixture, args: {envs: {a: 'one.py:Own', b: textcraft, c: 'two.py:Own'}}}"
    code = plugin_files(load(parts, "tasks.train=readers.py:read"))
    assert set(code) == {
        "env one.py:Own",
        "env one.py:Own (own_lib.py)",
        "env two.py:Own",
        "tasks.train readers.py:read",
    }
    Path("own_lib.py").write_text("changed = True")
    changed = plugin_files(load(parts, "tasks.train=readers.py:read"))
    assert {key for key in code if code[key] != changed[key]} == {"env one.py:Own (own_lib.py)"}


PARTS = """
from types import SimpleNamespace
from ludus.core.errors import ConfigError

class Backend:
    sampler = SimpleNamespace()
    begin_stage = train = save = load = None
    closed = 0
    def close(self):
        Backend.closed += 1

class Judge:
    def __init__(self):
        raise ConfigError("no such rubric")
"""


def test_a_part_that_cannot_be_built_leaves_no_open_back_end(load: Any, tmp_path: Path) -> None:
    path = tmp_path / "parts.py"
    path.write_text(PARTS)
    config = load(f"backend={path}:Backend", f"judge={path}:Judge")
    splits = read_splits(config)
    tokenizer = make_tokenizer(config, splits.train, [])
    with pytest.raises(ConfigError, match="no such rubric"):
        build(config, RunFolder(tmp_path), splits, tokenizer)
    assert load_module(str(path)).Backend.closed == 1
