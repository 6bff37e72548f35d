"""ALFWorld's engine, TextWorld's PDDL environment, made fast: the same texts, less parsing.

The engine parses the templates of its grammar anew for every admissible command of every step, and
translates the same PDDL four times a reset. What `fast` replaces:

    the parser of templates        remembered by text; gives copies, for derivations write to them
    the parser of logical queries  remembered by text
    PDDL to SAS                    remembered by problem, and made once where the engine makes it
                                   twice (the second is for its planner, which nobody asks)
    the text of a command          remembered by what fills its template, for as long as the game

An engine holds a copy of a native library that is never unloaded; so engines are lent and taken
back (`borrow`, `give_back`), and there are as many as episodes at once.
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import fast_downward
import fast_downward.interface
import textworld
from textworld.envs.pddl import PddlEnv, textgen

from ludus.core.errors import EnvError

Facts = Mapping[str, list[tuple[str, ...]]]
"""Predicate to the names that it holds of: {"holds": [("agent1", "apple 1")], ...}."""

NUM_TRANSLATIONS = 32
"""Problems whose translation is kept: 1 MB each, and groups play the same one."""

LOCK = threading.RLock()
"""Held while parsing or translating: both write to globals, of theirs and `sys.argv`."""


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


def _print_to_files(*values: object, file: Any = None, **options: Any) -> None:
    if file is not None:
        print(*values, file=file, **options)


def _silence() -> None:
    """The translator prints as it works, and its caller takes `sys.stdout` away from all threads
    for as long. Neither is needed if the modules print nothing."""
    arguments, sys.argv = sys.argv, ["translate.py", "domain", "task"]  # parsed when imported
    try:
        importlib.import_module("fast_downward.translate.translate")
    finally:
        sys.argv = arguments
    for name, module in list(sys.modules.items()):
        if name.startswith("fast_downward.translate"):
            vars(module)["print"] = _print_to_files
    fast_downward.interface.CapturingStdout = nullcontext


_silence()

# What the engine's modules hold, before `fast` puts its own in place.
_parse_template = textgen._parse_and_convert
_parse_query = textworld.logic._parse_and_convert
_translate = fast_downward.pddl2sas


@functools.lru_cache(maxsize=4096)
def _template(text: str, rule_name: str) -> list[Any]:
    with LOCK:
        symbols: list[Any] = _parse_template(text, rule_name=rule_name)
        return symbols


def _fast_template(text: str, rule_name: str, **_: Any) -> list[Any]:
    return copy.deepcopy(_template(text, rule_name))


@functools.lru_cache(maxsize=4096)
def _fast_query(text: str, rule_name: str) -> Any:
    with LOCK:
        return _parse_query(text, rule_name=rule_name)


@functools.lru_cache(maxsize=NUM_TRANSLATIONS)
def _translation(domain: str, problem: str) -> tuple[Any, str]:
    with LOCK:
        arguments = sys.argv
        try:
            task, sas = _translate(domain, problem)
        finally:
            sys.argv = arguments
        if not sas.startswith("begin_version"):
            raise ValueError("the problem has no translation")  # the library would end the process
        return task, sas


def _fast_translation(domain: str, problem: str, **_: Any) -> tuple[Any, str]:
    return _translation(domain, problem)


def fast(enabled: bool = True) -> None:
    """Have the engine remember what it parsed; or put its own functions back, to compare."""
    textgen._parse_and_convert = _fast_template if enabled else _parse_template
    textworld.logic._parse_and_convert = _fast_query if enabled else _parse_query
    fast_downward.pddl2sas = _fast_translation if enabled else _translate


def forget() -> None:
    """Drop what was remembered: the next reset of a game costs what its first one did."""
    for function in (_template, _fast_query, _translation):
        function.cache_clear()


class _Grammar(textgen.ContextSensitiveGrammar):  # type: ignore[misc]
    """A grammar that remembers the text of commands. Those name what fills them and where it
    stands, which no action changes; what `#rules#` derive depends on the state."""

    def __init__(self, grammar: Any) -> None:
        super().__init__()
        self.update(grammar)
        self._commands: dict[tuple[Any, ...], str] = {}

    def derive(self, start: str, context: Any) -> str:
        if "#" in start:
            text: str = super().derive(start, context)
            return text
        key = (start, *context["mapping"].values())
        if key not in self._commands:
            self._commands[key] = super().derive(start, context)
        return self._commands[key]


class Engine:
    """One game at a time. Errors of the engine are EnvError."""

    def __init__(self) -> None:
        self._env = PddlEnv(textworld.EnvInfos(admissible_commands=True, won=True))
        self._state: Any = None

    def reset(self, game: Mapping[str, Any]) -> str:
        """Load a game (a `game.tw-pddl` as a dict) and start it; the opening's text."""
        with LOCK:  # the native library is loaded into globals of the translator
            self._guarded("load", lambda: self._load(game))
            self._state = self._guarded("reset", self._env.reset)
        text: str = self._state.feedback
        return text

    def _load(self, game: Mapping[str, Any]) -> None:
        env = self._env
        env.load(game)
        env._logic.grammar = _Grammar(env._logic.grammar)
        names = Demangler(game_infos=env._entity_infos)
        for info in env._entity_infos.values():
            info.name = names.demangle_alfred_name(info.id).strip()

    def step(self, command: str) -> str:
        """Take a command; the engine's answer, `Nothing happens.` to one that it does not know."""
        self._state, *_ = self._guarded("step", lambda: self._env.step(command))
        text: str = self._state.feedback
        return text

    @property
    def won(self) -> bool:
        return bool(self._state["won"])

    @property
    def commands(self) -> list[str]:
        """The admissible commands, sorted."""
        commands: list[str] = self._state["admissible_commands"]
        return commands

    def facts(self, *predicates: str) -> Facts:
        """What is true now, of these predicates or of all; the names are those of the texts."""
        found: dict[str, list[tuple[str, ...]]] = {}
        entities = self._env._entity_infos
        for fact in self._env._pddl_state.facts:
            if not predicates or fact.name in predicates:
                names = tuple(entities[argument.name].name for argument in fact.arguments)
                found.setdefault(fact.name, []).append(names)
        return {predicate: sorted(names) for predicate, names in found.items()}

    @staticmethod
    def _guarded(what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise EnvError(f"alfworld: {what} raised {type(error).__name__}: {text}") from error


_idle: list[Engine] = []


def borrow() -> Engine:
    """An engine that nobody else has."""
    with LOCK:
        return _idle.pop() if _idle else Engine()


def give_back(engine: Engine) -> None:
    """Lend it to others. Its native library stays loaded: it cannot be unloaded for good."""
    with LOCK:
        _idle.append(engine)


fast()
