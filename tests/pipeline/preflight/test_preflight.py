"""Bad input is refused before demonstrations and before a run has a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preflight_envs import Count

from ludus.config.schema import RunConfig
from ludus.core.errors import CheckpointError, ConfigError, DataError, LudusError
from ludus.core.types import Trajectory
from ludus.pipeline import launch
from ludus.pipeline.parts.companions import LaunchOptions
from ludus.pipeline.preflight import episodes, judges, parts
from ludus.pipeline.preflight.preflight import preflight

ENVS = str(Path(__file__).parents[2] / "support" / "preflight_envs.py")
SMALL = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
MODEL: dict[str, Any] = {
    "architecture": {"name": "qwen3", "args": SMALL},
    "tokenizer": "words",
    "chat_template": "plain",
    "context_length": 64,
}


class Silent:
    """An observer that keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stage(self, name: str, total: int, start: int = 0) -> None:
        raise AssertionError(f"{name} began")

    def tick(self) -> None: ...
    def episode(self, trajectory: Trajectory) -> None: ...
    def step(self, stage: str, step: int, metrics: dict[str, float]) -> None: ...
    def close(self) -> None: ...


def recipe(tmp_path: Path, model: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    """Demonstrations and RL of `Count`; `env_` changes its arguments."""
    args = {key[4:]: changes.pop(key) for key in list(changes) if key.startswith("env_")}
    tiers = changes.pop("tiers", ["short"])
    own: dict[str, Any] = {
        "name": "tried",
        "runs_dir": str(tmp_path / "runs"),
        "model": {**MODEL, **(model or {})},
        "env": {"name": f"{ENVS}:Count", "args": args},
        "tasks": {"train": {"name": "env", "args": {"num_tasks": 40, "tiers": tiers}}},
        "rollout": {"max_tokens_per_turn": 8, "max_turns": 5},
        "demonstrations": {"num_episodes": 40},
        "sft": {"steps": 1},
        "rl": {"steps": 10, "groups_per_step": 2, "group_size": 2},
        "threads": 1,
    }
    return RunConfig.model_validate({k: v for k, v in {**own, **changes}.items() if v is not None})


def judged(tmp_path: Path, judge: Any, rows: list[dict[str, Any]] | None = None) -> RunConfig:
    """RL of single turns that a judge scores."""
    rows = rows or [{"prompt": f"say {n}", "answer": str(n)} for n in range(6)]
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    tasks = {"train": {"name": "json", "args": {"path": str(file)}}}
    return recipe(tmp_path, env=None, demonstrations=None, sft=None, judge=judge, tasks=tasks)


def refused(config: RunConfig, kind: type[LudusError] = ConfigError) -> str:
    """Returns the message; the run has left nothing."""
    with pytest.raises(kind) as error:
        launch.train(config, Silent())
    assert not Path(config.runs_dir).exists()
    return str(error.value)


def told(config: RunConfig) -> list[str]:
    """Returns the notes of a recipe that is not refused."""
    notes: list[str] = []
    preflight(config, launch.read_splits(config), launch.PLAIN, notes.append)
    assert not Path(config.runs_dir).exists()
    return notes


def test_a_good_recipe_is_told_in_a_line(tmp_path: Path) -> None:
    [line] = told(recipe(tmp_path))
    assert line.endswith("s; the expert won 8 of 8 episodes of 3 turns")


def test_a_limit_above_the_number_of_held_out_tasks_is_told(tmp_path: Path) -> None:
    def of(between: int) -> str:
        heldout = {"name": "env", "args": {"num_tasks": 5, "first_seed": 900, "tiers": ["short"]}}
        train = {"name": "env", "args": {"num_tasks": 40, "tiers": ["short"]}}
        config = recipe(tmp_path, tasks={"train": train, "heldout": heldout})
        evaluate = config.evaluate.model_copy(update={"num_tasks_between": between})
        return "\n".join(told(config.model_copy(update={"evaluate": evaluate})))

    assert "evaluate.num_tasks_between: there are 5 held-out tasks, fewer than 6" in of(6)
    assert "num_tasks_between" not in of(5)


@pytest.mark.parametrize(("warm_up", "said"), [(4, ""), (16, "comes to 25% of `sft.optimizer.lr`")])
def test_a_warm_up_beyond_the_last_step_is_told(tmp_path: Path, warm_up: int, said: str) -> None:
    config = recipe(tmp_path)
    assert config.sft
    optimizer = config.sft.optimizer.model_copy(update={"warmup_steps": warm_up})
    sft = config.sft.model_copy(update={"steps": 4, "optimizer": optimizer})
    notes = "\n".join(told(config.model_copy(update={"sft": sft})))
    assert ("sft.optimizer.warmup_steps" in notes) == bool(said)
    assert said in notes


# Model, tokenizer, device, template, sampler, learner


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        ({}, {"learner": {"compile": True}}, "`learner.compile: true` replaces"),
        ({}, {"verify": True}, "`verify: true` does without"),
        ({"lora": {"rank": 2}}, {}, "`model.lora` does without"),
        ({"dtype": "bfloat16"}, {}, "`model.dtype: bfloat16` does without"),
    ],
)
def test_gradients_that_skip_observations_need_the_kernels(
    tmp_path: Path, model: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    learner = {"detach_observations": True, **changes.pop("learner", {})}
    text = refused(recipe(tmp_path, model, learner=learner, **changes))
    assert f"learner.detach_observations needs ludus' training kernels, which {said}" in text


def test_without_a_compiler_gradients_cannot_skip_observations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "kernels", lambda _: None)
    text = refused(recipe(tmp_path, learner={"detach_observations": True}))
    assert "which this machine lacks (no C compiler, or LUDUS_NATIVE=0)" in text


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"architecture": None, "path": "nowhere", "tokenizer": None}, "no folder nowhere"),
        ({"architecture": None, "path": "nowhere"}, "model.path: there is no folder nowhere"),
        ({"chat_template": "nowhere.jinja"}, "'nowhere.jinja' is neither a shipped template nor"),
        ({"device": "cuda:63"}, "model.device: cuda:63 does not exist"),
        ({"tokenizer": "nowhere/at/all"}, "model.tokenizer: there is no folder nowhere/at/all"),
        (
            {"architecture": {"name": "llama", "args": {**SMALL, "hidden_size": 17}}},
            "hidden size (17)",
        ),
        (
            {"architecture": {"name": "qwen3", "args": {**SMALL, "hidden_size": 10_000_000}}},
            "parameters take",
        ),
        ({"tokenizer": {"name": "words", "args": {"vocab_size": 16}}}, "vocab_size: 16 is too"),
    ],
)
def test_a_model_that_cannot_be_built(tmp_path: Path, model: dict[str, Any], said: str) -> None:
    assert said in refused(recipe(tmp_path, model))


def test_a_template_whose_turns_cannot_be_appended(tmp_path: Path) -> None:
    template = tmp_path / "twice.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    message = refused(recipe(tmp_path, {"chat_template": str(template)}))
    assert "content 2 times; it must be written exactly once" in message


def test_a_sampler_that_is_not_installed(tmp_path: Path) -> None:
    rollout = {"max_tokens_per_turn": 8, "deterministic": False}
    message = refused(recipe(tmp_path, sampler="vllm", rollout=rollout))
    assert "has no vLLM" in message


@pytest.fixture
def pretrained(tmp_path: Path) -> Callable[..., RunConfig]:
    """A recipe of a model in a folder, which `model.path` names."""
    from ludus.core.types import Spec
    from ludus.models.build import build_model
    from ludus.models.chat.tokenizers import train_tokenizer

    folder = tmp_path / "own"
    tokenizer = train_tokenizer(Spec(name="words"), ["count 1 2 3 next"])
    build_model(recipe(tmp_path).model, tokenizer, 0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    def made(**model: Any) -> RunConfig:
        own = {"architecture": None, "tokenizer": None, "path": str(folder), **model}
        return recipe(tmp_path, own)

    return made


def test_a_pretrained_model(pretrained: Callable[..., RunConfig], tmp_path: Path) -> None:
    assert len(told(pretrained())) == 1
    message = refused(pretrained(context_length=80))
    assert "model.context_length: 80 exceeds the model's 64 positions" in message
    message = refused(pretrained(lora={"targets": ["q_prj"]}))
    assert "model.lora.targets[0]: the model has no linear module 'q_prj' (did you mean" in message
    weights = tmp_path / "own" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors may be truncated" in refused(pretrained(), CheckpointError)
    weights.unlink()
    assert "own has no weights (*.safetensors)" in refused(pretrained())
    index = {"weight_map": {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}}
    (tmp_path / "own" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks 2 of the 2 files with its weights" in refused(pretrained())


# The expert's episodes


def test_an_expert_that_needs_more_turns(tmp_path: Path) -> None:
    message = refused(recipe(tmp_path, rollout={"max_turns": 1, "max_tokens_per_turn": 8}))
    assert message == (
        "rollout.max_turns: 1 is less than the expert needs in all 8 episodes that were tried: 3 "
        "turns. Longer episodes are cut and earn nothing: set rollout.max_turns to at least 3"
    )
    rl = {"groups_per_step": 2, "group_size": 2, "horizon": [[0, 1], [5, 2]]}
    assert refused(recipe(tmp_path, rl=rl)).startswith("rl.horizon: 2 is less than")
    notes = told(recipe(tmp_path, tiers=["short", "long"]))
    assert notes[0] == (
        "warning: preflight: rollout.max_turns: 5 is less than the expert needs in 4 of 8 "
        "episodes: 9 turns. Longer episodes are cut: set rollout.max_turns to at least 9"
    )


def test_a_trained_bpe_tokenizer_is_an_estimate(tmp_path: Path) -> None:
    model = {"tokenizer": {"name": "bpe"}, "context_length": 128}
    message = refused(recipe(tmp_path, model, env_action="".join(map(chr, range(33, 99)))))
    assert "tokens in the longest turn (estimated: the tokenizer will be" in message
    needed = int(message.partition(" were tried: ")[2].split()[0])
    near = recipe(
        tmp_path,
        {**model, "context_length": 512},
        env_action="".join(map(chr, range(33, 99))),
        rollout={"max_tokens_per_turn": needed - 1},
    )
    assert not any("max_tokens_per_turn" in note for note in told(near))


def test_a_quick_test_may_have_any_limit(tmp_path: Path) -> None:
    """It learns nothing anyway; its turns are fewer than the recipe's."""
    config = recipe(tmp_path, rollout={"max_turns": 1, "max_tokens_per_turn": 8})
    options, notes = LaunchOptions(quick=True), list[str]()
    preflight(config, launch.read_splits(config), options, notes.append)
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"env_action": "a a a a a a a a "}, "rollout.max_tokens_per_turn: 8 is less than"),
        ({"env_action": "a a a a a a a a "}, "10 tokens in the longest turn. Longer turns end"),
        ({"env_opening": "long " * 80}, "model.context_length: 64 tokens have no room for a turn"),
        ({"env_opening": "long " * 50}, "model.context_length: 64 is less than the expert needs"),
        ({"env_expert": False}, "has no expert for the 32 tasks that were tried: nobody can count"),
        ({"env_reward": 0.0}, "the expert loses the 32 episodes that were tried, with a reward of"),
        ({"env_reward": float("nan")}, "a reward that is no finite number"),
    ],
)
def test_episodes_that_train_nothing(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said in refused(recipe(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"env_reward": 1e6}, "1e+06 is outside of the environment's score_range, 0 to 1: grpo di"),
        (
            {"env_reward": 1e6, "rl": {"algorithm": "dr_grpo"}},
            "dr_grpo trains with advantages of that size, up to 500000",
        ),
        ({"env_reward": 1e6, "rl": {"algorithm": "ppo"}}, "ppo may train with advantages"),
        ({"env_anyway": True}, "the expert and random words both earn a reward of 1"),
        ({"env_strict": True}, "an action of random words failed with: ValueError: no command"),
        (
            {"env_reward": 0.0, "demonstrations": None, "sft": None},
            "the expert loses the 32 episodes",
        ),
        (
            {"env_reward": float("nan"), "demonstrations": None, "sft": None},
            "the expert's play failed in the 32 episodes",
        ),
        ({"env_expert": False, "demonstrations": None, "sft": None}, "there is no expert"),
    ],
)
def test_unusual_episodes_are_told(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert any(said in note for note in told(recipe(tmp_path, **changes)))


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        ("opening", "env: task count/short/0 differs when it is played again"),
        ("reward", "env: task count/short/0 differs when it is played again"),
        ("expert", "env: the expert acts differently when task count/short/0 is played again"),
        ("fails", "count/short/0 fails when it is played again: the world is gone"),
    ],
)
def test_a_task_that_differs_when_played_again(tmp_path: Path, drawn: str, said: str) -> None:
    notes = told(recipe(tmp_path, env_drawn=drawn, env_anyway=True))
    assert len([note for note in notes if said in note]) == 1, notes


def heldout(tiers: list[str]) -> dict[str, Any]:
    """Tasks whose held-out ones are of other levels."""
    train = {"name": "env", "args": {"num_tasks": 40, "tiers": ["short"]}}
    args = {"num_tasks": 4, "tiers": tiers, "first_seed": 1000}
    return {"train": train, "heldout": {"name": "env", "args": args}}


def test_held_out_tasks_of_which_none_opens_are_refused(tmp_path: Path) -> None:
    said = refused(recipe(tmp_path, env_shut="long", tasks=heldout(["long"])))
    assert (
        "tasks.heldout: none of 4 tasks that were tried can be opened (task count/long/1000" in said
    )
    assert "task count/long/1000: KeyError: 'lever'" in said


def test_a_held_out_level_that_does_not_open_is_told(tmp_path: Path) -> None:
    [line] = [
        t
        for t in told(recipe(tmp_path, env_shut="long", tasks=heldout(["short", "long"])))
        if "heldout" in t
    ]
    assert (
        "2 of 2 tasks of level 'long' that were tried cannot be opened (task count/long/100" in line
    )


def test_held_out_tasks_whose_steps_raise_are_refused(tmp_path: Path) -> None:
    said = refused(recipe(tmp_path, env_stuck="long", tasks=heldout(["long"])))
    assert "tasks.heldout: none of 4 tasks that were tried can be played" in said
    assert "KeyError: 'hinge'" in said


def test_a_held_out_level_whose_steps_raise_is_told(tmp_path: Path) -> None:
    tasks = heldout(["short", "long"])
    [line] = [t for t in told(recipe(tmp_path, env_stuck="long", tasks=tasks)) if "heldout" in t]
    assert "2 of 2 tasks of level 'long' that were tried cannot be played (task" in line


def test_held_out_tasks_that_no_evaluation_plays_are_not_tried(tmp_path: Path) -> None:
    tasks = heldout(["short", "long"])
    config = recipe(tmp_path, env_shut="long", tasks=tasks, evaluate={"num_tasks": 1})
    assert not [text for text in told(config) if "heldout" in text]


def test_held_out_tasks_that_open_are_not_told(tmp_path: Path) -> None:
    config = recipe(tmp_path, tasks=heldout(["short"]))
    assert not [text for text in told(config) if "heldout" in text]


def test_no_task_is_played_again_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes, "PATIENCE_S", 0.0)
    notes = told(recipe(tmp_path, env_drawn="opening"))
    assert not any("again" in note for note in notes)


def test_a_slow_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "PATIENCE_S", 1.0)
    rl = {"steps": 100, "groups_per_step": 32, "group_size": 8}
    rollout = {"max_tokens_per_turn": 8, "max_turns": 5, "concurrency": 8}
    notes = told(recipe(tmp_path, env_step_s=0.6, rl=rl, rollout=rollout))
    [slow] = [note for note in notes if "a step takes 0.6 s" in note]
    assert "the 256 episodes of an RL step, of about 3 turns and 8 at a time, take about" in slow
    assert re.search(r"(58|59|60) s, all 100 steps \d+ minutes, in the environment alone", slow), (
        slow
    )


def test_an_environment_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "DEADLINE_S", 0.3)
    notes = told(recipe(tmp_path, env_step_s=1000.0))
    assert any("it took longer than 0 s, so it was not checked further" in n for n in notes)


# Judges


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        (
            {"fault": "raises"},
            "made-up episode of each of 4 tasks: it raised KeyError: 'verdict' "
            "[preflight_envs.py, line 105]",
        ),
        ({"fault": "nan"}, "it has to return a Score with a finite value"),
        ({"fault": "none"}, "it returned None; it has to return a Score"),
    ],
)
def test_a_judge_without_a_score(tmp_path: Path, judge: dict[str, Any], said: str) -> None:
    message = refused(judged(tmp_path, {"name": f"{ENVS}:Judge", "args": judge}))
    assert message.startswith("judge: ")
    assert said in message


def test_a_judge_that_is_not_async(tmp_path: Path) -> None:
    message = refused(judged(tmp_path, {"name": f"{ENVS}:SyncJudge"}))
    assert "its `__call__` is not async (it returned Score): write `async def __call__`" in message


def test_a_judge_without_answers(tmp_path: Path) -> None:
    rows = [{"prompt": f"say {n}"} for n in range(6)]
    config = judged(tmp_path, "answer", rows)
    config.tasks.train.args["answer"] = None
    message = refused(config)
    assert "no answer" in message
    assert "Set the reader's `answer` to the field that holds the answer" in message


@pytest.mark.slow  # the judge asks again
def test_a_judge_without_its_service(tmp_path: Path) -> None:
    url = "http://127.0.0.1:1/v1"
    model = {"name": "model", "args": {"base_url": url, "model": "m"}}
    message = refused(judged(tmp_path, model))
    assert f"Start the server at {url}, or correct the judge's args" in message


def test_unusual_judges_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "DEADLINE_S", 0.3)

    def notes(fault: str) -> str:
        return told(judged(tmp_path, {"name": f"{ENVS}:Judge", "args": {"fault": fault}}))[0]

    assert "no score for a made-up episode of 1 of 4 tasks, e.g. /" in notes("some")
    assert "no score of a made-up episode in 0 s" in notes("hangs")
    assert "gives 0.5 to 'I do not know.' and to the task's own answer" in notes("constant")
    assert len(told(judged(tmp_path, "answer"))) == 1


# Files


def test_a_file_of_conversations(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    sft = {"sft": {"data": str(file)}, "demonstrations": None}
    assert "does not exist" in refused(recipe(tmp_path, **sft), DataError)
    turns = [{"role": "user", "content": "a " * 99}, {"role": "assistant", "content": "b"}]
    file.write_text(json.dumps({"messages": turns}))
    assert "sft.data: 1 of 1 conversations that were tried are left out" in refused(
        recipe(tmp_path, **sft)
    )


# Resumed runs


def test_a_resumed_run_is_not_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    config = recipe(tmp_path, demonstrations=None, sft=None)
    monkeypatch.setattr(launch, "build_training", stop)
    with pytest.raises(launch.Stopped):
        launch.train(config, Silent())
    Count.played = 0
    changed = ["model.device=cuda:63"]
    with pytest.raises(ConfigError, match="cuda:63 does not exist"):
        launch.resume("tried-1", config.runs_dir, Silent(), changed)
    with pytest.raises(launch.Stopped):
        launch.resume("tried-1", config.runs_dir, Silent())
    assert Count.played == 0


def test_a_runs_dir_that_cannot_be_made_is_refused_before_anything_is_played(
    tmp_path: Path,
) -> None:
    Count.played = 0
    (tmp_path / "file").touch()
    config = recipe(tmp_path, runs_dir=str(tmp_path / "file" / "runs"))
    with pytest.raises(ConfigError, match=r"runs_dir: cannot create a run in .*/file/runs"):
        launch.train(config, Silent())
    assert Count.played == 0


def test_an_entropy_that_no_policy_reaches_is_refused(tmp_path: Path) -> None:
    rl = {"steps": 1, "groups_per_step": 2, "group_size": 2}
    rl["algorithm"] = {"name": "grpo", "args": {"entropy_bonus": 0.1, "entropy_target": 50}}
    words = "entropy_target: no policy reaches 50 nats a token: with"
    assert words in refused(recipe(tmp_path, {"tokenizer": "bytes"}, rl=rl))
