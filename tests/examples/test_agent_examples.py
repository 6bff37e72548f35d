"""The agents of `examples/agents/`: each framework plays through the gateway, and trains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from agent_frameworks import WARNINGS
from harness import Ludus
from rollout_world import Scripted
from variants import variants

import ludus
from ludus.config.load import load_config
from ludus.config.schema import RolloutConfig
from ludus.core.types import Message, Spec, Status, Task, ToolCall, Trajectory
from ludus.judges.answer import AnswerJudge
from ludus.models.chat.by_task import TaskRenderers
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.rollout.collect import Collector
from ludus.rollout.workflow import Agent
from ludus.services.gateway.gateway import HttpGateway
from ludus.tasks.readers import read_tasks
from ludus.tasks.splits import check_disjoint
from ludus.train.batches.samples import rows

FOLDER = Path(ludus.__file__).parents[1] / "examples" / "agents"
PACKAGES = {
    "plain_openai": "openai",
    "openai_agents": "agents",
    "langgraph_agent": "langgraph",
    "agentscope_react": "agentscope",
    "smolagents_tools": "smolagents",
}
pytestmark = [pytest.mark.usefixtures("unclosed_clients"), pytest.mark.filterwarnings(*WARNINGS)]

KEEPS_HISTORY = {*PACKAGES} - {"smolagents_tools"}
"""Sends each turn back as the model wrote it. smolagents sends calls and results as text."""

TASK = Task(id="sum", prompt=[Message(role="user", content="What is 12 * 7 + 5 ?")], answer="89")
CALL = ToolCall(name="calculator", arguments={"expression": "12 * 7 + 5"})
PLAIN = Message(role="assistant", tool_calls=[CALL])
TURNS = {
    "a call": PLAIN,
    "text and a call": PLAIN.model_copy(update={"content": "I compute ."}),
    "space around the text": PLAIN.model_copy(update={"content": "\n\nI compute .\n"}),
    "thinking": PLAIN.model_copy(update={"thinking": "a sum", "content": "I compute ."}),
    "two calls": PLAIN.model_copy(update={"tool_calls": [CALL, CALL]}),
}

hosts: list[str] = []


def _listen(event: str, args: tuple[Any, ...]) -> None:
    if event == "socket.getaddrinfo":
        hosts.append(str(args[0]))


sys.addaudithook(_listen)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(train_tokenizer(Spec(name="bpe"), ["What is 12 * 7 + 5 ?"], "plain"))


class ByResults(Scripted):
    """Scripted turns, chosen by the number of results in the prompt: a fork goes on with them."""

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, *, session: str
    ) -> Completion:
        done = self.renderer.text(prompt_ids).count("89")
        turn = self.texts[min(done, len(self.texts) - 1)]
        one = Scripted(self.renderer, turn)
        one.open(session)
        return await one.sample(prompt_ids, params, session=session)


async def play(
    name: str, renderer: Renderer, *turns: Message | str, num: int = 1
) -> list[Trajectory]:
    collector = Collector(
        sampler=ByResults(renderer, *turns, context_length=8192),
        renderers=TaskRenderers(renderer),
        config=RolloutConfig(max_tokens_per_turn=256, max_retries=0),
        env=None,
        judge=AnswerJudge(),
        agent=Agent.build(Spec(name=f"{FOLDER}/{name}.py:run")),
        gateway=HttpGateway(),
    )
    try:
        (group,) = await collector.collect([TASK], 0, num)
    finally:
        await collector.close()
    return group.trajectories


def last_turn(name: str) -> Message | str:
    if name != "smolagents_tools":
        return "89"
    answer = ToolCall(name="final_answer", arguments={"answer": "89"})
    return Message(role="assistant", tool_calls=[answer])


@pytest.mark.parametrize("kind", TURNS)
@pytest.mark.parametrize("name", PACKAGES)
async def test_each_plays_with_its_tool(name: str, kind: str, renderer: Renderer) -> None:
    pytest.importorskip(PACKAGES[name], reason="needs the extra agents")
    hosts.clear()
    (played,) = await play(name, renderer, TURNS[kind], last_turn(name))
    assert (played.status, played.error, played.reward) == (Status.COMPLETED, None, 1.0)
    assert played.num_turns == 2
    found = rows(played, 1.0)
    assert sum(sum(row.loss_mask) for row in found) == played.num_sampled_tokens
    assert len(found) == (1 if name in KEEPS_HISTORY else 2)
    assert set(hosts) <= {"127.0.0.1"}, "a framework reached for the internet"


@pytest.mark.parametrize("name", variants([*PACKAGES], [*PACKAGES][:1]))
async def test_many_at_once(name: str, renderer: Renderer) -> None:
    """Frameworks share clients between agents, which play in threads of their own."""
    pytest.importorskip(PACKAGES[name], reason="needs the extra agents")
    for played in await play(name, renderer, PLAIN, PLAIN, PLAIN, last_turn(name), num=24):
        assert (played.error, played.reward, played.num_turns) == (None, 1.0, 4)


@pytest.mark.parametrize("name", PACKAGES)
async def test_no_call_of_the_tool(name: str, renderer: Renderer) -> None:
    """A turn that calls no tool, or calls it wrongly, ends the episode or is answered."""
    pytest.importorskip(PACKAGES[name], reason="needs the extra agents")
    for said in ("88", "<tool_call>{oops</tool_call>", "..."):
        (played,) = await play(name, renderer, said)
        assert played.reward == 0.0, (said, played.error)
        assert played.status.trainable, (said, played.error)


@pytest.mark.parametrize("name", PACKAGES)
def test_each_has_less_than_forty_lines(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 40


def test_the_recipe_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parents[1])
    config = load_config("examples/agents/sums.yaml")
    tasks = read_tasks(config.tasks.train, "tasks.train")
    assert len(tasks) == 2000
    assert tasks[0] == read_tasks(config.tasks.train, "tasks.train")[0]
    assert config.tasks.heldout is not None
    check_disjoint(tasks, read_tasks(config.tasks.heldout, "tasks.heldout"))


VARIED = """
from ludus.core.types import Score

class Varied:
    async def __call__(self, task, trajectory):
        return Score(value=trajectory.num_sampled_tokens % 3 + int(trajectory.id[-1]))
"""


@pytest.mark.parametrize(
    "name", ["plain_openai", *(pytest.param(n, marks=pytest.mark.slow) for n in [*PACKAGES][1:])]
)
def test_each_trains(name: str, ludus: Ludus) -> None:
    pytest.importorskip(PACKAGES[name], reason="needs the extra agents")
    recipe = ludus.recipe(
        "tiny",
        context_length=4096,
        agent=f"{FOLDER}/{name}.py:run",
        judge="varied.py:Varied",
        tasks={"train": {"name": f"{FOLDER}/sums.py:sums", "args": {"num_tasks": 8}}},
        rollout={"deterministic": False, "max_turns": 3, "max_tokens_per_turn": 24},
        verify=False,
        rl={"steps": 1, "groups_per_step": 2, "group_size": 2},
    )
    (ludus.cwd / "varied.py").write_text(VARIED)
    ludus("train", recipe, "model.tokenizer=bpe").ok()
    (step,) = ludus.metrics()
    assert step["rollout/excluded"] == 0
    assert step["rollout/sampled_tokens"] > 0
    if name != "smolagents_tools":  # it scores itself: a policy from scratch earns nothing
        assert step["train/grad_norm"] > 0
