"""ALFWorld's engine, TextWorld's PDDL environment, made fast: the same texts, less work.

The engine parses its grammar anew for each reset and the templates of it for every admissible
command of every step, copies deeply what nobody changes, and translates the same PDDL four times a
reset. Here a game is read once and shared by its episodes (`Game`), its planner's part
is `alfworld_planning`, and of TextWorld there are the grammar and the queries, made fast by `fast`:

    the parser of templates        remembered by text; gives copies, for derivations write to them
    the parser of logical queries  remembered by text
    deep copies                    of what derivations write to, and no deeper
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
"""Predicate to the names that it holds of: {"holds": [("agent1", "apple 1")], ...}."""

T = TypeVar("T")

NUM_GAMES = 32
"""Games that are remembered, 0.4 to 2 MB each: groups play the same ones."""

TASK = re.compile(r'"rhs": ("Your task is to: [^"\\\n]*")')
"""In a grammar: all that the games of a kind do not have in common."""

QUERY = re.compile(r"\|([^{}|]*)}")
PREDICATE = re.compile(r"(\w+)\(")


@contextmanager
def without_data_folder() -> Iterator[None]:
    """ALFWorld makes its data folder when it is imported, and sets ALFWORLD_DATA; it need not."""
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

# What the engine's modules hold, before `fast` puts its own in place.
_parse_template = textgen._parse_and_convert
_parse_query = textworld.logic._parse_and_convert
_deepcopy = textgen.deepcopy


@contextmanager
def _parsing(module: Any) -> Iterator[None]:
    """A parser keeps its last error, and that the frames it passed: games, engines, tasks."""
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
    symbols: list[Any] = _copied(_template(text, rule_name))
    return symbols


@lru_cache(maxsize=4096)
def _fast_query(text: str, rule_name: str) -> Any:
    with _parsing(textworld.logic):
        return _parse_query(text, rule_name=rule_name)


def _copied(value: Any) -> Any:
    """What a derivation writes to is its symbols, its dicts and its lists; not what they name."""
    if isinstance(value, list):
        return [_copied(entry) for entry in value]
    if isinstance(value, dict):
        return dict(value)
    twin = object.__new__(type(value))
    vars(twin).update(vars(value))
    if isinstance(value, textgen.ListSymbol):
        twin.symbol = _copied(value.symbol)
    elif isinstance(value, textgen.ConditionalSymbol):
        twin.expression = _copied(value.expression)
    return twin


def fast(enabled: bool = True) -> None:
    """Have TextWorld remember what it parsed; or put its own functions back, to compare."""
    textgen._parse_and_convert = _fast_template if enabled else _parse_template
    textworld.logic._parse_and_convert = _fast_query if enabled else _parse_query
    textgen.deepcopy = _copied if enabled else _deepcopy


@lru_cache(maxsize=8)
def _grammar(text: str) -> tuple[Mapping[str, Any], Any]:
    with _parsing(logic):
        actions, grammar = logic._parse_and_convert(text, rule_name="pddlStart")
        return actions, grammar


def _grammar_of(text: str) -> tuple[Mapping[str, Any], Any]:
    """A game's actions and grammar. The tenth of a second goes into what all games share; the
    sentence that states the task is parsed on its own, as the parser of grammars would."""
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
    """What the episodes of a game share: nothing here changes, but for what is remembered."""

    def __init__(self, domain: str, grammar: str, problem: str) -> None:
        self.actions, self.grammar = _grammar_of(grammar)
        self.problem = Problem(domain, problem)
        self.entities = _entities(self.problem.facts)
        self._words = {name: entity.name for name, entity in self.entities.items()}
        self._commands: dict[str, str] = {}
        self._lasting = {
            action.template: "#" not in action.template
            and self.problem.changing.isdisjoint(_predicates(action.template))
            for action in self.actions.values()
        }
        first = Episode(self.problem)
        self.opening: str = self.grammar.derive("#intro#", self._context(first, {}))
        self.first_commands = self.commands(first)

    def commands(self, episode: Episode) -> dict[str, Operator]:
        """The admissible commands, and what they do."""
        found: dict[str, Operator] = {}
        for operator in episode.possible():
            found.setdefault(self._command(operator, episode), operator)
        return found

    def _command(self, operator: Operator, episode: Episode) -> str:
        """In words; remembered, unless they ask for what an action may change."""
        if operator.name in self._commands:
            return self._commands[operator.name]
        template = self.actions[operator.action].template
        context = self._context(episode, self._mapping(operator))
        text: str = self.grammar.derive(template, context).format(**self._words)
        if self._lasting[template]:
            self._commands[operator.name] = text
        return text

    def answer(self, operator: Operator, episode: Episode) -> str:
        """What is told when an operator has been applied."""
        context = self._context(episode, self._mapping(operator))
        text: str = self.grammar.derive(self.actions[operator.action].feedback_rule, context)
        return text

    def _mapping(self, operator: Operator) -> dict[Placeholder, Variable]:
        parameters = self.problem.parameters[operator.action]
        return {
            Placeholder(name, type_): Variable(argument, type_)
            for (name, type_), argument in zip(parameters, operator.arguments, strict=False)
        }  # an `exists` of the preconditions is a parameter too, behind those that are named

    def _context(self, episode: Episode, mapping: dict[Placeholder, Variable]) -> dict[str, Any]:
        return {
            "state": episode,
            "facts": list(episode.facts),
            "variables": {ph.name: self.entities[var.name] for ph, var in mapping.items()},
            "mapping": mapping,
            "entity_infos": self.entities,
        }


def _entities(facts: list[Proposition]) -> dict[str, EntityInfo]:
    """Of each thing that a fact names: its name in the texts."""
    infos = {v.name: EntityInfo(v.name, v.type) for fact in facts for v in fact.arguments}
    for info in infos.values():
        info.name, info.definite, info.indefinite = info.id, "the", "a"
    names = Demangler(game_infos=infos)
    for info in infos.values():
        info.name = names.demangle_alfred_name(info.id).strip()
    return infos


def _predicates(template: str) -> set[str]:
    """The predicates that a template asks for: `go to [{r.name | receptacleatlocation(r, l)}]`."""
    found = (name for query in QUERY.findall(template) for name in PREDICATE.findall(query))
    return {name.removeprefix("not_") for name in found}


Texts = tuple[str, str, str]
_games: OrderedDict[Texts, Game] = OrderedDict()
_games_lock = threading.Lock()


def _game(texts: Texts) -> Game:
    """The game of a domain, a grammar and a problem; read once, however many ask for it at once."""
    found = _remembered(texts)
    if found is None:
        with LOCK:
            found = _remembered(texts) or Game(*texts)
            with _games_lock:
                _games[texts] = found
                while len(_games) > NUM_GAMES:
                    _games.popitem(last=False)
    return found


def _remembered(texts: Texts) -> Game | None:
    with _games_lock:
        if texts in _games:
            _games.move_to_end(texts)
        return _games.get(texts)


def forget() -> None:
    """Drop what was remembered: the next reset of a game costs what its first one did."""
    with _games_lock:
        _games.clear()
    for function in (_template, _fast_query, _grammar):
        function.cache_clear()


class Engine:
    """One game at a time. Errors of the engine are EnvError."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        """The admissible commands, sorted."""

    def reset(self, game: Mapping[str, Any]) -> str:
        """Load a game (a `game.tw-pddl` as a dict) and start it; the opening's text."""
        self._guarded("load", lambda: self._load(game))
        return self._game.opening

    def _load(self, game: Mapping[str, Any]) -> None:
        self._game = _game((game["pddl_domain"], game["grammar"], game["pddl_problem"]))
        self._episode = Episode(self._game.problem)
        self._see(self._game.first_commands)

    def _see(self, commands: dict[str, Operator]) -> None:
        self._operators, self.commands = commands, sorted(commands)

    def step(self, command: str) -> str:
        """Take a command; the engine's answer, `Nothing happens.` to one that it does not know."""
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
        """What is true now, of these predicates or of all; the names are those of the texts."""
        found: dict[str, list[tuple[str, ...]]] = {}
        entities = self._game.entities
        for fact in self._episode.facts:
            if not predicates or fact.name in predicates:
                names = tuple(entities[argument.name].name for argument in fact.arguments)
                found.setdefault(fact.name, []).append(names)
        return {predicate: sorted(names) for predicate, names in found.items()}

    @staticmethod
    def _guarded(what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise EnvError(f"alfworld: {what} raised {type(error).__name__}: {text}") from error


fast()
