"""WebShop's pages as text, and their clickable elements.

    Instruction: [SEP] i need a shampoo [SEP] Back to Search [SEP] Page 1 (Total results: 50) [SEP]
    Next > [SEP] B0QWXRTKLM [SEP] Norara Shampoo, Tea Tree [SEP] $9.49 [SEP] ...

As in the original's text mode, texts are joined by ` [SEP] `, and chosen options are not marked.
Unlike the original, the last page does not show the goal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ludus.envs.webshop.reward import Product

SEPARATOR = " [SEP] "
BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
THANKS = ("Thank you for shopping with us!", "Your score (min 0.0, max 1.0)")
SUB_PAGES = ("Description", "Features", "Reviews")
EMPTY = ("No Description", "No Features", "No reviews found")
"""Texts of sub-pages without content, in the order of SUB_PAGES."""


@dataclass(slots=True)
class Page:
    """The current page. `kind`: search, results, item, or one of SUB_PAGES.

    `hits` are the asins of the last search, `number` the page of results, counted from 1;
    `options` maps the options of the product `asin` to the chosen values.
    """

    kind: str = "search"
    keywords: str = ""
    hits: Sequence[str] = ()
    number: int = 1
    asin: str = ""
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layout:
    """Format of the pages.

    `size` products a page of results, named by ASIN or with `places` by position (`item 1`).
    `original` shows exactly what WebShop's templates show: `Next >` also on the last page of
    results, and nothing for an empty description, list of features or reviews.
    """

    size: int
    places: bool = False
    original: bool = False


def on_page(page: Page, size: int) -> Sequence[str]:
    """Asins of the hits on this page of the results."""
    return page.hits[(page.number - 1) * size : page.number * size]


def links(page: Page, layout: Layout) -> dict[str, str]:
    """Maps the link of each product on this page of results to its asin."""
    return {
        f"item {place}" if layout.places else asin: asin
        for place, asin in enumerate(on_page(page, layout.size), 1)
    }


def buttons(page: Page, layout: Layout) -> list[str]:
    """The buttons of a page, in the order shown."""
    if page.kind == "search":
        return []
    if page.kind == "results":
        back = [PREVIOUS] if page.number > 1 else []
        left = page.number * layout.size < len(page.hits)
        more = [NEXT] if left or layout.original else []
        return [BACK, *back, *more]
    return [BACK, PREVIOUS, *([*SUB_PAGES, BUY] if page.kind == "item" else [])]


def clickable(page: Page, product: Product | None, layout: Layout) -> list[str]:
    """The texts of all clickable elements, as shown."""
    products = list(links(page, layout)) if page.kind == "results" else []
    values: list[str] = []
    if page.kind == "item" and product is not None:
        values = [value for choices in product.options.values() for value in choices]
    return [*buttons(page, layout), *products, *values]


def text_of_page(
    page: Page,
    products: dict[str, Product],
    instruction: str | None,
    layout: Layout,
) -> str:
    """The page's text, with the instruction at the top unless it is None."""
    head = [] if instruction is None else ["Instruction:", instruction]
    shown = buttons(page, layout)
    if page.kind == "search":
        return SEPARATOR.join(["WebShop", *head, "Search"])
    if page.kind == "results":
        count = f"Page {page.number} (Total results: {len(page.hits)})"
        body = [shown[0], count, *shown[1:]]
        for name, asin in links(page, layout).items():
            body += [name, products[asin].title, products[asin].price_tag]
        return SEPARATOR.join([*head, *body])
    product = products[page.asin]
    if page.kind == "item":
        choices = [text for name, values in product.options.items() for text in (name, *values)]
        about = [product.title, f"Price: {product.price_tag}", f"Rating: {product.rating}"]
        return SEPARATOR.join([*head, *shown[:2], *choices, *about, *shown[2:]])
    about = _sub_page(page.kind, product)
    if layout.original:
        about = [text.strip() for text in about if text and text not in EMPTY]
    return SEPARATOR.join([*head, *shown, *about])


def _sub_page(kind: str, product: Product) -> list[str]:
    if kind == "Description":
        return [product.description or EMPTY[0]]
    if kind == "Features":
        return list(product.bullets) or [EMPTY[1]]
    rows = [text for title, stars, body in product.reviews for text in (f'"{title}"', stars, body)]
    return rows or [EMPTY[2]]
