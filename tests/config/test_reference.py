"""The reference says what the schema and the plug-ins say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from rich.console import Console

from ludus.config.load import load_config
from ludus.config.reference import config_reference, keys, plugins, show_reference
from ludus.config.registry import Registry, Row
from ludus.config.schema import RLConfig
from ludus.core.errors import ConfigError
from ludus.train import ALGORITHMS

AGENT = ("task", "model", "env", "tools")


@dataclass
class Walk:
    level: Annotated[str, Field(description="Where | to walk.")]
    size: Annotated[int, Field(ge=2, description="Cells a side.")] = 8
    mode: Literal["slow", "fast"] = "slow"


def talk(**rest: Any) -> dict[str, Any]:
    return rest


def stand() -> None:
    return None


ENVS: Registry[Any] = Registry(
    "env",
    {
        "walk": Row(f"{__name__}:Walk", summary="walking about"),
        "talk": Row(f"{__name__}:talk"),
        "stand": Row(f"{__name__}:stand"),
        "absent": Row("no_such_package.env:Env", "envs", "not here"),
    },
)


def printed(key: str | None) -> str:
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        console.print(show_reference(key, {"env": ENVS, "judge": ENVS}))
    return capture.get()


def test_every_key_has_a_type_a_description_and_a_default():
    found = keys()
    assert len({entry.key for entry in found}) == len(found)
    for entry in found:
        assert entry.type, entry
        assert entry.description, entry


def test_defaults_are_those_of_a_loaded_config():
    """A stage that is given empty has exactly the defaults that the reference states."""
    by_key = {entry.key: entry for entry in keys()}
    stage = load_config(
        {"model": {"path": "x"}, "tasks": {"train": "x"}, "env": "x", "rl": {"optimizer": {}}}
    ).rl
    assert isinstance(stage, RLConfig)
    assert by_key["rl.steps"].default == str(stage.steps)
    assert by_key["rl.optimizer.lr"].default == str(stage.optimizer.lr) == "0.0003"
    assert by_key["sft.optimizer.lr"].default == "0.001"
    assert by_key["rl.optimizer.betas"].default == "[0.9, 0.95]"
    assert by_key["rl.algorithm"].default == "grpo"
    assert by_key["model"].default == "required"
    assert by_key["rl"].default == "null"


def test_plugins_with_their_arguments():
    found = {plugin.name: plugin for plugin in plugins(ENVS)}
    assert [(a.key, a.type, a.default) for a in found["walk"].arguments] == [
        ("level", "text", "required"),
        ("size", "a whole number >= 2", "8"),
        ("mode", "one of slow, fast", "slow"),
    ]
    assert found["talk"].open_ended
    assert found["absent"].problem == (
        "env 'absent' needs the package no_such_package, which is not installed: "
        "pip install 'ludus-rl[envs]'"
    )


def test_the_markdown_has_every_key_and_every_plugin():
    text = config_reference({"env": ENVS, "judge": ENVS})
    for entry in keys():
        assert f"| `{entry.key}` | " in text
    assert text.count("## Plug-ins: env") == 1
    assert "Named by `env`, `judge`." in text
    assert "| `level` | text | `required` | Where \\| to walk. |" in text
    assert "### `absent`\n\nNot here.\n\nenv 'absent' needs the package" in text
    assert "### `stand`\n\nNo arguments." in text
    assert "### `talk`\n\nFurther arguments are passed through." in text


def test_one_key_on_a_terminal():
    text = printed("rl.steps")
    assert "rl.steps  100      a whole number >= 1: Policy iterations" in text
    assert "rl.epochs" not in text


def test_a_section_and_a_plugin_on_a_terminal():
    assert "rl.optimizer.lr" in printed("rl")
    text = printed("env")
    assert "Plug-ins for env:" in text
    assert "walk  walking about" in text
    assert "a whole number >= 2: Cells a side." in text
    assert "pip install 'ludus-rl[envs]'" in " ".join(text.split())


def test_a_section_lists_its_plug_ins_without_their_arguments():
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        console.print(show_reference("rl", {"rl.algorithm": ENVS}))
    text = capture.get()
    assert "rl.optimizer.lr" in text
    assert "walk" in text
    assert "walking about" in text
    assert "Cells a side" not in text
    assert "ludus config NAME, or rl.algorithm, shows their arguments." in text


def test_a_file_shows_the_arguments_that_a_config_may_set(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def run(task, model, env, tools, patience: int = 3): ...\n"
        "def make(task, hardness: float = 0.5): ...\n"
    )
    registries = {"env": Registry("env", {}), "agent": Registry("agent", {}, frozenset(AGENT))}

    def shown(name):
        console = Console(width=200)
        with console.capture() as capture:
            console.print(show_reference(f"{path}:{name}", registries))
        return capture.get()

    said = shown("run")
    assert "patience" in said
    assert not [name for name in AGENT if name in said.replace(str(path), "").split()]
    said = shown("make")
    assert "hardness" in said
    assert "task" in said, "an environment has no such parameter of ours"


def test_all_keys_on_a_terminal():
    text = printed(None)
    assert all(entry.key in text for entry in keys())


def test_an_unknown_key_is_told_with_the_nearest():
    with pytest.raises(ConfigError) as caught:
        show_reference("rl.stpes", {})
    assert (
        str(caught.value)
        == "rl.stpes is not a key, a section or a plug-in (did you mean rl.steps?)"
    )


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("target_kl", {"rl.optimizer.target_kl"}),
        ("until.min_gain", {"sft.until.min_gain"}),
        ("optimizer", {"sft.optimizer", "sft.optimizer.lr", "rl.optimizer", "rl.optimizer.lr"}),
    ],
)
def test_a_key_is_found_by_its_end_or_section(name: str, keys: set[str]):
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(show_reference(name, {}))
    shown = {line.split()[0] for line in capture.get().splitlines() if line[:1].strip()}
    assert keys <= shown, shown
    assert all(f".{name}." in f"{key}." for key in shown - {"key"})


def test_an_argument_under_an_unknown_section_is_refused():
    with pytest.raises(ConfigError, match=r"^coevolve.entropy_target is not a key"):
        show_reference("coevolve.entropy_target", {"rl.algorithm": ALGORITHMS})
    with pytest.raises(ConfigError, match=r"^'' is not a key"):
        show_reference("", {"rl.algorithm": ALGORITHMS})


def test_an_argument_of_plugins_is_found_by_its_name():
    """Also under the key where a reader of the documentation looks for it."""

    names = ("entropy_target", "rl.algorithm.entropy_target", "rl.algorithm.args.entropy_target")
    for name in names:
        console = Console(width=200, no_color=True)
        with console.capture() as capture:
            console.print(show_reference(name, {"rl.algorithm": ALGORITHMS}))
        assert "set it as rl.algorithm.args.entropy_target:" in capture.get()


def test_a_file_of_another_kind_hides_what_ludus_supplies(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def tokenizer(texts, framing, min_count: int = 1): ...\n")
    tokenizers = Registry("tokenizer", {}, context=frozenset({"texts", "framing"}))
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        registries = {"env": ENVS, "model.tokenizer": tokenizers}
        console.print(show_reference(f"{path}:tokenizer", registries))
    text = capture.get()
    assert "min_count" in text
    assert "framing" not in text
