"""WebShop's reward (Yao et al., NeurIPS 2022, arXiv:2207.01206, section 3.2).

    reward = r_type * (attributes met + options met + [price <= limit]) / (attributes + options + 1)

`r_type` is 1 if the bought product is of the requested kind, and lower the fewer words the titles
share. The original extracts the nouns of a title with a spaCy model, which must be downloaded; here
all words count except function words and numbers. The rest is as in the original, including quirks:
`x-large` matches `large`, and colors are compared by the first listed color name they contain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rapidfuzz import fuzz, utils

MATCH_ABOVE = 85
"""token_set_ratio (0 to 100) above which two texts match."""

COLORS = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown
burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee
cognac copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold
granite grape graphite grass gray green grey heather indigo ivory ivy khaki lavender lemon
leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom
mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust
sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger
turquoise violet walnut wheat white wine yellow
""".split()  # noqa: SIM905 - words read better so

STOP_WORDS = frozenset(
    "a an and as at by for from in is it of on or s that the this to with".split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Product:
    """A product of the shop. `options` maps names to values, in lower case. `price` is the price
    paid; `price_tag` is shown and may be a range. `department` is the data's `category` (`beauty`),
    `category` its `product_category`, a path."""

    asin: str
    title: str
    query: str
    category: str
    department: str
    description: str
    bullets: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    price: float
    price_tag: str
    rating: str
    reviews: tuple[tuple[str, str, str], ...]

    def text(self) -> tuple[str, str, str]:
        """Title, bullets and description, in lower case."""
        return self.title.lower(), " ".join(self.bullets).lower(), self.description.lower()


@dataclass(frozen=True, slots=True)
class Goal:
    """An instruction and its requirements: attributes, option values, a price limit."""

    asin: str
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_upper: float


@dataclass(frozen=True, slots=True)
class Parts:
    """A reward and its parts; `num_attributes` and `num_options` count the requirements met."""

    value: float
    type: float
    num_attributes: int
    num_options: int
    price: bool


def score(goal: Goal, target: Product, bought: Product, options: Iterable[str]) -> Parts:
    """The reward, 0 to 1, of buying `bought` with `options` when `target` is the goal's product."""
    r_type = type_score(target, bought)
    num_attributes = sum(has_attribute(bought, wanted) for wanted in goal.attributes)
    chosen = list(options)
    num_options = sum(any(same_option(o, wanted) for o in chosen) for wanted in goal.options)
    price = bought.price <= goal.price_upper
    total = len(goal.attributes) + len(goal.options) + 1
    value = r_type * (num_attributes + num_options + price) / total
    return Parts(value, r_type, num_attributes, num_options, price)


def type_score(target: Product, bought: Product) -> float:
    """1 for the same query, two shared categories or similar titles, else 0.5; but 0.1 if less than
    10 % of the words of the target's title are shared, and 0 if none are.
    """
    wanted = _words(target.title)
    shared = len(wanted & _words(bought.title)) / len(wanted) if wanted else 0.2
    if shared == 0:
        return 0.0
    if shared < 0.1:
        return 0.1
    alike = target.query == bought.query or len(_levels(target) & _levels(bought)) >= 2
    return 1.0 if alike or shared > 0.2 else 0.5


def has_attribute(product: Product, wanted: str) -> bool:
    """True if a product's attributes match `wanted`, or its texts contain it."""
    if any(same_attribute(attribute, wanted) for attribute in product.attributes):
        return True
    return any(wanted in text for text in product.text())


def same_attribute(one: str, other: str) -> bool:
    """True if two attributes match."""
    return fuzz.token_set_ratio(one, other, processor=utils.default_process) > MATCH_ABOVE


def same_option(one: str, other: str) -> bool:
    """True if two option values match."""
    return same_attribute(normalise_color(one), normalise_color(other))


def normalise_color(text: str) -> str:
    """The alphabetically first color name in the text, or the text itself."""
    return next((color for color in COLORS if color in text), text)


def _words(title: str) -> set[str]:
    return set(re.findall(r"[^\W\d_]+", title.lower())) - STOP_WORDS


def _levels(product: Product) -> set[str]:
    return {level.strip() for level in product.category.split("›")}
