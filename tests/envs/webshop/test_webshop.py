"""WebShop: the shop, the pages, the reward, the expert."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from turns import act, say

import ludus
from ludus.core.errors import ConfigError, DataError, EnvError
from ludus.core.types import Task, ToolCall

pytest.importorskip("bm25s", reason="needs ludus-rl[webshop]")
pytest.importorskip("rapidfuzz", reason="needs ludus-rl[webshop]")

from ludus.envs.webshop.env import FIRST_HELD_OUT, TIERS, WebShop
from ludus.envs.webshop.pages import Page
from ludus.envs.webshop.reward import (
    Goal,
    Product,
    has_attribute,
    normalise_color,
    same_option,
    score,
)
from ludus.envs.webshop.shop import Kind, load_shop

ROOT = Path(ludus.__file__).parents[1]
SHOP = load_shop(None, None, "human")


def product(**changed: Any) -> Product:
    row = Product(
        asin="B0AAAAAAAA",
        title="Norara Shampoo, Tea Tree",
        query="shampoo",
        category="Beauty › Hair Care › Wash",
        department="beauty",
        description="Smells of rosemary.",
        bullets=("Sulfate free.",),
        attributes=("tea tree", "long lasting"),
        options={"scent": ("citrus", "jasmine"), "color": ("navy blue", "black")},
        price=12.0,
        price_tag="$12.0",
        rating="4.1",
        reviews=(),
    )
    return replace(row, **changed)


def goal(**changed: Any) -> Goal:
    row = Goal("B0AAAAAAAA", "i need shampoo", ("tea tree", "sulfate free"), ("citrus",), 20.0)
    return replace(row, **changed)


async def shopping(index: int = 0, **args: Any) -> WebShop:
    env = WebShop(**args)
    await env.reset(Task(id="x", data={"goal": index}))
    return env


async def play(env: WebShop, task: Task) -> tuple[float, int]:
    """The expert's reward and turns; 0 where it has not bought within the rounds."""
    await env.reset(task)
    for turn in range(1, env.max_turns + 1):
        action = env.expert_action()
        assert env.text_of(env.call_of(action)) == action
        result = await act(env, action)
        if result.done:
            return result.reward or 0.0, turn
    return 0.0, env.max_turns


@pytest.mark.parametrize(
    ("bought", "options", "reward", "what"),
    [
        ({}, ["citrus"], 1.0, "everything"),
        ({}, [], 3 / 4, "no option"),
        ({}, ["jasmine"], 3 / 4, "another option"),
        ({"price": 20.0}, ["citrus"], 1.0, "at the limit"),
        ({"price": 20.01}, ["citrus"], 3 / 4, "too dear"),
        ({"bullets": ()}, ["citrus"], 3 / 4, "an attribute less"),
        ({"attributes": (), "title": "Shampoo"}, ["citrus"], 3 / 4, "only a bullet says it"),
        ({"title": "Bel Towel", "attributes": ("tea tree",)}, ["citrus"], 0.0, "no word shared"),
        ({"query": "soap", "category": "Beauty › Bath"}, ["citrus"], 1.0, "the titles agree"),
    ],
)
def test_the_reward_counts_what_was_met(
    bought: dict[str, Any], options: list[str], reward: float, what: str
) -> None:
    assert score(goal(), product(), product(**bought), options).value == pytest.approx(reward), what


def test_the_kind_of_product_scales_the_reward() -> None:
    long = "Shampoo One Two Three Four Five Six Seven Eight Nine Ten"
    # Numbers are words here; of eleven, one is shared: under a tenth.
    other = product(title="Shampoo Bar", query="bar", category="Home › Decor")
    assert score(goal(), product(title=long), other, ["citrus"]).type == 0.1
    half = product(title="Shampoo A B C D", query="bar", category="Home › Decor")
    wanted = product(title="Shampoo Tea Tree Mint Wash Bottle")
    assert score(goal(), wanted, half, []).type == 0.5
    assert score(goal(), wanted, replace(half, query="shampoo"), []).type == 1.0
    assert score(goal(), wanted, replace(half, category=wanted.category), []).type == 1.0


def test_options_are_compared_by_color_and_loosely() -> None:
    assert normalise_color("deep navy blue") == "blue"  # the first in alphabetical order
    assert same_option("navy blue", "sky blue")
    assert same_option("x-large", "large")  # a peculiarity of the original's comparison
    assert not same_option("small", "large")
    assert not same_option("3 pack", "6 pack")


def test_the_shop_is_large_and_its_goals_are_reachable() -> None:
    assert len(SHOP.products) == 1536
    assert len(SHOP.goals) == 30720
    assert len({goal.instruction for goal in SHOP.goals}) > 30000
    for wanted in SHOP.goals:
        target = SHOP.products[wanted.asin]
        chosen = [v for values in target.options.values() for v in values if v in wanted.options]
        assert score(wanted, target, target, chosen).value == 1.0


def test_search_matters() -> None:
    """The name of a product's type alone seldom shows it on the first page."""
    rng = random.Random(0)
    found = 0
    for wanted in rng.sample(SHOP.goals, 100):
        target = SHOP.products[wanted.asin]
        alike = [p for p in SHOP.products.values() if p.query == target.query]
        assert len(alike) == 32
        found += wanted.asin in SHOP.search(target.query)[:10]
        words = " ".join([target.query, *wanted.attributes])
        assert wanted.asin in SHOP.search(words)
    assert found < 60


def test_search_is_ordered_bounded_and_robust() -> None:
    hits = SHOP.search("coffee table solid wood")
    assert len(hits) == 50
    assert "Coffee Table" in SHOP.products[hits[0]].title
    assert SHOP.search("Coffee TABLE solid wood coffee") != []
    assert SHOP.search("zzz qqq") == SHOP.search("[]!") == []


def test_training_and_held_out_goals_are_disjoint() -> None:
    train, heldout = SHOP.split("train"), SHOP.split("heldout")
    assert (len(train), len(heldout)) == (25600, 5120)
    assert not set(train) & set(heldout)
    asked = {(g.asin, frozenset(g.attributes), frozenset(g.options)) for g in SHOP.goals}
    assert len(asked) == len(SHOP.goals), "two goals ask for the same"
    for tier in TIERS:
        below, above = WebShop.task(tier, 5), WebShop.task(tier, FIRST_HELD_OUT + 5)
        assert (below.data["split"], above.data["split"]) == ("train", "heldout")


async def test_the_expert_buys_what_was_asked_for() -> None:
    env = WebShop()
    rng = random.Random(1)
    results = [
        await play(env, Task(id="x", data={"goal": index}))
        for index in rng.sample(range(len(SHOP.goals)), 300)
    ]
    assert sum(reward == 1.0 for reward, _ in results) >= 0.95 * len(results)
    assert max(turns for _, turns in results) <= 10


@pytest.mark.parametrize(("reward", "earned"), [("score", 0.5), ("success", 0.0)])
async def test_half_of_the_score_may_count_for_nothing(reward: str, earned: float) -> None:
    wanted = next(i for i, g in enumerate(SHOP.goals) if not g.options and len(g.attributes) == 1)
    env = await shopping(wanted, reward=reward)
    target = SHOP.products[SHOP.goals[wanted].asin]
    env._page = Page("item", asin=_another(target, SHOP.goals[wanted]).asin)
    result = await act(env, "click[Buy Now]")
    assert (result.reward, result.info["success"]) == (earned, False)
    env = await shopping(wanted, reward=reward)
    env._page = Page("item", asin=target.asin)
    assert (await act(env, "click[Buy Now]")).reward == 1.0


def _another(target: Product, wanted: Goal) -> Product:
    """One of the same kind that is cheap enough, and has not what is asked for."""
    return next(
        found
        for found in SHOP.products.values()
        if found.query == target.query
        and found.price <= wanted.price_upper
        and not has_attribute(found, wanted.attributes[0])
    )


async def test_the_expert_finds_its_way_from_any_page() -> None:
    rng = random.Random(2)
    for index in range(40):
        env = await shopping(index, page_size=5)
        for _ in range(6):
            page = env._page
            assert page is not None
            asins = list(page.hits[:5]) or ["Buy"]
            places = ["Back to Search", "Next >", "< Prev", "Features", *asins]
            await act(env, rng.choice([*(f"click[{p}]" for p in places), "search[black]"]))
        rewards = []
        for _ in range(20):
            result = await act(env, env.expert_action())
            rewards.append(result.reward)
            if result.done:
                break
        assert rewards[-1] == 1.0, index


async def test_an_episode_by_hand() -> None:
    wanted = next(i for i, g in enumerate(SHOP.goals) if len(g.options) == 1)
    asked, target = SHOP.goals[wanted], SHOP.products[SHOP.goals[wanted].asin]
    env = WebShop()
    opening = (await env.reset(Task(id="x", data={"goal": wanted}))).messages[0].content
    assert opening == f"WebShop [SEP] Instruction: [SEP] {asked.instruction} [SEP] Search"
    results = await say(env, f"search[{target.title}]")
    head = f"Instruction: [SEP] {asked.instruction} [SEP] Back to Search [SEP] Page 1 (Total "
    assert results.startswith(f"{head}results: 50) [SEP] Next > [SEP] B0")
    assert f" [SEP] {target.asin} [SEP] {target.title} [SEP] {target.price_tag}" in results
    assert "Page 2 (Total results: 50) [SEP] < Prev [SEP] Next >" in await say(env, "click[next >]")
    assert await say(env, "click[< Prev]") == results
    item = await say(env, f"click[{target.asin}]")
    assert item.endswith(
        f" [SEP] {target.title} [SEP] Price: {target.price_tag} [SEP] Rating: {target.rating}"
        " [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    for name, values in target.options.items():
        assert " [SEP] ".join([name, *values]) in item
    assert target.description in await say(env, "click[Description]")
    assert await say(env, "click[< Prev]") == item
    assert target.bullets[0] in await say(env, "click[features]")
    await act(env, "click[< prev]")
    assert await say(env, f"click[{asked.options[0]}]") == item
    result = await act(env, "click[Buy Now]")
    assert (result.reward, result.terminated, result.info["success"]) == (1.0, True, True)
    assert result.messages[0].content.endswith("Your score (min 0.0, max 1.0) [SEP] 1")
    with pytest.raises(EnvError, match="call reset first"):
        await act(env, "search[x]")


async def test_what_can_be_done_is_told_with_each_page() -> None:
    env = WebShop(page_size=2)
    opening = await env.reset(Task(id="x", data={"goal": 0}))
    assert opening.info["available_actions"] == ["search[keywords]"]
    told = (await act(env, "search[coffee table]")).info["available_actions"]
    assert told[:2] == ["click[back to search]", "click[next >]"]
    assert [len(told), *map(len, told[2:])] == [4, 17, 17]
    item = (await act(env, told[2])).info["available_actions"]
    options = SHOP.products[told[2][6:-1].upper()].options.values()
    fixed = ["back to search", "< prev", "description", "features", "reviews", "buy now"]
    assert item == [f"click[{text}]" for text in [*fixed, *(v for vs in options for v in vs)]]
    assert all(action == action.lower() for action in item)
    below = (await act(env, "click[reviews]")).info["available_actions"]
    assert below == ["click[back to search]", "click[< prev]"]
    assert (await act(env, "click[no such]")).info["available_actions"] == below
    await act(env, "click[< prev]")
    assert (await act(env, "click[buy now]")).info["available_actions"] == []


async def test_options_are_forgotten_with_the_product() -> None:
    env = await shopping()
    await act(env, "search[women's summer dress]")
    hits = env._page.hits if env._page else []
    item = await say(env, f"click[{hits[0]}]")
    value = next(iter(SHOP.products[hits[0]].options["color"]))
    assert value in item
    await act(env, f"click[{value}]")
    assert env._page is not None
    assert env._page.options == {"color": value}
    await act(env, "click[< Prev]")
    await act(env, f"click[{hits[1]}]")
    assert env._page.options == {}


@pytest.mark.parametrize(
    ("action", "remark"),
    [
        ("dance", "no such action."),
        ("search[]", "no such action."),
        ("click[Buy Now]", "there is nothing of that name"),
        ("click[B0AAAAAAAA]", "there is nothing of that name"),
        ("click[search]", "there is nothing of that name"),
    ],
)
async def test_a_wrong_action_is_answered_and_the_page_shown_again(
    action: str, remark: str
) -> None:
    env = await shopping()
    answer = await say(env, action)
    assert answer.startswith(remark)
    assert answer.endswith("[SEP] Search")


async def test_pages_can_be_short() -> None:
    env = await shopping(page_size=2, repeat_instruction=False)
    answer = await say(env, "search[leggings]")
    assert answer.startswith("Back to Search [SEP] Page 1 (Total results: 32)")
    assert answer.count("B0") == 2


async def test_products_can_be_named_by_their_place() -> None:
    coded, placed = [await shopping(3, page_size=3, codes=codes) for codes in ("asin", "place")]
    query = coded.expert_action()
    codes, places = [await say(env, query) for env in (coded, placed)]
    found = re.findall(r"\bB0\w{8}\b", codes)
    assert len(found) == 3
    for place, asin in enumerate(found, 1):
        codes = codes.replace(asin, f"item {place}")
    assert codes == places
    opened = [await say(coded, f"click[{found[1]}]"), await say(placed, "click[item 2]")]
    assert opened[0] == opened[1]
    assert "nothing of that name" in await say(placed, "click[item 2]")
    for seed in range(20):
        assert (await play(placed, WebShop.task(None, seed)))[0] == 1.0


def test_tool_calls_are_checked() -> None:
    env = WebShop()
    assert env.text_of(ToolCall(name="search", arguments={"keywords": "a b"})) == "search[a b]"
    with pytest.raises(ValueError, match="there are search and click"):
        env.text_of(ToolCall(name="buy"))
    with pytest.raises(ValueError, match="keywords is missing"):
        env.text_of(ToolCall(name="search"))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"goal": 30720}, "not one of 0 to 30719"),
        ({"goal": "1"}, "not one of 0 to 30719"),
        ({}, "needs a goal, or a split"),
        ({"split": "test", "seed": 1}, "needs a goal, or a split"),
        ({"split": "train", "seed": None}, "needs a goal, or a split"),
        ({"split": "train", "seed": 1, "options": [1]}, r"data.options is \[1\], not integer"),
        ({"split": "train", "seed": 1, "department": {}}, r"data.department is {}, not string"),
        ({"split": "train", "seed": 1, "attributes": 9}, "this shop has no goal of"),
        (
            {"split": "train", "seed": 1, "department": "toys"},
            "no department 'toys'; it has beauty, clothing, electronics",
        ),
    ],
)
async def test_wrong_tasks_are_named(data: dict[str, Any], problem: str) -> None:
    with pytest.raises(EnvError, match=problem):
        await WebShop().reset(Task(id="x", data=data))


def test_wrong_tiers_are_named() -> None:
    with pytest.raises(ConfigError, match=r"options-3.*did you mean options-"):
        WebShop.task("options-3", 0)
    for tier in ("options-1:", "options-0/attributes-x", "options-7/attributes-1", "beauty"):
        with pytest.raises(ConfigError, match="narrower tiers are options-0:beauty"):
            WebShop.check_tier(tier)


def test_a_tier_may_be_narrowed() -> None:
    def goals(tier: str) -> list[Goal]:
        data = WebShop.task(tier, 0).data
        kind = Kind(data["options"], data["attributes"], data["department"])
        found = [SHOP.goals[i] for i in SHOP.split("train", kind)]
        assert found
        assert {min(len(goal.options), 2) for goal in found} == {kind.options}
        return found

    whole, beauty = goals("options-0"), goals("options-0:beauty")
    assert {goal.asin for goal in beauty} < {goal.asin for goal in whole}
    departments = {SHOP.products[goal.asin].category.split(" ›")[0] for goal in beauty}
    assert departments == {"Beauty"}
    assert {len(goal.attributes) for goal in goals("options-0/attributes-1:beauty")} == {1}
    assert {len(goal.attributes) for goal in goals("options-2/attributes-3")} == {3}
    assert WebShop.task("options-0:beauty", FIRST_HELD_OUT + 2).data["seed"] == 2
    assert set(SHOP.departments()) > {"beauty", "grocery", "shoes"}


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def original_files(folder: Path) -> None:
    """Two products in the formats of WebShop's own files, with their odd corners."""
    row = {
        "name": "Acme Mug",
        "category": "garden",
        "query": "Coffee Mug ",
        "product_category": "Home › Kitchen › Mugs",
        "full_description": None,
        "small_description": "Dishwasher safe",
        "images": ["x.jpg"],
        "customization_options": {
            "Color": [{"value": "Red/Blue ", "image": None}, {"value": "Black"}],
            "Size": None,
        },
    }
    second = {**row, "asin": "B000000002", "name": "Acme Cup", "customization_options": ""}
    write(
        folder,
        "items_shuffle_1000.json",
        [
            {**row, "asin": "B000000001", "pricing": "$1,010.50$1,020.00"},
            {**second, "pricing": None},
            {**row, "asin": "nan"},
            {**row, "asin": "B000000001"},
        ],
    )
    write(
        folder,
        "items_ins_v2_1000.json",
        {
            "B000000001": {
                "attributes": ["dishwasher safe"],
                "instruction": "find me a mug",
                "instruction_attributes": ["dishwasher safe"],
            },
            "B000000002": {"attributes": ["bpa free"]},
        },
    )
    human = {"instruction": "i want a bpa free cup.", "instruction_attributes": ["bpa free"]}
    write(folder, "items_human_ins.json", {"B000000002": [{**human, "instruction_options": []}]})


async def test_the_original_files_can_be_loaded(tmp_path: Path) -> None:
    original_files(tmp_path)
    shop = load_shop(str(tmp_path), None, "human")
    assert list(shop.products) == ["B000000001", "B000000002"]
    mug, cup = shop.products.values()
    assert mug.options == {"color": ("red | blue", "black")}
    assert mug.price_tag == "$1010.5 to $1020.0"
    assert 1010.5 <= mug.price <= 1020
    assert (mug.bullets, mug.query, cup.price_tag) == (("Dishwasher safe",), "coffee mug", "$100.0")
    [wanted] = shop.goals
    assert wanted.instruction.startswith("i want a bpa free cup, and price lower than 1")
    assert await play(WebShop(path=str(tmp_path)), Task(id="x", data={"goal": 0})) == (1.0, 3)
    synthetic = load_shop(str(tmp_path), None, "synthetic")
    said = sorted(goal.instruction for goal in synthetic.goals)
    assert said == ["find me a mug with color: black", "find me a mug with color: red | blue"]


async def test_an_option_with_two_spaces_can_be_chosen(tmp_path: Path) -> None:
    original_files(tmp_path)
    path = tmp_path / "items_shuffle_1000.json"
    path.write_text(path.read_text().replace("Red/Blue ", "Red / Blue"))
    env = await shopping(path=str(tmp_path), instructions="synthetic")
    await act(env, "search[mug]")
    await act(env, "click[B000000001]")
    await act(env, "click[red  |  blue]")
    assert env._page is not None
    assert env._page.options == {"color": "red  |  blue"}


def test_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        WebShop(path=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"no items_shuffle_1000.json and no items_shuffle.json"):
        WebShop(path=str(tmp_path))
    original_files(tmp_path)
    (tmp_path / "items_human_ins.json").write_text("{")
    with pytest.raises(DataError, match=r"items_human_ins\.json: not JSON"):
        WebShop(path=str(tmp_path))
    original_files(tmp_path)
    write(tmp_path, "items_shuffle_1000.json", [{"asin": "B000000001"}])
    with pytest.raises(DataError, match=r"not in WebShop's format: no field '"):
        WebShop(path=str(tmp_path), instructions="synthetic")


PROBE = """
import asyncio, hashlib
from ludus.core.types import Message, Task
from ludus.envs.webshop.env import WebShop
async def main():
    env, digest = WebShop(), hashlib.sha256()
    for index in range(40):
        opening = await env.reset(Task(id="x", data={"goal": index}))
        result = await env.step(Message(role="assistant", content=env.expert_action()))
        digest.update((opening.messages[0].content + result.messages[0].content).encode())
    print(digest.hexdigest())
asyncio.run(main())
"""


def test_pages_do_not_depend_on_the_hash_seed() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", PROBE],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1


def test_the_script_writes_what_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "scripts/make_webshop_catalogue.py"
    spec = importlib.util.spec_from_file_location("make_webshop_catalogue", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    shipped = script.OUTPUT.read_bytes()
    monkeypatch.setattr(script, "OUTPUT", tmp_path / "webshop.json.gz")
    script.main()
    # The header's last byte names the operating system; what is packed must be the same.
    assert gzip.decompress(script.OUTPUT.read_bytes()) == gzip.decompress(shipped)
