"""A function on offer, and the check of a call's arguments against its JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from referencing import Registry as Schemas
from referencing.exceptions import Unresolvable

from ludus.core.errors import ConfigError, ToolError, did_you_mean
from ludus.core.types import ToolSpec
from ludus.tools.base import Tool

_OPEN_SCHEMA = {"patternProperties", "additionalProperties", "$ref", "allOf", "anyOf", "oneOf"}
"""Keywords with which `properties` does not list all arguments."""


MAX_DEPTH = 50
"""Nesting of arguments beyond which a check that fails is not the schema's fault."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function on offer, its tool, and the check of its arguments."""

    spec: ToolSpec
    tool: Tool
    validator: Any

    def fault(self, arguments: Mapping[str, Any]) -> str | None:
        """The fault of a call's arguments, in words for the model; None if they fit."""
        schema = self.spec.parameters
        known = schema.get("properties", {})
        unknown = sorted(set(arguments) - set(known))
        if unknown and not (_OPEN_SCHEMA - {"additionalProperties"}) & set(schema):
            closed = schema.get("additionalProperties", False) is False
            if closed:
                takes = did_you_mean(unknown[0], known) or ": it takes none" * (not known)
                return f"there is no argument {unknown[0]!r}{takes}"
        try:
            wrong = best_match(self.validator.iter_errors(dict(arguments)))
        except RecursionError:
            if _depth(arguments) > MAX_DEPTH:
                return "the arguments are nested too deeply"
            raise ToolError(f"{self.spec.name}: its schema refers to itself without end") from None
        except Unresolvable as error:
            raise ToolError(f"{self.spec.name}: its schema refers to {error.ref!r}") from error
        if wrong is None:
            return None
        place = wrong.json_path.removeprefix("$").removeprefix(".")
        return f"{place}: {wrong.message}" if place else str(wrong.message)


def _depth(value: Any) -> int:
    """Nesting of a JSON value; a number has depth 1."""
    depth, level = 0, [value]
    while level:
        depth += 1
        lists = [item.values() if isinstance(item, Mapping) else item
                 for item in level if isinstance(item, Mapping | list)]  # fmt: skip
        level = [child for items in lists for child in items]
    return depth


def checked_function(place: str, spec: ToolSpec, tool: Tool) -> Function:
    """The function, with its schema checked. Errors: ConfigError that names the place."""
    return Function(spec, tool, _validator(place, spec))


def _validator(place: str, spec: ToolSpec) -> Any:
    """Errors: ConfigError where `parameters` is not a JSON schema of an object."""
    if spec.parameters.get("type") != "object":
        raise ConfigError(f'{place}: {spec.name}: parameters must be a schema of type "object"')
    try:
        Draft202012Validator.check_schema(spec.parameters)
    except SchemaError as error:
        raise ConfigError(
            f"{place}: {spec.name}: parameters are not a JSON schema: {error.message:.200}"
        ) from None
    return Draft202012Validator(spec.parameters, registry=Schemas())  # fetches no schema by URL
