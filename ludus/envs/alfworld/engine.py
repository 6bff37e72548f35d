"""A faster version of ALFWorld's engine, TextWorld's PDDL environment, with identical texts.

The original parses its grammar at each reset and its templates for every admissible command of
every step, deep-copies immutable data, and translates the same PDDL four times a reset. Here a game
is loaded once and shared by its episodes (`Game`), `planning` replaces the planner, and `fast`
patches TextWorld's grammar and queries:

    template parser   cached by text; returns copies, since derivations modify them
    query parser      cached by text
    deep copies       only of the parts that derivations modify
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import textworld
from textworld.envs.pddl import logic, textgen
from textworld.generator.game import EntityInfo
from textworld.logic import Placeholder, Proposition, Variable

from ludus.core.errors import EnvError
from ludus.envs.alfworld.planning import Episode, Operator, Problem
from ludus.envs.alfworld.translation import LOCK

Facts = Mapping[str, list[tuple[str, ...]]]
"""Predicate to argument names: {"holds": [("agent1", "apple 1")], ...}."""

T = TypeVar("T")

NUM_GAMES = 32
"""Number of cached games, 0.4 to 2 MB each; the episodes of a group share a game."""

TASK = re.compile(r'"rhs": ("Your task is to: [^"\\\n]*")')
"""The only part of a grammar that differs between games of a kind."""

QUERY = re.compile(r"\|([^{}|]*)}")
PREDICATE = re.compile(r"(\w+)\(")


@contextmanager
def without_data_folder() -> Iterator[None]:
    """Keep ALFWorld's import from creating its data folder and setting ALFWORLD_DATA."""
    before = os.environ.get("ALFWORLD_DATA")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ALFWORLD_DATA"] = folder
        try:
            yield
        finally:
            os.environ.pop("ALFWORLD_DATA")
            if before is not None:
                os.environ["ALFWORLD_DATA"] = before


with without_data_folder():
    from alfworld.agents.utils.misc import Demangler

# The original functions, which `fast` replaces.
_parse_template = textgen._parse_and_convert
_parse_query = textworld.logic._parse_and_convert
_deepcopy = textgen.deepcopy


@contextmanager
def _parsing(module: Any) -> Iterator[None]:
    """Drop the parser's last error, whose traceback would keep games, engines and tasks alive."""
    with LOCK:
        try:
            yield
        finally:
            module._PARSER._furthest_exception = None


@lru_cache(maxsize=4096)
def _template(text: str, rule_name: str) -> list[Any]:
    with _parsing(textgen):
        symbols: list[Any] = _parse_template(text, rule_name=rule_name)
        return symbols


def _fast_template(text: str, rule_name: str, **_: Any) -> list[Any]:
    symbols: list[Any] = _copy(_template(text, rule_name))
    return symbols


@lru_cache(maxsize=4096)
def _fast_query(text: str, rule_name: str) -> Any:
    with _parsing(textworld.logic):
        return _parse_query(text, rule_name=rule_name)


def _copy(value: Any) -> Any:
    """Copy the parts that a derivation modifies: symbols, dicts and lists, not their contents."""
    if isinstance(value, list):
        return [_copy(entry) for entry in value]
    if isinstance(value, dict):
        return dict(value)
    copy = object.__new__(type(value))
    vars(copy).update(vars(value))
    if isinstance(value, textgen.ListSymbol):
        copy.symbol = _copy(value.symbol)
    elif isinstance(value, textgen.ConditionalSymbol):
        copy.expression = _copy(value.expression)
    return copy


def fast(enabled: bool = True) -> None:
    """Patch TextWorld's parsers and copies; with False, restore the originals for comparison."""
    textgen._parse_and_convert = _fast_template if enabled else _parse_template
    textworld.logic._parse_and_convert = _fast_query if enabled else _parse_query
    textgen.deepcopy = _copy if enabled else _deepcopy


@lru_cache(maxsize=8)
def _grammar(text: str) -> tuple[Mapping[str, Any], Any]:
    with _parsing(logic):
        actions, grammar = logic._parse_and_convert(text, rule_name="pddlStart")
        return actions, grammar


def _grammar_of(text: str) -> tuple[Mapping[str, Any], Any]:
    """A game's actions and grammar. The shared part takes 0.1 s to parse and is cached; the task's
    sentence is parsed separately, as the grammar's parser would."""
    sentences = TASK.findall(text)
    if len(sentences) != 1:
        return _grammar(text)
    actions, shared = _grammar(TASK.sub('"rhs": "Your task is to: "', text))
    grammar = textgen.ContextSensitiveGrammar()
    grammar.update(shared)
    (rule,) = shared._rules["task"]
    symbols = _fast_template(json.loads(sentences[0]), "symbols")
    grammar._rules["task"] = [textgen.ProductionRule("task", symbols, rule.weight, rule.condition)]
    return actions, grammar


class Game:
    """The part of a game shared by its episodes; immutable except for caches."""

    def __init__(self, domain: str, grammar: str, problem: str) -> None:
        self.actions, self.grammar = _grammar_of(grammar)
        self.problem = Problem(domain, problem)
        self.entities = _entities(self.problem.facts)
        self._words = {name: entity.name for name, entity in self.entities.items()}
        self._commands: dict[str, str] = {}
        self._is_static = {
            action.template: "#" not in action.template
            and self.problem.changing.isdisjoint(_predicates(action.template))
            for action in self.actions.values()
        }
        first = Episode(self.problem)
        self.opening: str = self.grammar.derive("#intro#", self._context(first, {}))
        self.first_commands = self.commands(first)

    def commands(self, episode: Episode) -> dict[str, Operator]:
        """Maps the admissible commands to operators."""
        operators: dict[str, Operator] = {}
        for operator in episode.possible():
            operators.setdefault(self._command(operator, episode), operator)
        return operators

    def _command(self, operator: Operator, episode: Episode) -> str:
        """The operator's command; cached if its template depends on no changing predicate."""
        if operator.name in self._commands:
            return self._commands[operator.name]
        template = self.actions[operator.action].template
        context = self._context(episode, self._mapping(operator))
        text: str = self.grammar.derive(template, context).format(**self._words)
        if self._is_static[template]:
            self._commands[operator.name] = text
        return text

    def answer(self, operator: Operator, episode: Episode) -> str:
        """The engine's answer after an operator has been applied."""
        context = self._context(episode, self._mapping(operator))
        text: str = self.grammar.derive(self.actions[operator.action].feedback_rule, context)
        return text

    def _mapping(self, operator: Operator) -> dict[Placeholder, Variable]:
        parameters = self.problem.parameters[operator.action]
        return {
            Placeholder(name, type_): Variable(argument, type_)
            for (name, type_), argument in zip(parameters, operator.arguments, strict=False)
        }  # an `exists` in the preconditions adds parameters after the named ones

    def _context(self, episode: Episode, mapping: dict[Placeholder, Variable]) -> dict[str, Any]:
        return {
            "state": episode,
            "facts": list(episode.facts),
            "variables": {ph.name: self.entities[var.name] for ph, var in mapping.items()},
            "mapping": mapping,
            "entity_infos": self.entities,
        }


def _entities(facts: list[Proposition]) -> dict[str, EntityInfo]:
    """The entities of the facts, with their names in texts."""
    infos = {v.name: EntityInfo(v.name, v.type) for fact in facts for v in fact.arguments}
    for info in infos.values():
        info.name, info.definite, info.indefinite = info.id, "the", "a"
    names = Demangler(game_infos=infos)
    for info in infos.values():
        info.name = names.demangle_alfred_name(info.id).strip()
    return infos


def _predicates(template: str) -> set[str]:
    """The predicates that a template queries: `go to [{r.name | receptacleatlocation(r, l)}]`."""
    names = (name for query in QUERY.findall(template) for name in PREDICATE.findall(query))
    return {name.removeprefix("not_") for name in names}


Texts = tuple[str, str, str]
_games: OrderedDict[Texts, Game] = OrderedDict()
_games_lock = threading.Lock()


def _game(texts: Texts) -> Game:
    """The game of domain, grammar and problem; loaded once, also under concurrent calls."""
    game = _cached(texts)
    if game is None:
        with LOCK:
            game = _cached(texts) or Game(*texts)
            with _games_lock:
                _games[texts] = game
                while len(_games) > NUM_GAMES:
                    _games.popitem(last=False)
    return game


def _cached(texts: Texts) -> Game | None:
    with _games_lock:
        if texts in _games:
            _games.move_to_end(texts)
        return _games.get(texts)


def forget() -> None:
    """Clear all caches, so the next reset of a game takes as long as its first."""
    with _games_lock:
        _games.clear()
    for function in (_template, _fast_query, _grammar):
        function.cache_clear()


class Engine:
    """Plays a game at a time. Errors of the engine become EnvError."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        """The admissible commands, sorted."""

    def reset(self, game: Mapping[str, Any]) -> str:
        """Load and start a game (a `game.tw-pddl` as a dict). Returns the opening text."""
        self._guarded("load", lambda: self._load(game))
        return self._game.opening

    def _load(self, game: Mapping[str, Any]) -> None:
        self._game = _game((game["pddl_domain"], game["grammar"], game["pddl_problem"]))
        self._episode = Episode(self._game.problem)
        self._see(self._game.first_commands)

    def _see(self, commands: dict[str, Operator]) -> None:
        self._operators, self.commands = commands, sorted(commands)

    def step(self, command: str) -> str:
        """Execute a command. Returns the engine's answer, `Nothing happens.` if it is unknown."""
        return self._guarded("step", lambda: self._step(command.strip()))

    def _step(self, command: str) -> str:
        if command not in self._operators:
            return "Nothing happens."
        operator = self._operators[command]
        self._episode.apply(operator)
        text = self._game.answer(operator, self._episode)
        self._see(self._game.commands(self._episode))
        return text

    @property
    def won(self) -> bool:
        return self._episode.won

    def facts(self, *predicates: str) -> Facts:
        """The current facts of these predicates (default: all), with names as in the texts."""
        facts: dict[str, list[tuple[str, ...]]] = {}
        entities = self._game.entities
        for fact in self._episode.facts:
            if not predicates or fact.name in predicates:
                names = tuple(entities[argument.name].name for argument in fact.arguments)
                facts.setdefault(fact.name, []).append(names)
        return {predicate: sorted(names) for predicate, names in facts.items()}

    @staticmethod
    def _guarded(what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise EnvError(f"alfworld: {what} raised {type(error).__name__}: {text}") from error


fast()
