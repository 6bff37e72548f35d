"""Synthetic goals of WebShop's own files, against the goals that AgentGym's server makes of them.

`agentgym_goals.json` has products and attributes in the formats of `items_shuffle_1000.json` and
`items_ins_v2_1000.json`, with their odd corners, and the goals recorded from AgentGym's own code
(`load_products`, `get_goals`, its shuffle), in the order of its session ids.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("bm25s", reason="needs ludus-rl[webshop]")
pytest.importorskip("rapidfuzz", reason="needs ludus-rl[webshop]")

from ludus.core.types import Task
from ludus.envs.webshop.env import WebShop
from ludus.envs.webshop.shop import load_shop

RECORDED = json.loads(Path(__file__).with_name("agentgym_goals.json").read_text("utf-8"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, key in (("items_shuffle", "products"), ("items_ins_v2", "attributes")):
        (tmp_path / f"{name}_1000.json").write_text(json.dumps(RECORDED[key]), "utf-8")
    return tmp_path


def test_synthetic_goals_have_agentgyms_indices_and_limits(folder: Path) -> None:
    goals = load_shop(str(folder), None, "synthetic").goals
    found = [
        [g.asin, g.instruction, list(g.attributes), list(g.options), g.price_upper] for g in goals
    ]
    assert found == RECORDED["goals"]


async def test_agentgyms_texts_take_the_synthetic_goals_of_a_users_files(folder: Path) -> None:
    env = WebShop(path=str(folder), texts="agentgym")
    for index, (_, instruction, *_) in enumerate(RECORDED["goals"]):
        opening = await env.reset(Task(id="x", data={"goal": index}))
        expected = f"WebShop [SEP] Instruction: [SEP] {instruction} [SEP] Search"
        assert opening.messages[0].content == expected
