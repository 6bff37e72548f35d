"""Generated arithmetic and algebra: to solve, and to propose."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from ludus.config.schema import MarkersConfig
from ludus.core.errors import ConfigError, EnvError
from ludus.core.types import NO_ENV, Message, Spec, Task
from ludus.data.demonstrations import generate_demonstrations, load_demonstrations
from ludus.envs.checks.check import check_env
from ludus.envs.synthetic.problems import TIERS, Problems, calculations, true_answer
from ludus.envs.synthetic.proposals import PROMPT, Proposals
from ludus.tasks.readers import read_tasks
from ludus.tools.calculator import evaluate

MARKERS = MarkersConfig(tool="calculator")
TOO_LONG = "what is " + "1 + " * 200 + "1 ?"


@pytest.mark.parametrize("name", ["problems", "proposals"])
async def test_it_conforms(name: str) -> None:
    assert await check_env(Spec(name=name)) == []


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("what is 12 + 7 * 3 ?", "33"),
        ("what is ( 12 - 30 ) * 2 ?", "-36"),
        ("  what is   7 / 2 ?", "7/2"),
        ("what is -3 + 5 ?", "2"),
        ("solve 3 * x + 4 = 19 .", "5"),
        ("solve x / 4 - 1 = 2 .", "12"),
        ("solve 2 * x + 3 = 5 * x - 9 .", "4"),
        ("let a = 4 * 5 . let b = a - 8 . what is b * 2 + a ?", "44"),
        ("let a = 2 + 1 . solve a * x + 1 = 10 .", "3"),
    ],
)
def test_the_answer_of_a_question(question: str, answer: str) -> None:
    assert true_answer(question) == Fraction(answer)


@pytest.mark.parametrize(
    "question",
    [
        "",
        "12 + 7",
        "what is 12 + ?",
        "what is 1 / 0 ?",
        "what is x + 1 ?",
        "what is b ?",
        "what is 2 ** 9 ?",
        "what is 007 ?",
        "what is a . b ?",
        "solve x * x = 4 .",
        "solve 0 * x = 4 .",
        "solve x + 1 = x + 1 .",
        "let a = b . what is a ?",
        "what is 12 ? what is 13 ?",
        "what is 1234567890123 ?",
        TOO_LONG,
        "what is 3or 4 ?",
        "what is 1e5 ?",
        "what is ( 3 + 4 ?",
    ],
)
async def test_other_texts_have_no_answer(question: str) -> None:
    assert true_answer(question) is None
    with pytest.raises(EnvError, match=r"problems: task 'x': data.question is .*it has to be"):
        await Problems().reset(Task(id="x", data={"question": question}))


@pytest.mark.parametrize("tier", list(TIERS))
def test_the_last_calculation_of_the_expert_is_the_answer(tier: str) -> None:
    num_steps = int(tier[-1]) if tier.startswith("steps") else 1
    for seed in range(200):
        task = Problems.task(tier, seed)
        question = task.data["question"]
        done = calculations(question)
        assert len(done) == num_steps
        assert evaluate(done[-1]) == true_answer(question) == Fraction(task.answer)
        numbers = [int(n) for n in question.split() if n.isdecimal()]
        limit = 10**9 if tier == "equation" else 10_000  # its right side is a result
        assert max(numbers) < limit


def test_a_question_of_another_form_has_no_calculations() -> None:
    for question in ("solve 2 * x = 5 * x - 9 .", "no question"):
        with pytest.raises(ValueError, match=r"form|language"):
            calculations(question)


async def test_a_number_counts_in_any_form() -> None:
    task = Task(id="x", data={"question": "what is 7 / 2 ?"})
    for text, reward in {"3.5": 1, " 7/2 ": 1, "3": 0, "": 0, "9" * 10_000: 0}.items():
        env = Problems()
        assert (await env.reset(task)).messages[0].content == "what is 7 / 2 ?"
        assert (await env.step(Message(role="assistant", content=text))).reward == reward


async def test_the_expert_computes_each_step(tmp_path: Path) -> None:
    tasks = [Problems.task(tier, 5) for tier in TIERS]
    path = tmp_path / "demonstrations.jsonl"
    generate_demonstrations(
        Spec(name="problems"),
        tasks,
        path,
        num_workers=1,
        format="code",
        tools=[Spec(name="calculator")],
        markers=lambda _: MARKERS,
    )
    for task, demo in zip(tasks, load_demonstrations(path), strict=True):
        results = [m.content for m in demo.messages if m.role == "tool"]
        calls = [m.content for m in demo.messages if "<code>" in m.content]
        assert calls == [f"<code> {text} </code>" for text in calculations(task.data["question"])]
        assert len(results) == len(calls)
        assert results[-1] == task.answer
        assert f"<answer> {task.answer} </answer>" in [m.content for m in demo.messages]


async def test_a_proposal_needs_its_form_and_the_right_answer() -> None:
    texts = {
        r"<question> what is 12 + 7 ? </question> \boxed{19}": 1,
        "<question>solve 2 * x + 1 = 7 .</question>\n\\boxed{3} ": 1,
        r"<question> what is 12 + 7 ? </question> \boxed{18}": 0,
        r"<question> what is 12 + ? </question> \boxed{12}": 0,
        r"<question> what is 12 + 7 ? </question>": 0,
        r"what is 12 + 7 ? \boxed{19}": 0,
    }
    for text, reward in texts.items():
        env = Proposals()
        opening = await env.reset(Task(id="x"))
        assert [message.content for message in opening.messages] == [PROMPT]
        assert (await env.step(Message(role="assistant", content=text))).reward == reward


async def test_experts_propose_many_different_problems_of_all_kinds() -> None:
    tasks = [Proposals.task(None, seed) for seed in range(600)]
    questions = {task.data["question"] for task in tasks}
    assert len(questions) > 550
    assert {len(calculations(question)) for question in questions} == {1, 2, 3, 4}
    env = Proposals()
    await env.reset(tasks[0])
    text = env.expert_action()
    assert (await env.step(Message(role="assistant", content=text))).reward == 1
    assert [await env.world(task) for task in tasks[:2]] == [None, None]
    with pytest.raises(ConfigError, match="'hard' is not a tier of Proposals"):
        Proposals.task("hard", 0)


def test_the_reader_gives_different_problems_with_their_prompts() -> None:
    spec = Spec(name="ludus.envs.synthetic.problems:read_problems", args={"num_tasks": 200})
    tasks = read_tasks(spec)
    questions = [task.prompt[0].content for task in tasks]
    assert len(set(questions)) == 200
    assert {task.tier for task in tasks} == set(TIERS)
    for task, question in zip(tasks, questions, strict=True):
        assert str(true_answer(question)) == task.answer
        assert (task.env, task.data) == (NO_ENV, {})
    args = {"num_tasks": 1, "tiers": ["sums"]}
    with pytest.raises(ConfigError, match=r"'sums' is not a tier of Problems \(did you mean sum"):
        read_tasks(spec.model_copy(update={"args": args}))
