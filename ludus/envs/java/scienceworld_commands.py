"""Commands of ScienceWorld's engine, and tool calls: each is written as the other."""

from __future__ import annotations

import re
from typing import Any

from ludus.core.errors import did_you_mean
from ludus.core.types import ToolCall, ToolSpec
from ludus.envs.actions import command_text, parameters_of, pattern_of, tool_spec

COMMANDS: dict[str, str] = {
    "look_around": "look around",
    "look_at": "look at {thing}",
    "look_in": "look in {thing}",
    "go_to": "go to {place}",
    "teleport_to": "teleport to {place}",
    "open": "open {thing}",
    "close": "close {thing}",
    "pick_up": "pick up {thing}",
    "put_down": "put down {thing}",
    "move": "move {thing} to {place}",
    "focus_on": "focus on {thing}",
    "activate": "activate {thing}",
    "deactivate": "deactivate {thing}",
    "use_on": "use {thing} on {other}",
    "use": "use {thing}",
    "connect": "connect {thing} to {other}",
    "disconnect": "disconnect {thing}",
    "pour": "pour {thing} in {place}",
    "dunk": "dunk {thing} in {place}",
    "mix": "mix {thing}",
    "read": "read {thing}",
    "eat": "eat {thing}",
    "flush": "flush {thing}",
    "inventory": "inventory",
    "task": "task",
    "wait_once": "wait1",
    "wait": "wait",
    "choose": "{number}",
}
"""Tools and engine commands. A command belongs to the first tool with a matching pattern."""

ALIASES = {
    "drop {thing}": "put_down",
    "examine {thing}": "look_at",
    "pour {thing} into {place}": "pour",
    "dunk {thing} into {place}": "dunk",
}
"""Other forms of commands in gold paths, and their tools."""

DESCRIPTIONS = {
    "go_to": "Go to a place next to this one, through an open door.",
    "focus_on": "Tell what the task is about; the wrong thing ends the episode as lost.",
    "wait_once": "Let one step of time pass.",
    "wait": "Let ten steps of time pass.",
    "choose": "Answer the question which of several things is meant, by its number.",
}


def _pattern(command: str) -> re.Pattern[str]:
    """The pattern that parses a command's arguments."""
    text = pattern_of(command).pattern
    return re.compile(text.replace("(?P<number>.+)", r"(?P<number>0|[1-9]\d{0,2})"))


PATTERNS = [
    *((_pattern(command), name) for command, name in ALIASES.items()),
    *((_pattern(command), name) for name, command in COMMANDS.items()),
]


def read_command(action: str) -> ToolCall:
    """Returns the tool call of a command. Errors: ValueError."""
    for pattern, name in PATTERNS:
        if match := pattern.fullmatch(action):
            arguments: dict[str, Any] = match.groupdict()
            if name == "choose":
                arguments = {"number": int(arguments["number"])}
            return ToolCall(name=name, arguments=arguments)
    raise ValueError(f"{action!r} is not a command of scienceworld")


def write_command(call: ToolCall) -> str:
    """Returns the command of a tool call. Errors: ValueError."""
    if call.name not in COMMANDS:
        raise ValueError(f"there is no such tool{did_you_mean(call.name, COMMANDS)}")
    return command_text(COMMANDS[call.name], call, {"number": int})


def command_tool(name: str) -> ToolSpec:
    """Returns the tool of a command."""
    command = COMMANDS[name]
    properties: dict[str, Any] = {
        argument: {"type": "string", "description": "As the observations name it."}
        for argument in parameters_of(command)
    }
    if name == "choose":
        properties = {"number": {"type": "integer", "minimum": 0}}
    description = DESCRIPTIONS.get(name, f"The command: {shown(name)}.")
    return tool_spec(name, description, **properties)


def shown(name: str) -> str:
    """Returns a command as the guide shows it: `open THING`."""
    return re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), COMMANDS[name])
