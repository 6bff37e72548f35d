"""`ludus init` of a user's agent: its recipe trains; what cannot train is refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from harness import SMALLEST, Ludus
from typer.testing import CliRunner

from ludus.cli import app
from ludus.config.load import load_config
from ludus.config.sections import ModelConfig
from ludus.core.types import Spec
from ludus.diagnostics.calibration.agents import calibrate, episodes
from ludus.models.build import build_model
from ludus.models.chat.tokenizers import train_tokenizer

AGENTS = """
import time

from ludus import Env, Message, Outcome, Task


async def ask(task, model):
    return await model.chat([{"role": "user", "content": task.prompt[0].content}])


async def twice(task, model, least: int = 4):
    first = await ask(task, model)
    again = {"role": "user", "content": "again"}
    second = await model.chat([{"role": "user", "content": task.prompt[0].content}, first, again])
    return Outcome(reward=(len(first.content) % least + len(second.content) % least) / (2 * least))


async def quiet(task, model):
    await ask(task, model)


async def constant(task, model):
    await ask(task, model)
    return 0.5


async def raises(task, model):
    await ask(task, model)
    raise ValueError("the page has no table")


def idle(task, model):
    return 1.0


def hangs(task, model):
    time.sleep(60)


async def endless(task, model):
    talk = [{"role": "user", "content": task.prompt[0].content}]
    while True:
        reply = await model.chat(talk)
        talk += [reply, {"role": "user", "content": "again"}]


async def wordy(task, model):
    await model.chat([{"role": "user", "content": "again " * 400}])


async def with_env(task, model, env):
    await env.reset()


async def with_tools(task, model, tools):
    await ask(task, model)


async def question(task):
    return 1.0


class Asks:
    def __init__(self, least: int = 2):
        self.least = least

    async def __call__(self, task, model):
        return len((await ask(task, model)).content) % self.least


class Neither:
    pass


def some(task_count: int):
    return []


def sums(num_tasks: int, first_seed: int = 0):
    seeds = range(first_seed, first_seed + num_tasks)
    prompts = [[Message(role="user", content=f"What is {n} + 1 ?")] for n in seeds]
    return [Task(id=f"n{n}", prompt=p, answer=str(n + 1)) for n, p in zip(seeds, prompts)]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with agents, rows and the weights of a tiny model; few and short episodes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrate, "MAX_TOKENS", {"cpu": 12, "cuda": 12})
    monkeypatch.setattr(episodes, "MOST_GROUPS", 5)
    (tmp_path / "mine.py").write_text(AGENTS)
    rows = [{"question": f"What is {n} + 1 ?", "answer": str(n + 1)} for n in range(20)]
    for name, kept in (("rows", ("question", "answer")), ("bare", ("question",))):
        lines = [json.dumps({key: row[key] for key in kept}) for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    words = [" ".join(["What is + ? again", *map(str, range(30))])]
    tokenizer = train_tokenizer(Spec(name="words"), words)
    shape = {"name": "qwen3", "args": SMALLEST}
    model = ModelConfig(architecture=shape, tokenizer="words", context_length=256)
    build_model(model, tokenizer, 0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def init(*argv: str) -> str:
    """The output of the command, which has to succeed."""
    done = CliRunner().invoke(app, ["init", *argv])
    assert done.exit_code == 0, done.exception
    return done.output


def refusal(*argv: str) -> str:
    done = CliRunner().invoke(app, ["init", *argv])
    assert done.exit_code != 0
    assert done.exception is not None
    return f"{type(done.exception).__name__}: {done.exception}"


def test_the_recipe_of_an_agent_trains(folder: Path, ludus: Ludus) -> None:
    told = init("mine.py:twice", "least=3", "--tasks", "rows.jsonl", "--model", "./model")
    assert "2.0 calls (to 2); 0 failed" in told
    config = load_config("twice.yaml")
    assert config.agent == Spec(name="mine.py:twice", args={"least": 3})
    assert config.judge is None  # the agent returns its rewards
    assert config.rollout.max_turns == 4
    assert not config.rollout.deterministic
    assert config.tasks.train.args == {"path": "rows.jsonl", "prompt": "question", "limit": 16}
    assert config.tasks.heldout is not None
    assert config.tasks.heldout.args["skip"] == 16
    assert config.model.context_length <= 256
    assert config.rl is not None
    text = (folder / "twice.yaml").read_text()
    assert text.startswith("# Written by `ludus init mine.py:twice least=3 --model ./model --tasks")
    for name in ("mine.py", "rows.jsonl", "twice.yaml"):
        (ludus.cwd / name).write_bytes((folder / name).read_bytes())
    if ludus.cwd != folder:
        (ludus.cwd / "model").symlink_to(folder / "model")
    ludus("train", "twice.yaml", "rl.steps=2", "threads=1").ok()
    steps = [row for row in ludus.metrics("twice-1") if row["stage"] == "rl"]
    assert len(steps) == 2
    assert all(row["rollout/turns"] == 2 and row["rollout/excluded"] == 0 for row in steps)
    ludus("train", "twice.yaml", "--quick-test", "threads=1").ok()


def test_a_judge_scores_an_agent_that_returns_nothing(folder: Path) -> None:
    init("mine.py:quiet", "--tasks", "mine.py:sums", "--model", "./model", "--seed", "3")
    recipe = yaml.safe_load((folder / "quiet.yaml").read_text())
    assert recipe["judge"] == "answer"
    assert recipe["seed"] == 3
    assert recipe["tasks"]["train"]["name"] == "mine.py:sums"


@pytest.mark.slow
def test_a_judge_that_is_named(folder: Path) -> None:
    named = ("--judge", "answer", "judge.extract=number", "--force")
    init("mine.py:quiet", *named, "--tasks", "rows.jsonl", "--model", "./model")
    recipe = yaml.safe_load((folder / "quiet.yaml").read_text())
    assert recipe["judge"] == {"name": "answer", "args": {"extract": "number"}}


@pytest.mark.slow
def test_a_class_and_an_environment(folder: Path) -> None:
    init("mine.py:Asks", "--tasks", "bare.jsonl", "--model", "./model")
    assert load_config("asks.yaml").agent == Spec(name="mine.py:Asks")
    plays = "async def plays(task, model, env):\n    opening = await env.reset()\n"
    plays += "    reply = await model.chat([*task.prompt, *opening.messages][-1:])\n"
    (folder / "plays.py").write_text(plays + "    await env.step(reply)\n")
    where = ("--env", "textcraft", "--tiers", "depth-1")
    init("plays.py:plays", *where, "--model", "./model")
    recipe = yaml.safe_load((folder / "plays.yaml").read_text())
    assert recipe["env"] == "textcraft"
    assert recipe["tasks"]["train"]["args"]["tiers"] == ["depth-1"]


def test_warnings(folder: Path) -> None:
    told = init(
        "mine.py:constant", "--tasks", "rows.jsonl", "--judge", "answer", "--model", "model"
    )
    assert "episodes have the reward 0.5" in told
    assert "--judge: it was never asked" in told
    assert "too few to learn" not in told


@pytest.mark.slow
def test_conversations_that_outgrow_the_context_are_told(folder: Path) -> None:
    told = init("mine.py:endless", "--tasks", "rows.jsonl", "--model", "./model")
    assert "20 of 20 episodes outgrew the context of 256 tokens" in told


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("raises", "ValueError: the page has no table"),
        ("idle", "none of its 4 episodes called the model"),
        ("quiet", "neither answers nor a judge"),
        ("wordy", "first prompts leave no room in the context of 256 tokens"),
    ],
)
def test_episodes_that_cannot_train_are_refused(folder: Path, name: str, problem: str) -> None:
    message = refusal(f"mine.py:{name}", "--tasks", "bare.jsonl", "--model", "./model")
    assert problem in message
    assert message.startswith("ConfigError")
    assert not list(folder.glob("*.yaml"))


def test_an_agent_that_hangs_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "PLAY_S", 1.0)
    message = refusal("mine.py:hangs", "--tasks", "rows.jsonl", "--model", "./model")
    assert "no episode ended within 1 s, and no turn was sampled" in message


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("mine.py:twice --tasks rows.jsonl", "name a pretrained one with --model"),
        ("mine.py:twice --model ./model", "nothing says which tasks it plays"),
        ("mine.py:with_env --model ./model", "give its environment: --env NAME"),
        ("mine.py:with_env --model ./model --tasks rows.jsonl", "have none"),
        ("mine.py:with_tools --model ./model --tasks rows.jsonl", "--tools RECIPE"),
        ("mine.py:twice --model ./model --env textcraft", "takes no `env`"),
        ("mine.py:twice --model ./model --tasks rows.jsonl --env textcraft", "leave one out"),
        ("mine.py:twice --model ./model --tasks rows.jsonl --tiers a", "which an agent has with"),
        ("mine.py:twice --model ./model --tasks nope.jsonl", "nope.jsonl does not exist"),
        ("mine.py:twice --model ./model --tasks textcraft", "name it with --env"),
        ("mine.py:with_env --model ./model --tasks env", "in place of --tasks, with --env"),
        ("mine.py:with_env --model ./model --env textcraft env.x=1", ": env.x is not an argument"),
        ("mine.py:twice --model ./model --tasks mine.py:some", "sets `num_tasks`"),
        ("mine.py:twice --model ./none --tasks rows.jsonl", "there is no folder ./none"),
        ("mine.py:twice least=x --model ./model --tasks rows.jsonl", ": least must be a whole"),
        ("mine.py:twice judge.x=1 --model ./model --tasks rows.jsonl", "belongs to --judge"),
        ("mine.py:twice other.x=1 --model ./model --tasks rows.jsonl", "tasks.KEY=VALUE"),
        ("mine.py:twice tasks.x=1 --model ./model --tasks rows.jsonl", ": tasks.x is not an arg"),
        ("mine.py:twice --judge anser --model ./model --tasks rows.jsonl", "did you mean answer?"),
        ("mine.py:question --model ./model --tasks rows.jsonl", "it has to take `task` and"),
        ("mine.py:Neither", "neither an environment"),
        ("mine.py:some", "an agent is a function of `task` and `model`"),
        ("mine.py:twize", "did you mean twice?"),
        ("relay --model ./model --tasks rows.jsonl", "plays several roles"),
        ("textcraft --tasks rows.jsonl", "--tasks: only an agent takes this"),
        ("rows.jsonl --judge answer", "--judge: only an agent takes this"),
    ],
)
def test_wrong_arguments_are_refused(folder: Path, argv: str, problem: str) -> None:
    message = refusal(*argv.split())
    assert problem in message
    assert message.startswith(("ConfigError", "DataError"))


def test_the_field_of_the_prompt_is_named(folder: Path) -> None:
    (folder / "odd.jsonl").write_text('{"q": "1 + 1"}\n{"q": "1 + 2"}\n')
    message = refusal("mine.py:twice", "--model", "./model", "--tasks", "odd.jsonl")
    assert "`ludus init mine.py:twice --tasks odd.jsonl tasks.prompt=FIELD`" in message
    init("mine.py:twice", "tasks.prompt=q", "--model", "./model", "--tasks", "odd.jsonl")


def test_an_existing_recipe_stays(folder: Path) -> None:
    (folder / "twice.yaml").write_text("precious")
    message = refusal("mine.py:twice", "--tasks", "rows.jsonl", "--model", "./model")
    assert "twice.yaml exists" in message
    assert (folder / "twice.yaml").read_text() == "precious"
