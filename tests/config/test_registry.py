"""Plug-ins by name: loading, checking arguments, building."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from ludus.backends import BACKENDS
from ludus.config.registry import Registry, Row
from ludus.core.errors import ConfigError, MissingDependency
from ludus.core.types import Spec
from ludus.envs import ENVS
from ludus.judges import JUDGES
from ludus.models import ARCHITECTURES, SAMPLERS
from ludus.telemetry.sinks import SINKS
from ludus.train import ALGORITHMS


@dataclass
class Walk:
    tokenizer: str
    level: Annotated[str, Field(description="Where to walk.")] = "easy"
    size: Annotated[int, Field(ge=2)] = 8
    mode: Literal["slow", "fast"] = "slow"
    seeds: int | list[int] | None = None


def talk(**rest: Any) -> dict[str, Any]:
    return rest


def registry() -> Registry[Any]:
    return Registry(
        "env",
        {
            "walk": Row(f"{__name__}:Walk", summary="walks"),
            "talk": Row(f"{__name__}:talk"),
            "absent": Row("no_such_package.env:Env", "envs"),
            "unbuilt": Row("ludus.core.no_such_module:Env", "envs"),
            "empty": Row(f"{__name__}:Nothing"),
        },
        context=frozenset({"tokenizer"}),
    )


def complaint(spec: Any, where: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        registry().check(Spec.model_validate(spec), where)
    return str(caught.value)


def test_names_are_sorted():
    assert list(registry()) == ["absent", "empty", "talk", "unbuilt", "walk"]


def test_build_gives_arguments_and_context():
    spec = Spec(name="walk", args={"size": 3})
    assert registry().build(spec, tokenizer="words", unused=1) == Walk("words", size=3)
    assert registry().build("walk", tokenizer="words") == Walk("words")
    assert registry().build(Spec(name="talk", args={"a": 1})) == {"a": 1}
    assert registry().build(f"{__name__}:Walk", tokenizer="w") == Walk("w")


def test_check_gives_only_what_was_given():
    assert registry().check(Spec(name="walk", args={"seeds": [1]})) == {"seeds": [1]}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("wlak", "'wlak' is not a known env (did you mean walk?)"),
        ("zzz", "'zzz' is not a known env (known: absent, empty, talk, unbuilt, walk)"),
        ("empty", f"env 'empty': module {__name__} has no 'Nothing'"),
        (
            "unbuilt",
            "env 'unbuilt': cannot import ludus.core.no_such_module "
            "(no module named 'ludus.core.no_such_module')",
        ),
        (
            {"name": "walk", "args": {"sise": 3}},
            "env 'walk': args.sise is not an argument (did you mean args.size?)",
        ),
        (
            {"name": "walk", "args": {"size": 1}},
            "env 'walk': args.size must be a whole number >= 2, got 1",
        ),
        (
            {"name": "walk", "args": {"mode": "fats"}},
            "env 'walk': args.mode must be one of slow, fast, got 'fats' (did you mean fast?)",
        ),
        (
            {"name": "walk", "args": {"seeds": "x"}},
            "env 'walk': args.seeds must be a whole number, or a list (of a whole number), "
            "or null, got 'x'",
        ),
        (
            {"name": "walk", "args": {"seeds": [1, "x"]}},
            "env 'walk': args.seeds.1 must be a whole number, got 'x'",
        ),
        (
            {"name": "walk", "args": {"tokenizer": "mine"}},
            "env 'walk': args.tokenizer is not an argument (known: level, mode, seeds, size)",
        ),
    ],
)
def test_a_fault_is_told_exactly(spec, message):
    assert complaint(spec) == message


def test_a_file_without_a_name_is_told_what_it_offers(tmp_path):
    tools = tmp_path / "my_tools.py"
    tools.write_text("def _own(): ...\nasync def weather(): ...\nclass Map: ...\nx = 1\n")
    told = f"env '{tools}': write {tools}:NAME, with a function or class of the file: weather, Map"
    assert complaint(str(tools)) == told
    tools.write_text("x = 1\n")
    assert complaint(str(tools)).endswith("function or class of the file: it has none")
    tools.write_text("def (\n")
    assert f"{tools} is not a Python file: invalid syntax" in complaint(str(tools))
    assert complaint("nothing.py") == "env 'nothing.py': there is no file nothing.py"


def test_where_takes_the_place_of_the_kind():
    assert complaint({"name": "walk", "args": {"sise": 3, "size": 0}}, "env").splitlines() == [
        "env.args.size must be a whole number >= 2, got 0",
        "env.args.sise is not an argument of walk (did you mean env.args.size?)",
    ]
    assert complaint("wlak", "env") == "env.name: 'wlak' is not a known env (did you mean walk?)"


def test_a_missing_package_names_its_extra():
    with pytest.raises(MissingDependency) as caught:
        registry().load("absent")
    assert str(caught.value) == (
        "env 'absent' needs the package no_such_package, which is not installed: "
        "pip install 'ludus-rl[envs]'"
    )
    assert caught.value.extra == "envs"


# Content of a user's own file

OWN = """
from __future__ import annotations
from functools import partial
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from decimal import Decimal
class Row:
    pass
def grown(size: int, clip: float = 0.2): return (size, clip)
def hidden(size: Decimal): return size
def needy(size): return size
value = Row()
part = partial(grown, clip=0.3)
"""


def test_a_partial_is_a_plug_in(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    name = f"{tmp_path}/own.py:part"
    assert registry().build(Spec(name=name, args={"size": 2})) == (2, 0.3)
    assert registry().build(Spec(name=name, args={"size": 2, "clip": 0.5})) == (2, 0.5)
    assert "args.size must be a whole number" in complaint({"name": name, "args": {"size": "x"}})


def test_an_argument_of_any_type_is_named_alone(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    assert complaint({"name": f"{tmp_path}/own.py:needy"}).endswith("args.size is required")


def test_a_place_within_ludus_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from ludus import Env\nclass Own(Env): pass\n")
    with pytest.raises(ConfigError, match=r"with abstract methods reset, step$"):
        ENVS.build(f"{tmp_path}/own.py:Own")


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("value", OWN, "value is of type Row, not a class or a function; name a function that"),
        ("hidden", OWN, "annotations of its arguments cannot be read (NameError: name 'Decimal'"),
        ("grwon", OWN, "has no 'grwon' (did you mean grown?)"),
        ("x", "def x(:\n", "raised SyntaxError: invalid syntax [own.py, line 1]"),
        ("x", "import json\njson.loads('{')\n", "[own.py, line 2]"),
        ("x", "from json import nope\n", "cannot import name 'nope' from 'json'"),
        ("x", None, "there is no file"),
    ],
)
def test_what_a_users_file_may_get_wrong(
    tmp_path: Path, name: str, code: str | None, message: str
) -> None:
    if code is not None:
        (tmp_path / "own.py").write_text(code)
    said = complaint(f"{tmp_path}/own.py:{name}")
    assert message in said
    assert "frozen" not in said


def test_a_sink_is_not_a_metrics() -> None:
    with pytest.raises(ConfigError, match=r"^'nope' is not a known metrics sink \(known: prom"):
        SINKS.check(Spec(name="nope"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "os:getcwd",
            r"^judge: 'os:getcwd' gives '.*, not a judge \(it has no `__call__`\): name a",
        ),
        ("builtins:print", r"^judge: 'builtins:print' gives None, not a judge"),
        (
            f"{__name__}:own_class",
            r"gives the class Walk, not a judge: name a class, or a function",
        ),
    ],
)
def test_what_gives_no_plug_in_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        JUDGES.build(name, "judge")
    for kind in (ALGORITHMS, ARCHITECTURES, BACKENDS, SAMPLERS, SINKS):
        with pytest.raises(ConfigError, match=f"^{kind.kind}: .* not an? {kind.kind}"):
            kind.build(name)


def own_class() -> type[Walk]:
    return Walk


def test_a_function_in_place_of_a_judge_is_told_what_a_judge_is(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("def reward(task, trajectory):\n    return 1.0\n")
    with pytest.raises(ConfigError, match=r"reward is a function: .* returns a judge") as caught:
        JUDGES.check(Spec(name=f"{path}:reward"), "judge")
    assert "judge.args.task is required" in str(caught.value)


def test_an_argument_of_a_plug_in_without_any(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text("class Plain:\n    pass\n")
    message = r"env\.args\.size is not an argument of Plain; it takes none$"
    with pytest.raises(ConfigError, match=message):
        ENVS.check(Spec(name=f"{path}:Plain", args={"size": 3}), "env")
