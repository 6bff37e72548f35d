"""Types in words, and validation errors as one line each: place, fault, correct form.

    rl.steps must be a whole number >= 1, got 'ten'
    rollout.max_truns is not a key (did you mean rollout.max_turns?)

Both come from the pydantic models, so the configuration's reference (`reference.py`) and its errors
(`load.py`, `registry.py`) use the same words.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ludus.config.secrets import Secret
from ludus.core.errors import did_you_mean
from ludus.core.types import Spec

PathKey = tuple[str | int, ...]
"""A place in a configuration: ("metrics", 0, "args", "port")."""

ANYTHING = "anything"
"""The words of a type that admits every value."""

_PLAIN = {bool: "true or false", int: "a whole number", float: "a number"}
_LIMITS = {
    "gt": "> {}",
    "ge": ">= {}",
    "lt": "< {}",
    "le": "<= {}",
    "multiple_of": "a multiple of {}",
}
_LENGTHS = {"min_length": "at least {} of them", "max_length": "at most {} of them"}
_CHARACTERS = {
    "min_length": "of at least {} characters",
    "max_length": "of at most {} characters",
}


@dataclass(frozen=True, slots=True)
class Type:
    """A type annotation and its constraints."""

    annotation: Any
    constraints: tuple[Any, ...] = ()

    @classmethod
    def of(cls, field: FieldInfo) -> Type:
        """The type of a pydantic field."""
        return cls(field.annotation, tuple(field.metadata))

    def unwrapped(self) -> Type:
        """The type without `Annotated`, whose metadata becomes constraints."""
        if get_origin(self.annotation) is not Annotated:
            return self
        inner, *extra = get_args(self.annotation)
        constraints: list[Any] = []
        for item in extra:
            constraints += item.metadata if isinstance(item, FieldInfo) else [item]
        return Type(inner, (*self.constraints, *constraints)).unwrapped()

    def branches(self) -> list[Type]:
        """The members of a union without None; otherwise the type itself."""
        plain = self.unwrapped()
        if get_origin(plain.annotation) not in (Union, UnionType):
            return [] if plain.annotation in (None, NoneType) else [plain]
        members = (Type(member, plain.constraints) for member in get_args(plain.annotation))
        return [branch for member in members for branch in member.branches()]

    @property
    def nullable(self) -> bool:
        """True if null is allowed."""
        plain = self.unwrapped().annotation
        return plain in (None, NoneType) or NoneType in get_args(plain)

    def model(self) -> type[BaseModel] | None:
        """The section (or plug-in spec) allowed here."""
        for branch in self.branches():
            if inspect.isclass(branch.annotation) and issubclass(branch.annotation, BaseModel):
                return branch.annotation
        return None

    def admits(self, kind: type) -> bool:
        """True if a plain `kind` (str, list, dict, Spec) is allowed here."""
        kinds = (get_origin(branch.annotation) or branch.annotation for branch in self.branches())
        return kind in kinds

    def child(self, key: str | int) -> Type | None:
        """The type of an entry; None where no entry of that name is allowed."""
        for branch in self.branches():
            model, origin, args = (
                branch.model(),
                get_origin(branch.annotation),
                get_args(branch.annotation),
            )
            if model is not None and key in model.model_fields:
                return Type.of(model.model_fields[str(key)])
            if origin is list and isinstance(key, int):
                return Type(args[0])
            if origin is tuple and isinstance(key, int):
                position = 0 if args[-1] is Ellipsis else min(key, len(args) - 1)
                return Type(args[position])
            if origin in (dict, Mapping) and isinstance(key, str):
                return Type(args[1])
        return None

    def words(self) -> str:
        """The type in words: "a whole number >= 1, or null"."""
        parts = [branch._words() for branch in self.branches()]
        return ", or ".join([*parts, *(["null"] if self.nullable else [])])

    def _words(self) -> str:
        kind, origin, args = self.annotation, get_origin(self.annotation), get_args(self.annotation)
        if origin is Literal:
            shown = ", ".join(show(choice, bare=True) for choice in args)
            return shown if len(args) == 1 else f"one of {shown}"
        if kind is str:
            words = " ".join(["text", *_limits(self.constraints, _CHARACTERS)])
            return words.replace("of at least 1 characters", "that is not empty")
        if kind in _PLAIN:
            return " ".join([_PLAIN[kind], *_limits(self.constraints, _LIMITS)])
        if origin is tuple and args[-1] is not Ellipsis:
            return f"a list of {len(args)} ({', '.join(Type(arg).words() for arg in args)})"
        if origin in (list, tuple, set, frozenset, Sequence):
            words = f"a list (of {Type(args[0]).words()})"
            return ", ".join([words, *_limits(self.constraints, _LENGTHS)])
        if kind in (list, tuple):
            return "a list"
        if kind is Spec:
            return "a plug-in (a name, or {name: ..., args: {...}})"
        if origin in (dict, Mapping) or kind in (dict, Mapping):
            return ", ".join(["a mapping", *_limits(self.constraints, _LENGTHS)])
        if kind is Path:
            return "a path"
        if kind is Any or kind is object:
            return ANYTHING
        if self.model() is not None:
            return "a section"
        return getattr(kind, "__name__", str(kind))

    def literals(self) -> list[str]:
        """The texts allowed here."""
        return [
            choice
            for branch in self.branches()
            if get_origin(branch.annotation) is Literal
            for choice in get_args(branch.annotation)
            if isinstance(choice, str)
        ]


def _limits(constraints: Sequence[Any], names: Mapping[str, str]) -> list[str]:
    """`>= 1 and < 5`, from annotated-types' and pydantic's constraint objects."""
    texts = [
        text.format(show(getattr(item, name), bare=True))
        for item in constraints
        for name, text in names.items()
        if getattr(item, name, None) is not None
    ]
    patterns = [p for item in constraints if (p := getattr(item, "pattern", None)) is not None]
    words = [" and ".join(texts)] if texts else []
    return words + ([f"that matches {patterns[0]}"] if patterns and names is not _LENGTHS else [])


def show(value: Any, bare: bool = False, width: int = 60) -> str:
    """A value in YAML's spelling, shortened; `bare`: a text without quotes."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    try:
        text = value if bare and isinstance(value, str) else repr(value)
    except RecursionError:
        return "a value that is nested too deeply"
    return text if len(text) <= width else text[: width - 3] + "..."


def dotted(path: Sequence[str | int], place: str = "") -> str:
    """`metrics.0.args`, with the dotted prefix `place`."""
    return ".".join([*([place] if place else []), *(str(part) for part in path)])


def explain(
    error: ValidationError, model: type[BaseModel], place: str = "", noun: str = "a key"
) -> list[tuple[PathKey, str]]:
    """Returns each fault as its path in `model` and one line of text, in the order of the fields.

    `place` is the dotted path of the model itself; `noun` names an entry of the model.
    """
    return explain_items(error.errors(include_url=False), model, place, noun)


def explain_items(
    problems: Iterable[ErrorDetails], model: Any, place: str = "", noun: str = "a key"
) -> list[tuple[PathKey, str]]:
    """As `explain`, for pydantic's errors of any type annotation."""
    errors: dict[PathKey, list[ErrorDetails]] = {}
    for item in problems:
        errors.setdefault(_real_path(item, model), []).append(item)
    lines: dict[tuple[PathKey, str], None] = {}
    for path, items in errors.items():
        # One branch of a union failed inside the value: the other branches do not apply.
        fails_inside = any(other[: len(path)] == path and other != path for other in errors)
        at = type_at(model, path)
        if fails_inside and at is not None and len(at.branches()) > 1:
            continue
        for item in items:
            lines[path, _line(item, path, model, place, noun)] = None
    return list(lines)


def option_faults(
    error: ValidationError, model: type[BaseModel], names: Mapping[str, str] | None = None
) -> str:
    """Returns the faults of values that a command's options gave, in one line.

    `names` maps a field to its option; by default `max_round` is `--max-round`.
    """
    lines = []
    for path, line in explain(error, model, noun="an option"):
        field = dotted(path)
        option = (names or {}).get(field, "--" + field.replace("_", "-"))
        lines.append(line.replace(field, option, 1).removesuffix(": text"))
    return "; ".join(lines)


def _real_path(item: ErrorDetails, model: Any) -> PathKey:
    """The error's path without pydantic's tags for the branches of a union."""
    path: list[str | int] = []
    at: Type | None = Type(model)
    for index, part in enumerate(item["loc"]):
        below = at.child(part) if at else None
        if at and len(at.branches()) > 1 and _is_tag(part):
            continue
        is_extra = item["type"] == "extra_forbidden" and index == len(item["loc"]) - 1
        if below is None and at and len(at.branches()) > 1 and not is_extra:
            continue
        path.append(part)
        at = below
    return tuple(path)


def _is_tag(part: str | int) -> bool:
    """True for pydantic's name of a branch that a mapping in the union would take for its key."""
    return isinstance(part, str) and (part.startswith("constrained-") or part.endswith("]"))


def type_at(model: Any, path: PathKey) -> Type | None:
    """The type at a path; None where the path does not exist."""
    at: Type | None = Type(model)
    for part in path:
        at = at.child(part) if at else None
    return at


def _line(item: ErrorDetails, path: PathKey, model: Any, place: str, noun: str) -> str:
    where, at = dotted(path, place), type_at(model, path)
    if item["type"] == "extra_forbidden":
        return f"{where} is not {noun}{_nearest_key(path, model, place)}"
    if item["type"] == "missing":
        words = at.words() if at else ANYTHING
        return f"{where} is required" + ("" if words == ANYTHING else f": {words}")
    if item["type"] in ("value_error", "assertion_error"):
        text = str(item["ctx"]["error"])
        return f"{where}: {text}" if where else text
    value = item["input"]
    secret = at is not None and any(isinstance(c, Secret) for c in at.unwrapped().constraints)
    got = "" if secret else f", got {show(value)}"
    if at is None:
        return f"{where}: {item['msg']}{got}"
    if not where:
        return f"must be {at.words()}{got}"
    if item["type"] == "finite_number":
        return f"{where} must be {at.words().replace('a number', 'a finite number', 1)}{got}"
    near = did_you_mean(value, at.literals()) if isinstance(value, str) else ""
    hint = near if "did you mean" in near else _default(path, model) if value is None else ""
    return f"{where} must be {at.words()}{got}{hint}"


def _default(path: PathKey, model: Any) -> str:
    """The default of a key that cannot be null: often the value that turns it off."""
    owner = next(iter(_owners(path, model)), None)
    field = owner.model_fields.get(str(path[-1])) if owner else None
    if field is None or not isinstance(field.default, bool | int | float | str):
        return ""
    return f" (the default is {show(field.default)})"


def _nearest_key(path: PathKey, model: Any, place: str) -> str:
    """The nearest key of the same section, else the same key of another section, else where to
    look for an argument of a plug-in; of a section without keys, that it has none."""
    owners = _owners(path, model)
    keys = list(owners[0].model_fields) if len(owners) == 1 else []
    if len(owners) == 1 and not keys:
        return "; it takes none"
    name = str(path[-1])
    parent = dotted(path[:-1], place)
    hint = did_you_mean(name, keys, f"{parent}.{{}}" if parent else "{}")
    if "did you mean" in hint:
        return hint
    if owners == [Spec]:
        return f" (known: args, name): did you mean the plug-in's argument, {parent}.args.{name}?"
    keys_below = walk(model) if isinstance(model, type) and issubclass(model, BaseModel) else ()
    elsewhere = [key for key in keys_below if key[-1] == name and type_at(model, key)]
    if elsewhere:
        near = max(elsewhere, key=lambda key: _shared(key, path))
        return f" (did you mean {dotted(near, place)}?)"
    return hint or f": a plug-in's argument? `ludus config {name}` tells its place"


def _owners(path: PathKey, model: Any) -> list[type[BaseModel]]:
    """The models that the section of a path may be."""
    section = type_at(model, path[:-1])
    branches = section.branches() if section else []
    return [owner for branch in branches if (owner := branch.model())]


def _shared(one: PathKey, other: PathKey) -> int:
    """The number of first parts that two paths share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def walk(model: type[BaseModel], path: PathKey = ()) -> Iterator[PathKey]:
    """Yields the paths of all keys, depth first, in declaration order; specs are leaves."""
    for name, field in model.model_fields.items():
        yield (*path, name)
        below = Type.of(field).model()
        if below is not None and below is not Spec:
            yield from walk(below, (*path, name))
