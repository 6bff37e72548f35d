"""The judge `curriculum`: a step of proposals, answered by an executor of known behaviour."""

from dataclasses import replace

import pytest
from judged import said

from ludus.core.errors import ConfigError
from ludus.core.types import Group, Spec, Status, Task
from ludus.judges import JUDGES


class Executor:
    """Answers a question with the texts that `answers` has for it; None: its tool failed."""

    def __init__(self, answers, calls=0.0):
        self.answers, self.calls, self.asked, self.closed = answers, calls, [], False

    async def stream(self, tasks, label, step, k, finish):
        self.asked.append([task.prompt[0].content for task in tasks])
        for number, task in enumerate(tasks):
            await finish(number, self._group(task, f"{label}-{step}/{number}", k))

    def _group(self, task, id, k):
        texts = self.answers[task.prompt[0].content]
        assert len(texts) == k
        played = [replace(said(text or "?"), id=f"{id}/{n}") for n, text in enumerate(texts)]
        for trajectory, text in zip(played, texts, strict=True):
            trajectory.metrics["tool_calls"] = self.calls
            if text is None:
                trajectory.status, trajectory.error = Status.ERROR_TOOL, "the sandbox is gone"
        return Group(id, task, played)

    async def close(self):
        self.closed = True


def proposal(id, text):
    return replace(said(text), id=id, reward=1.0, scores={"format": 1.0})


def step_of(*texts):
    members = [proposal(f"t{i}", text) for i, text in enumerate(texts)]
    return [Group("g", Task(id="q"), members)]


def judge_of(executor, **args):
    spec = Spec(name="curriculum", args={"executor": "executor.yaml", **args})
    return JUDGES.build(spec, make_player=lambda path: executor)


def asks(question, answer="7"):
    return f"<question>{question}</question> \\boxed{{{answer}}}"


def box(*answers):
    return [f"\\boxed{{{answer}}}" for answer in answers]


async def test_a_step_by_hand():
    executor = Executor({"3 + 4?": box(7, "7.0", 8, 9), "f(x)": ["no", "idea", "?", "-"]}, 2.0)
    judge = judge_of(executor, num_answers=4, extract="boxed")
    groups = step_of(asks("3 + 4?"), asks("f(x)"), "no proposal", asks("3 + 4?", 8))
    [group] = await judge.score_groups(groups, 5)
    first, second, third, fourth = group.trajectories
    # p = 2/4; two calls; the question twice among four proposals
    assert first.reward == pytest.approx(1.0 + 0.6 * 2 - 2 / 4)
    assert first.scores == {
        "format": 1.0,
        "uncertainty": 1.0,
        "tool": 2.0,
        "repetition": 0.5,
        "consistency": 0.5,
        "tool_calls": 2.0,
        "cluster_size": 2.0,
        "unparsed": 0.0,
        "claim": 1.0,
    }
    assert first.explanation == (
        "p 0.50 of 4 answers: '7' 2, '8' 1, '9' 1\n"
        "claimed '7': the majority agrees; 2 tool calls an answer; cluster of 2 in 4"
    )
    assert second.reward == pytest.approx(0.0 + 0.6 * 2 - 1 / 4)
    assert (second.scores["consistency"], second.scores["unparsed"]) == (0.0, 1.0)
    assert (third.reward, third.scores) == (0.0, {"format": 0.0})
    assert third.explanation == "no proposal: no <question>...</question>"
    assert (fourth.reward, fourth.scores["claim"]) == (first.reward, 0.0)
    assert executor.asked == [["3 + 4?", "f(x)"]]
    assert groups[0].trajectories[0].reward == 1.0, "the argument changed"
    await judge.close()
    assert executor.closed


async def test_failed_episodes_of_the_executor_are_no_wrong_answers():
    executor = Executor({"a1": [*box(7, 7), None, None], "b2": [None] * 4})
    judge = judge_of(executor, num_answers=4)
    [group] = await judge.score_groups(step_of(asks("a1"), asks("b2")), 0)
    first, second = group.trajectories
    assert first.scores["consistency"] == 1.0
    assert (second.status, second.reward) == (Status.UNSCORABLE, None)
    told = "0 of 4 episodes of the executor count, fewer than half: the sandbox is gone"
    assert second.error == told


async def test_excluded_proposals_stay_as_they_are_and_leave_the_batch():
    executor = Executor({"a1": box(7, 7)})
    groups = step_of(asks("a1"), asks("b2"))
    lost = groups[0].trajectories[1]
    lost.status, lost.reward = Status.ERROR_SAMPLER, None
    [group] = await judge_of(executor, num_answers=2).score_groups(groups, 0)
    assert group.trajectories[1] is lost
    assert group.trajectories[0].scores["repetition"] == 1.0  # 1 of 1


async def test_without_an_executor_only_the_format_is_scored():
    judge = JUDGES.build(Spec(name="curriculum", args={"executor": "e.yaml"}))
    task = Task(id="q")
    assert (await judge(task, said(asks("3 + 4?")))).value == 1
    assert (await judge(task, said("3 + 4?"))).value == 0
    with pytest.raises(ConfigError, match="set its `executor`"):
        await judge.score_groups(step_of(asks("3 + 4?")), 0)


async def test_one_proposal_alone():
    executor = Executor({"a1": box(7, 8)})
    [group] = await judge_of(executor, num_answers=2).score_groups(step_of(asks("a1")), 0)
    assert group.trajectories[0].reward == 0.0  # 1 - 1/1, a tie
    assert "p 0.50 of 2 answers, a tie: '7' 1, '8' 1" in group.trajectories[0].explanation


async def test_all_proposals_alike():
    executor = Executor({"a1": box(7, 8)}, calls=1.0)
    groups = step_of(*[asks("a1")] * 64)
    [group] = await judge_of(executor, num_answers=2).score_groups(groups, 0)
    [reward] = {t.reward for t in group.trajectories}
    assert reward == pytest.approx(0.6)  # 1 + 0.6 - 64/64
    assert executor.asked == [["a1"]]


async def test_no_proposal_at_all():
    executor = Executor({})
    [group] = await judge_of(executor, num_answers=2).score_groups(step_of("a", "b"), 0)
    assert [t.reward for t in group.trajectories] == [0.0, 0.0]
    assert executor.asked == []
    assert await judge_of(executor, num_answers=2).score_groups([], 0) == []


async def test_a_proposal_without_a_message():
    [group] = step_of(asks("a1"))
    group.trajectories[0].segments = []
    [scored] = await judge_of(Executor({}), num_answers=2).score_groups([group], 0)
    told = "no proposal: the curriculum agent wrote nothing"
    assert scored.trajectories[0].explanation == told


@pytest.mark.slow
async def test_a_hostile_step():
    deep = "(" * 400 + "1" + ")" * 400
    texts = {
        "towers": box("10^{10^{10}}", "9^{9^{9^9}}", "\\infty", "\\infty"),
        "long": box("1" * 100_000, "}" * 99, "\\{1,2\\}", "\\{2,1\\}"),
        "brackets \u202e": box(deep, "\ud800", "5\\text{ cm}", "5"),
    }
    judge = judge_of(Executor(texts), num_answers=4, limit_s=0.2)
    proposals = [asks(question, "10^{10^{10}}") for question in texts]
    noise = ["<question>" * 50_000, "\\boxed{" * 20_000, "\0" * 100_000, "\ud800", ""]
    [group] = await judge.score_groups(step_of(*proposals, *noise), 0)
    assert [t.scores.get("consistency") for t in group.trajectories] == [0.5] * 3 + [None] * 5
    assert [t.scores.get("claim") for t in group.trajectories[:3]] == [0.0] * 3
    for trajectory in group.trajectories:
        trajectory.explanation.encode()
        assert len(trajectory.explanation) < 1000


@pytest.mark.parametrize("name", ["sum", "first"])
def test_it_cannot_be_a_part_of_another_judge(name):
    key = {"sum": "parts", "first": "judges"}[name]
    part = {"name": "curriculum", "args": {"executor": "e.yaml"}}
    with pytest.raises(ConfigError, match=rf"{key}.a: this judge scores the episodes of a step"):
        JUDGES.build(Spec(name=name, args={key: {"a": part}}))


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"executor": ""}, "executor"),
        ({"executor": "e", "num_answers": 1}, "num_answers"),
        ({"executor": "e", "tool": -1}, "tool"),
        ({"executor": "e", "tool": float("nan")}, "tool"),
        ({"executor": "e", "bleu_distance": 0}, "bleu_distance"),
        ({"executor": "e", "question_markers": ["", "b"]}, "question_markers"),
        ({"executor": "e", "make_player": None}, "make_player"),
    ],
)
def test_wrong_arguments_are_named(args, told):
    with pytest.raises(ConfigError, match=rf"args\.{told}"):
        JUDGES.build(Spec(name="curriculum", args=args))
