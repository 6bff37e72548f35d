"""WebShop's expert: searches with the instruction's words, opens the first product that meets all
requirements, chooses the options and buys. It reads the catalogue, not only the pages, and can
continue from any page.
"""

from __future__ import annotations

from collections.abc import Sequence

from ludus.envs.webshop.pages import BUY, NEXT, PREVIOUS, SUB_PAGES, Page, on_page
from ludus.envs.webshop.reward import Goal, Product, same_option, score
from ludus.envs.webshop.shop import Shop


def advise(shop: Shop, goal: Goal, page: Page, size: int) -> str:
    """The next action towards a purchase with full reward, or of the goal's own product."""
    target = shop.products[goal.asin]
    if page.kind in SUB_PAGES:
        return f"click[{PREVIOUS}]"
    if page.kind == "item":
        product = shop.products[page.asin]
        choice = choices(product, goal)
        if fulfils(product, target, goal) or product is target:
            missing = [v for name, v in choice.items() if page.options.get(name) != v]
            return f"click[{missing[0] if missing else BUY}]"
    if page.kind == "results":
        listed = on_page(page, size)
        if asin := _first(shop, goal, listed):
            return f"click[{asin}]"
        if goal.asin in listed:
            return f"click[{goal.asin}]"
        later = page.hits[page.number * size :]
        if goal.asin in later or _first(shop, goal, later):
            return f"click[{NEXT}]"
    return f"search[{best_query(shop, goal, size)}]"


def best_query(shop: Shop, goal: Goal, size: int) -> str:
    """The first of several queries with a fulfilling product on the first page of results; else on
    a later page; else the target's title."""
    target = shop.products[goal.asin]
    words = " ".join([*goal.attributes, target.query])
    queries = [" ".join([words, *goal.options]), words, target.title.lower()]
    hits = [shop.search(query) for query in queries]
    for last in (size, None):
        for query, asins in zip(queries, hits, strict=True):
            if _first(shop, goal, asins[:last]):
                return query
    return queries[-1]


def choices(product: Product, goal: Goal) -> dict[str, str]:
    """The product's option values that the goal asks for, as far as the product has them."""
    return {
        name: value
        for wanted in goal.options
        for name, values in product.options.items()
        for value in values
        if same_option(value, wanted)
    }


def fulfils(product: Product, target: Product, goal: Goal) -> bool:
    """True if buying the product with the best options gives the full reward."""
    return score(goal, target, product, choices(product, goal).values()).value == 1.0


def _first(shop: Shop, goal: Goal, asins: Sequence[str]) -> str | None:
    target = shop.products[goal.asin]
    return next((a for a in asins if fulfils(shop.products[a], target, goal)), None)
