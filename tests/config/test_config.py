"""Loading a configuration: what is right loads, what is wrong is told exactly."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from ludus.config.load import check_specs, diff, dump_config, load_config, lookup
from ludus.config.registry import Registry, Row
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, MissingDependency
from ludus.core.types import Spec

MINIMAL = {"model": {"architecture": "qwen3", "tokenizer": "words"}, "tasks": {"train": "range"}}


def complaint(*args: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(*args)
    return str(caught.value)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a recipe below the minimal one into the working folder, and names it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()

    def write(text: str = "", name: str = "tiny.yaml") -> str:
        head = "model: {architecture: qwen3, tokenizer: words}\ntasks: {train: range}\n"
        Path("recipes", name).write_text(head + textwrap.dedent(text))
        return f"recipes/{name}"

    return write


def test_yaml_file_loads(recipe):
    config = load_config(recipe("sft: {data: demos.jsonl, optimizer: {lr: 1e-3, betas: [0, 0]}}"))
    assert config.sft is not None
    assert config.sft.optimizer.lr == 0.001
    assert config.sft.optimizer.betas == (0.0, 0.0)
    assert config.tasks.train == Spec(name="range")


def test_every_source_gives_the_same_config(recipe, tmp_path, monkeypatch):
    from_file = load_config(recipe())
    assert load_config(MINIMAL) == from_file
    assert load_config(lambda: MINIMAL) == from_file
    assert load_config(from_file) == from_file
    code = f"def tiny():\n    return {MINIMAL!r}\n"
    (tmp_path / "my_recipe.py").write_text(code)
    assert load_config("my_recipe.py:tiny") == from_file
    assert load_config("my_recipe:tiny") == from_file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "rollout:\n  max_truns: 3",
            "recipes/tiny.yaml: rollout.max_truns is not a key "
            "(did you mean rollout.max_turns?) [line 4]",
        ),
        (
            "rl: {lr: 3}\nenv: babyai",
            "recipes/tiny.yaml: rl.lr is not a key (did you mean rl.optimizer.lr?) [line 3]",
        ),
        (
            "checkpoint: {often: true}",
            "recipes/tiny.yaml: checkpoint.often is not a key "
            "(known: every, keep_best, keep_last, metric) [line 3]",
        ),
        (
            "rollout:\n  format: tolos",
            "recipes/tiny.yaml: rollout.format must be one of plain, react, tools, code, "
            "got 'tolos' "
            "(did you mean tools?) [line 4]",
        ),
        ("seed: '3'", "recipes/tiny.yaml: seed must be a whole number >= 0, got '3' [line 3]"),
        ("seed: 3.0", "recipes/tiny.yaml: seed must be a whole number >= 0, got 3.0 [line 3]"),
        ("seed: true", "recipes/tiny.yaml: seed must be a whole number >= 0, got true [line 3]"),
        (
            "seed: null",
            "recipes/tiny.yaml: seed must be a whole number >= 0, got null (the default is 0) "
            "[line 3]",
        ),
        ("report: on", "recipes/tiny.yaml: report must be true or false, got 'on' [line 3]"),
        (
            "threads: 010",
            "recipes/tiny.yaml: threads must be a whole number >= 0 and <= 1024, got '010' "
            "[line 3]",
        ),
        (
            "evaluate: {confidence: 1}",
            "recipes/tiny.yaml: evaluate.confidence must be a number > 0 and < 1, got 1 [line 3]",
        ),
        (
            "rollout:\n  temperature: .inf",
            "recipes/tiny.yaml: rollout.temperature must be a finite number >= 0, got inf [line 4]",
        ),
        (
            "rollout:\n  stop:\n    - 'a'\n    - 5",
            "recipes/tiny.yaml: rollout.stop.1 must be text, got 5 [line 6]",
        ),
        (
            "env: 5",
            "recipes/tiny.yaml: env must be a plug-in (a name, or {name: ..., args: {...}}), "
            "or null, got 5 [line 3]",
        ),
        (
            "env: {name: babyai, agrs: {}}",
            "recipes/tiny.yaml: env.agrs is not a key (did you mean env.args?) [line 3]",
        ),
        (
            "metrics: tensorboard",
            "recipes/tiny.yaml: metrics must be a list "
            "(of a plug-in (a name, or {name: ..., args: {...}})), got 'tensorboard' [line 3]",
        ),
        (
            "sft: {data: x, optimizer: {betas: [0.9]}}",
            "recipes/tiny.yaml: sft.optimizer.betas.1 is required: a number >= 0 and < 1 [line 3]",
        ),
        (
            "name: a b",
            "recipes/tiny.yaml: name must be text of at most 100 characters that matches "
            "^[A-Za-z0-9][A-Za-z0-9._-]*$, got 'a b' [line 3]",
        ),
        ("sft: {}", "recipes/tiny.yaml: `sft` needs `demonstrations` or `sft.data`"),
        (
            "rl: {}",
            "recipes/tiny.yaml: `rl` needs an `env`, a `judge` or an `agent` to score episodes",
        ),
        (
            "rollout: {max_tokens_per_turn: 1024}",
            "recipes/tiny.yaml: `rollout.max_tokens_per_turn` must be below `model.context_length`",
        ),
        ("seed: 1\nseed: 2", "recipes/tiny.yaml: seed is given twice [lines 3 and 4]"),
        (
            "rollout:\n  stop: []\n  top_k: 1\n  stop: []",
            "recipes/tiny.yaml: rollout.stop is given twice [lines 4 and 6]",
        ),
        (
            "rollout: {stop: [a",
            "recipes/tiny.yaml: not valid YAML: while parsing a flow sequence expected ',' or "
            "']', but got '<stream end>' [line 3]",
        ),
        (
            "seed: !!python/name:os.system",
            "recipes/tiny.yaml: not valid YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/name:os.system' [line 3]",
        ),
        ("env: &e {name: x, args: *e}", "recipes/tiny.yaml: env.args refers to itself [line 3]"),
    ],
)
def test_a_fault_is_told_exactly(recipe, text, message):
    assert complaint(recipe(text)) == message


def test_an_argument_beside_args_is_told_with_its_key(recipe):
    said = complaint(recipe(""), ["env.name=guess", "env.size=3"])
    assert said == (
        "override env.size=3: env.size is not a key (known: args, name): did you mean the "
        "plug-in's argument, env.args.size?"
    )


def test_all_faults_are_told_at_once(recipe):
    path = recipe("rollout:\n  max_truns: 3\n  top_p: 2\nreport: yes\nbogus: 1")
    assert complaint(path, ["rl.steps=0", "seed=x"]).splitlines() == [
        "override seed=x: seed must be a whole number >= 0, got 'x'",
        f"{path}: rollout.top_p must be a number > 0 and <= 1, got 2 [line 5]",
        f"{path}: rollout.max_truns is not a key (did you mean rollout.max_turns?) [line 4]",
        "override rl.steps=0: rl.steps must be a whole number >= 1, got 0",
        f"{path}: report must be true or false, got 'yes' [line 6]",
        f"{path}: bogus is not a key: a plug-in's argument? `ludus config bogus` tells its place "
        "[line 7]",
    ]


def test_a_union_is_told_once():
    assert complaint(MINIMAL, ["model.tokenizer=5"]) == (
        "override model.tokenizer=5: model.tokenizer must be text, or a plug-in (a name, or "
        "{name: ..., args: {...}}), or null, got 5"
    )
    assert complaint(MINIMAL, ["model.tokenizer={nam: words}"]).splitlines() == [
        "override model.tokenizer={nam: words}: model.tokenizer.name is required: text",
        "override model.tokenizer={nam: words}: model.tokenizer.nam is not a key "
        "(did you mean model.tokenizer.name?)",
    ]
    assert complaint(MINIMAL, ["model.lora.targets=[q, 5]"]) == (
        "override model.lora.targets=[q, 5]: model.lora.targets.1 must be text, got 5"
    )


def test_an_impossible_combination_names_its_section():
    assert complaint({"tasks": {"train": "x"}, "model": {}}) == (
        "config: model: set exactly one of `path` and `architecture`"
    )


def test_missing_sections():
    assert complaint({}).splitlines() == [
        "config: model is required: a section",
        "config: tasks is required: a section",
    ]


def test_missing_file(recipe, tmp_path):
    recipe(name="babyai-tiny.yaml")
    near = "no such file (did you mean recipes/babyai-tiny.yaml?)"
    assert complaint("recipes/babyai-tinny.yaml") == f"recipes/babyai-tinny.yaml: {near}"
    assert complaint("babyai-tinny") == f"babyai-tinny: {near.replace('file', 'file or recipe')}"
    assert complaint("recipes") == "recipes: is a folder, not a YAML file"
    for number in range(20):  # too many to name all
        recipe(name=f"mine-{number}.yaml")
    told = "zzz.yaml: no such file: `ludus recipes` lists those of the package"
    assert complaint("zzz.yaml") == told


def test_recipes_of_the_package_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("babyai-tiny", ["seed=7"]).seed == 7
    (tmp_path / "babyai-tiny").mkdir()  # a run's folder, say
    assert load_config("babyai-tiny").name == "babyai-tiny"
    assert complaint("textcraft-tinny") == (
        "textcraft-tinny: no such file or recipe (did you mean textcraft-tiny?)"
    )
    assert complaint("zzz").endswith("`ludus recipes` lists those of the package")


def test_a_file_wins_over_a_recipe_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("babyai-tiny").write_text("model: {path: x}\ntasks: {train: x}\nname: mine\n")
    assert load_config("babyai-tiny").name == "mine"


def test_a_file_that_is_no_mapping(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("# nothing\n")
    assert complaint(path) == f"{path}: the file is empty: it needs at least `model` and `tasks`"
    path.write_text("- 1\n")
    assert complaint(path) == f"{path}: must be a mapping of keys, got [1]"
    path.write_text("model: {path: x}\ntasks: {train: x}\nenv: {name: a, args: {1: x}}\n")
    assert complaint(path) == f"{path}: env.args: a key must be text, got 1 [line 3]"
    path.write_bytes(b"name: \xff\n")
    assert complaint(path) == f"{path}: not UTF-8 text (byte 6)"


def test_python_sources_that_fail(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from ludus import RunConfig\n"
        "def tiny():\n    return 1 / 0\n"
        "def wrong():\n    return RunConfig(model={'path': 'x'}, taks={})\n"
        "def number():\n    return 5\n"
        "word = 'x'\n"
        "def leaves():\n    raise SystemExit\n"
    )
    Path("broken.py").write_text("import no_such_thing\n")
    assert complaint("mine.py") == "mine.py: name the function too, e.g. mine.py:config"
    assert complaint("mine.py:tiny") == (
        "mine.py:tiny: it raised ZeroDivisionError: division by zero [mine.py, line 3]"
    )
    assert complaint("mine.py:tinny") == (
        "mine.py:tinny: mine.py has no function 'tinny' (did you mean tiny?)"
    )
    assert complaint("mine.py:word") == (
        "mine.py:word: mine.py has no callable 'word' (known: leaves, number, tiny, wrong)"
    )
    assert complaint("mine.py:leaves") == (
        "mine.py:leaves: it raised SystemExit:  [mine.py, line 10]"
    )
    assert complaint("mine.py:number") == "mine.py:number: must be a mapping of keys, got 5"
    assert complaint("mine.py:wrong").splitlines() == [
        "mine.py:wrong: tasks is required: a section",
        "mine.py:wrong: taks is not a key (did you mean tasks?)",
    ]
    assert complaint("gone.py:tiny") == "gone.py:tiny: no such file"
    assert complaint("no_such_module:tiny") == (
        "no_such_module:tiny: no module named 'no_such_module'"
    )
    assert complaint("broken.py:tiny") == (
        "broken.py:tiny: broken.py raised ModuleNotFoundError: No module named 'no_such_thing' "
        "[broken.py, line 1]"
    )


def test_a_value_that_cannot_be_stored_is_refused():
    config = {**MINIMAL, "env": {"name": "x", "args": {"f": len}}}
    assert complaint(config) == (
        "config: env.args.f: <built-in function len> is a builtin_function_or_method, "
        "which a configuration cannot hold"
    )


# Overrides


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("seed=7", "seed", 7),
        ("sft.optimizer.lr=1e-4", "sft.optimizer.lr", 1e-4),
        ("sft.optimizer.betas.0=0.8", "sft.optimizer.betas", [0.8, 0.95]),
        ("rl=null", "rl", None),
        ("rl.optimizer.eps=1e-6", "rl.optimizer.lr", 3e-4),
        ("rl.algorithm.args.clip=0.3", "rl.algorithm", {"name": "grpo", "args": {"clip": 0.3}}),
        ("env.args.level=GoToObj", "env", {"name": "babyai", "args": {"level": "GoToObj"}}),
        ("env.args.a.b=[1, x]", "env.args", {"a": {"b": [1, "x"]}}),
        ("metrics.1=wandb", "metrics.1", {"name": "wandb", "args": {}}),
        ("metrics.0.args.port=9", "metrics.0", {"name": "prometheus", "args": {"port": 9}}),
        ("model.lora.rank=4", "model.lora.rank", 4),
        ("rollout.stop.0=</s>", "rollout.stop", ["</s>"]),
        ("rollout.system_prompt=a=b", "rollout.system_prompt", "a=b"),
        ("model.tokenizer.name=words", "model.tokenizer.name", "words"),
    ],
)
def test_override(override, key, value):
    base = {
        **MINIMAL,
        "model": {"architecture": "qwen3", "tokenizer": {"name": "bytes"}},
        "env": "babyai",
        "metrics": ["prometheus"],
        "sft": {"data": "x"},
        "rl": {},
    }
    assert lookup(load_config(base, [override]), key) == value


def test_the_last_override_wins_and_takes_the_blame():
    assert load_config(MINIMAL, ["seed=1", "seed=2"]).seed == 2
    assert complaint(MINIMAL, ["seed=1", "seed=-1"]) == (
        "override seed=-1: seed must be a whole number >= 0, got -1"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "override seed: write it as dotted.key=value"),
        ("a..b=1", "override a..b=1: write it as dotted.key=value"),
        ("=1", "override =1: write it as dotted.key=value"),
        ("seed.x=1", "override seed.x=1: seed is 0, which has no entry 'x'"),
        (
            "model.tokenizer.args.size=9",
            "override model.tokenizer.args.size=9: model.tokenizer is 'words', "
            "which has no entry 'args'",
        ),
        (
            "metrics.1=wandb",
            "override metrics.1=wandb: metrics is a list: write an index (0), got '1'",
        ),
        (
            "metrics.first=wandb",
            "override metrics.first=wandb: metrics is a list: write an index (0), got 'first'",
        ),
        (
            "rl.optimzer.lr=1",
            "override rl.optimzer.lr=1: rl.optimzer is not a key (did you mean rl.optimizer?)",
        ),
        (
            "rollout.max_turns=0",
            "override rollout.max_turns=0: rollout.max_turns must be a whole number >= 1, or a "
            "mapping, or null, got 0",
        ),
        ("RL.steps=1", "override RL.steps=1: RL is not a key (did you mean rl?)"),
        (
            "rollout.stop=[a",
            "override rollout.stop=[a: not valid YAML: while parsing a flow sequence expected "
            "',' or ']', but got '<stream end>' [line 1]",
        ),
        (
            'name="a\\ud800"',
            "override name=\"a\\ud800\": name must be text, got 'a\\ud800': a surrogate is no "
            "character",
        ),
        (
            "sft.steps=99999999999999999999",
            "override sft.steps=99999999999999999999: sft.steps must be within 64 bits, got "
            "99999999999999999999",
        ),
    ],
)
def test_a_bad_override_is_told_exactly(override, message):
    assert complaint(MINIMAL, [override]) == message


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(PLAIN)
def test_any_value_survives_dump_and_load(value):
    config = load_config({**MINIMAL, "env": {"name": "x", "args": {"value": value}}})
    from ludus.config import yaml12

    text = dump_config(config)
    again = load_config(yaml12.parse(text, "dump")[0])
    assert again == config
    assert again.env is not None
    assert again.env.args["value"] == value
    assert diff(config, again) == []


@given(PLAIN)
def test_any_value_survives_an_override(value):
    from ludus.config import yaml12

    config = load_config(MINIMAL, ["env=x", f"env.args.value={yaml12.inline(value)}"])
    assert config.env is not None
    assert config.env.args["value"] == value


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(0, 2**31),
            "rollout.temperature": st.floats(0, 2),
            "rollout.stop": st.lists(st.text(st.characters(codec="utf-8"), min_size=1), max_size=3),
            "evaluate.num_tasks": st.none() | st.integers(1, 99),
            "report": st.booleans(),
            "model.device": st.sampled_from(["cpu", "cuda", "cuda:1", "on", "1e3", "null"]),
        },
    )
)
def test_overrides_are_what_diff_finds(values):
    from ludus.config import yaml12

    base = load_config(MINIMAL)
    changed = load_config(base, [f"{key}={yaml12.inline(v)}" for key, v in values.items()])
    for key, value in values.items():
        assert lookup(changed, key) == value
    assert set(diff(base, changed)) == {k for k, v in values.items() if lookup(base, k) != v}


def test_diff_names_the_changed_keys():
    before = load_config(MINIMAL)
    after = load_config(MINIMAL, ["env=babyai", "metrics=[wandb]", "seed=3", "model.lora.rank=4"])
    assert diff(before, after) == ["seed", "model.lora", "env", "metrics"]
    other = load_config(after, ["metrics.0.args.mode=online", "model.lora.rank=5"])
    assert diff(after, other) == ["model.lora.rank", "metrics.0.args.mode"]
    assert lookup(other, "metrics.0.args.mode") == "online"
    assert lookup(after, "metrics.0.args.mode") is None


# Plug-ins


class Walk:
    def __init__(self, level: str, size: Annotated[int, Field(ge=2)] = 8) -> None:
        self.level, self.size = level, size


ENVS: Registry[Any] = Registry(
    "env",
    {
        "walk": Row(f"{__name__}:Walk"),
        "absent": Row("no_such_package.env:Env", "envs"),
    },
)


def test_check_specs_tells_all_faults():
    config = load_config(
        {
            **MINIMAL,
            "env": {"name": "walk", "args": {"lvel": "a", "size": 1}},
            "tasks": {"train": "wlak"},
            "metrics": [{"name": "walk", "args": {"level": "x"}}, "walk"],
        }
    )
    registries = {"env": ENVS, "judge": ENVS, "tasks.train": ENVS, "metrics": ENVS}
    with pytest.raises(ConfigError) as caught:
        check_specs(config, {**registries, "rl.algorithm": ENVS, "model.tokenizer": ENVS}, "r.yaml")
    assert str(caught.value).splitlines() == [
        "r.yaml: env.args.level is required: text",
        "r.yaml: env.args.size must be a whole number >= 2, got 1",
        "r.yaml: env.args.lvel is not an argument of walk (did you mean env.args.level?)",
        "r.yaml: tasks.train.name: 'wlak' is not a known env (did you mean walk?)",
        "r.yaml: metrics.1.args.level is required: text",
    ]


def test_check_specs_accepts_what_is_right():
    check_specs(load_config(MINIMAL, ["env={name: walk, args: {level: a}}"]), {"env": ENVS})


def test_check_specs_names_the_extra():
    config = load_config(MINIMAL, ["env=absent"])
    with pytest.raises(MissingDependency, match=r"pip install 'ludus-rl\[envs\]'"):
        check_specs(config, {"env": ENVS})


def test_a_loaded_config_cannot_be_changed():
    config = load_config(MINIMAL)
    assert isinstance(config, RunConfig)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3


def test_what_is_no_file_of_a_recipe_is_told(tmp_path: Path):
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"pipe\.yaml: is a pipe or a device, not a file$"):
        load_config(str(pipe))
    (tmp_path / "made.py").write_text("def made():\n    pass\n")
    with pytest.raises(ConfigError, match=r"made\.py:made returned None; it has to return a conf"):
        load_config(f"{tmp_path}/made.py:made")
