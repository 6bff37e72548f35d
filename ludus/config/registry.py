"""Plug-ins by name: one row each, loaded on first use.

A row names its target as "module:attribute", so a registry imports nothing until a plug-in is
built. Other packages add rows with an entry point of the group `ludus.<kind>`; a config may also
name "module:Class" or "path/file.py:Class". The target's signature is the schema of the plug-in's
arguments: a parameter `Annotated[int, Field(ge=1, description="...")]` is checked and documented
accordingly.
"""

from __future__ import annotations

import ast
import inspect
import re
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from ludus.config.messages import explain
from ludus.core.errors import ConfigError, LudusError, MissingDependency, did_you_mean
from ludus.core.files import searched
from ludus.core.modules import load_module, own_frame, told
from ludus.core.sources import parse_module
from ludus.core.types import Spec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """A plug-in's target ("module:attribute"), and the extra that installs its imports."""

    target: str
    extra: str = ""
    summary: str = ""


class Registry(Generic[T]):
    """The plug-ins of one kind ("env", "judge", ...).

    `context` names the parameters that ludus supplies when it builds a plug-in (e.g. a tokenizer).
    A config cannot set them. `needs` names attributes of every plug-in of this kind. `fault`
    returns what is wrong with a target, or None.
    """

    def __init__(
        self,
        kind: str,
        rows: Mapping[str, Row],
        context: frozenset[str] = frozenset(),
        needs: tuple[str, ...] = (),
        fault: Callable[[Any], str | None] = lambda target: None,
    ) -> None:
        self.kind = kind
        self.needs = needs
        self._fault = fault
        self.context = context
        self._rows = dict(rows)
        self._schemas: dict[Callable[..., T], type[BaseModel]] = {}

    @property
    def _a_plug_in(self) -> str:
        return f"{'an' if self.kind[0] in 'aeiou' else 'a'} {self.kind}"

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def names(self) -> list[str]:
        """All known names, including installed entry points."""
        outside = [point.name for point in entry_points(group=f"ludus.{self.kind}")]
        return sorted({*self._rows, *outside})

    def row(self, name: str) -> Row:
        """The row of a name, of an entry point, or of "module:Class"."""
        if name in self._rows:
            return self._rows[name]
        if ":" in name:  # before entry points: reading them opens one file per package
            return Row(name)
        for point in entry_points(group=f"ludus.{self.kind}", name=name):
            return Row(point.value)
        if name.endswith(".py"):
            raise ConfigError(f"{self.kind} {name!r}: {_without_attribute(name)}")
        noun = "metrics sink" if self.kind == "metrics" else self.kind
        raise ConfigError(f"{name!r} is not a known {noun}{did_you_mean(name, self.names())}")

    def load(self, name: str) -> Callable[..., T]:
        """The plug-in's class or factory."""
        row = self.row(name)
        module_name, _, attribute = row.target.rpartition(":")
        try:
            module = load_module(module_name)
        except ModuleNotFoundError as error:
            missing = module_name if error.name is None else error.name
            if row.extra and not missing.startswith("ludus"):
                raise MissingDependency(missing, row.extra, f"{self.kind} {name!r}") from error
            reason = f"cannot import {module_name} (no module named {missing!r})"
            if missing == module_name and module_name.endswith(".py"):
                reason = f"there is no file {module_name}{searched(module_name)}"
            raise ConfigError(f"{self.kind} {name!r}: {reason}") from error
        except LudusError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{self.kind} {name!r}: importing {module_name} raised {told(error)}"
            ) from error
        if not hasattr(module, attribute):
            names = [key for key, value in vars(module).items() if callable(value)]
            near = did_you_mean(attribute, names)
            raise ConfigError(
                f"{self.kind} {name!r}: module {module_name} has no {attribute!r}"
                f"{near if 'did you mean' in near else ''}"
            )
        target: Callable[..., T] = getattr(module, attribute)
        buildable = inspect.isroutine(target) or inspect.isclass(target)
        if not buildable and not isinstance(target, partial):
            raise ConfigError(
                f"{self.kind} {name!r}: {attribute} is of type {type(target).__name__}, not a "
                "class or a function; name a function that returns it"
            )
        if fault := self._fault(target):
            raise ConfigError(f"{self.kind} {name!r}: {fault}")
        return target

    def arguments(self, name: str) -> type[BaseModel]:
        """A pydantic model of the arguments that a config may set, from the target's signature."""
        target = self.load(name)
        if target in self._schemas:
            return self._schemas[target]
        try:
            model = _schema(f"{name.replace(':', '_')}_args", target, self.context)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{self.kind} {name!r}: the annotations of its arguments cannot be read ({reason})"
            ) from error
        self._schemas[target] = model
        return model

    def check(self, spec: Spec, where: str = "") -> dict[str, Any]:
        """Returns the spec's arguments, validated. Errors: ConfigError with the path."""
        place = f"{where}.args" if where else "args"
        try:
            schema = self.arguments(spec.name)
            parsed = schema.model_validate(spec.args)
        except ConfigError as error:
            raise ConfigError(f"{where}.name: {error}" if where else str(error)) from None
        except ValidationError as error:
            prefix = "" if where else f"{self.kind} {spec.name!r}: "
            noun = "an argument"
            if where:
                noun += f" of {spec.name.rpartition(':')[2]}"
            lines = [prefix + text for _, text in explain(error, schema, place, noun)]
            missing = any(each["type"] == "missing" for each in error.errors())
            if missing and self.needs and inspect.isfunction(self.load(spec.name)):
                lines.append(
                    f"{spec.name} is a function: its parameters are arguments of the recipe, and "
                    f"it returns {self._a_plug_in}, an object with {' and '.join(self.needs)}"
                )
            raise ConfigError("\n".join(lines)) from None
        return {key: getattr(parsed, key) for key in parsed.model_fields_set}

    def build(self, spec: Spec | str, where: str = "", **context: Any) -> T:
        """Build the plug-in. It receives the entries of `context` that its signature names.

        Errors: ConfigError for wrong arguments, and where a class from outside of ludus raises, or
        a function from outside returns no plug-in of this kind.
        """
        spec = Spec(name=spec) if isinstance(spec, str) else spec
        args = self.check(spec, where)
        target = self.load(spec.name)
        parameters = inspect.signature(target).parameters
        supplied = {key: value for key, value in context.items() if key in parameters}
        try:
            built = target(**args, **supplied)
        except ConfigError as error:
            text = str(error)
            named = _ARGUMENT.match(text)  # an argument, or a plug-in among the arguments
            if where and named and named[1] in args:
                raise ConfigError(f"{where}.args.{text}") from error
            if not where or _PLACE.match(text):
                raise
            raise ConfigError(f"{_argument(where, args, text)}: {text}") from error
        except (LudusError, BdbQuit):
            raise
        except (Exception, SystemExit) as error:
            ours = target.__module__.partition(".")[0] == "ludus"
            if ours and own_frame(error) is None:  # keep the traceback of our fault
                raise
            place = where or self.kind
            raise ConfigError(f"{place}: {spec.name!r} cannot be built: {told(error)}") from error
        absent = [name for name in self.needs if not hasattr(built, name)]
        if absent or (self.needs and inspect.isclass(built)):
            what = f"the class {built.__name__}" if inspect.isclass(built) else f"{built!r:.80}"
            lacks = f" (it has no `{absent[0]}`)" if absent else ""
            raise ConfigError(
                f"{where or self.kind}: {spec.name!r} gives {what}, not {self._a_plug_in}"
                f"{lacks}: name a class, or a function that returns one"
            )
        return built


_ARGUMENT = re.compile(r"(\w+)(?:\[\d+\])?[.:]")
_PLACE = re.compile(r"[a-z_]+\.\w+|[a-z_.]+: ")
"""The beginning of a message that names its place itself."""


def _argument(where: str, args: Mapping[str, Any], text: str) -> str:
    """The place of the argument that a message quotes; `where.args` if it quotes none."""
    quoted = [
        name for name, value in args.items() if isinstance(value, str) and repr(value) in text
    ]
    return ".".join([where, "args", *quoted[:1]])


def _without_attribute(path: str) -> str:
    """The fault of a file's path as the name of a plug-in, with its functions and classes."""
    try:
        source = Path(path).expanduser().read_text(encoding="utf-8")
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        names = [node.name for node in parse_module(source).body if isinstance(node, kinds)]
    except OSError:
        return f"there is no file {path}"
    except (SyntaxError, ValueError) as error:
        return f"{path} is not a Python file: {error}"
    found = ", ".join(name for name in names if not name.startswith("_"))
    return f"write {path}:NAME, with a function or class of the file: {found or 'it has none'}"


def _schema(name: str, target: Callable[..., Any], context: frozenset[str]) -> type[BaseModel]:
    """A pydantic model of the parameters of `target` that are not in `context`."""
    function = target.func if isinstance(target, partial) else target
    if inspect.isclass(function):
        function = function.__init__
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    open_ended = False
    for parameter in inspect.signature(target).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            open_ended = True
        elif parameter.kind is not parameter.VAR_POSITIONAL and parameter.name not in context:
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hints.get(parameter.name, Any), default)
    config = ConfigDict(extra="allow" if open_ended else "forbid", arbitrary_types_allowed=True)
    return create_model(name, __config__=config, **fields)
