"""A PDDL problem, translated; and kept on disk, for that takes a tenth of a second to a whole one.

The translator (PDDL to SAS+, Helmert, JAIR 2006) is Fast Downward's own, in Python. What it says is
a function of the two texts, so the cache's files are named by them, in a folder that is named by
what made them: this module and the translator's version.

    ~/.cache/ludus/alfworld/translated-1f0c.../a3b1....json.gz

They are JSON, which can do no harm, and no pickles: those would bring the hashes of strings that
TextWorld's propositions keep, and they differ from one process to the next.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

from ludus.envs.alfworld import cache as alfworld_cache
from ludus.envs.alfworld.cache import cache_root

LOCK = threading.RLock()
"""Held while parsing or translating: both write to globals."""

AS_IT_IS = {
    "filter_unimportant_vars": False,
    "filter_unreachable_facts": False,
    "use_partial_encoding": False,
    "skip_variable_reordering": True,
    "add_implied_preconditions": False,
    "invariant_generation_max_candidates": 0,
}
"""The translator's options as TextWorld sets them, so that no operator and no fact is left out."""

Fact = tuple[int, int]
"""A variable's number and its value; a list, as all tuples here, where it comes from the disk."""

Axiom = tuple[Sequence[Fact], Fact]
"""Conditions, and what follows from them."""

Row = str
"""Numbers: `12 0 7`."""


def _print_to_files(*values: object, file: Any = None, **options: Any) -> None:
    if file is not None:
        print(*values, file=file, **options)


def _silence() -> None:
    """The translator prints as it works."""
    arguments, sys.argv = sys.argv, ["translate.py", "domain", "task"]  # parsed when imported
    try:
        importlib.import_module("fast_downward.translate.translate")
    finally:
        sys.argv = arguments
    for name, module in list(sys.modules.items()):
        if name.startswith("fast_downward.translate"):
            vars(module)["print"] = _print_to_files


_silence()

from fast_downward.translate import normalize, options, translate  # noqa: E402
from fast_downward.translate.pddl import Assign, Atom  # noqa: E402
from fast_downward.translate.pddl_parser import lisp_parser, parsing_functions  # noqa: E402


@dataclass(frozen=True, slots=True)
class Translation:
    """A problem as tables of names and numbers, and so the same in JSON.

    Operators are sorted by their preconditions, the library's order; an operator's rank is its
    place. Effects, propositions and words, which many have in common, go by number. Rows of which
    few are ever looked at are texts, to be read by `numbers`: they load faster than lists.
    """

    parameters: Mapping[str, Sequence[tuple[str, str]]]  # of each action: their names and types
    types: Sequence[tuple[str, Sequence[str]]]  # and those above them
    objects: Mapping[str, str]  # and their types
    goal: Sequence[Fact]
    values: Sequence[int]  # at first, those of derived variables included
    underived: Sequence[Fact]
    layers: Sequence[Sequence[Axiom]]
    words: Sequence[str]
    operators: Sequence[Row]  # their words: `gotolocation agent1 loc_1 loc_2 fridge_1`
    effects_of: Sequence[Row]  # by rank
    unmet: Sequence[int]  # by rank: how many preconditions do not hold at first
    needing: Sequence[tuple[int, int, Sequence[int]]]  # a fact, and the ranks that need it
    effects: Sequence[Row]  # the fact, the proposition that is told, the facts that it depends on
    propositions: Sequence[Row]  # their words: a predicate and its arguments
    changing: Sequence[str]  # the predicates that effects tell, or deny
    facts: Sequence[int]  # the propositions that hold at first


def numbers(row: Row) -> list[int]:
    """What a row holds."""
    return [int(number) for number in row.split()]


def translation(domain: str, problem: str) -> Translation:
    """The problem's tables, from the disk where they are there and whole. Errors: what the
    translator raises; ValueError where nothing leads to the goal."""
    path = None
    with suppress(OSError, RuntimeError, PackageNotFoundError):  # RuntimeError: there is no home
        path = _path(domain, problem)
    found = _kept(path) if path else None
    if found is None:
        found = _tables(*_translated(domain, problem))
        if path:
            row = {field.name: getattr(found, field.name) for field in fields(found)}
            with suppress(OSError):  # without a cache, games are translated anew
                alfworld_cache.write(path, {"file": path.name} | row)
    return found


def _path(domain: str, problem: str) -> Path:
    name = hashlib.sha256(json.dumps([domain, problem]).encode()).hexdigest()
    return cache_root() / f"translated-{_maker()}" / f"{name}.json.gz"


@cache
def _maker() -> str:
    """Of what makes the tables; another one reads nothing that this one has left."""
    source = Path(__file__).read_bytes() + version("fast_downward_textworld").encode()
    return hashlib.sha256(source).hexdigest()[:12]


def _kept(path: Path) -> Translation | None:
    with _without_collections():
        row = alfworld_cache.read(path)
    if not isinstance(row, dict) or row.pop("file", None) != path.name:
        return None
    with suppress(TypeError):  # other tables
        return Translation(**row)
    return None


def with_derived(
    values: list[int], underived: Sequence[Fact], layers: Sequence[Sequence[Axiom]]
) -> list[int]:
    """The values with those of derived variables: layer by layer, what the axioms say."""
    for var, value in underived:
        values[var] = value
    for axioms in layers:
        found = True
        while found:
            found = False
            for conditions, (var, value) in axioms:
                if values[var] != value and all(values[v] == x for v, x in conditions):
                    values[var] = value
                    found = True
    return values


@contextmanager
def _without_collections() -> Iterator[None]:
    """The translator makes hundreds of thousands of objects that live until it is done: to look
    for garbage among them takes a third of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _translated(domain: str, problem: str) -> tuple[Any, Any]:
    with LOCK, _without_collections():
        vars(options).update(AS_IT_IS)
        try:
            said = [lisp_parser.parse_nested_list(text.split("\n")) for text in (domain, problem)]
            task = parsing_functions.parse_task(*said)
            normalize.normalize(task)
            return task, translate.pddl_to_sas(task)
        except SystemExit as error:  # as a program it would end; here it must not
            raise ValueError(str(error)) from error


class _Numbers(dict[Any, int]):
    """Numbers what it is asked for, from 0 on."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


def _tables(task: Any, sas: Any) -> Translation:
    if not sas.operators:
        raise ValueError("nothing leads to the goal")
    names, init = sas.variables.value_names, sas.init.values
    needs = [_preconditions(operator) for operator in sas.operators]
    order = sorted(range(len(needs)), key=lambda number: (needs[number], number))
    different = [sorted(set(needs[number])) for number in order]
    needing: dict[Fact, list[int]] = {}
    for rank, preconditions in enumerate(different):
        for fact in preconditions:
            needing.setdefault(fact, []).append(rank)
    effects, told, words = _Numbers(), _Numbers(), _Numbers()
    effects_of = []
    for number in order:
        found = []
        for var, _, value, conditions in sas.operators[number].pre_post:
            said = told[_proposition(names[var][value])]
            found.append(effects[_row([var, value, said, *chain(*conditions)])])
        effects_of.append(_row(found))
    changing = {name.removeprefix("not_") for name, *_ in told}
    underived, layers = _axioms(sas)
    values = with_derived(list(init), underived, layers)
    true = [_proposition(names[var][value]) for var, value in enumerate(values)]
    first = [
        *sorted(_stated(task.init)),
        *(fact for fact in true if not fact[0].startswith("not_")),
    ]
    return Translation(
        parameters={
            action.name: [(p.name.strip("?"), p.type_name) for p in action.parameters]
            for action in task.actions
        },
        types=[(type_.name, type_.supertype_names) for type_ in task.types],
        objects={thing.name: thing.type_name for thing in task.objects},
        goal=list(sas.goal.pairs),
        values=values,
        underived=underived,
        layers=layers,
        operators=[
            _row(words[word] for word in sas.operators[number].name[1:-1].split())
            for number in order
        ],
        effects_of=effects_of,
        unmet=[sum(init[var] != value for var, value in facts) for facts in different],
        needing=[(*fact, ranks) for fact, ranks in needing.items()],
        facts=[told[fact] for fact in dict.fromkeys(first)],
        effects=list(effects),
        changing=sorted(changing),
        propositions=[_row(words[word] for word in proposition) for proposition in told],
        words=list(words),
    )


def _row(found: Iterable[int]) -> Row:
    return " ".join(map(str, found))


def _axioms(sas: Any) -> tuple[list[Fact], list[list[Axiom]]]:
    """The derived variables before they are derived, and the axioms, layer by layer."""
    layer_of = sas.variables.axiom_layers
    underived = [(v, sas.init.values[v]) for v, layer in enumerate(layer_of) if layer >= 0]
    layers: dict[int, list[Axiom]] = {}
    for axiom in sas.axioms:
        layers.setdefault(layer_of[axiom.effect[0]], []).append((axiom.condition, axiom.effect))
    return underived, [axioms for _, axioms in sorted(layers.items())]


def _preconditions(operator: Any) -> list[Fact]:
    """Sorted; twice where two effects say the same one, as the library has them."""
    needs = [*operator.prevail, *((var, pre) for var, pre, _, _ in operator.pre_post if pre != -1)]
    return sorted(needs)


def _stated(init: Iterable[Any]) -> Iterator[tuple[str, ...]]:
    """The facts that the problem states; a predicate and its arguments. In no order: it is a set
    of what is hashed by its address."""
    for said in init:
        if isinstance(said, Atom) and said.predicate != "=":
            yield said.predicate, *said.args
        elif isinstance(said, Assign) and said.fluent.symbol != "total-cost":
            name = str(said.expression.value)
            if not name.isdigit():  # digits are distances
                yield name, *said.fluent.args


def _proposition(text: str) -> tuple[str, ...]:
    """`NegatedAtom holds(agent1, apple_1)` as a fact, as TextWorld reads it."""
    kind, rest = text.split(" ", 1)
    name, arguments = rest.split("(", 1)
    told = (arg for arg in arguments[:-1].split(", ") if arg)
    return f"not_{name}" if kind == "NegatedAtom" else name, *told
