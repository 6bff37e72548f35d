"""Runs and rollouts in the terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from store_examples import branched, make_groups

from ludus.core.errors import ConfigError, StoreError
from ludus.core.types import WITHOUT_TURN, Group, Message, Segment, Status, Task, Trajectory
from ludus.store import RunStore
from ludus.store.show import (
    find_place,
    render_run,
    render_runs,
    render_step,
    render_trajectory,
    render_turns,
)


def text_of(shown: RenderableType, width: int = 100, color: bool = False) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
    )
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


@pytest.fixture
def local(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore.open(None, tmp_path) as store:
        store.create_run("run-1", "demo", {}, {"torch": "2"})
        yield store


def test_a_rollout_turn_by_turn_without_colour(local: RunStore) -> None:
    group = Group("g", Task(id="task-g", tier="easy"), [branched("t", "g", 0.5)])
    local.record_step("run-1", "rl", 3, [group], {})
    shown = text_of(render_trajectory(local, "run-1", "t"), width=140)
    head, _, turns = shown.partition("only they have loss\n")
    for fact in ("run-1, rl step 3", "task-g (tier easy)", "completed", "success 1, speed 0.125"):
        assert fact in head
    assert "solver, policy small" in head
    assert [line for line in turns.splitlines() if not line.startswith(("branch", "["))] == [
        "      go to the red ball",
        "    + (thinking) hm",
        "    + look",
        "    + (calls look: at='door', deep=[1, None, {'a': 2.5}])",
        "      a door",
        "    + open",
        "    +",
        "    + 4 1",
    ]
    assert "[0] user: 3 tokens" in turns
    assert (
        "[1] assistant, turn 1: sampled 2 tokens, policy 3, logprob mean -0.40, least -0.70 (id 9)"
    ) in turns
    assert "[2] tool: 1 token\n" in turns
    branches = [line.rstrip(" ─") for line in turns.splitlines() if line.startswith("branch")]
    assert branches == [
        "branch 1 of 3, from the start",
        "branch 2 of 3, continues after [1]",
        "branch 3 of 3, continues after [0]",
    ]


def test_a_turn_over_an_update_shows_its_versions(local: RunStore) -> None:
    turn = Segment(0, [2] * 3, [-0.5] * 3, policy_version=3, version_runs=[(3, 1), (4, 2)])
    group = Group("g", Task(id="x"), [Trajectory("t", "g", "x", [Segment(-1, [1]), turn])])
    local.record_step("run-1", "rl", 0, [group], {})
    shown = text_of(render_trajectory(local, "run-1", "t"), width=140)
    assert "sampled 3 tokens, policy 3 (1 token), 4 (2 tokens), logprob mean" in shown


def test_decoded_tokens_wrap_with_their_mark(local: RunStore) -> None:
    segments = [Segment(-1, [1] * 30, None), Segment(0, [2] * 30, [-0.5] * 30)]
    group = Group("g", Task(id="x"), [Trajectory("t", "g", "x", segments, reward=1.0)])
    local.record_step("run-1", "rl", 0, [group], {})
    words = {1: "given ", 2: "taken "}
    shown = render_trajectory(
        local, "run-1", "t", decode=lambda ids: "".join(words[i] for i in ids)
    )
    lines = text_of(shown, width=40).splitlines()
    given = [line for line in lines if "given given" in line]
    taken = [line for line in lines if "taken taken" in line]
    assert len(given) > 3
    assert len(taken) > 3
    assert all(line.startswith("    + taken") for line in taken)
    assert all(line.startswith("      given") for line in given)
    coloured = text_of(shown, width=40, color=True)
    assert "\x1b[32mtaken taken" in coloured, "sampled text is green"
    assert "\x1b[32mgiven" not in coloured


def test_a_failed_rollout_says_why(local: RunStore) -> None:
    local.record_step("run-1", "rl", 0, make_groups(0), {})
    shown = text_of(render_trajectory(local, "run-1", "s0-g0-2"))
    assert "error_env" in shown
    assert 'the environment raised C:\\new "\\x00\\ud800"' in shown
    assert "none has loss (error_env)" in shown


def test_text_cannot_steer_the_terminal(local: RunStore) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07 \u202e [red]not markup[/red] [/] :boom:"
    message = Message(role="user", content=evil)
    trajectory = Trajectory("t", "g", evil, [Segment(-1, [1], None, message)], error=evil)
    trajectory.dropped, trajectory.scores, trajectory.explanation = evil, {evil: 1.0}, evil
    group = Group("g", Task(id=evil), [trajectory])
    local.record_step("run-1", evil, 0, [group], {evil: 1.0}, dropped=[(evil, evil)])
    local.finish_run("run-1", "failed", error=evil)
    for part in (
        render_trajectory(local, "run-1", "t"),
        render_run(local, "run-1"),
        render_runs(local),
    ):
        shown = text_of(part, width=400)
        assert not set(shown) & set("\x1b\x07\u202e")
        assert "\\x1b[2J\\x1b]0;owned\\x07 \\u202e [red]not markup[/red] [/] :boom:" in shown


def test_mean_rewards_of_several_roles(local: RunStore) -> None:
    """In a zero-sum game their mean is always the same."""
    groups = make_groups(0)
    for trajectory in (t for group in groups for t in group.trajectories):
        trajectory.role = "wolf" if trajectory.group_id.endswith("g0") else "villager"
        trajectory.reward = 1.0 if trajectory.role == "wolf" else 0.0
    local.record_step("run-1", "rl", 0, groups, {"rl/reward": 1.0})
    shown = " ".join(text_of(render_run(local, "run-1"), width=140).split())
    assert "rl 1 0 6 villager 0, wolf 1 completed 4, error_env 2" in shown


def test_a_role_without_a_turn_is_no_episode_and_ids_stay_whole(local: RunStore) -> None:
    task, groups = Task(id="kernel:reduction/small/0"), []
    for role, segments in (("generator", [Segment(-1, [1], [-0.5])]), ("optimiser", [])):
        id = f"evaluate/before-000000/g0000/e000/{role}"
        trajectory = Trajectory(id, f"g/{role}", task.id, segments, status=Status.COMPLETED)
        trajectory.role = role
        if not segments:
            trajectory.dropped = WITHOUT_TURN
        groups.append(Group(trajectory.group_id, task, [trajectory]))
    local.record_step("run-1", "evaluate/before", 0, groups, {})
    [stage] = local.summary("run-1")
    assert (stage.num_trajectories, stage.num_without_turn) == (2, 1)
    assert stage.statuses == {Status.COMPLETED: 1}
    for width in (80, 200):
        shown = text_of(render_run(local, "run-1"), width=width)
        listed = shown.partition("newest trajectories")[2]
        assert "evaluate/before 1 0 1 completed 1, no turn 1" in " ".join(shown.split())
        assert WITHOUT_TURN not in shown
        assert "dropped because" not in shown, "nothing was lost"
        for whole in (task.id, "evaluate/before-000000/g0000/e000/optimiser"):
            assert whole in listed, width
        assert ("trajectory, task" in listed) == (width == 80)


def evaluated(num_episodes: int, max_turns: int) -> list[Group]:
    """Held-out tasks of two tiers: an episode of n turns fails if n is even; each ninth has no
    score."""
    groups = []
    for number in range(num_episodes):
        place, turns = f"evaluate/after-000000/g{number:04d}", number % max_turns + 1
        segments = [Segment(i - 1, [1], [-0.5]) for i in range(turns)]
        tier = "hard" if number % 3 else "easy"
        trajectory = Trajectory(f"{place}/e000", place, f"task/{number}", segments)
        trajectory.status = Status.COMPLETED if turns < 4 else Status.TRUNCATED_TURNS
        trajectory.metrics["success"] = float(turns % 2)
        trajectory.reward = None if number % 9 == 8 else float(turns % 2)
        groups.append(Group(place, Task(id=f"task/{number}", tier=tier), [trajectory]))
    return groups


def test_failures_of_the_newest_evaluation_are_counted_and_listed(local: RunStore) -> None:
    local.record_step("run-1", "evaluate/before", 0, evaluated(4, 2), {})
    local.record_step("run-1", "evaluate/after", 0, evaluated(72, 4), {})
    shown = text_of(render_run(local, "run-1"), width=140)
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert any("held-out failures after SFT: 32 of 64 episodes" in line for line in lines)
    assert "easy 24 12 50% truncated_turns 6, completed 6" in lines
    assert "2 16 16 100% completed 16" in lines
    assert "3 16 0 0%" in lines
    assert "4 16 16 100% truncated_turns 16" in lines
    assert sum(line.startswith("evaluate/after-000000/g") for line in lines) == 15
    assert "ludus show run-1 --failed lists all 32" in lines
    assert "newest trajectories" not in shown

    everything = text_of(render_step(local, "run-1", None, failures=True), width=140)
    assert "evaluate/after-000000: 72 episodes, 32 failed, 8 without a score" in everything
    assert everything.count("evaluate/after-000000/g") == 32 + 8
    [title, _, one] = text_of(
        render_step(local, "run-1", "evaluate/after-000000/g0002"), width=140
    ).splitlines()
    assert "g0002: 1 episode, 0 failed" in title
    assert "task/2" in one
    local.record_step("run-1", "rl", 0, make_groups(0), {})
    with pytest.raises(ConfigError, match=r"no episodes at rl-000003: the last step of rl is 0"):
        render_step(local, "run-1", "rl-000003")


def test_what_failed_episodes_were_told_last_is_counted(local: RunStore) -> None:
    groups = evaluated(16, 4)
    for number, group in enumerate(groups):
        text = "no such\nbin" if number % 8 == 1 else f"step {number}"
        said = Segment(
            len(group.trajectories[0].segments) - 1, [], None, Message(role="user", content=text)
        )
        group.trajectories[0].segments.append(said)
    local.record_step("run-1", "evaluate/after", 0, groups, {})
    lines = [" ".join(x.split()) for x in text_of(render_run(local, "run-1"), 140).splitlines()]
    assert lines[lines.index("their last message failed") + 1] == "no such bin 2"


def test_roles_without_a_turn_are_no_episodes(local: RunStore) -> None:
    groups = evaluated(2, 2)
    silent = Trajectory("evaluate/after-000000/g0001/e000/b", "g", "task/1", [], reward=0.0)
    silent.dropped, silent.status = WITHOUT_TURN, Status.COMPLETED
    groups.append(Group("g", Task(id="task/1"), [silent]))
    local.record_step("run-1", "evaluate/after", 0, groups, {})
    assert "SFT: 1 of 2 episodes" in text_of(render_run(local, "run-1"), width=140)
    assert ": 2 episodes, 1 failed" in text_of(render_step(local, "run-1", "evaluate/after"))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("evaluate/after", "evaluate/after-000000"),
        ("evaluate/after-0", "evaluate/after-000000"),
        ("evaluate/after-0/g3", "evaluate/after-000000/g0003"),
        ("evaluate/after-000000/g0003/e000", "None"),
        ("evaluate", "None"),
        ("evaluate/after-\u0660", "None"),
        ("", "None"),
    ],
)
def test_places_by_their_ids(local: RunStore, text: str, place: str) -> None:
    local.record_step("run-1", "evaluate/after", 0, evaluated(4, 2), {})
    assert str(find_place(local, "run-1", text)) == place


def test_a_group_that_is_missing_is_told_with_those_that_there_are(local: RunStore) -> None:
    local.record_step("run-1", "evaluate/after", 0, evaluated(4, 2), {})
    with pytest.raises(ConfigError, match=r"at evaluate/after-000000/g0009: .* g0000 to g0003"):
        render_step(local, "run-1", "evaluate/after-0/g9")


def test_a_narrow_terminal_folds_what_it_cannot_show(local: RunStore) -> None:
    local.record_step("run-1", "evaluate/after", 0, evaluated(2, 2), {})
    shown = text_of(render_step(local, "run-1", "evaluate/after"), width=30)
    assert "".join("".join(line[:10].split()) for line in shown.splitlines()).count("g0001") == 1
    assert "turns" in "".join(shown.split())


def test_a_resumed_run_with_rl_says_after_rl(local: RunStore) -> None:
    """Its row has the configuration that it began with, which may lack RL."""
    assert not local.run("run-1").config.get("rl")
    for stage, when in (("sft", "SFT"), ("rl", "RL")):
        local.record_step("run-1", stage, 0, [], {})
        local.record_step("run-1", "evaluate/after", 0, evaluated(4, 2), {"evaluate/success": 0.5})
        shown = " ".join(text_of(render_run(local, "run-1"), width=140).split())
        assert f"held-out failures after {when}: " in shown
        assert f"held-out success 50.0 % after {when}" in shown


def test_many_numbers_of_turns_are_counted_by_powers_of_two(local: RunStore) -> None:
    local.record_step("run-1", "evaluate/rl", 40, evaluated(72, 12), {})
    shown = text_of(render_run(local, "run-1"), width=140)
    assert "held-out failures at RL step 40" in shown
    cells = [line.split("  ")[0] for line in shown.splitlines()]
    assert cells[cells.index("turns") + 1 :][:5] == ["1", "2", "3 to 4", "5 to 8", "9 to 16"]


def test_an_evaluation_that_is_missing_is_told(local: RunStore) -> None:
    with pytest.raises(ConfigError, match="has no evaluation on held-out tasks: name a step"):
        render_step(local, "run-1", None, failures=True)
    assert find_place(local, "run-1", "rl-000003") is None


def test_metrics_that_are_few_of_many(local: RunStore) -> None:
    metrics = {"rollout/success": 0.5, "train/loss": 0.25, "memory/rss_gb": 1.0}
    for stage in ("sft", "rl"):
        local.record_step("run-1", stage, 0, [], metrics)
    shown = text_of(render_run(local, "run-1"), width=140)
    assert [shown.count(name) for name in metrics] == [1, 2, 0]
    assert "ludus show run-1 --metrics shows all metrics" in shown
    shown = text_of(render_run(local, "run-1", metrics=True), width=140)
    assert [shown.count(name) for name in metrics] == [2, 2, 2]
    assert "--metrics" not in shown


def test_a_run_at_a_glance(local: RunStore) -> None:
    assert "running" in text_of(render_run(local, "run-1")), "an empty run shows too"
    local.record_step("run-1", "sft", 0, [], {"sft/loss": 2.0})
    local.record_step("run-1", "sft", 1, [], {"sft/loss": 0.25})
    local.record_step("run-1", "rl", 0, make_groups(0), {"rl/reward": float("nan")})
    local.finish_run("run-1", "interrupted")
    shown = " ".join(text_of(render_run(local, "run-1"), width=140).split())
    assert "sft 2 1 0" in shown  # stage, steps, last, trajectories
    assert "rl 1 0 6 0.25 completed 4, error_env 2" in shown
    assert "sft/loss 2 0.25" in shown
    assert "rl/reward nan nan" in shown
    assert "rl error_env 2" in shown
    assert "s0-g1-1 rl 0 task-s0-g1 completed 0.5 4" in shown
    runs = " ".join(text_of(render_runs(local), width=140).split())
    assert "run-1 interrupted" in runs
    assert "sft 2, rl 1" in runs, "numbers of steps, not the last one's, which counts from 0"


def test_held_out_success_before_and_after_rl_is_told_first(local: RunStore) -> None:
    def line() -> str:
        lines = text_of(render_run(local, "run-1"), width=140).splitlines()[:8]
        return " ".join(next((x for x in lines if x.startswith("held-out")), "").split())

    assert line() == ""
    local.record_step("run-1", "evaluate/before", 0, [], {"evaluate/success": 0.513})
    assert line() == "held-out success 51.3 % before RL"
    gain = {"evaluate/gain": 0.125, "evaluate/gain_low": 0.084, "evaluate/gain_high": 0.166}
    local.record_step("run-1", "evaluate/rl", 40, [], {"evaluate/success": 0.6})
    assert line() == "held-out success 51.3 % before RL, 60.0 % at step 40"
    local.record_step("run-1", "evaluate/after", 0, [], {"evaluate/success": 0.638, **gain})
    assert line() == (
        "held-out success 51.3 % before RL, 63.8 % after (+12.5 points on the tasks of both, 95 % "
        "interval 8.4 to 16.6)"
    )


def test_held_out_success_of_a_run_without_rl(local: RunStore) -> None:
    local.record_step("run-1", "evaluate/after", 0, [], {"evaluate/success": 0.5})
    shown = " ".join(text_of(render_run(local, "run-1"), width=140).split())
    assert "held-out success 50.0 % after SFT" in shown


def test_a_pause_does_not_count_as_time_of_a_run(local: RunStore) -> None:
    """The budget counts the time of a run; it continues where a resumed run goes on."""
    local.record_step("run-1", "sft", 0, [], {"time/elapsed_s": 60.0})
    assert local.run("run-1").elapsed_s == 60
    local.finish_run("run-1", "interrupted")
    assert " 0 s" in text_of(render_runs(local), width=140), "of an older ludus: since its creation"
    local.finish_run("run-1", "completed", elapsed_s=100.0)
    for shown in (render_runs(local), render_run(local, "run-1")):
        assert "1 min 40 s" in text_of(shown, width=140)
    local.reopen_run("run-1")
    assert local.run("run-1").elapsed_s == 60


def test_long_lists_are_cut_and_say_how_to_see_all(local: RunStore) -> None:
    for number in range(2, 5):
        local.create_run(f"run-{number}", "run", {}, {})
    text = text_of(render_runs(local, 2))
    assert "2 older runs: ludus runs --all" in text
    assert [f"run-{n}" in text for n in range(1, 5)] == [False, False, True, True]
    for limit in (None, 4):
        assert "older" not in text_of(render_runs(local, limit))
    local.record_step("run-1", "rl", 0, make_groups(0), {})
    assert "ludus export" not in text_of(render_run(local, "run-1"))
    for step in range(1, 4):
        local.record_step("run-1", "rl", step, make_groups(step), {})
    assert "ludus export run-1 FILE.jsonl writes all 24" in text_of(render_run(local, "run-1"))


def test_a_trajectory_id_is_in_one_piece_on_a_narrow_screen(local: RunStore) -> None:
    id = "evaluate/after-000000/g0019/e000"
    trajectory = Trajectory(id, "g", "a-task-12345", [Segment(-1, [1], [-0.5])], reward=1.0)
    group = Group("g", Task(id="a-task-12345"), [trajectory])
    local.record_step("run-1", "evaluate/after", 0, [group], {})
    (line,) = [x for x in text_of(render_run(local, "run-1"), width=80).splitlines() if id in x]
    assert line.split() == [id, "a-task-12345", "completed", "1", "1"], "the id has stage and step"


def test_a_demonstration_is_not_shown_as_sampled(local: RunStore) -> None:
    segments = [Segment(-1, [1], None), Segment(0, [2, 3], [0.0, 0.0])]
    group = Group("g", Task(id="x"), [Trajectory("t", "g", "x", segments, reward=1.0)])
    local.record_step("run-1", "sft", 0, [group], {})
    shown = text_of(render_trajectory(local, "run-1", "t"))
    assert "lines that begin with + were demonstrated: only they have loss" in shown
    assert "[1] assistant, turn 1: demonstrated 2 tokens\n" in shown


def test_a_demonstration_whose_observations_train_is_told_so(local: RunStore) -> None:
    local.create_run("run-2", "demo", {"sft": {"observation_weight": 0.2}}, {})
    segments = [Segment(-1, [1], None), Segment(0, [2, 3], [0.0, 0.0])]
    group = Group("g", Task(id="x"), [Trajectory("t", "g", "x", segments, reward=1.0)])
    local.record_step("run-2", "sft", 0, [group], {})
    shown = text_of(render_trajectory(local, "run-2", "t"), width=200)
    assert (
        "lines that begin with + were demonstrated: they have loss with weight 1, all others with "
        "0.2 (sft.observation_weight)"
    ) in shown


def test_an_empty_store_says_what_to_do(tmp_path: Path) -> None:
    with RunStore.open(None, tmp_path) as store:
        assert "ludus train" in text_of(render_runs(store), width=300)


def test_unknown_names(local: RunStore) -> None:
    local.record_step("run-1", "rl", 0, make_groups(0), {})
    with pytest.raises(StoreError, match=r"did you mean run-1\?"):
        render_run(local, "runn-1")
    with pytest.raises(StoreError, match=r"did you mean s0-g0-\d\?"):
        render_trajectory(local, "run-1", "s0-g0-O")


def test_a_turn_without_tokens_shows_its_message() -> None:
    turns = [
        Segment(-1, [], None, Message(role="user", content="go to the ball")),
        Segment(0, [7], None, Message(role="user", content="told by its tokens")),
        Segment(1, [], None),
    ]
    shown = text_of(render_turns(Trajectory("t", "g", "k", turns), lambda ids: f"<{ids}>"))
    assert "      go to the ball\n" in shown
    assert "      <[7]>\n" in shown
    assert "told by its tokens" not in shown
