"""`ludus coevolve --dry-run`: all stages with time and memory; wrong keys are refused; no file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ludus.cli import app
from ludus.coevolve.checks import check_all
from ludus.coevolve.flow import StageId, stages_of, storage_of
from ludus.coevolve.plan import CoevolutionPlan, StagePlan, plan
from ludus.coevolve.roles import Roles
from ludus.config import yaml12
from ludus.config.coevolve import CoevolveConfig
from ludus.config.load import load_as
from ludus.core.errors import ConfigError, LudusError
from ludus.diagnostics.hardware import HARDWARE, Hardware

RECIPE: dict[str, Any] = {
    "name": "sums",
    "iterations": 3,
    "shared": {
        "model": {
            "architecture": {
                "name": "qwen3",
                "args": {"hidden_size": 64, "num_layers": 2, "intermediate_size": 128},
            },
            "tokenizer": {"name": "words", "args": {"vocab_size": 512}},
            "context_length": 128,
        },
        "rollout": {"max_tokens_per_turn": 32, "concurrency": 16},
        "budget": {"price_per_hour": 2.0, "currency": "EUR"},
    },
    "curriculum": {
        "tasks": {"train": {"name": "prompts", "args": {"prompts": ["A sum!"], "num_tasks": 8}}},
        "rl": {"algorithm": "grpo", "steps": 5, "groups_per_step": 8, "group_size": 4},
    },
    "executor": {
        "judge": "answer",
        "tasks": {"heldout": {"name": "benchmark", "args": {"name": "math-500"}}},
        "rl": {"algorithm": "adpo", "steps": 7, "groups_per_step": 2, "group_size": 4},
    },
    "answers": {"number": 10},
    "questions": {"proposals": 300, "max_problems": 200},
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("sums.yaml").write_text(yaml12.dump(RECIPE))
    return "sums.yaml"


def roles(*overrides: str) -> Roles:
    config = load_as(CoevolveConfig, RECIPE, overrides)
    return Roles(config, storage_of(config))


def stages(found: CoevolutionPlan) -> dict[str, StagePlan]:
    return {stage.name: stage for stage in found.each}


def test_all_stages_with_counts_and_nothing_is_written(recipe: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = CliRunner().invoke(app, ["coevolve", recipe, "--dry-run", "--hardware", "l4"])
    assert done.exit_code == 0, done.output
    assert sorted(tmp_path.rglob("*")) == before
    rows = [line.split() for line in done.output.splitlines()]
    names = ["evaluate", "curriculum", "generate", "score", "filter", "executor", "evaluate"]
    assert [row[0] for row in rows if row and row[0] in names] == names
    for text in (
        "19 stages in coevolve/sums",
        "each of the iterations 1 to 3",
        "rl: 5 steps of 8 x 4; 10 answers to each of 160 proposals",
        "10 answers to each of 300 proposals at most",
        "200 problems at most, p from 0.25 to 0.75",
        "rl: 7 steps of 2 x 4; of 200 problems at most",
        "500 held-out tasks, 200 problems with executor-1",
        "no expert",
        "EUR",
    ):
        assert text in done.output


def test_training_of_the_curriculum_counts_the_answers_and_both_models() -> None:
    alike = "executor.rl.groups_per_step=8"
    few, many = (stages(plan(roles(alike, f"answers.number={k}"), "l4")) for k in (10, 40))
    own = few["curriculum"].seconds - few["curriculum"].parts["answers"]
    assert many["curriculum"].parts["answers"] > 2 * few["curriculum"].parts["answers"]
    assert many["curriculum"].seconds - many["curriculum"].parts["answers"] == pytest.approx(own)
    [alone] = few["generate"].memory.values()
    [trains] = few["executor"].memory.values()
    [both] = few["curriculum"].memory.values()
    assert both == pytest.approx(alone + trains, rel=0.1)


def test_roles_on_two_devices_have_their_memory_there() -> None:
    devices = 'curriculum.model={device: "cuda:0"}', 'executor.model={device: "cuda:1"}'
    found = stages(plan(roles(*devices), "l4"))
    assert set(found["curriculum"].memory) == {"cuda:0", "cuda:1"}
    assert set(found["generate"].memory) == {"cuda:0"}
    assert set(found["executor"].memory) == set(found["score"].memory) == {"cuda:1"}


def test_side_by_side_takes_the_longer_one_and_the_memory_of_both() -> None:
    turns, beside = plan(roles(), "l4"), plan(roles("side_by_side=true"), "l4")
    one, other = (stages(turns)[name] for name in ("executor", "curriculum"))
    assert turns.pair is None
    assert beside.pair is not None
    assert beside.pair.seconds == max(one.seconds, other.seconds)
    assert beside.pair.memory["cpu"] == pytest.approx(one.memory["cpu"] + other.memory["cpu"])
    saved = 2 * min(one.seconds, other.seconds)
    assert beside.seconds == pytest.approx(turns.seconds - saved)


def test_too_large_a_recipe_is_told_of_with_exit_code_1(recipe: str) -> None:
    words = ["coevolve", recipe, "--dry-run", "--hardware", "t4"]
    done = CliRunner().invoke(app, [*words, "shared.rollout.concurrency=1000000"])
    assert done.exit_code == 1
    assert "out of memory: curriculum needs" in done.output


def test_complete_stages_are_counted(recipe: str) -> None:
    state = Path("coevolve/sums/state.json")
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"stages": {"iteration-0/evaluate": {}}}))
    done = CliRunner().invoke(app, ["coevolve", recipe, "--dry-run", "--hardware", "l4"])
    assert "1 are complete, next: iteration-1/curriculum" in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["score", "--dry-run"],
            "--dry-run shows all stages of a whole co-evolution: remove score",
        ),
        (["--test-mode", "--dry-run"], "remove --test-mode"),
        (["--hardware", "l4"], "--hardware belongs to --dry-run"),
        (["--fill", "0.5"], "--fill belongs to --dry-run"),
        (["--dry-run", "--hardware", "h1000"], "--hardware: there is no 'h1000'"),
    ],
)
def test_options_at_wrong_places(recipe: str, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["coevolve", recipe, *words], catch_exceptions=False)
    assert not Path("coevolve").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "executor.rollout.max_truns=3",
            "override executor.rollout.max_truns=3: executor.rollout.max_truns is not a key "
            "(did you mean executor.rollout.max_turns?)",
        ),
        ("shared.modle.path=x", "shared.modle is not a key (did you mean shared.model?)"),
        ("curriculum.rl.stepps=3", "curriculum.rl.stepps is not a key"),
        (
            "executor.judge=maths",
            "executor.judge.name: 'maths' is not a known judge (did you mean math?)",
        ),
        ("executor.rl.algorithm={name: adpo, args: {clip: 1}}", "executor.rl.algorithm.args.clip"),
        ("executor.tasks.heldout=jsonn", "executor.tasks.heldout.name: 'jsonn' is not a known"),
        ("curriculum.rollout.top_p=0.99", "curriculum.rollout.top_p must be 1"),
        ("executor.evaluate={samples_per_task: 4}", "executor.evaluate.samples_per_task: 4 "),
        ("reward.toool=1", "reward.toool is not an argument"),
        ("reward.num_answers=1", "reward.num_answers: the co-evolution sets it itself"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_wrong_keys_are_refused_before_the_first_stage(
    recipe: str, override: str, message: str, dry: bool
) -> None:
    words = ["coevolve", recipe, override, *(["--dry-run"] if dry else [])]
    with pytest.raises(LudusError) as caught:
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert message in str(caught.value)
    assert str(caught.value).startswith((f"override {override}: ", recipe))
    assert not Path("coevolve").exists()


@pytest.mark.parametrize("name", ["executor", "shared"])
def test_tiers_of_the_kept_problems_are_refused(name: str) -> None:
    tiers = "{tiers: {easy: {until: {success: 0.5}}, hard: {}}}"
    words = rf"{name}\.tasks\.curriculum: the kept problems have no tiers: remove it"
    with pytest.raises(ConfigError, match=words):
        check_all(roles(f"{name}.tasks.curriculum={tiers}"))


def test_faults_of_a_shared_key_are_reported_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_all(roles("shared.rollout.max_truns=3", "executor.rl.stepps=4"))
    assert sorted(line.partition(" is")[0] for line in str(caught.value).splitlines()) == [
        "executor.rl.stepps",
        "shared.rollout.max_truns",
    ]


CODE = "executor.rollout.format=code", "executor.tools=[calculator]", "executor.judge=math"


def marked(*overrides: str) -> Roles:
    return roles(*CODE, "executor.rollout.markers={tool: calculator}", *overrides)


FINAL = (
    "executor.rollout.markers.answer=[<final>, </final>]",
    "executor.judge={name: math, args: {markers: [<final>, </final>]}}",
)


def test_votes_read_answers_between_the_markers_of_the_executor() -> None:
    ours = marked(*FINAL)
    check_all(ours)
    for config in (ours.training("curriculum", 1), ours.proposing(0, 1)):
        assert config.judge is not None
        assert config.judge.args["answer_markers"] == ["<final>", "</final>"]


def test_other_markers_of_votes_are_refused_with_both_keys() -> None:
    own = "reward.answer_markers=[<final>, </final>]"
    told = (
        r"^reward\.answer_markers: \['<final>', '</final>'\], but the executor writes its answers "
        r"between those of executor\.rollout\.markers\.answer, \['<answer>', '</answer>'\]: remove "
    )
    with pytest.raises(ConfigError, match=told):
        check_all(marked(own))
    check_all(marked(own, *FINAL))
    check_all(roles(own))  # a prompt may ask for any, where `format` reads none


def test_the_estimate_is_near_a_measured_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """546 s on two cores with other load: 384, 43, 50 and 67 s for start and iterations."""
    laptop = Hardware("laptop", memory=16e9, bandwidth=15e9, flops=140e9, flops32=140e9)
    monkeypatch.setitem(HARDWARE, "laptop", laptop)
    steps = "start.sft.steps=1500", "curriculum.rl.steps=8", "executor.rl.steps=20"
    config = load_as(CoevolveConfig, "coevolve-tiny", [*steps, "questions.proposals=800"])
    found = plan(Roles(config, storage_of(config)), "laptop")
    iteration = sum(stage.seconds for stage in found.each)
    assert 384 / 3 < found.first[0].seconds < 384 * 3
    assert 53 / 3 < iteration < 53 * 3


def test_plan_shows_the_same_and_train_names_the_verb(recipe: str) -> None:
    dry = CliRunner().invoke(app, ["coevolve", recipe, "--dry-run", "--hardware", "l4"])
    done = CliRunner().invoke(app, ["plan", recipe, "--hardware", "l4"])
    assert (done.exit_code, done.output) == (dry.exit_code, dry.output)
    slower = CliRunner().invoke(app, ["plan", recipe, "--hardware", "l4", "--efficiency", "0.1"])
    assert slower.exit_code == 0
    assert slower.output != done.output
    with pytest.raises(ConfigError, match="--tool-calls belongs to the plan of a run"):
        CliRunner().invoke(app, ["plan", recipe, "--tool-calls", "3"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="run it with `ludus coevolve`"):
        CliRunner().invoke(app, ["train", recipe], catch_exceptions=False)


def test_keys_of_shared_decide_on_the_stages_too() -> None:
    """`rl` and the held-out tasks of `shared` count as those of the role."""
    held = {"name": "benchmark", "args": {"name": "math-500"}}
    moved = {**RECIPE, "shared": {**RECIPE["shared"], "rl": RECIPE["curriculum"]["rl"]}}
    moved["curriculum"] = {key: value for key, value in RECIPE["curriculum"].items() if key != "rl"}
    names = [stage.name for stage in stages_of(load_as(CoevolveConfig, moved))]
    assert names.count("curriculum") == 3
    none = load_as(CoevolveConfig, moved, ["curriculum.rl=null"])
    assert "curriculum" not in [stage.name for stage in stages_of(none)]
    executor = {key: value for key, value in RECIPE["executor"].items() if key != "tasks"}
    moved = {**RECIPE, "executor": executor}
    assert StageId(0, "evaluate") not in stages_of(load_as(CoevolveConfig, moved))
    moved["shared"] = {**RECIPE["shared"], "tasks": {"heldout": held}}
    assert StageId(0, "evaluate") in stages_of(load_as(CoevolveConfig, moved))
