"""Translates PDDL problems and caches the result on disk (translation takes 0.1 to 1 s).

The translator (PDDL to SAS+, Helmert, JAIR 2006) is Fast Downward's, in Python. Its result depends
only on the texts of domain and problem, so their hash names the cache file. The hash of this module
and the translator's version names the folder:

    ~/.cache/ludus/alfworld/translated-1f0c.../a3b1....json.gz

Files are JSON, which is safe to load. Pickles would also contain the string hashes that TextWorld's
propositions store, which differ between processes.
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

from ludus.envs.alfworld import cache as cache_files
from ludus.envs.alfworld.cache import cache_root

LOCK = threading.RLock()
"""Held while parsing or translating, since both modify globals."""

UNPRUNED = {
    "filter_unimportant_vars": False,
    "filter_unreachable_facts": False,
    "use_partial_encoding": False,
    "skip_variable_reordering": True,
    "add_implied_preconditions": False,
    "invariant_generation_max_candidates": 0,
}
"""The translator's options, as in TextWorld: keep all operators and facts."""

Fact = tuple[int, int]
"""A variable's number and its value. From the cache, this and all other tuples are lists."""

Axiom = tuple[Sequence[Fact], Fact]
"""Conditions, and the derived fact."""

Row = str
"""Numbers as text: `12 0 7`."""


def _print_to_files(*values: object, file: Any = None, **options: Any) -> None:
    if file is not None:
        print(*values, file=file, **options)


def _silence() -> None:
    """Import the translator and silence its prints."""
    arguments, sys.argv = sys.argv, ["translate.py", "domain", "task"]  # parsed at import
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
    """A problem as JSON-compatible tables of names and numbers.

    Operators are sorted by their preconditions, in the library's order; an operator's rank is its
    position. Effects, propositions and words are shared and referenced by number. Rarely used rows
    are texts, parsed by `numbers`, since texts load faster than lists.
    """

    parameters: Mapping[str, Sequence[tuple[str, str]]]  # by action: names and types
    types: Sequence[tuple[str, Sequence[str]]]  # types and supertypes
    objects: Mapping[str, str]  # objects and types
    goal: Sequence[Fact]
    values: Sequence[int]  # initial values, including derived variables
    underived: Sequence[Fact]
    layers: Sequence[Sequence[Axiom]]
    words: Sequence[str]
    operators: Sequence[Row]  # words: `gotolocation agent1 loc_1 loc_2 fridge_1`
    effects_of: Sequence[Row]  # by rank
    unmet: Sequence[int]  # by rank: number of preconditions unmet initially
    needing: Sequence[tuple[int, int, Sequence[int]]]  # a fact, and the ranks that need it
    effects: Sequence[Row]  # fact, added proposition, conditions
    propositions: Sequence[Row]  # words: a predicate and its arguments
    changing: Sequence[str]  # predicates that effects add or delete
    facts: Sequence[int]  # initial propositions


def numbers(row: Row) -> list[int]:
    """Parse a row."""
    return [int(number) for number in row.split()]


def translation(domain: str, problem: str) -> Translation:
    """The problem's tables, from the cache if it holds an undamaged file. Errors: errors of the
    translator; ValueError for an unreachable goal."""
    path = None
    with suppress(OSError, RuntimeError, PackageNotFoundError):  # RuntimeError: no home folder
        path = _path(domain, problem)
    tables = _cached(path) if path else None
    if tables is None:
        tables = _tables(*_translated(domain, problem))
        if path:
            row = {field.name: getattr(tables, field.name) for field in fields(tables)}
            with suppress(OSError):  # the cache is optional
                cache_files.write(path, {"file": path.name} | row)
    return tables


def _path(domain: str, problem: str) -> Path:
    name = hashlib.sha256(json.dumps([domain, problem]).encode()).hexdigest()
    return cache_root() / f"translated-{_maker()}" / f"{name}.json.gz"


@cache
def _maker() -> str:
    """Hash of this module and the translator's version; other versions use another folder."""
    source = Path(__file__).read_bytes() + version("fast_downward_textworld").encode()
    return hashlib.sha256(source).hexdigest()[:12]


def _cached(path: Path) -> Translation | None:
    with _without_gc():
        row = cache_files.read(path)
    if not isinstance(row, dict) or row.pop("file", None) != path.name:
        return None
    with suppress(TypeError):  # different fields
        return Translation(**row)
    return None


def with_derived(
    values: list[int], underived: Sequence[Fact], layers: Sequence[Sequence[Axiom]]
) -> list[int]:
    """Apply the axioms, layer by layer, to the derived variables in `values`. Returns `values`."""
    for var, value in underived:
        values[var] = value
    for axioms in layers:
        changed = True
        while changed:
            changed = False
            for conditions, (var, value) in axioms:
                if values[var] != value and all(values[v] == x for v, x in conditions):
                    values[var] = value
                    changed = True
    return values


@contextmanager
def _without_gc() -> Iterator[None]:
    """Disable garbage collection, a third of the translator's time: it creates hundreds of
    thousands of objects that live until its end."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _translated(domain: str, problem: str) -> tuple[Any, Any]:
    with LOCK, _without_gc():
        vars(options).update(UNPRUNED)
        try:
            lists = [lisp_parser.parse_nested_list(text.split("\n")) for text in (domain, problem)]
            task = parsing_functions.parse_task(*lists)
            normalize.normalize(task)
            return task, translate.pddl_to_sas(task)
        except SystemExit as error:  # the translator is written as a program
            raise ValueError(str(error)) from error


class _Numbers(dict[Any, int]):
    """Numbers its keys on first access, from 0."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


def _tables(task: Any, sas: Any) -> Translation:
    if not sas.operators:
        raise ValueError("the goal is unreachable")
    names, init = sas.variables.value_names, sas.init.values
    needs = [_preconditions(operator) for operator in sas.operators]
    order = sorted(range(len(needs)), key=lambda number: (needs[number], number))
    unique_needs = [sorted(set(needs[number])) for number in order]
    needing: dict[Fact, list[int]] = {}
    for rank, preconditions in enumerate(unique_needs):
        for fact in preconditions:
            needing.setdefault(fact, []).append(rank)
    effects, propositions, words = _Numbers(), _Numbers(), _Numbers()
    effects_of = []
    for number in order:
        own_effects = []
        for var, _, value, conditions in sas.operators[number].pre_post:
            added = propositions[_proposition(names[var][value])]
            own_effects.append(effects[_row([var, value, added, *chain(*conditions)])])
        effects_of.append(_row(own_effects))
    changing = {name.removeprefix("not_") for name, *_ in propositions}
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
        unmet=[sum(init[var] != value for var, value in facts) for facts in unique_needs],
        needing=[(*fact, ranks) for fact, ranks in needing.items()],
        facts=[propositions[fact] for fact in dict.fromkeys(first)],
        effects=list(effects),
        changing=sorted(changing),
        propositions=[_row(words[word] for word in proposition) for proposition in propositions],
        words=list(words),
    )


def _row(values: Iterable[int]) -> Row:
    return " ".join(map(str, values))


def _axioms(sas: Any) -> tuple[list[Fact], list[list[Axiom]]]:
    """The default values of derived variables, and the axioms by layer."""
    layer_of = sas.variables.axiom_layers
    underived = [(v, sas.init.values[v]) for v, layer in enumerate(layer_of) if layer >= 0]
    layers: dict[int, list[Axiom]] = {}
    for axiom in sas.axioms:
        layers.setdefault(layer_of[axiom.effect[0]], []).append((axiom.condition, axiom.effect))
    return underived, [axioms for _, axioms in sorted(layers.items())]


def _preconditions(operator: Any) -> list[Fact]:
    """Sorted preconditions, with duplicates if effects repeat one, as in the library."""
    needs = [*operator.prevail, *((var, pre) for var, pre, _, _ in operator.pre_post if pre != -1)]
    return sorted(needs)


def _stated(init: Iterable[Any]) -> Iterator[tuple[str, ...]]:
    """The problem's initial facts, each a predicate and its arguments. Unordered, since `init` is a
    set hashed by address."""
    for fact in init:
        if isinstance(fact, Atom) and fact.predicate != "=":
            yield fact.predicate, *fact.args
        elif isinstance(fact, Assign) and fact.fluent.symbol != "total-cost":
            name = str(fact.expression.value)
            if not name.isdigit():  # digits are distances
                yield name, *fact.fluent.args


def _proposition(text: str) -> tuple[str, ...]:
    """Convert `NegatedAtom holds(agent1, apple_1)` to TextWorld's form of a fact."""
    kind, rest = text.split(" ", 1)
    name, arguments = rest.split("(", 1)
    names = (arg for arg in arguments[:-1].split(", ") if arg)
    return f"not_{name}" if kind == "NegatedAtom" else name, *names
