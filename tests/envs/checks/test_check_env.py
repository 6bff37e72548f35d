"""The checker finds what is planted, and finds nothing where nothing is."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import faulty_envs as faulty
import pytest
from preflight_envs import Count
from variants import variants

from ludus.core.errors import ConfigError, EnvError
from ludus.core.types import Message, Observation, Spec, StepResult, Task
from ludus.envs import base, forks
from ludus.envs.base import Env
from ludus.envs.checks import levels, outcomes, play
from ludus.envs.checks.check import check_env
from ludus.envs.checks.subject import Finding


@pytest.mark.parametrize(
    "spec",
    [
        Spec(name="babyai"),
        Spec(name="babyai", args={"actions": "macro", "guide": True}),
        Spec(name="textcraft"),
    ],
    ids=["babyai", "babyai-macro", "textcraft"],
)
async def test_own_environments_conform(spec: Spec) -> None:
    assert await check_env(spec, num_tasks=5) == []


async def test_the_environment_of_the_protocol_s_page_conforms() -> None:
    """The example in the docstring of `ludus.envs.base`, as it stands there."""
    text = inspect.getdoc(base) or ""
    names = dict(vars(base)) | {"Message": Message, "EnvError": EnvError}
    exec(textwrap.dedent(text[text.index("    class Guess") :]), names)
    tasks = [Task(id=str(seed), data={"seed": seed}) for seed in range(4)]
    findings = await check_env(names["Guess"], tasks=tasks)
    assert [finding.severity for finding in findings] == ["note"], "it has no expert"


async def test_a_faultless_environment_has_no_findings() -> None:
    assert await check_env(faulty.Digit) == []


FAULTS: list[tuple[type[Env], str, str]] = [
    (faulty.RaisesOnRubbish, "rubbish", "an empty action raised ValueError"),
    (faulty.ReturnsRubbish, "episode", "EnvError: step returned a str, not a StepResult"),
    (
        faulty.Praises,
        "episode",
        "EnvError: Praises.step: StepResult has reward='good'; it has to be a number",
    ),
    (faulty.AnswersAsAssistant, "messages", "assistant message"),
    (faulty.Prints, "standard output", "'a step"),
    (faulty.NotDeterministic, "determinism", "the opening"),
    (faulty.SeedsTheWorld, "random state", "random"),
    (faulty.Shares, "independence", "beside other episodes"),
    (faulty.GoesOn, "expert", "1,000 steps returned terminated or truncated (so it is in 5 other"),
    (faulty.PaysTooMuch, "rewards", "outside of score_range 0 to 1"),
    (faulty.ClosesOnce, "close", "the second close raised RuntimeError"),
    (faulty.Silent, "answers", "no messages"),
]


QUICK = [fault for fault in FAULTS if fault[0] is not faulty.GoesOn]  # it has a test of its own


@pytest.mark.parametrize(
    ("env", "check", "detail"), variants(FAULTS, QUICK), ids=[f[0].__name__ for f in FAULTS]
)
async def test_a_planted_fault_is_found(env: type[Env], check: str, detail: str) -> None:
    found = [f for f in await check_env(env) if f.severity == "error" and f.check == check]
    assert any(detail in finding.detail for finding in found), found


async def test_an_environment_that_hangs_ends_the_checks() -> None:
    findings = await check_env(faulty.Hangs, timeout_s=0.3)
    assert [f.check for f in findings] == ["time"]
    assert "step takes longer than 0.3 s" in str(findings[0])


async def test_an_expert_that_differs_between_two_plays_of_a_task_is_told() -> None:
    findings = await check_env(faulty.Fickle, num_tasks=1)
    assert [(f.severity, f.check) for f in findings] == [("note", "expert")]
    said = r"digit/0, played twice: the expert takes, in turn 1, '(\d+)' and then '(\d+)': the same"
    found = re.match(said, findings[0].detail)
    assert found
    assert found[1] != found[2]


async def test_one_finding_tells_that_tasks_differ_between_two_plays_and_the_cure() -> None:
    [finding] = await check_env(faulty.NotDeterministic, num_tasks=3)
    said = r"of 3 tasks, played twice with the same actions, differs?; digit/\d: the opening has "
    assert re.search(said + r"'(.+)' and then '(.+)'\. The same task", finding.detail)
    assert "random.Random(task.data['seed'])" in finding.detail


async def test_a_hash_seed_is_seen_through_in_another_process() -> None:
    findings = await check_env(Spec(name="faulty_envs:HashDependent"), num_tasks=1)
    assert [f.check for f in findings] == ["determinism"]
    assert "another process" in findings[0].detail


async def test_an_expert_that_differs_in_another_process_is_told() -> None:
    [finding] = await check_env(Spec(name="faulty_envs:HashDependentExpert"), num_tasks=1)
    assert (finding.severity, finding.check) == ("note", "expert")
    assert "digit/0, played in another process: the expert takes, in turn 1," in finding.detail
    assert "`hash()` of a text" in finding.detail


async def test_a_hash_seed_that_is_given_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new process has another one than this, which starts with the same seed as a user's."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    code = (
        "import asyncio, os\nfrom ludus.core.types import Spec\n"
        "from ludus.envs.checks.check import check_env\n"
        "if __name__ == '__main__':\n"
        "    spec = Spec(name='faulty_envs:HashDependent')\n"
        "    print(*asyncio.run(check_env(spec, num_tasks=1)), os.environ['PYTHONHASHSEED'])\n"
    )
    support = str(Path(faulty.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": support},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "error: determinism: digit/0 differs in another process" in done.stdout
    assert done.stdout.endswith(" 7\n")


async def test_what_is_raised_in_another_process_alone_is_told_with_its_place() -> None:
    [finding] = await check_env(Spec(name="faulty_envs:RaisesElsewhere"), num_tasks=1)
    said = (
        r"digit/0, played in another process, raised .*KeyError: 'digit/0' \[faulty_envs.py, line"
    )
    assert re.match(said, finding.detail), finding


async def test_the_outcome_of_each_level_is_told() -> None:
    told: list[str] = []
    findings = await check_env(faulty.Levels, timeout_s=1.0, tell=told.append)
    assert {finding.check for finding in findings} == {"levels"}
    details = [finding.detail for finding in findings]
    where = r" \[faulty_envs.py, line \d+\]"
    for said, detail in zip(
        [
            rf"'file': task raised ValueError: no such file{where}",
            rf"'map': reset: KeyError: 'map'{where}",
            rf"'rules', 'moves': step: KeyError: 'rule'{where}",
            "'sleeps': step takes longer than 1 s",
        ],
        details,
        strict=True,
    ):
        assert re.fullmatch(said, detail), detail
    assert told[0] == "of 6 levels 1 can be played ('fine'), 5 cannot"
    assert told[1].startswith("the expert wins 6 of 6 tasks")


class Tiered(faulty.Digit):
    """Two levels of the same digits."""

    names: ClassVar[tuple[str, ...]] = ("one", "two")

    @classmethod
    def tiers(cls) -> tuple[str, ...]:
        return cls.names

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        return Task(id=f"{tier}/{seed}", data={"seed": seed}, tier=tier)


async def test_levels_for_which_no_time_is_left_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Tiered):
        async def reset(self, task: Task) -> Observation:
            await asyncio.sleep(0.1)
            return await super().reset(task)

    monkeypatch.setattr(levels, "LEVELS_S", 0.1)
    told: list[str] = []
    assert not [f for f in await check_env(Slow, 2, tell=told.append) if f.severity == "error"]
    assert told[0] == "of 2 levels 1 can be played in 0.1 s ('one'), 1 not tried ('two')"


@pytest.mark.parametrize("seconds", [20.0, 0.1])
async def test_a_first_level_that_hangs_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    class Hangs(Tiered):
        names = ("hangs", "fine")

        async def reset(self, task: Task) -> Observation:
            if task.tier == "hangs":
                await asyncio.sleep(60)
            return await super().reset(task)

    monkeypatch.setattr(levels, "LEVELS_S", seconds)
    found = await check_env(Hangs, 2, timeout_s=0.5)
    [error] = [finding for finding in found if finding.severity == "error"]
    assert error.check == "levels"
    assert error.detail == "'hangs': reset takes longer than 0.5 s"


async def test_a_level_of_which_only_the_first_task_fails_can_be_played_in_part() -> None:
    class Partly(Tiered):
        async def reset(self, task: Task) -> Observation:
            if task.id == "one/0":
                raise KeyError("map")
            return await super().reset(task)

    told: list[str] = []
    found = await check_env(Partly, 2, tell=told.append)
    [error] = [finding for finding in found if finding.severity == "error"]
    said = r"'one': reset: KeyError: 'map' \[.*, line \d+\], in its first task; its second plays"
    assert re.fullmatch(said, error.detail), error
    assert told[0] == "of 2 levels 1 can be played ('two'), 1 in part"


async def test_levels_that_all_fail_alike_are_told_once() -> None:
    class Alike(faulty.Levels):
        async def reset(self, task: Task) -> Observation:
            raise KeyError("map")

        @classmethod
        def task(cls, tier: str | None, seed: int) -> Task:
            return Task(id=f"{tier}/{seed}", data={"seed": seed}, tier=tier)

    [finding] = await check_env(Alike)
    assert finding.check == "episode"


async def test_tasks_that_ignore_the_seed_are_told() -> None:
    [finding] = await check_env(faulty.Deaf)
    assert (finding.severity, finding.check) == ("note", "tasks")
    assert "the 6 tasks have the same data and the same opening" in finding.detail


async def test_tasks_of_one_id_are_one_finding() -> None:
    findings = list(map(str, await check_env(faulty.Namesakes)))
    assert findings == ["error: tasks: different seeds give tasks with the same id"]


async def test_an_error_is_told_with_its_place_in_the_user_s_file() -> None:
    findings = list(map(str, await check_env(faulty.RaisesOnRubbish, num_tasks=1)))
    raised = r"raised ValueError: .* \[faulty_envs.py, line \d+\]"
    assert re.match(f"error: rubbish: words that are no action {raised}", findings[0])
    assert re.match(f"error: rubbish: an empty action {raised}", findings[1])


async def test_a_finding_is_not_longer_than_a_page() -> None:
    class Wordy(faulty.NotDeterministic):
        @classmethod
        def task(cls, tier: str | None, seed: int) -> Task:
            return Task(id="x" * 100_000, data={"seed": seed})

    findings = await check_env(Wordy, num_tasks=1)
    assert findings
    assert all(len(finding.detail) < 2000 for finding in findings)


async def test_a_process_that_dies_is_told(tmp_path: Path) -> None:
    env = tmp_path / "mortal.py"
    env.write_text(faulty.MORTAL)
    findings = await check_env(Spec(name=f"{env}:Digit"), num_tasks=1)
    assert [f.check for f in findings] == ["determinism"]
    assert "a new process that plays" in findings[0].detail


async def test_a_step_out_of_turn_has_to_be_refused() -> None:
    findings = await check_env(faulty.GoesOn, num_tasks=1)
    assert any("a step before reset was accepted" in f.detail for f in findings)


async def test_an_environment_without_tasks_of_its_own_is_given_some() -> None:
    class Bare(faulty.Digit):
        @classmethod
        def task(cls, tier: str | None, seed: int) -> Task:
            raise NotImplementedError

    assert "Bare has no classmethod `task(tier, seed)`" in str((await check_env(Bare))[0])
    assert await check_env(Bare, tasks=[Task(id="a", data={"seed": 4})]) == []


def hang(*_: object) -> None:
    time.sleep(30)


def endless() -> Iterator[str]:
    while True:
        yield "a"


WRONG_CLASSES: list[tuple[dict[str, Any], str]] = [
    ({"task": classmethod(hang)}, "time: tiers or task takes longer than 0.3 s; the remaining"),
    ({"tiers": staticmethod(endless)}, "tasks: tiers() returned <generator"),
    ({"tiers": staticmethod(lambda: "easy")}, "tasks: tiers() returned 'easy'; it has to be a tu"),
    ({"tiers": staticmethod(lambda: ("a", "a"))}, "tasks: tiers() returned ('a', 'a'), with a na"),
    ({"tiers": staticmethod(lambda: None)}, "tasks: tiers() returned None; it has to be a tuple"),
    ({"tiers": lambda self: ("a",)}, "tasks: tiers() raised TypeError: .*; write `@classmethod d"),
    ({"tiers": staticmethod(sys.exit)}, "tasks: the environment called for exit: SystemExit"),
    ({"task": staticmethod(lambda *_: {"id": "x"})}, "tasks: task(None, 0) returned {'id': 'x'};"),
    ({"task": lambda self, tier, seed: None}, "tasks: task(None, 0) raised TypeError: .*; write "),
    ({"expert_action": lambda self: 49}, "episode: expert_action of task digit/0: EnvError: "),
    (
        {"blocking": "no"},
        "declarations: EnvError: .*: blocking is 'no'; it has to be True or False",
    ),
    ({"expert_knows_more": 17}, "declarations: EnvError: Wrong.expert_knows_more raised TypeError"),
]


@pytest.mark.parametrize(("members", "told"), WRONG_CLASSES)
async def test_a_class_with_wrong_members_is_told(members: dict[str, Any], told: str) -> None:
    env = type("Wrong", (faulty.Digit,), members)
    findings = [str(f) for f in await check_env(env, num_tasks=1, timeout_s=0.3)]
    form = re.escape(told).replace(re.escape(".*"), ".*")
    assert any(re.match("error: " + form, finding) for finding in findings), findings


async def test_an_expert_that_is_async_is_told() -> None:
    async def expert_action(self: object) -> str:
        return "1"

    findings = await check_env(type("Wrong", (faulty.Digit,), {"expert_action": expert_action}))
    assert "expert_action is async: write `def expert_action`" in str(findings)


async def test_an_environment_that_never_gives_a_reward_is_told() -> None:
    class Unscored(faulty.Digit):
        async def step(self, action: Message) -> StepResult:
            return (await super().step(action)).model_copy(update={"reward": None})

    findings = [str(f) for f in await check_env(Unscored, num_tasks=2)]
    said = "note: rewards: no step gives a reward (it is None): a judge has to score the episodes"
    assert said in findings


async def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match="did you mean babyai"):
        await check_env("babyia")


@pytest.mark.parametrize(("name", "told"), [("Blocking", 1), ("Digit", 0)])
async def test_a_needless_thread_is_told(
    name: str, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "FAST_STEP_S", 60.0)
    findings = await check_env(Spec(name=f"faulty_envs:{name}"), num_tasks=1)
    assert len(findings) == told, findings
    for finding in findings:
        assert str(finding).startswith("note: speed: a step of the environment takes ")
        assert finding.detail.endswith("cannot hang, set `blocking = False` in the class")


def test_steps_that_are_worth_a_thread_are_not_told() -> None:
    assert outcomes.needless_thread(2e-5, 1e-4) is not None
    assert outcomes.needless_thread(5e-4, 1e-4) is None
    assert outcomes.needless_thread(2e-5, 2.0) is None, "others would wait for the reset"


def counted(**args: object) -> Spec:
    return Spec(name="preflight_envs:Count", args=args)


@pytest.mark.parametrize(
    ("args", "severity", "said"),
    [
        ({"turns": 1}, "note", "length: each episode of the expert ends in its first turn"),
        ({"turns": 300}, "note", "the expert's episode has 300 turns and 1,999 characters"),
        ({"turns": 300}, "note", "needs more than max_turns, 20, in all episodes, up to 300: they"),
        ({"anyway": True}, "note", "and one of random words all earn 1: where all episodes do"),
        ({"reward": 1e6}, "error", "the reward 1e+06 is outside of score_range 0 to 1"),
        (
            {"reward": 1e6, "anyway": True, "expert": False},
            "error",
            "the reward 1e+06 of random words is outside of score_range 0 to 1",
        ),
        ({"reward": math.nan}, "error", "rewards: step returned the reward nan"),
        ({"expert": False}, "note", "expert: there is none for count/short/0"),
    ],
)
async def test_what_trains_badly_is_told(
    args: dict[str, object], severity: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Count, "tiers", lambda: ["short"])
    findings = await check_env(counted(**args), num_tasks=2)
    assert any(said in str(f) and f.severity == severity for f in findings), findings


async def test_slow_steps_are_told_before_all_other_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outcomes, "SLOW_STEP_S", 0.05)
    findings: list[tuple[float, Finding]] = []
    started = time.monotonic()

    def report(finding: Finding) -> None:
        findings.append((time.monotonic() - started, finding))

    await check_env(counted(step_s=0.1), report=report)
    after_s, first = findings[0]
    assert first.check == "speed"
    assert re.match(r"a step takes 0\.1\d? s \(median of 3\)", first.detail)
    assert "an episode of 20 turns takes about 2 s" in first.detail
    assert "6 tasks are checked, 3 turns of each episode" in first.detail
    assert after_s < 15
    assert all(finding.severity == "note" for _, finding in findings)


class Loads(faulty.Digit):
    """Its constructor takes long."""

    blocking = True

    def __init__(self) -> None:
        time.sleep(0.02)


async def test_slow_openings_reduce_the_checks_and_need_their_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outcomes, "SLOW_STEP_S", 0.01)
    monkeypatch.setattr(play, "SLOW_S", 0.1)
    notes = await check_env(Loads)
    assert all(f.severity == "note" for f in notes), notes
    assert re.search(r"the constructor 0\.0\d+ s: .* one task is checked, 1 turn", notes[0].detail)
    [left] = [f.detail for f in notes if f.check == "left out"]
    assert left.endswith("independence: the environment is slow")
    assert not any("blocking = False" in f.detail for f in notes)


class Sleeps(faulty.Digit):
    def __init__(self) -> None:
        time.sleep(60)


async def test_a_constructor_that_hangs_ends_the_checks() -> None:
    [found] = await check_env(Sleeps, timeout_s=0.3)
    assert "the constructor takes longer than 0.3 s; the remaining checks did not" in str(found)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["reset", "step"])
async def test_a_call_for_exit_is_told_once(kind: type[BaseException], method: str) -> None:
    async def leave(*_: object) -> None:
        raise kind(0)

    env = type("Leaves", (faulty.Digit,), {method: leave})
    [found] = await check_env(env)
    assert "the environment called for exit" in found.detail
    assert kind.__name__ in found.detail


async def test_a_fault_of_all_calls_is_told_once() -> None:
    def step(*_: object) -> None:
        return None

    [found] = await check_env(type("NotAsync", (faulty.Digit,), {"step": step}))
    assert "step is not async" in found.detail


async def test_a_child_that_returns_from_the_call_ends() -> None:
    process = os.getpid()

    copies: list[int] = []

    async def step(self: faulty.Digit, action: Message) -> object:
        copies.append(os.fork())
        return await faulty.Digit.step(self, action)

    findings = await check_env(type("Forks", (faulty.Digit,), {"step": step}), num_tasks=1)
    assert os.getpid() == process
    [found] = [f for f in findings if f.severity == "error"]
    assert "forks, and the new process returns from the call too" in found.detail
    for copy in copies:
        os.waitpid(copy, 0)
    forks.copy_returned()  # of copies that ended after the check: the next test has none


async def test_rewards_that_are_no_numbers_are_no_difference() -> None:
    class NoNumber(faulty.Digit):
        async def step(self, action: Message) -> StepResult:
            return (await super().step(action)).model_copy(update={"reward": math.nan})

    errors = [f for f in await check_env(NoNumber) if f.severity == "error"]
    assert [f.detail for f in errors] == ["step returned the reward nan"]


async def test_random_words_have_the_turns_of_an_episode() -> None:
    class Quarters(faulty.Digit):
        max_turns, success_at = 4, 0.25

        async def step(self, action: Message) -> StepResult:
            result = await super().step(action)
            done = action.content.isdecimal()
            return result.model_copy(update={"reward": 0.25, "terminated": done})

    errors = [f for f in await check_env(Quarters) if f.severity == "error"]
    assert errors == []


async def test_an_end_that_is_not_told_is_named() -> None:
    """The class takes its episode for ended, and refuses the next step; nothing says why."""

    class Forgets(faulty.Digit):
        async def step(self, action: Message) -> StepResult:
            return (await super().step(action)).model_copy(update={"terminated": False})

    [found] = await check_env(Forgets)
    assert "EnvError: call reset first" in found.detail
    assert found.detail.endswith("if it ends the episode, return terminated=True")


async def test_tasks_that_play_alike_are_told() -> None:
    """Their data differ, but `reset` does not use the seed."""

    class Same(faulty.Digit):
        async def reset(self, task: Task) -> Observation:
            return await super().reset(task.model_copy(update={"data": {"seed": 3}}))

    [found] = await check_env(Same)
    assert found.detail.startswith("the 6 tasks play alike: RL would learn one task by heart")


async def test_a_later_task_whose_steps_are_slow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "SLOW_S", 2.0)
    monkeypatch.setattr(play, "LATE_STEP_S", 0.3)

    class Later(faulty.Digit):
        async def step(self, action: Message) -> StepResult:
            if self.secret:
                await asyncio.sleep(0.4)
            return await super().step(action)

    found = [str(finding) for finding in await check_env(Later)]
    assert "the first episode was fast: the slowest step took 0.4" in found[0]
    assert "left out" in found[-1]


def told_of(**methods: Any) -> type[Env]:
    return type("Told", (faulty.Digit,), methods)


NAMED: list[tuple[dict[str, Any], str]] = [
    ({"max_turn": 3}, "note: declarations: `max_turn` of Told is no name of Env: if you mean"),
    ({"Tiers": ("a",)}, "`Tiers` of Told is no name of Env: if you mean `tiers`, rename it"),
    ({"tierz": ("a",)}, "`tierz` of Told is no name of Env: if you mean `tiers`, rename it"),
    ({"cheap_resets": True}, "if you mean `cheap_reset`, rename it, for it has no effect"),
    ({"expert_actoin": lambda self: "1"}, "if you mean `expert_action`, rename it"),
]


@pytest.mark.parametrize(("names", "detail"), NAMED)
async def test_names_that_may_be_misspelt_are_told(names: dict[str, Any], detail: str) -> None:
    digit = dict(vars(faulty.Digit))
    if "expert_actoin" in names:
        del digit["expert_action"]
    env = type("Told", (Env,), digit | names)
    found = [str(finding) for finding in await check_env(env)]
    assert any(detail in each for each in found), found


async def test_wrong_worlds_are_told() -> None:
    async def raises(self: Env, task: Task) -> str:
        return str(self.nothing)  # type: ignore[attr-defined]

    async def number(self: Env, task: Task) -> Any:
        return 3

    async def changes(self: Env, task: Task) -> str:
        return str(time.perf_counter())

    for world, detail in (
        (raises, "digit/0: world raised AttributeError"),
        (number, "world returned 3; it has to return a text or None"),
        (changes, "digit/0: two calls of world differ"),
    ):
        [found] = await check_env(told_of(world=world))
        assert (found.check, detail in found.detail) == ("world", True), found


async def test_a_task_without_its_tier_is_told() -> None:
    env = told_of(tiers=classmethod(lambda cls: ("easy", "hard")))
    [found] = await check_env(env)
    assert (
        "task('easy', 0) returned a task without a tier: give the Task `tier=tier`" in found.detail
    )


@pytest.mark.parametrize(
    ("task", "detail"),
    [
        (
            lambda cls, tier, seed: Task(id=seed),
            "task(None, 0): Task has id=0; it has to be a text",
        ),
        (
            lambda cls, tier, seed: Task(id="a", seed=seed),
            "task(None, 0): Task has no field 'seed' (did you mean data?)",
        ),
        (
            lambda cls, tier, seed: Task(id="\udcff"),
            "task(None, 0): the id of the task has a lone surrogate, \\udcff, which is no "
            "character",
        ),
    ],
)
async def test_a_task_that_cannot_be_made_is_told(task: Any, detail: str) -> None:
    [found] = await check_env(told_of(task=classmethod(task)))
    assert found.detail == detail


async def test_texts_that_no_tokenizer_holds_are_told() -> None:
    [found] = await check_env(told_of(expert_action=lambda self: "\udcff"))
    assert "expert_action returned a text that has a lone surrogate, \\udcff" in found.detail

    async def reset(self: Env, task: Task) -> Observation:
        return Observation(messages=faulty.user("\ud800"))

    [found] = await check_env(told_of(reset=reset))
    assert "reset returned a message that has a lone surrogate, \\ud800" in found.detail


async def test_large_messages_are_told() -> None:
    class Speaks(faulty.Digit):
        async def reset(self, task: Task) -> Observation:
            await super().reset(task)
            return Observation(messages=faulty.user("word " * 50_000))

    [size] = [f for f in await check_env(Speaks, num_tasks=1) if f.check == "size"]
    assert "reset returned messages of 250,000 characters" in size.detail


async def test_the_expert_s_actions_are_spoilt_too() -> None:
    """No word of RUBBISH begins as an action does, so a parser of its own form is not reached."""

    class Parses(faulty.Digit):
        async def step(self, action: Message) -> StepResult:
            words = action.content.split()
            if words[:1] == ["say"]:
                int(words[1])
                action = Message(role="assistant", content=words[1])
            return await super().step(action)

        def expert_action(self) -> str:
            return f"say {super().expert_action()}"

    found = [str(finding) for finding in await check_env(Parses)]
    assert len(found) == 2, found
    assert "error: rubbish: the action 'say' raised IndexError" in found[0]
    assert "error: rubbish: the action 'say abc' raised ValueError" in found[1]


async def test_a_reset_or_step_that_raises_is_told_with_its_task() -> None:
    """The first task plays: such an environment was said to lack determinism."""

    class InReset(faulty.Digit):
        async def reset(self, task: Task) -> Observation:
            if task.id != "digit/1":
                raise KeyError("lever")
            return await super().reset(task)

    class InStep(faulty.Digit):
        async def reset(self, task: Task) -> Observation:
            self.id = task.id
            return await super().reset(task)

        async def step(self, action: Message) -> StepResult:
            if self.id != "digit/1" and self.secret is not None:
                raise KeyError("lever")
            return await super().step(action)

    tasks = [faulty.Digit.task(None, seed) for seed in range(1, 5)]
    for cls, check in ((InReset, "reset"), (InStep, "step")):
        found = (await check_env(cls, tasks=tasks))[0]
        assert found.check == check
        assert found.detail.startswith("task digit/2: KeyError: 'lever'")
