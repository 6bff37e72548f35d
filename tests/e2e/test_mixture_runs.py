"""Runs over several environments at once: exact shares in every step, and the same bits resumed."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from pathlib import Path

import pytest
from harness import MIXTURE, SOURCES, Ludus, Zygote

from ludus.models.chat.tokenizers import load_tokenizer

RUN = "mixed-1"
SHORT = ("sft.steps=2", "demonstrations.num_episodes=12")


@pytest.fixture(scope="module")
def mixed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Ludus:
    """A whole run that nothing disturbed; to be read, not changed."""
    ludus = Ludus(zygote, tmp_path_factory.mktemp("mixed"))
    ludus("train", MIXTURE).ok()
    return ludus


def shares(ludus: Ludus, stage: str, step: int) -> Counter[str]:
    with ludus.store() as store:
        return Counter(g.task.data["part"] for g in store.groups(RUN, stage, step))


def test_every_step_of_sft_has_its_shares_and_those_of_rl_carry_over(mixed: Ludus) -> None:
    for step in range(20):
        assert shares(mixed, "sft", step) == {"babyai": 4, "crafting": 2}
    given: Counter[str] = Counter()
    for step in range(4):  # of 4 tasks, which the ratios do not divide
        given += shares(mixed, "rl", step)
        assert abs(given["babyai"] - 4 * (step + 1) * 2 / 3) < 1
    assert given.total() == 16


def test_each_environment_has_its_own_turns_and_horizon(mixed: Ludus) -> None:
    most: dict[tuple[str, int], int] = {}
    with mixed.store() as store:
        for step in range(4):
            for group in store.groups(RUN, "rl", step):
                turns = max(trajectory.num_turns for trajectory in group.trajectories)
                key = (group.task.data["part"], step)
                most[key] = max(most.get(key, 0), turns)
    for (part, step), turns in most.items():
        assert turns <= (5 if part == "babyai" and step >= 2 else 3)
    assert max(turns for (part, step), turns in most.items() if part == "babyai" and step >= 2) > 3


def test_metrics_and_evaluations_are_by_environment(mixed: Ludus) -> None:
    lines = mixed.metrics(RUN)
    for line in (line for line in lines if line["stage"] == "rl"):
        counts = [line[f"rollout/groups_{part}"] for part in ("babyai", "crafting")]
        rewards = [line[f"rollout/reward_{part}"] for part in ("babyai", "crafting")]
        assert sum(counts) == 4
        mean = sum(n * r for n, r in zip(counts, rewards, strict=True)) / 4
        assert line["rollout/reward"] == pytest.approx(mean)
        assert line["rollout/raw_reward_babyai"] == line["rollout/reward_babyai"]
    (last,) = [line for line in lines if line["stage"] == "evaluate/after"]
    found = json.loads((mixed.run(RUN) / "evaluations" / "after-000000.json").read_text())
    for part in ("babyai", "crafting"):
        assert last[f"evaluate/success_{part}"] == found["tiers"][part]["success"]["value"]
        assert found["tiers"][part]["success"]["num_tasks"] == 4
    assert found["tiers"]["babyai/GoToObjS6"] == found["tiers"]["babyai"]
    marks = {(outcome["part"], outcome["success_at"]) for outcome in found["outcomes"]}
    assert marks == {("babyai", 1e-6), ("crafting", 1.0)}


@pytest.mark.slow
def test_killed_and_resumed_it_is_the_same_run(mixed: Ludus, ludus: Ludus) -> None:
    kills = {  # in SFT; in the second step of RL; in the fourth, one step after a checkpoint
        "ludus.train.learner:Learner.train_step": [7],
        "ludus.rollout.collect:run_episode": [8 + 12 + 2, 8 + 3 * 12 + 2],
    }
    for where, call in ((where, call) for where, calls in kills.items() for call in calls):
        argv = ("--resume", RUN) if ludus.run(RUN).exists() else (MIXTURE,)
        killed = ludus("train", *argv, setup=f'strike("{where}", {call}, "kill")')
        assert killed.code == -signal.SIGKILL, killed.all
    left = sorted(path.name for path in (ludus.run(RUN) / "checkpoints").iterdir())
    assert "rl-000002" in left, left
    ludus("train", "--resume", RUN).ok()
    mine, other = ludus.state(RUN), mixed.state(RUN)
    moved = [x["train/optimizer_steps"] for x in mixed.metrics(RUN) if x["stage"] == "rl"]
    assert any(moved[2:]), "RL has to change the weights, or this proves little"
    for part in other:
        assert mine[part] == other[part], f"{part} differ"


def test_by_tool_calls_each_task_shows_the_tools_of_its_environment(ludus: Ludus) -> None:
    template = ("model.chat_template=qwen3", "model.context_length=1024", "rl.steps=1")
    tools = ("rollout.format=tools", "rollout.max_tokens_per_turn=64")
    ludus("train", MIXTURE, *tools, *template, *SHORT).ok()
    tokenizer = load_tokenizer(str(ludus.run(RUN) / "tokenizer"))
    offered = {"babyai": {"act"}, "crafting": {"craft", "get", "inventory"}}
    seen = set()
    with ludus.store() as store:
        for stage in ("sft", "rl"):
            for group in store.groups(RUN, stage, 0):
                text = tokenizer.decode(group.trajectories[0].segments[0].token_ids)
                shown = set(re.findall(r'"name":\s*"(\w+)",\s*"desc', text))
                assert shown == offered[group.task.data["part"]], text
                seen.add((stage, group.task.data["part"]))
    assert len(seen) == 4


def with_sayings(ludus: Ludus) -> Ludus:
    """`sayings.jsonl` in its folder: the file of the recipe `sources`."""
    words = ["go forward", "turn left", "turn right"]
    rows = [
        {"prompt": f"say {words[n % 3]} , {n} times", "answer": words[n % 3]} for n in range(10)
    ]
    (ludus.cwd / "sayings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ludus


@pytest.mark.slow
def test_an_environment_a_file_and_puzzles_in_one_run_killed_and_resumed(
    zygote: Zygote, tmp_path: Path
) -> None:
    (tmp_path / "killed").mkdir()
    (tmp_path / "whole").mkdir()
    whole = with_sayings(Ludus(zygote, tmp_path / "whole"))
    whole("train", SOURCES).ok()
    run, parts = "sources-1", {"babyai": 4, "puzzles": 3, "sayings": 3}
    given: Counter[str] = Counter()
    with whole.store() as store:
        for step in range(6):
            groups = store.groups(run, "rl", step)
            for task, played in ((group.task, t) for group in groups for t in group.trajectories):
                opening = played.segments[0].message
                assert opening is not None
                judged = task.data["part"] == "sayings"
                assert set(played.scores) >= ({"correct", "found"} if judged else {"raw_reward"})
                assert (opening.content == "Repeat.") == judged
                assert played.num_turns <= {"babyai": 6}.get(task.data["part"], 1)
            shares = Counter(group.task.data["part"] for group in groups)
            given += shares
            for part, tenths in parts.items():
                assert tenths * 4 // 10 <= shares[part] <= -(-tenths * 4 // 10)
                assert abs(given[part] - tenths * 4 * (step + 1) / 10) < 1
    lines = [line for line in whole.metrics(run) if line["stage"] == "rl"]
    assert sum(line["mixture/babyai/share"] for line in lines) == given["babyai"] / 4
    assert lines[-1]["mixture/sayings/left"] == 10 - given["sayings"]
    assert any(line["train/optimizer_steps"] for line in lines), "RL has to change the weights"
    killed = with_sayings(Ludus(zygote, tmp_path / "killed"))
    strike = 'strike("ludus.rollout.collect:run_episode", 49, "kill")'  # in the fourth step
    assert killed("train", SOURCES, setup=strike).code == -signal.SIGKILL
    killed("train", "--resume", run).ok()
    mine, other = killed.state(run), whole.state(run)
    for part in other:
        assert mine[part] == other[part], f"{part} differ"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rollout.parts={babyia: {max_turns: 3}}", "rollout.parts.babyia: 'babyia' is no part of"),
        ("rl.horizon=[[0, 3]]", "rollout.parts.babyai.max_turns: rl.horizon limits the same"),
        ("tasks.train.args.parts.sayings.judge=null", "nothing scores task 'sayings.jsonl:1'"),
        ("tasks.train.args.parts.sayings.judge=answr", "'answr' is not a known judge"),
        ("tasks.train.args.parts.babyai.ratio=50%", "50% + 0.3 + 3/10 sum to 1.1"),
        ("tasks.train.args.parts.sayings.tasks.args.path=no.jsonl", "parts.sayings: no.jsonl does"),
        ("tasks.train.args.parts.sayings.tasks.args.limit=1", "part 'sayings' has 1 tasks, but"),
        ("tasks.train.args.parts.sayings.env=null", "'sayings' is no environment of the mixture"),
    ],
)
def test_sources_that_do_not_fit_are_refused_by_name(
    ludus: Ludus, setting: str, message: str
) -> None:
    code = 1 if "tasks.args" in setting else 2  # bad data, not a bad configuration
    with_sayings(ludus)("train", SOURCES, setting).refused(code, message)
    assert not ludus.run("sources-1").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "rollout.max_turns={baby: 3}",
            "rollout.max_turns.baby: 'baby' is no part of a mixture (did you mean babyai?)",
        ),
        ("rl.horizon={babyai: [[1, 3]]}", "rl: `horizon` must be a list of [first step, turns]"),
        ("rollout.max_turns=4", "rollout.max_turns must be by environment, or null"),
        ("env.args.envs.babyai={name: babyay}", "'babyay' is not a known env"),
        ("tasks.train.args.parts.babyai.ratio=0", "ratio must be a whole number >= 1"),
        ("env=babyai", "is not a tier of BabyAI"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(ludus: Ludus, setting: str, message: str) -> None:
    ludus("train", MIXTURE, setting).refused(2, message)
    assert not ludus.run(RUN).exists()
