"""State of a translated PDDL problem: applicable operators, their effects, the goal.

TextWorld loads a copy of Fast Downward's native library for each episode: 34 MB, never unloaded,
and its crashes kill the process. A few tables replace the library. The order of the applicable
operators is the library's, since of two operators with the same words the first is used:

    operators, sorted by their preconditions    the order of the successor generator
    unmet                                       number of unmet preconditions of each operator
    ready                                       operators without unmet preconditions

Operators are built when they first become applicable, since most never do.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from textworld.logic import Proposition, Signature, State, Type, TypeHierarchy, Variable

from ludus.envs.alfworld.translation import Fact, Row, numbers, translation, with_derived


@dataclass(frozen=True, slots=True)
class Effect:
    """A fact that an operator sets if the conditions hold, and the propositions that the operator
    adds and deletes."""

    fact: Fact
    conditions: Sequence[Fact]
    added: Proposition
    deleted: Proposition


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
    """The immutable part of a game, shared by all of its episodes. Errors: errors of the
    translator; ValueError for an unreachable goal."""

    def __init__(self, domain: str, problem: str) -> None:
        self._tables = tables = translation(domain, problem)
        self.parameters = tables.parameters
        self.types = TypeHierarchy()
        for name, above in tables.types:
            with suppress(ValueError):  # `object` occurs twice: the domain's and the translator's
                self.types.add(Type(name, above))
        self._variables = {name: Variable(name, type_) for name, type_ in tables.objects.items()}
        self._propositions: dict[int, Proposition] = {}
        self._effects: dict[int, Effect] = {}
        self._operators: dict[int, Operator] = {}
        self.unmet, self.values, self.goal = tables.unmet, tables.values, tables.goal
        self.needing = {(var, value): ranks for var, value, ranks in tables.needing}
        self.facts = [self._proposition(number) for number in tables.facts]
        self.changing = set(tables.changing)

    def with_derived(self, values: list[int]) -> list[int]:
        """The values, with derived variables computed."""
        return with_derived(values, self._tables.underived, self._tables.layers)

    def operator(self, rank: int) -> Operator:
        if rank not in self._operators:
            name = " ".join(self._words(self._tables.operators[rank]))
            effects = numbers(self._tables.effects_of[rank])
            self._operators[rank] = Operator(name, tuple(map(self._effect, effects)))
        return self._operators[rank]

    def _effect(self, number: int) -> Effect:
        if number not in self._effects:
            var, value, proposition, *rest = numbers(self._tables.effects[number])
            conditions = tuple(zip(rest[::2], rest[1::2], strict=True))
            added = self._proposition(proposition)
            self._effects[number] = Effect((var, value), conditions, added, _negated(added))
        return self._effects[number]

    def _proposition(self, number: int) -> Proposition:
        if number not in self._propositions:
            name, *arguments = self._words(self._tables.propositions[number])
            variables = [self._variables[argument] for argument in arguments]
            self._propositions[number] = _proposition(name, variables)
        return self._propositions[number]

    def _words(self, row: Row) -> list[str]:
        return [self._tables.words[number] for number in numbers(row)]


class Episode(State):  # type: ignore[misc]
    """The state of a running problem, with the facts for TextWorld's grammars.

    As in TextWorld, facts are added by operators whether or not the conditions of their effects
    hold. Applicability and the goal depend on the values, not on these facts.
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
        """Facts in sorted order, which makes the callers' sort fast."""
        if sig not in self._sorted:
            self._sorted[sig] = sorted(self._facts.get(sig, ()))
        return self._sorted[sig]

    def possible(self) -> list[Operator]:
        """The applicable operators, the first of each name."""
        by_name: dict[str, Operator] = {}
        for rank in sorted(self._ready):
            operator = self._problem.operator(rank)
            by_name.setdefault(operator.name, operator)
        return list(by_name.values())

    def apply(self, operator: Operator) -> None:
        values = list(self._values)
        for effect in operator.effects:
            if all(self._values[var] == value for var, value in effect.conditions):
                values[effect.fact[0]] = effect.fact[1]
        self._set(self._problem.with_derived(values))
        for effect in operator.effects:
            for fact in (effect.added, effect.deleted):
                self._sorted.pop(fact.signature, None)
            self._facts.setdefault(effect.deleted.signature, set()).discard(effect.deleted)
            self._facts.setdefault(effect.added.signature, set()).add(effect.added)

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


def _proposition(name: str, arguments: Sequence[Variable]) -> Proposition:
    """Bypasses the metaclass, which caches every proposition of every game without limit."""
    return type.__call__(Proposition, name, arguments)


def _negated(fact: Proposition) -> Proposition:
    name = fact.name.removeprefix("not_") if fact.is_negation else f"not_{fact.name}"
    return _proposition(name, fact.arguments)
