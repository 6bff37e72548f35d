"""Write ludus/envs/webshop/webshop.json.gz: the shop that ludus brings along, in WebShop's formats.

    python scripts/make_webshop_catalogue.py

1,536 invented products of 48 types, 32 of each, which differ in attributes, options, price and
rating, and twenty instructions for each. The output depends on this file alone, byte for byte.
Three things are checked, for without them a wrong purchase could score: no two values of an option
count as the same, nor do two attributes, and no text names an attribute that its product has not.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any

from ludus.envs.webshop.reward import same_attribute, same_option

OUTPUT = Path(__file__).parents[1] / "ludus/envs/webshop/webshop.json.gz"
PRODUCTS_PER_TYPE = 32
GOALS_PER_PRODUCT = 20

ATTRIBUTES = {
    "wear": "machine wash|long sleeve|slim fit|loose fit|elastic waist|quick drying|"
    "moisture wicking|button closure|drawstring closure|polyester spandex|soft cotton|wool blend|"
    "deep pockets|stretch fabric|tummy control|hand embroidered",
    "shoes": "rubber sole|memory foam insole|arch support|lace up|water resistant|ankle strap|"
    "steel toe|vegan leather|breathable mesh|anti slip|reflective stripes|wide toe box|"
    "ethylene vinyl|faux fur lining",
    "beauty": "cruelty free|paraben free|sulfate free|fragrance free|dermatologist tested|"
    "long lasting|anti aging|tea tree|argan oil|hyaluronic acid|for sensitive skin|alcohol free|"
    "easy apply|deep moisture|natural ingredients|travel size",
    "food": "gluten free|non gmo|no added sugar|keto friendly|low sodium|plant based|ready to eat|"
    "kosher|certified organic|high protein|dairy free|individually wrapped|no artificial colors|"
    "resealable bag|small batch|fair trade",
    "device": "noise cancelling|fast charging|hands free|long battery life|splash proof|"
    "plug and play|stereo sound|wireless bluetooth|aluminum alloy|high resolution|ultra compact|"
    "carrying case|optical zoom|touch control|motion sensing|two year warranty",
    "home": "easy assembly|solid wood|space saving|stainless steel|easy clean|non slip feet|"
    "heavy duty|mid century|fade resistant|faux leather|tempered glass|eco friendly|living room|"
    "adjustable height|scratch proof|assembled in usa",
}

OPTIONS = {
    "color": "black|white|navy|burgundy|olive|khaki|teal|charcoal|coral|lavender|mustard|ivory|"
    "turquoise|maroon|silver|pink|beige|orange|purple|brown",
    "size": "small|medium|large|xl|xxl",
    "shoe size": "6|7|8|9|10|11|12",
    "pack": "single|twin set|3 pack|6 pack|12 pack",
    "flavor": "vanilla|chocolate|strawberry|peanut butter|sea salt|honey|cinnamon|lemon|coconut|"
    "barbecue|jalapeno|maple",
    "volume": "8 oz|half liter|1 gallon|mini|refill",
    "scent": "rosemary|jasmine|eucalyptus|citrus|sandalwood|unscented",
    "capacity": "16gb|64gb|128gb|1tb",
    "length": "3 ft|6 ft|10 ft|25 ft",
    "dimensions": "24 x 36|48 x 60|5 x 8|9 x 12|18 x 18",
    "finish": "oak|walnut|white marble|espresso|brass",
}

PHRASES = {
    "color": ["in {}", "in the color {}", "in {} color"],
    "size": ["in size {}", "size {}", "that come in {}"],
    "shoe size": ["in size {}", "in a size {}"],
    "pack": ["as a {}", "in a {}"],
    "flavor": ["with {} flavor", "in the flavor {}", "that taste of {}"],
    "volume": ["in the {} bottle", "of {}"],
    "scent": ["with {} scent", "in the scent {}"],
    "capacity": ["with {}", "with {} of storage"],
    "length": ["that is {} long", "of {}"],
    "dimensions": ["that measures {}", "in {}"],
    "finish": ["with {} finish", "in {}"],
}

OPENINGS = [
    "i am looking for {}", "i need {}", "i want to buy {}", "find me {}", "can you find {}",
    "i would like {}", "show me {}", "please get me {}",
]  # fmt: skip

TYPES = """\
wear|women's yoga leggings|Clothing › Women › Active › Leggings|18-55|color,size
wear|women's summer dress|Clothing › Women › Dresses › Casual|22-80|color,size
wear|women's knit cardigan|Clothing › Women › Sweaters › Cardigans|25-90|color,size
wear|women's pajama set|Clothing › Women › Sleep › Pajamas|20-60|color,size
wear|men's polo shirt|Clothing › Men › Shirts › Polos|15-50|color,size
wear|men's cargo shorts|Clothing › Men › Shorts › Cargo|18-48|color,size
wear|men's rain jacket|Clothing › Men › Jackets › Shells|40-150|color,size
wear|men's dress pants|Clothing › Men › Pants › Formal|28-85|color,size
wear|boys hoodie|Clothing › Boys › Tops › Hoodies|14-40|color,size
shoes|women's ankle boots|Shoes › Women › Boots › Ankle|35-140|color,shoe size
shoes|women's wedge sandals|Shoes › Women › Sandals › Wedges|25-95|color,shoe size
shoes|women's slippers|Shoes › Women › Slippers › Indoor|12-40|color,shoe size
shoes|men's running shoes|Shoes › Men › Athletic › Running|40-160|color,shoe size
shoes|men's work boots|Shoes › Men › Boots › Work|55-190|color,shoe size
shoes|men's loafers|Shoes › Men › Slip-Ons › Loafers|35-120|color,shoe size
beauty|face moisturizer|Beauty › Skin Care › Face › Moisturizers|9-48|volume
beauty|shampoo|Beauty › Hair Care › Wash › Shampoo|7-32|volume,scent
beauty|body lotion|Beauty › Skin Care › Body › Lotions|6-28|volume,scent
beauty|lip balm|Beauty › Skin Care › Lips › Balms|4-16|pack
beauty|nail polish|Beauty › Nails › Color › Polish|5-18|color
beauty|hair brush|Beauty › Hair Care › Tools › Brushes|8-35|color
beauty|bath candle|Beauty › Bath › Relaxation › Candles|9-38|scent,pack
beauty|deodorant|Beauty › Personal Care › Body › Deodorants|5-22|scent,pack
food|granola bars|Grocery › Snacks › Bars › Granola|6-36|flavor,pack
food|roasted almonds|Grocery › Snacks › Nuts › Almonds|8-42|flavor,pack
food|popcorn|Grocery › Snacks › Savory › Popcorn|5-30|flavor,pack
food|protein shake|Grocery › Drinks › Nutrition › Shakes|12-55|flavor,pack
food|ground coffee|Grocery › Drinks › Hot › Coffee|9-45|flavor
food|herbal tea|Grocery › Drinks › Hot › Tea|5-26|pack
food|potato chips|Grocery › Snacks › Savory › Chips|4-28|flavor,pack
food|beef jerky|Grocery › Snacks › Meat › Jerky|7-40|flavor,pack
device|bluetooth headphones|Electronics › Audio › Personal › Headphones|20-240|color
device|portable speaker|Electronics › Audio › Speakers › Portable|18-190|color
device|usb flash drive|Electronics › Computers › Storage › Drives|8-70|color,capacity
device|action camera|Electronics › Cameras › Video › Action|45-320|capacity
device|phone charger|Electronics › Phones › Power › Chargers|9-55|color,length
device|hdmi cable|Electronics › Video › Cables › HDMI|6-40|length
device|smart watch|Electronics › Wearables › Wrist › Watches|35-290|color
device|tablet|Electronics › Computers › Mobile › Tablets|70-480|color,capacity
device|security camera|Electronics › Home › Safety › Cameras|25-210|capacity
home|coffee table|Furniture › Indoor › Tables › Coffee|60-380|finish
home|bar stool|Furniture › Indoor › Seating › Stools|45-210|color
home|area rug|Home › Decor › Floor › Rugs|30-260|color,dimensions
home|throw pillow|Home › Decor › Textiles › Pillows|10-45|color,dimensions
home|bookshelf|Furniture › Indoor › Storage › Shelves|50-300|finish
home|desk lamp|Home › Lighting › Lamps › Desk|18-120|color
home|storage bench|Furniture › Indoor › Storage › Benches|65-290|finish
home|shower curtain|Home › Bath › Textiles › Curtains|12-60|color,dimensions"""

SYLLABLES = (
    "al ben cor dar el fin gal hol is jor kel lum mar nor ov pel quin ros sel tor ul ven wes zan"
)
ENDINGS = "o a is en ara ora ley ton wick mere line co"
USES = [
    "for every day", "for travel and for home", "as a gift", "for the weekend",
    "for busy mornings", "for guests", "all year round", "for beginners and experts",
]  # fmt: skip
PRAISE = [
    "great value", "exactly as described", "five stars from me", "would buy again",
    "better than expected", "my whole family likes it",
]  # fmt: skip
BLAME = [
    "not what i hoped for", "arrived late", "fine for the price", "the picture looks different",
    "it is okay", "had to return it",
]  # fmt: skip


def main() -> None:
    rng = random.Random("ludus webshop")
    for pool in OPTIONS.values():
        _no_two_alike(pool.split("|"), same_option)
    for pool in ATTRIBUTES.values():
        _no_two_alike(pool.split("|"), same_attribute)
    names = [a + b for a in SYLLABLES.split() for b in ENDINGS.split()]
    brands = [name.capitalize() for name in rng.sample(names, 160)]
    asins = _asins(rng, len(TYPES.splitlines()) * PRODUCTS_PER_TYPE)
    products, attributes, instructions = [], {}, {}
    for line in TYPES.splitlines():
        kind, query, path, prices, dims = line.split("|")
        taken: set[frozenset[str]] = set()
        for _ in range(PRODUCTS_PER_TYPE):
            asin, has = next(asins), _attributes(kind, rng, taken)
            product = _product(asin, query, path, prices, dims.split(","), has, brands, rng)
            _names_only_its_own(product, has, ATTRIBUTES[kind].split("|"))
            products.append(product)
            attributes[asin] = {"attributes": has}
            instructions[asin] = _instructions(product, has, rng)
    rng.shuffle(products)
    catalogue = {"products": products, "attributes": attributes, "instructions": instructions}
    catalogue["reviews"] = [_reviews(product["asin"], rng) for product in products]
    text = json.dumps(catalogue, ensure_ascii=False, separators=(",", ":"))
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_bytes(gzip.compress(text.encode(), mtime=0))
    goals = sum(map(len, instructions.values()))
    print(f"{len(products)} products, {goals} goals, {OUTPUT.stat().st_size // 1024} KiB")


def _no_two_alike(values: list[str], same: Any) -> None:
    for one, other in itertools.permutations(values, 2):
        if same(one, other):
            raise SystemExit(f"{one!r} and {other!r} count as the same: rename one of them")


def _names_only_its_own(product: dict[str, Any], has: list[str], pool: list[str]) -> None:
    parts = [product["name"], product["full_description"], *product["small_description"]]
    text = " ".join(parts).lower()
    for attribute in pool:
        if attribute not in has and attribute in text:
            raise SystemExit(f"{product['asin']}: its text names {attribute!r}, which it has not")


def _asins(rng: random.Random, count: int) -> Any:
    """Ten characters as Amazon's: B0, and here eight letters."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["B0" + "".join(rng.choices("BCDFGHJKLMNPQRSTVWXYZ", k=8))] = None
    return iter(found)


def _attributes(kind: str, rng: random.Random, taken: set[frozenset[str]]) -> list[str]:
    """Three to six attributes; no two products of a type have the same."""
    pool = ATTRIBUTES[kind].split("|")
    while True:
        has = rng.sample(pool, rng.randint(3, 6))
        if frozenset(has) not in taken:
            taken.add(frozenset(has))
            return has


def _product(
    asin: str, query: str, path: str, prices: str, dims: list[str], has: list[str],
    brands: list[str], rng: random.Random,
) -> dict[str, Any]:  # fmt: skip
    """A row of WebShop's `items_shuffle.json`. The title names up to three attributes, the bullets
    the others; the description repeats one of them."""
    brand, shown = rng.choice(brands), has[: rng.randint(1, 3)]
    low, high = map(int, prices.split("-"))
    price = rng.randint(low, high - 1) + rng.choice([0.0, 0.49, 0.95, 0.99])
    pricing = f"${price:.2f}"
    if rng.random() < 0.1:
        pricing += f"${price + rng.randint(2, 9):.2f}"
    use = rng.choice(USES)
    bullets = [f"{attribute.capitalize()}." for attribute in has[len(shown) :]]
    bullets += [f"Made {use}.", f"From {brand}, with care."]
    rng.shuffle(bullets)
    named = rng.choice(has)
    options = {}
    for dim in dims:
        pool = OPTIONS[dim].split("|")
        values = rng.sample(pool, rng.randint(2, min(6, len(pool))))
        options[dim] = [{"value": value, "image": None} for value in sorted(values, key=pool.index)]
    title = f"{brand} {query.title().replace(chr(39) + 'S', chr(39) + 's')}"
    return {
        "asin": asin,
        "name": ", ".join([title, *(attribute.title() for attribute in shown)]),
        "category": path.split(" › ")[0].lower(),
        "query": query,
        "product_category": path,
        "pricing": pricing,
        "full_description": f"The {brand} {query} {use}: {named}. Choose your {', '.join(dims)}.",
        "small_description": bullets,
        "customization_options": options,
        "images": [""],
    }


def _instructions(
    product: dict[str, Any], has: list[str], rng: random.Random
) -> list[dict[str, Any]]:
    """Rows of WebShop's `items_human_ins.json`, no two of which ask for the same."""
    rows: dict[Any, dict[str, Any]] = {}
    options = product["customization_options"]
    while len(rows) < GOALS_PER_PRODUCT:
        wanted = rng.sample(has, rng.randint(1, 3))
        dims = rng.sample(list(options), rng.randint(0, len(options)))
        chosen = {dim: rng.choice(options[dim])["value"] for dim in dims}
        key = (frozenset(wanted), frozenset(chosen.items()))
        rows[key] = {
            "asin": product["asin"],
            "instruction": _say(product["query"], wanted, chosen, rng),
            "instruction_attributes": wanted,
            "instruction_options": list(chosen.values()),
        }
    return list(rows.values())


def _say(query: str, wanted: list[str], chosen: dict[str, str], rng: random.Random) -> str:
    before = rng.randint(0, 1)
    first, rest = wanted[:before], wanted[before:]
    text = " ".join([*first, query])
    if rest:
        text += f"{rng.choice([' with', ', with', ' that offers'])} {' and '.join(rest)}"
    parts = [rng.choice(PHRASES[dim]).format(value) for dim, value in chosen.items()]
    text += "".join(f", {part}" for part in parts)
    return rng.choice(OPENINGS).format(text)


def _reviews(asin: str, rng: random.Random) -> dict[str, Any]:
    """A row of WebShop's `reviews.json`."""
    rows = []
    for _ in range(rng.randint(0, 3)):
        stars = rng.choice([5, 5, 4, 4, 3, 2])
        title, body = rng.sample(PRAISE if stars > 3 else BLAME, 2)
        rows.append({"title": title, "stars": f"{stars}.0 out of 5 stars", "review": body})
    rating = f"{rng.randint(31, 50) / 10} out of 5 stars" if rows else "N.A."
    return {"asin": asin, "reviews": rows, "average_rating": rating}


if __name__ == "__main__":
    main()
