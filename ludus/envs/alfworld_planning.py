"""A PDDL problem, translated and played: what is possible, what it changes, whether it is won.

TextWorld asks a copy of Fast Downward's native library for each episode: 34 MB to be copied and
loaded, never unloaded, whose faults end the process. What it asks, a few tables answer. The order
of the possible actions is the library's, for where two have the same words the first is taken:

    operators, sorted by their preconditions    as its successor generator walks them
    unmet                                       of each operator, how many preconditions do not hold
    ready                                       the operators that have none

The translator (PDDL to SAS+, Helmert, JAIR 2006) is Fast Downward's own, in Python.
"""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from textworld.logic import Proposition, Signature, State, Type, TypeHierarchy, Variable

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
"""A variable's number and its value."""


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
class Effect:
    """What an operator sets, where its conditions held before; and the fact that is then told."""

    fact: Fact
    conditions: Sequence[Fact]
    told: Proposition
    untold: Proposition


@dataclass(frozen=True, slots=True)
class Operator:
    """An action with its arguments: `gotolocation agent1 loc_1 loc_2 fridge_1`."""

    name: str
    effects: Sequence[Effect]

    @property
    def action(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def arguments(self) -> list[str]:
        return self.name.split()[1:]


class Problem:
    """What never changes in a game: shared by all of its episodes. Errors: what the translator
    raises; ValueError where nothing leads to the goal."""

    def __init__(self, domain: str, problem: str) -> None:
        task, sas = _translated(domain, problem)
        if not sas.operators:
            raise ValueError("nothing leads to the goal")
        self.parameters = {
            action.name: [(p.name.strip("?"), p.type_name) for p in action.parameters]
            for action in task.actions
        }
        self.types = TypeHierarchy()
        for type_ in task.types:
            with suppress(ValueError):  # the domain's `object` and the translator's
                self.types.add(Type(type_.name, type_.supertype_names))
        self._variables = {
            thing.name: Variable(thing.name, thing.type_name) for thing in task.objects
        }
        self.goal: list[Fact] = list(sas.goal.pairs)
        self._read_operators(sas)
        self._read_axioms(sas)
        self.values: list[int] = self.with_derived(list(sas.init.values))
        self.facts = self._first_facts(task.init, sas.variables.value_names)
        self.changing = {
            effect.told.name.removeprefix("not_")
            for operator in self.operators
            for effect in operator.effects
        }

    def _read_operators(self, sas: Any) -> None:
        needs = [_preconditions(operator) for operator in sas.operators]
        order = sorted(range(len(needs)), key=lambda number: (needs[number], number))
        names, values = sas.variables.value_names, sas.init.values
        effects: dict[Any, Effect] = {}  # thousands of operators have some hundreds in common
        self.operators: list[Operator] = []
        self.unmet: list[int] = []
        self.needing: dict[Fact, list[int]] = {}
        for rank, number in enumerate(order):
            operator = sas.operators[number]
            found = []
            for var, _, value, conditions in operator.pre_post:
                key = ((var, value), tuple(conditions))
                if key not in effects:
                    told = self._proposition(names[var][value])
                    effects[key] = Effect(*key, told, _negated(told))
                found.append(effects[key])
            self.operators.append(Operator(operator.name[1:-1], tuple(found)))
            different = set(needs[number])
            self.unmet.append(sum(values[var] != value for var, value in different))
            for fact in different:
                self.needing.setdefault(fact, []).append(rank)

    def _read_axioms(self, sas: Any) -> None:
        layers = sas.variables.axiom_layers
        self._underived = {v: sas.init.values[v] for v, layer in enumerate(layers) if layer >= 0}
        self._axioms: dict[int, list[tuple[Sequence[Fact], Fact]]] = {}
        for axiom in sas.axioms:
            rule = (axiom.condition, axiom.effect)
            self._axioms.setdefault(layers[axiom.effect[0]], []).append(rule)

    def with_derived(self, values: list[int]) -> list[int]:
        """The values with those of derived variables: layer by layer, what the axioms say."""
        for var, value in self._underived.items():
            values[var] = value
        for _, axioms in sorted(self._axioms.items()):
            found = True
            while found:
                found = False
                for conditions, (var, value) in axioms:
                    if values[var] != value and all(values[v] == x for v, x in conditions):
                        values[var] = value
                        found = True
        return values

    def _first_facts(self, init: Iterable[Any], names: list[list[str]]) -> list[Proposition]:
        found = []
        for said in init:
            if isinstance(said, Atom) and said.predicate != "=":
                arguments = [self._variables[arg] for arg in said.args]
                found.append(_proposition(said.predicate, arguments))
            elif isinstance(said, Assign) and said.fluent.symbol != "total-cost":
                name = str(said.expression.value)
                if not name.isdigit():  # digits are distances
                    arguments = [self._variables[arg] for arg in said.fluent.args]
                    found.append(_proposition(name, arguments))
        told = (self._proposition(names[var][value]) for var, value in enumerate(self.values))
        return list(dict.fromkeys([*found, *(fact for fact in told if not fact.is_negation)]))

    def _proposition(self, text: str) -> Proposition:
        """`NegatedAtom holds(agent1, apple_1)` as a fact, as TextWorld reads it."""
        kind, rest = text.split(" ", 1)
        name, arguments = rest.split("(", 1)
        told = [self._variables[arg] for arg in arguments[:-1].split(", ") if arg]
        return _proposition(f"not_{name}" if kind == "NegatedAtom" else name, told)


class Episode(State):  # type: ignore[misc]
    """A problem that is being played; the facts are those that TextWorld's grammars ask for.

    They are what operators told, whether or not the conditions of their effects held: so
    TextWorld keeps them. What is possible and whether the goal is reached follow the values.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem, self._logic = problem, problem
        self._values = list(problem.values)
        self._unmet = list(problem.unmet)
        self._facts: dict[Signature, set[Proposition]] = {}
        self._sorted: dict[Signature, list[Proposition]] = {}
        for fact in problem.facts:
            self._facts.setdefault(fact.signature, set()).add(fact)
        self._ready = {rank for rank, num in enumerate(self._unmet) if not num}

    def facts_with_signature(self, sig: Signature) -> list[Proposition]:
        """Sorted already: who asks sorts them, which is quick then."""
        if sig not in self._sorted:
            self._sorted[sig] = sorted(self._facts.get(sig, ()))
        return self._sorted[sig]

    def possible(self) -> list[Operator]:
        """The operators that can be applied, one of a name."""
        operators = self._problem.operators
        found: dict[str, Operator] = {}
        for rank in sorted(self._ready):
            found.setdefault(operators[rank].name, operators[rank])
        return list(found.values())

    def apply(self, operator: Operator) -> None:
        values = list(self._values)
        for effect in operator.effects:
            if all(self._values[var] == value for var, value in effect.conditions):
                values[effect.fact[0]] = effect.fact[1]
        self._set(self._problem.with_derived(values))
        for effect in operator.effects:
            for fact in (effect.told, effect.untold):
                self._sorted.pop(fact.signature, None)
            self._facts.setdefault(effect.untold.signature, set()).discard(effect.untold)
            self._facts.setdefault(effect.told.signature, set()).add(effect.told)

    def _set(self, values: list[int]) -> None:
        unmet, needing = self._unmet, self._problem.needing
        for var, (old, new) in enumerate(zip(self._values, values, strict=True)):
            if old == new:
                continue
            for rank in needing.get((var, old), ()):
                unmet[rank] += 1
                self._ready.discard(rank)
            for rank in needing.get((var, new), ()):
                unmet[rank] -= 1
                if not unmet[rank]:
                    self._ready.add(rank)
        self._values = values

    @property
    def won(self) -> bool:
        return all(self._values[var] == value for var, value in self._problem.goal)


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


def _preconditions(operator: Any) -> list[Fact]:
    """Sorted; twice where two effects say the same one, as the library has them."""
    needs = [*operator.prevail, *((var, pre) for var, pre, _, _ in operator.pre_post if pre != -1)]
    return sorted(needs)


def _proposition(name: str, arguments: Sequence[Variable]) -> Proposition:
    """Not by calling the class: that keeps every proposition of every game, for good."""
    return type.__call__(Proposition, name, arguments)


def _negated(fact: Proposition) -> Proposition:
    name = fact.name.removeprefix("not_") if fact.is_negation else f"not_{fact.name}"
    return _proposition(name, fact.arguments)
