"""WebShop: buy the product of an instruction (Yao et al., NeurIPS 2022, arXiv:2207.01206).

    user        WebShop [SEP] Instruction: [SEP] i need tea tree shampoo, with citrus scent, and
                price lower than 30.00 dollars [SEP] Search
    assistant   search[tea tree shampoo citrus]
    user        Instruction: [SEP] ... [SEP] Back to Search [SEP] Page 1 (Total results: 50) [SEP]
                Next > [SEP] B0QWXRTKLM [SEP] Norara Shampoo, Tea Tree [SEP] $9.49 [SEP] ...
    assistant   click[B0QWXRTKLM]
    user        Instruction: [SEP] ... [SEP] scent [SEP] citrus [SEP] jasmine [SEP] ... Buy Now
    assistant   click[citrus]
    assistant   click[Buy Now]

Pages, actions and reward are the original's; the search is BM25 over titles, descriptions, bullets
and options.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ludus.core.errors import ConfigError, EnvError, did_you_mean
from ludus.core.types import Message, Observation, StepResult, Task, ToolCall, ToolSpec
from ludus.envs.actions import (
    JSON_NAMES,
    Guide,
    Texts,
    action_text,
    answer,
    call_text,
    tool_spec,
)
from ludus.envs.base import Env, NoExpert
from ludus.envs.webshop import agentgym
from ludus.envs.webshop.expert import advise
from ludus.envs.webshop.pages import (
    BACK,
    BUY,
    NEXT,
    PREVIOUS,
    SEPARATOR,
    SUB_PAGES,
    THANKS,
    Layout,
    Page,
    buttons,
    clickable,
    links,
    text_of_page,
)
from ludus.envs.webshop.reward import Product, score
from ludus.envs.webshop.shop import SPLITS, Instructions, Kind, load_shop

TIERS = ("options-0", "options-1", "options-2")
"""Number of options that the goal asks for; options-2: two or more. A narrower tier such as
`options-0/attributes-1:beauty` also sets the number of attributes and the department."""

TIER = re.compile(r"(options-\d)(?:/attributes-(\d))?(?::(.+))?")

FIRST_HELD_OUT = 1_000_000
"""Seeds from this number give held-out goals, lower seeds training goals."""

ACTION = re.compile(r"(search|click)\[(.+)\]", re.DOTALL)

GUIDE = """You are in a web shop and buy what the instruction asks for. Answer with one action a \
turn: search[keywords], or click[text], where text is a button, a product's code or an option on \
the page. Open a product, click its options that were asked for, then click[Buy Now]. You may buy \
once."""


class WebShop(Env):
    """An instruction; the episode ends with a purchase, with a reward from 0 to 1.

    `StepResult.info` has `success`, `available_actions` (`search[keywords]` on pages with a search
    bar, and the possible clicks) and, after the purchase, the parts of the reward: `type`,
    `num_attributes`, `num_options`, `price`.

    A task's data is `{"goal": index}`, in the original's order of goals, or
    `{"split": "train", "seed": n}` (the splits are train, heldout and all), optionally with the
    `options`, `attributes` and `department` of a `shop.Kind`.
    """

    agentgym: ClassVar[str | None] = "webshop"
    blocking: ClassVar[bool] = False  # a step takes less than a millisecond and cannot hang
    cheap_reset: ClassVar[bool] = True
    max_turns: ClassVar[int] = 10

    def __init__(
        self,
        path: Annotated[
            str | None, Field(description="Folder of WebShop's files; null: the built-in shop.")
        ] = None,
        num_products: Annotated[
            int | None, Field(ge=1, description="Use only the first products; null: all.")
        ] = None,
        instructions: Annotated[
            Instructions | None,
            Field(
                description="Human-written, or synthetic (needs `path`); null: human, but "
                "synthetic for AgentGym's texts with a `path`, as in its server."
            ),
        ] = None,
        page_size: Annotated[
            int, Field(ge=1, le=50, description="Products on a page of results.")
        ] = 10,
        codes: Annotated[
            Literal["asin", "place"],
            Field(
                description="Name of a product in the results: its ASIN, as in the original, or "
                "its position (`item 1`), for models too small to copy ASINs."
            ),
        ] = "asin",
        repeat_instruction: Annotated[
            bool, Field(description="Show the instruction on every page; false: on the first.")
        ] = True,
        reward: Annotated[
            Literal["score", "success"],
            Field(
                description="score: the original's, which gives about half for any product of the "
                "kind; success: 1 for a purchase with full score, else 0."
            ),
        ] = "score",
        texts: Texts = "ludus",
        guide: Guide = False,
    ) -> None:
        self.repeat_instruction, self.guide = repeat_instruction, guide
        self.reward, self._original = reward, texts == "agentgym"
        self._layout = Layout(page_size, codes == "place", self._original)
        if instructions is None:
            instructions = "synthetic" if self._original and path is not None else "human"
        self._shop = load_shop(path, num_products, instructions)
        self._page: Page | None = None

    async def reset(self, task: Task) -> Observation:
        index = self._index = self._goal_index(task)
        self._goal = self._shop.goals[index]
        self._target = self._shop.products[self._goal.asin]
        self._page = Page()
        text = self._view(instruction=True)
        return Observation(
            messages=[Message(role="user", content=f"{GUIDE}\n\n{text}" if self.guide else text)],
            info={
                "goal": index,
                "instruction": self._goal.instruction,
                "available_actions": self._actions(),
            },
        )

    def _goal_index(self, task: Task) -> int:
        data, total = task.data, len(self._shop.goals)
        if "goal" in data:
            index = data["goal"]
            if type(index) is not int or not 0 <= index < total:
                where = f"webshop: task {task.id!r}"
                raise EnvError(f"{where}: data.goal is {index!r:.40}, not one of 0 to {total - 1}")
            return int(index)
        if data.get("split") not in SPLITS or type(data.get("seed")) is not int:
            raise EnvError(
                f"webshop: task {task.id!r}: data needs a goal, or a split "
                f"({', '.join(SPLITS)}) and a seed"
            )
        for name, type_ in (("options", int), ("attributes", int), ("department", str)):
            if not isinstance(given := data.get(name), type_ | None):
                raise EnvError(
                    f"webshop: task {task.id!r}: data.{name} is {given!r:.40}, not "
                    f"{JSON_NAMES[type_]} or null"
                )
        kind = Kind(data.get("options"), data.get("attributes"), data.get("department"))
        goals = self._shop.split(data["split"], kind)
        if not goals:
            departments = self._shop.departments()
            if kind.department not in (None, *departments):
                names = ", ".join(name for name in departments if name) or "none"
                raise EnvError(
                    f"webshop: task {task.id!r}: this shop has no department "
                    f"{kind.department!r:.40}; it has {names}"
                )
            raise EnvError(f"webshop: task {task.id!r}: this shop has no goal of {task.tier}")
        return goals[int(data["seed"]) % len(goals)]

    async def step(self, action: Message) -> StepResult:
        if self._page is None:
            raise EnvError("webshop: the episode is over, or was never reset; call reset first")
        parsed = ACTION.fullmatch(action_text(self, action))
        remark = ""
        if parsed is None:
            remark = "no such action. use search[keywords] or click[text]. "
        elif parsed[1] == "search":
            self._page = Page("results", parsed[2], self._shop.search(parsed[2]))
        else:
            # Normalised like the action's text: lower case, single spaces.
            by_name = {" ".join(text.lower().split()): text for text in self._clickable()}
            if parsed[2] not in by_name:
                remark = "there is nothing of that name to click. "
            elif by_name[parsed[2]] == BUY:
                return self._buy(action)
            else:
                self._click(by_name[parsed[2]])
        if self._original:  # it does nothing, and says nothing of it
            remark = ""
        text = f"{remark}{self._view(self.repeat_instruction)}"
        info = {"success": False, "available_actions": self._actions()}
        return StepResult(messages=answer(action, text), reward=0.0, info=info)

    async def close(self) -> None:
        self._page = None

    @property
    def _product(self) -> Product | None:
        assert self._page is not None
        return self._shop.products.get(self._page.asin)

    def _clickable(self) -> list[str]:
        assert self._page is not None
        return clickable(self._page, self._product, self._layout)

    def _actions(self) -> list[str]:
        """The possible actions, without duplicates: two options may share a value."""
        assert self._page is not None
        search = ["search[keywords]"] if self._page.kind == "search" else []
        clicks = dict.fromkeys(text.lower() for text in self._clickable())
        return [*search, *(f"click[{text}]" for text in clicks)]

    def _view(self, instruction: bool) -> str:
        assert self._page is not None
        text = self._goal.instruction if instruction else None
        products = self._shop.products
        return text_of_page(self._page, products, text, self._layout)

    def _click(self, text: str) -> None:
        """Follow a link, choose an option, or press a button other than BUY."""
        page = self._page
        assert page is not None
        if text == BACK:
            self._page = Page()
        elif text in (NEXT, PREVIOUS) and page.kind == "results":
            page.number += 1 if text == NEXT else -1
        elif text == PREVIOUS and page.kind == "item":
            page.kind, page.options = "results", {}
        elif text == PREVIOUS:
            page.kind = "item"
        elif text in SUB_PAGES and page.kind == "item":
            page.kind = text
        elif page.kind == "results":
            page.asin = links(page, self._layout)[text]
            page.kind = "item"
        else:
            for name, values in self._shop.products[page.asin].options.items():
                if text in values:
                    page.options[name] = text

    def _buy(self, action: Message) -> StepResult:
        page, bought = self._page, self._product
        assert page is not None
        assert bought is not None
        parts = score(self._goal, self._target, bought, page.options.values())
        self._page = None
        success = parts.value >= self.success_at
        text = SEPARATOR.join([*THANKS, f"{parts.value:g}"])
        if self._original:
            text = agentgym.last_page(page.asin, page.options, parts.value)
        return StepResult(
            messages=answer(action, text),
            reward=float(success) if self.reward == "success" else parts.value,
            terminated=True,
            info={
                "success": success,
                "available_actions": [],
                "type": parts.type,
                "num_attributes": parts.num_attributes,
                "num_options": parts.num_options,
                "price": parts.price,
            },
        )

    def inspect(self, what: str) -> Any:
        if what != "state" or self._page is None:
            return super().inspect(what)
        named = links(self._page, self._layout) if self._page.kind == "results" else ()
        options = self._product.options if self._page.kind == "item" and self._product else {}
        shown = buttons(self._page, self._layout)
        return {
            "url": agentgym.url_of(self._page, self._index),
            "html": agentgym.html_of(self._view(instruction=True), shown, tuple(named), options),
        }

    def tools(self) -> Sequence[ToolSpec]:
        keywords = {"type": "string", "description": "What to look for."}
        text = {"type": "string", "description": "A button, a product's code or an option."}
        return [
            tool_spec("search", "Search the shop.", keywords=keywords),
            tool_spec("click", "Click on the page.", text=text),
        ]

    def text_of(self, call: ToolCall) -> str:
        names = {"search": "keywords", "click": "text"}
        if call.name not in names:
            raise ValueError("there is no such tool; there are search and click")
        return f"{call.name}[{call_text(call, {names[call.name]: str})[0]}]"

    def call_of(self, action: str) -> ToolCall:
        parsed = ACTION.fullmatch(action)
        if parsed is None:
            raise ValueError(f"{action!r:.80} is neither search[...] nor click[...]")
        argument = "keywords" if parsed[1] == "search" else "text"
        return ToolCall(name=parsed[1], arguments={argument: parsed[2]})

    def expert_action(self) -> str:
        if self._page is None:
            raise NoExpert("webshop: no episode is being played")
        action = advise(self._shop, self._goal, self._page, self._layout.size)
        names = links(self._page, self._layout)
        clicks = {f"click[{asin}]": f"click[{name}]" for name, asin in names.items()}
        return clicks.get(action, action)

    @classmethod
    def tiers(cls) -> Sequence[str]:
        return TIERS

    @classmethod
    def check_tier(cls, tier: str) -> None:
        _kind(tier)

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """The tier's goal number `seed`, modulo the number of goals.

        Seeds from 1,000,000 give held-out goals, which are disjoint from the training goals.
        """
        heldout = seed >= FIRST_HELD_OUT
        return Task(
            id=f"webshop/{tier or 'all'}/{seed}",
            data={
                "split": "heldout" if heldout else "train",
                "seed": seed - FIRST_HELD_OUT if heldout else seed,
                **(asdict(_kind(tier)) if tier else {}),
            },
            tier=tier,
            source="webshop",
        )


def _kind(tier: str) -> Kind:
    """The Kind of a tier; the department is checked by the shop."""
    parsed = TIER.fullmatch(tier)
    if parsed is None or parsed[1] not in TIERS:
        raise ConfigError(
            f"{tier!r} is not a tier of webshop{did_you_mean(tier, TIERS)} (narrower tiers are "
            "options-0:beauty, options-0/attributes-1, options-0/attributes-1:beauty)"
        )
    return Kind(TIERS.index(parsed[1]), int(parsed[2]) if parsed[2] else None, parsed[3])
