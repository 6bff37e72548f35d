"""Secrets of the configuration are neither printed nor stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ludus.cli.options import named_origins
from ludus.config.load import diff, dump_config, load_config
from ludus.config.secrets import is_masked, masked, shown_override, variable_of
from ludus.core.errors import ConfigError

RAW = {"model": {"path": "x"}, "tasks": {"train": "x"}}
URLS = ["slack://hunter2/B/C", "$NOTIFY", "Json://me:hunter2@h"]


def test_urls_are_stored_with_their_scheme_only() -> None:
    config = load_config({**RAW, "notify": URLS})
    assert config.notify == URLS, "the run itself has them"
    stored = ["slack://***", "$NOTIFY", "json://***"]
    assert config.model_dump(mode="json")["notify"] == stored
    assert "hunter2" not in dump_config(config) + repr(config) + str(config)
    assert load_config(config, ["seed=3"]).notify == URLS
    again = load_config(config.model_dump(mode="json"))
    assert again.notify == stored
    assert diff(config, again) == []
    assert dump_config(again) == dump_config(config)


def test_masks_and_variables_are_told_from_urls() -> None:
    assert [is_masked(url) for url in ("slack://***", "***", "slack://a***", "$N")] == [
        True, True, False, False
    ]  # fmt: skip
    assert [variable_of(url) for url in ("$N", "${N_1}", "$1", "$N/a", "json://$N")] == [
        "N", "N_1", None, None, None
    ]  # fmt: skip
    assert masked("no scheme") == "***"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("slack://hunter2", "notify must be a list"),
        ({"hunter2": 1}, "notify must be a list"),
        (["hunter2"], "notify.0: it must be a URL with a scheme"),
        (["$1hunter2"], "notify.0: it must be a URL with a scheme"),
        (["json://h", ["hunter2"]], "notify.1 must be text"),
        (None, "notify must be a list"),
    ],
)
def test_no_message_shows_a_wrong_value(value: Any, said: str) -> None:
    import json

    sources: list[tuple[Any, list[str]]] = [({**RAW, "notify": value}, [])]
    sources.append((RAW, [f"notify={json.dumps(value)}"]))
    for raw, overrides in sources:
        with pytest.raises(ConfigError) as refused:
            load_config(raw, overrides)
        assert said in str(refused.value)
        assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "override", ["notify=[hunter2", "notify:[hunter2]", "notify.0.hunter2=1", "notify.hunter2=1"]
)
def test_no_message_shows_a_wrong_override(override: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config({**RAW, "notify": ["json://hunter2"]}, [override])
    shown = str(refused.value).replace("has no entry 'hunter2'", "").replace("got 'hunter2'", "")
    assert "hunter2" not in shown


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("notify=[slack://hunter2]", "notify=***"),
        ("notify.0.hunter2=1", "notify=***"),
        ('shared.notify=["bad://hunter2@x"]', "shared.notify=***"),
        ('shared={notify: ["bad://hunter2@x"]}', "shared=***"),
        ("notifi=[slack://hunter2]", "notifi=***"),
        ("Notify=[slack://hunter2]", "Notify=***"),
        ("store=postgresql://me:hunter2@h/db", "store=postgresql://***@h/db"),
        ("rl.optimizer.lr=1e-3", "rl.optimizer.lr=1e-3"),
        ("env.args.levels=[a, b]", "env.args.levels=[a, b]"),
        ("seed=" + "9" * 5000, "seed=" + "9" * 155 + "..."),
        ("judge.args.prompt=notify me", "judge.args.prompt=***"),
    ],
)
def test_an_override_is_shown_without_secrets_and_cut(override: str, shown: str) -> None:
    assert shown_override(override) == shown


def test_errors_of_a_check_name_the_override_without_its_value(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("seed: 3\n", encoding="utf-8")
    with (
        pytest.raises(ConfigError, match=r"^override notify=\*\*\*: notify\.0: wrong$"),
        named_origins(str(recipe), ["notify=[slak://hunter2]"]),
    ):
        raise ConfigError("notify.0: wrong")
    assert shown_override("seed=3") == "seed=3"
