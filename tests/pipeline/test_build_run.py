"""Checks of a config; tasks, conversations and tokenizer of a run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from rollout_world import Scripted

import ludus
from ludus.config.load import load_config
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, DataError, EnvError, ToolError
from ludus.core.modules import load_module
from ludus.core.types import Group, Message, Segment, Spec, Task, ToolCall, ToolSpec, Trajectory
from ludus.data.conversations import functions_brought, read_conversations, replay_all
from ludus.data.expert import Demonstration, run_expert
from ludus.data.splits import read_splits
from ludus.envs import ENVS as ENVIRONMENTS
from ludus.pipeline.build import build, build_training, make_collector
from ludus.pipeline.monitoring.budget import Timings
from ludus.pipeline.monitoring.progress import Display
from ludus.pipeline.parts.checks import check
from ludus.pipeline.parts.registries import plugin_files
from ludus.pipeline.parts.tokenizer import (
    check_functions,
    environment_messages,
    functions_of,
    make_renderer,
    make_renderers,
    make_tokenizer,
    tools_of,
)
from ludus.store import RunStore
from ludus.store.export import export
from ludus.store.folders import RunFolder
from ludus.tools.limits.limiter import Limits

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


def test_tools_of_a_recipe_are_shown_and_checked(load: Any):
    config = load("tools=[calculator]", "env=null", "judge=answer")
    assert [tool.name for tool in tools_of(config)] == ["calculator"]
    assert [tool.name for tool in functions_of(config)] == ["calculator"]
    code = ("rollout.format=code", "rollout.markers.tool=calculator")
    assert tools_of(load("tools=[calculator]", *code)) == ()
    with pytest.raises(ConfigError, match=r"`rollout\.format: code` needs `tools`"):
        load(*code)
    with pytest.raises(ConfigError, match="the end markers of code and answer must differ"):
        load("tools=[calculator]", *code, 'rollout.markers.answer=["<a>", "</code>"]')
    tokenizer = make_tokenizer(load("model.tokenizer=words"), [], [user("say red")])
    with pytest.raises(ConfigError, match=r"rollout\.markers\.code: the tokenizer cannot write"):
        make_renderer(load("tools=[calculator]", *code), tokenizer)


TOOLS = 'tools=["played_tools:double", "played_tools:wordy"]', "model.tokenizer={name: bpe}"


@pytest.mark.parametrize("names", [None, ["double"], ["wordy", "double"], []])
def test_sft_shows_the_functions_that_a_rollout_of_the_task_shows(load: Any, names: Any):
    config = load(*TOOLS, "demonstrations={}", "sft={}", "model.context_length=4096")
    task = Task(id="Count-0", data={"seed": 0}, tools=names)
    demo = asyncio.run(run_expert(ENVIRONMENTS.build(config.env, "env"), task))
    conversations, _ = read_conversations(config, [demo], [task])
    tokenizer = make_tokenizer(config, [task], demo.messages)
    renderers = make_renderers(config, tokenizer)
    _, (taught,), _ = replay_all(conversations, renderers, 4096)
    said = [message for message in demo.messages if message.role == "assistant"]
    sampler: Any = Scripted(renderers.default, *said)
    collector = make_collector(config, sampler, renderers, Limits({}, []))
    ((played,),) = [g.trajectories for g in asyncio.run(collector.collect([task], 0, 1))]
    last = len(taught.segments) - 1
    assert played.token_ids(last) == taught.token_ids(last)
    assert [s.sampled for s in played.segments] == [s.sampled for s in taught.segments]
    shown = tokenizer.decode(played.segments[0].token_ids)
    for name in ("double", "wordy"):
        assert (f'"{name}"' in shown) == (names is None or name in names)


def test_a_task_with_an_unknown_function_is_refused_with_its_line(load: Any, tmp_path: Path):
    path, row = tmp_path / "t.jsonl", {"prompt": "a", "answer": 1, "key": "k1", "has": ["duble"]}
    rows = {**row, "prompt": "b", "key": "k0", "has": ["double"]}, row
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = f"tasks.train={{name: json, args: {{path: {path}, id: key, tools: has}}}}"
    config = load(*TOOLS, train, "env=null", "judge=answer", "tasks.heldout=null")
    splits = read_splits(config)
    told = rf"{path}:2: tools: 'duble' is no function on offer \(did you mean double\?\)"
    with pytest.raises(DataError, match=told):
        build(config, RunFolder(tmp_path), splits, None)
    check_functions(load(*TOOLS), splits.heldout, others=[Task(id="a", tools=["wordy"])])
    with pytest.raises(DataError, match=r"'x': tools: 'double' .* \(no tools are configured\)"):
        check_functions(load(), splits.heldout, others=[Task(id="x", tools=["double"])])


def test_adpo_refuses_a_task_without_consistency_at_the_start(load: Any, tmp_path: Path):
    path = tmp_path / "t.jsonl"
    rows = {"prompt": "a", "answer": 1, "p": 0.5}, {"prompt": "b", "answer": 1, "p": None}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = f"tasks.train={{name: json, args: {{path: {path}, consistency: p}}}}"
    config = load(train, "env=null", "judge=answer", "tasks.heldout=null", "rl.algorithm=adpo")
    with pytest.raises(
        DataError, match=rf"{path}:2 has no `consistency`, which the algorithm adpo"
    ):
        build(config, RunFolder(tmp_path), read_splits(config), None)


def test_conversations_of_a_file_may_name_their_functions(load: Any, tmp_path: Path):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    schemas = [{"type": "function", "function": {"name": "double"}}]
    rows = [{"messages": chat, "tools": tools} for tools in (["double"], [], schemas, None)]
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, _ = read_conversations(load(f"sft={{data: {path}}}"), [], [])
    assert [conversation.task.tools for conversation in found] == [["double"], [], None, None]


@pytest.mark.parametrize("nested", [False, True])
def test_a_judge_whose_sandbox_does_not_answer_is_refused_at_the_start(
    load: Any, nested: bool, tmp_path: Path
):
    folder, splits = RunFolder(tmp_path), read_splits(load())
    sandbox = '{name: remote, args: {url: "http://127.0.0.1:1", deadline_s: 0.1}}'
    code = f"{{name: code, args: {{sandbox: {sandbox}}}}}"
    judge = f"{{name: sum, args: {{parts: {{tests: {code}}}}}}}" if nested else code
    config = load(f"judge={judge}")
    with pytest.raises(ToolError, match=r"judge: sandbox http://127\.0\.0\.1:1.*serve sandbox"):
        build_training(config, folder, splits, Display(), Timings())


def test_exported_sft_data_shows_the_functions_of_the_rollout(load: Any, tmp_path: Path):
    tasks = [Task(id="a", tools=["double"]), Task(id="b"), Task(id="c", tools=[])]
    tasks.append(Task(id="d", data={"part": "easy"}))
    said = [("user", "you count ."), ("assistant", "one")]
    groups = []
    for task in tasks:
        messages = [Message(role=role, content=content) for role, content in said]
        segments = [Segment(-1, [1], None, messages[0]), Segment(0, [2], [-0.1], messages[1])]
        trajectory = Trajectory(task.id, "g", task.id, segments, reward=1.0)
        groups.append(Group("g", task, [trajectory]))
    path = tmp_path / "sft.jsonl"
    with RunStore.open(None, tmp_path) as store:
        store.create_run("run", "demo", {}, {})
        store.record_step("run", "rl", 0, groups, {})
        export(store, "run", path, what="sft")
    config = load(*TOOLS, f"sft={{data: {path}}}")
    found, _ = read_conversations(config, [], [])
    renderers = make_renderers(
        config, make_tokenizer(config, [], [user("double one 1 you count .")])
    )
    shown = [[tool.name for tool in renderers.of(task).tools] for task in tasks]
    assert [[t.name for t in renderers.of(one.task).tools] for one in found] == shown
    assert shown[0] == ["double"]
    assert shown[2] == []
    assert [one.task.data for one in found] == [{}, {}, {}, {"part": "easy"}]


SCHEMA = {"properties": {"code": {"type": "string"}}, "required": ["code"], "type": "object"}


def test_sft_data_of_an_agent_brings_its_functions(load: Any, tmp_path: Path):
    """In OpenAI's form, as agents send messages and tools; without `tools` in the recipe."""
    function = {"name": "python", "description": "Run it.", "parameters": SCHEMA}
    call = {"id": "a", "type": "function", "function": {"name": "python"}}
    call["function"]["arguments"] = '{"code": "one"}'
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    line = {"messages": [{"role": "user", "content": "you count ."}, said], "tools": [function]}
    wrapped = {**line, "tools": [{"type": "function", "function": {**function, "strict": True}}]}
    path = tmp_path / "sft.jsonl"
    path.write_text("\n".join(map(json.dumps, (line, wrapped))))
    config = load(f"sft={{data: {path}}}")
    found, _ = read_conversations(config, [], [])
    (tool,) = functions_brought(found)
    assert tool == ToolSpec.model_validate(function)
    assert [m.tool_calls for m in (found[0].messages[1], found[1].messages[1])] == [
        [ToolCall(name="python", arguments={"code": "one"}, id="a")]
    ] * 2
    messages = [message for item in found for message in item.messages]
    renderers = make_renderers(config, make_tokenizer(config, [], messages, [tool]))
    _, (one, other), _ = replay_all(found, renderers, 512)
    text = renderers.default.text(one.token_ids(len(one.segments) - 1))
    assert '"description": "Run it."' in text
    assert "<unk>" not in text
    assert one.segments == other.segments
    path.write_text(json.dumps({**line, "tools": [{"type": "function"}]}))
    with pytest.raises(DataError, match=r"sft.jsonl:1: tools.0 is no function: name"):
        read_conversations(config, [], [])


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
    tasks, played, left_out = replay_all(known, make_renderers(config, tokenizer), 64)
    assert [t.id for t in tasks] == [t.task_id for t in played] == ["fits"]
    assert played[0].metrics["success"] == 1.0
    ((task_id, reason),) = left_out
    assert task_id == "long"
    assert "tokens exceed model.context_length = 64" in reason
    bad, _ = read_conversations(config, [demonstration("bad", assistant("2"))], [])
    with pytest.raises(DataError, match=r"^bad: a conversation needs"):
        replay_all(bad, make_renderers(config, tokenizer), 64)


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
    begin_stage = train = save = load = make_envs = host_judge = None
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
