"""Parts of a mixture with markers and tools of their own, in the format `code`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ludus.config.load import load_config
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError
from ludus.data.demonstrations import dropped_path, generate_demonstrations, load_demonstrations
from ludus.data.splits import read_splits
from ludus.pipeline.build import make_collector
from ludus.pipeline.parts.checks import check
from ludus.pipeline.parts.tokenizer import check_functions
from ludus.tasks.mixture import part_of, settings_of
from ludus.tasks.readers import read_tasks
from ludus.tools.limits.limiter import Limits

pytest.importorskip("bm25s", reason="needs ludus-rl[tools]")

RECIPE = str(Path(__file__).parents[2] / "recipes" / "mixed-tiny.yaml")


def recipe(*overrides: str) -> RunConfig:
    return load_config(RECIPE, list(overrides))


def test_markers_of_a_part_without_the_format_code_are_refused() -> None:
    markers: Any = "rollout.parts.code.markers.tool=python"
    with pytest.raises(ConfigError, match=r"rollout\.parts\.code\.markers: the format plain has"):
        check(recipe(markers))


def test_a_judge_with_other_markers_than_the_policy_is_refused() -> None:
    """In the recipe, `qa` judges the part `search`, nothing looks for markers in `maths`."""
    own = 'rollout.parts.search.markers.answer=["<a>", "</a>"]'
    place = "tasks.train.args.parts.search.judge"
    with pytest.raises(ConfigError) as refused:
        check(recipe(own))
    first, second = str(refused.value).splitlines()  # training, held out
    assert first.startswith(f"{place}: qa takes the answer between <answer> and </answer>, and")
    assert first.endswith("set the judge's args.markers to ['<a>', '</a>']")
    assert second.startswith("tasks.heldout.args.parts.search.judge: qa")
    qa = '{name: qa, args: {markers: ["<a>", "</a>"]}}'
    check(recipe(own, f"{place}={qa}", f"tasks.heldout.args.parts.search.judge={qa}"))
    summed = "{name: sum, args: {parts: {right: answer}}}"
    with pytest.raises(ConfigError, match=rf"{place}: answer takes the answer between"):
        check(recipe(own, f"{place}={summed}", f"tasks.heldout.args.parts.search.judge={qa}"))
    maths = "{name: math, args: {extract: auto}}"
    with pytest.raises(ConfigError, match=rf"{place}: math takes the answer between"):
        check(recipe(own, f"{place}={maths}", f"tasks.heldout.args.parts.search.judge={qa}"))
    boxed = maths.replace("auto", "boxed")
    check(recipe(own, f"{place}={boxed}", f"tasks.heldout.args.parts.search.judge={qa}"))
    check(recipe())


def test_mistakes_in_a_part_are_refused_with_its_place() -> None:
    part = "tasks.train.args.parts.maths"
    with pytest.raises(ConfigError, match=rf"^{part}: judge\.name: 'cod' .* \(did you mean code"):
        read_splits(recipe(f"{part}.judge=cod"))
    with pytest.raises(ConfigError, match=rf"^{part}\.tools: 'pyton' .* \(did you mean python\?\)"):
        check_functions(recipe(f"{part}.tools=[pyton]"))
    key = "rollout.parts.maths.markers"
    config = recipe(f"{key}={{tool: pyton}}")
    with pytest.raises(ConfigError, match=rf"^{key}\.tool: 'pyton' is no function of `tools`"):
        make_collector(config, None, None, Limits({}, []))


def test_the_expert_writes_each_part_with_its_own_markers_and_tool(tmp_path: Path) -> None:
    from ludus.envs import ENVS

    config = recipe("tools.0.args.sandbox.name=plain_sandbox:PlainSandbox")
    assert config.env is not None
    maker = ENVS.build(config.env, "env")
    tasks = read_tasks(config.tasks.train, "tasks.train", maker=maker)[:10]
    path = tmp_path / "demonstrations.jsonl"
    generate_demonstrations(
        config.env,
        tasks,
        path,
        num_workers=1,
        format=lambda task: settings_of(config.rollout, part_of(task)).format,
        markers=lambda task: settings_of(config.rollout, part_of(task)).markers,
        tools=config.tools,
    )
    assert dropped_path(path).read_text() == ""
    seen = []
    for task, demo in zip(tasks, load_demonstrations(path), strict=True):
        part = part_of(task)
        seen.append(part)
        _, first, *rest = (message.content for message in demo.messages)
        if part == "code":
            assert first.startswith("```python\ndef f(x):\n")
        elif part == "search":
            assert first == f"<search> {task.data['person']} </search>"
            assert rest[0].startswith(f"[1] {task.data['person']}\n")
            assert rest[1] == f"<answer> {task.answer} </answer>"
        else:
            assert first.startswith("<code>print(")
            assert rest[1].startswith("<answer>")
    assert [seen.count(part) for part in ("code", "search", "maths")] == [4, 3, 3]
