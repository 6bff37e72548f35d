"""The tutorial docs/maths-agent.md: its files are the examples, and they run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agent_frameworks import WARNINGS
from harness import SMALLEST, Ludus
from rollout_world import Scripted
from transformers import Qwen3Config

import ludus
from ludus.config.load import load_config
from ludus.config.schema import RolloutConfig, RunConfig
from ludus.core.types import Message, Spec, Status, ToolCall, Trajectory
from ludus.data.conversations import functions_brought, read_conversations, replay_all
from ludus.diagnostics.hardware import HARDWARE
from ludus.diagnostics.plan import plan
from ludus.judges.math import MathJudge
from ludus.models.chat.by_task import TaskRenderers
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.pipeline.parts.checks import check
from ludus.rollout.collect import Collector
from ludus.rollout.tool_use import RunTools, read_functions
from ludus.rollout.workflow import Agent
from ludus.services.gateway.gateway import HttpGateway
from ludus.tasks.readers import read_tasks
from ludus.tasks.splits import check_disjoint
from ludus.train.batches.samples import rows

ROOT = Path(ludus.__file__).parents[1]
FOLDER = ROOT / "examples" / "agents"
PAGE = (ROOT / "docs" / "maths-agent.md").read_text(encoding="utf-8")
FILES = ["maths.py", "maths-tiny.yaml", "maths_examples.py", "maths-qwen3-0.6b.yaml"]

pytest.importorskip("agentscope", reason="needs the extra agents")
pytestmark = [pytest.mark.usefixtures("unclosed_clients"), pytest.mark.filterwarnings(*WARNINGS)]


def test_the_page_shows_the_files_that_run() -> None:
    shown = re.findall(r"^```(?:python|yaml)\n(.*?)^```", PAGE, re.M | re.S)
    assert shown == [(FOLDER / name).read_text(encoding="utf-8") for name in FILES]


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    path = tmp_path / "maths-examples.jsonl"
    command = [sys.executable, str(FOLDER / "maths_examples.py"), "16", str(path)]
    subprocess.run(command, check=True)
    return path


@pytest.fixture
def config(examples: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(ROOT)
    return load_config(str(FOLDER / "maths-tiny.yaml"), [f"sft.data={examples}"])


def test_the_recipe_is_valid(config: RunConfig) -> None:
    check(config)
    train = read_tasks(config.tasks.train, "tasks.train")
    assert config.tasks.heldout is not None
    check_disjoint(train, read_tasks(config.tasks.heldout, "tasks.heldout"))
    assert config.rl is not None
    assert len(train) >= config.rl.steps * config.rl.groups_per_step


async def play(config: RunConfig, renderer: Renderer, *turns: Any) -> Trajectory:
    functions = await read_functions(config.tools)
    (task,) = read_tasks(config.tasks.train, "tasks.train")[:1]
    collector = Collector(
        Scripted(renderer, *turns, context_length=8192),
        TaskRenderers(renderer),
        RolloutConfig(max_retries=0, max_turns=3, deterministic=False),
        None,
        MathJudge(extract="boxed"),
        tools=RunTools(config.tools, functions),
        agent=Agent.build(Spec(name=str(FOLDER / "maths.py:run"))),
        gateway=HttpGateway(),
    )
    try:
        (group,) = await collector.collect([task], 0, 1)
    finally:
        await collector.close()
    return group.trajectories[0]


async def test_sft_has_the_very_tokens_of_an_episode(config: RunConfig) -> None:
    found, _ = read_conversations(config, [], [])
    tools = functions_brought(found)
    renderer = Renderer(train_tokenizer(Spec(name="bpe"), ["What is 1 * 2 + 3 ?"], "plain", tools))
    shown = found[0]
    question = shown.messages[1].content
    code = question.removeprefix("What is ").removesuffix(" ?")
    call = ToolCall(name="python", arguments={"code": f"print({code})"})
    turns = Message(role="assistant", tool_calls=[call]), shown.messages[-1]
    asked = config.model_copy(deep=True)
    asked.tasks.train.args.update(num_tasks=1, first_seed=1_000_000)
    played = await play(asked, renderer, *turns)
    assert (played.status, played.error, played.reward) == (Status.COMPLETED, None, 1.0)
    assert played.metrics["tool_calls"] == 1.0
    _, (replayed, *_), _ = replay_all(found, TaskRenderers(renderer), 8192)
    (one,), (other,) = rows(replayed, 1.0), rows(played, 1.0)
    assert (one.token_ids, one.loss_mask) == (other.token_ids, other.loss_mask)


def test_it_trains(ludus: Ludus, examples: Path) -> None:
    for name in ("maths.py", "sums.py"):
        (ludus.cwd / "examples" / "agents").mkdir(parents=True, exist_ok=True)
        (ludus.cwd / "examples" / "agents" / name).write_bytes((FOLDER / name).read_bytes())
    small = [
        f"sft.data={examples}", f"model.architecture.args={json.dumps(SMALLEST)}", "threads=1",
        "sft.steps=2", "sft.episodes_per_step=4", "rl.steps=1", "rl.groups_per_step=2",
        "rl.group_size=2", "tasks.heldout=null", "tasks.train.args.num_tasks=16",
    ]  # fmt: skip
    ludus("train", str(FOLDER / "maths-tiny.yaml"), *small).ok()
    sft, *_, rl = ludus.metrics("maths-agent-tiny-1")
    assert sft["stage"] == "sft"
    assert rl["rollout/excluded"] == 0
    assert rl["rollout/sampled_tokens"] > 0


def test_the_plan_of_the_recipe_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    Qwen3Config(  # as the config.json on the hub has it: no test reaches the hub
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    ).save_pretrained(tmp_path)
    config = load_config(str(FOLDER / "maths-qwen3-0.6b.yaml"), [f"model.path={tmp_path}"])
    check(config)
    found = plan(config, HARDWARE["h200"], fill=0.4)
    assert found.num_parameters == 596_049_920
    assert found.fits
