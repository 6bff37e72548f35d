"""WebShop's products and goals, read from its files, and the product search.

The files are WebShop's, in one folder: `items_shuffle.json` (products), `items_ins_v2.json`
(attributes and synthetic instructions), `items_human_ins.json` (human instructions) and
`reviews.json` (optional); the small set has `_1000` before `.json`. The built-in shop has the same
formats and is made by scripts/make_webshop_catalogue.py.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import bm25s
import numpy as np

from ludus.core.errors import ConfigError, DataError
from ludus.envs.webshop.reward import Goal, Product

Instructions = Literal["human", "synthetic"]

SPLITS = ("train", "heldout", "all")

NUM_HITS = 50
"""Maximum number of results of a search."""

NUM_HELD_OUT, NUM_DEVELOPMENT = 500, 1000
"""The original's split: the first 500 goals are for testing, the next 1,000 for development.

Of the built-in shop, the first sixth is held out, the rest is for training.
"""

GOAL_SEED = 233
"""The original's seed of synthetic goals' price limits, and again of the order of all goals."""

NO_LIMIT = 1_000_000.0
"""Price limit of a goal without a limit."""

WORD = r"(?u)\b\w+\b"


@dataclass(frozen=True, slots=True)
class Kind:
    """A filter of goals; None: any value.

    `options` and `attributes` are the numbers of requirements in the instruction (options 2: two
    or more), `department` is the department of the goal's product.
    """

    options: int | None = None
    attributes: int | None = None
    department: str | None = None

    def has(self, goal: Goal, product: Product) -> bool:
        """True if the filter matches a goal with this product."""
        return (
            self.options in (None, min(len(goal.options), 2))
            and self.attributes in (None, len(goal.attributes))
            and self.department in (None, product.department)
        )


ANY = Kind()


@dataclass(frozen=True)
class Shop:
    """Products by asin, goals in the original's order, and `search`."""

    products: dict[str, Product]
    goals: list[Goal]
    _parts: dict[str, range]
    _asins: list[str]
    _index: bm25s.BM25
    _splits: dict[tuple[str, Kind], list[int]] = field(default_factory=dict)

    def search(self, keywords: str) -> list[str]:
        """Asins of up to 50 products that share a word with `keywords`, best first.

        Ties are in the catalogue's order.
        """
        vocabulary = self._index.vocab_dict
        words = [w for w in re.findall(WORD, keywords.lower()) if w in vocabulary]
        if not words:
            return []
        scores = self._index.get_scores(words)
        matches = np.flatnonzero(scores > 0)
        best = matches[np.argsort(-scores[matches], kind="stable")[:NUM_HITS]]
        return [self._asins[i] for i in best]

    def split(self, name: str, kind: Kind = ANY) -> list[int]:
        """Indices of the goals of a split (SPLITS) that `kind` matches."""
        indices = self._splits.get((name, kind))
        if indices is None:
            goals = ((i, self.goals[i]) for i in self._parts[name])
            indices = [i for i, goal in goals if kind.has(goal, self.products[goal.asin])]
            if indices:  # an empty result is not cached: clients could send any number of kinds
                self._splits[name, kind] = indices
        return indices

    def departments(self) -> list[str]:
        """The departments of all products, sorted."""
        return sorted({product.department for product in self.products.values()})


@lru_cache(maxsize=4)
def load_shop(path: str | None, num_products: int | None, instructions: Instructions) -> Shop:
    """Load the shop of a folder, or the built-in shop (None); cached.

    Errors: ConfigError for missing files, DataError for malformed files.
    """
    name = path or "the built-in shop"
    data = _own_files() if path is None else _users_files(Path(path).expanduser(), instructions)
    try:
        rows = data["products"][:num_products]
        products, goals = _read(rows, data, instructions)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"webshop: {name}: not in WebShop's format: {reason}") from error
    if not goals:
        raise DataError(
            f"webshop: {name}: its {len(products)} products have no {instructions} goal"
        )
    random.Random(GOAL_SEED).shuffle(goals)
    index = bm25s.BM25()
    texts = (_indexed(product) for product in products.values())
    vocabulary: dict[str, int] = {}
    ids = [
        [vocabulary.setdefault(word, len(vocabulary)) for word in re.findall(WORD, text)]
        for text in texts
    ]
    index.index((ids, vocabulary), show_progress=False)
    return Shop(products, goals, _split(len(goals), path is None), list(products), index)


def _split(num_goals: int, own: bool) -> dict[str, range]:
    """The ranges of goal indices of the splits."""
    parts = {"all": range(num_goals)}
    if own:
        first = num_goals // 6
        return {**parts, "heldout": range(first), "train": range(first, num_goals)}
    last = min(NUM_HELD_OUT, num_goals // 5)
    first = last + min(NUM_DEVELOPMENT, num_goals // 5)
    return {**parts, "heldout": range(last), "train": range(first, num_goals)}


def _own_files() -> dict[str, Any]:
    packed = files("ludus.envs.webshop").joinpath("webshop.json.gz").read_bytes()
    data: dict[str, Any] = json.loads(gzip.decompress(packed))
    return data


def _users_files(folder: Path, instructions: Instructions) -> dict[str, Any]:
    if not folder.is_dir():
        raise ConfigError(f"webshop: path: {folder} is not a folder")
    human = instructions == "human"
    return {
        "products": _json(folder, ["items_shuffle_1000.json", "items_shuffle.json"]),
        "attributes": _json(folder, ["items_ins_v2_1000.json", "items_ins_v2.json"]),
        "instructions": _json(folder, ["items_human_ins.json"]) if human else {},
        "reviews": _json(folder, ["reviews.json"], []),
    }


def _json(folder: Path, names: Sequence[str], default: Any = None) -> Any:
    """Load the first file that exists; without any, return `default` or raise ConfigError."""
    for name in names:
        if not (folder / name).is_file():
            continue
        try:
            return json.loads((folder / name).read_bytes())
        except ValueError as error:
            raise DataError(f"webshop: {folder / name}: not JSON: {error}") from error
    if default is None:
        raise ConfigError(f"webshop: path: {folder} has no {' and no '.join(names)}")
    return default


def _read(
    rows: list[dict[str, Any]], data: dict[str, Any], instructions: Instructions
) -> tuple[dict[str, Product], list[Goal]]:
    # The original draws prices within ranges from an unseeded generator; 42 is ours.
    rng = random.Random(42)
    reviews = {row["asin"]: row for row in data["reviews"]}
    products: dict[str, Product] = {}
    for row in rows:
        asin = row["asin"]
        if asin == "nan" or len(asin) > 10 or asin in products:
            continue
        listed = data["attributes"].get(asin, {})
        products[asin] = _product(row, listed, reviews.get(asin, {}), rng)
    make: Callable[..., Iterator[Goal]] = _human if instructions == "human" else _synthetic
    source = data["instructions"] if instructions == "human" else data["attributes"]
    if instructions == "synthetic":
        rng = random.Random(GOAL_SEED)  # seeded again, so price ranges do not move the limits
    goals = [g for p in products.values() if p.asin in source for g in make(p, source[p.asin], rng)]
    return products, goals


def _product(
    row: dict[str, Any], listed: dict[str, Any], rated: dict[str, Any], rng: random.Random
) -> Product:
    prices = [
        float(re.sub(r"[^\d.]", "", part)) for part in (row.get("pricing") or "").split("$")[1:3]
    ] or [100.0]
    bullets = row["small_description"] or []
    given = row["customization_options"] or {}
    options = {
        name.lower(): tuple(v["value"].strip().replace("/", " | ").lower() for v in values)
        for name, values in given.items()
        if values is not None
    }
    return Product(
        asin=row["asin"],
        title=row["name"],
        query=row["query"].lower().strip(),
        category=row["product_category"],
        department=row.get("category", ""),
        description=row["full_description"] or "",
        bullets=(bullets,) if isinstance(bullets, str) else tuple(bullets),
        attributes=tuple(listed.get("attributes", ("DUMMY_ATTR",))),
        options=options,
        price=prices[0] if len(prices) == 1 else rng.uniform(*prices),
        price_tag=" to ".join(f"${price}" for price in prices),
        rating=str(rated.get("average_rating", "N.A.")),
        reviews=tuple(
            (r["title"], str(r.get("stars", r.get("score"))), r.get("review", r.get("body", "")))
            for r in rated.get("reviews", [])
        ),
    )


def _limit(product: Product, rng: random.Random) -> tuple[float, str]:
    """The price limit of a goal, and its text in the instruction."""
    above = [10.0 * i for i in range(1, 100) if 10.0 * i > product.price][:4]
    if len(above) < 2:
        return NO_LIMIT, ""
    upper = max(rng.sample(above, 2))
    return upper, f", and price lower than {upper:.2f} dollars"


def _human(product: Product, rows: list[dict[str, Any]], rng: random.Random) -> Iterator[Goal]:
    for row in rows:
        if not row["instruction_attributes"]:
            continue
        upper, limit = _limit(product, rng)
        yield Goal(
            asin=product.asin,
            instruction=row["instruction"].strip(".") + limit,
            attributes=tuple(row["instruction_attributes"]),
            options=tuple(_values(row["instruction_options"])),
            price_upper=upper,
        )


def _synthetic(product: Product, row: dict[str, Any], rng: random.Random) -> Iterator[Goal]:
    """A goal for each combination of option values."""
    if row.get("instruction") is None or not row.get("instruction_attributes"):
        return
    upper, limit = _limit(product, rng)
    names = sorted(product.options)
    for values in itertools.product(*(product.options[name] for name in names)):
        choice = ", and ".join(
            f"{name}: {value}" for name, value in zip(names, values, strict=True)
        )
        yield Goal(
            asin=product.asin,
            instruction=f"{row['instruction']}{f' with {choice}' if choice else ''}{limit}",
            attributes=tuple(row["instruction_attributes"]),
            options=values,
            price_upper=upper,
        )


def _values(options: Any) -> list[str]:
    return list(options.values()) if isinstance(options, dict) else list(options)


def _indexed(product: Product) -> str:
    """The text of a product that is searched: title, description, bullets, options."""
    options = (f"{name} {' '.join(values)}" for name, values in product.options.items())
    parts = (product.title, product.description, *product.bullets, *options)
    return " ".join(parts).lower()
