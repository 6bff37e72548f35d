"""Texts of AgentGym's WebShop server beyond the pages (`texts: agentgym`): its last page, and the
address and HTML of a page for its route `/state`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape

from ludus.envs.webshop.pages import SEPARATOR, SUB_PAGES, Page

BASE_URL = "http://127.0.0.1:3000"
ABOUT_GOAL = ("options", "attrs", "price upper", "instuction text", "category", "product category")
"""Headings of the last page; their values are empty there. `instuction` is its spelling."""


def last_page(asin: str, options: Mapping[str, str], reward: float) -> str:
    """The page after a purchase; AgentGym's server leaves out all but product, options, score."""
    chosen = json.dumps(dict(options), sort_keys=True)
    for sign in "<>&'":
        chosen = chosen.replace(sign, f"\\u{ord(sign):04x}")
    bought = ["Purchased", "asin", asin, "options", chosen]
    for name in ("attrs", "category", "query", "product category"):
        bought += [name, "None"]
    return SEPARATOR.join([
        "Thank you for shopping with us!", "Your code:", "None",
        "(Paste it in your MTurk interface.)", *bought,
        "Target", "asin", *ABOUT_GOAL, "query", "Goal", "None",
        "Reward", "Your score (min 0.0, max 1.0)", str(float(reward)), "Reward Details", "None",
    ])  # fmt: skip


def url_of(page: Page, goal: int) -> str:
    """The address of a page in the session of a goal."""
    keywords = "+".join(page.keywords.split(" "))
    if page.kind == "search":
        return f"{BASE_URL}/{goal}"
    if page.kind == "results":
        return f"{BASE_URL}/search_results/{goal}/{keywords}/{page.number}"
    place = f"{goal}/{page.asin}/{keywords}/{page.number}"
    if page.kind in SUB_PAGES:
        return f"{BASE_URL}/item_sub_page/{place}/{page.kind}/{page.options}"
    return f"{BASE_URL}/item_page/{place}/{json.dumps(page.options)}"


def html_of(
    text: str, buttons: Sequence[str], links: Sequence[str], options: Mapping[str, Sequence[str]]
) -> str:
    """A page's text as HTML, with the ids and classes by which WebShop's clients find elements."""
    names = {value: name for name, values in options.items() for value in values}
    body = []
    parts = iter(text.split(SEPARATOR))
    for part in parts:
        shown = escape(part)
        if part == "Instruction:":
            said = f"<h4>Instruction: <br>{escape(next(parts, ''))}</h4>"
            body.append(f'<div id="instruction-text" class="text-center">{said}</div>')
        elif part == "Search":
            body.append('<input id="search_input" type="text" name="search_query"/>')
            body.append('<button class="btn btn-success" type="submit">Search</button>')
        elif part in buttons:
            body.append(f'<button class="btn btn-primary" type="submit">{shown}</button>')
        elif part in links:
            body.append(f'<a class="product-link">{shown}</a>')
        elif part in names:
            name = escape(names[part])
            body.append(f'<input type="radio" name="{name}" value="{shown}"/>')
            body.append(f"<label>{shown}</label>")
        else:
            body.append(f"<p>{shown}</p>")
    return "<!DOCTYPE html>\n<html>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>"
