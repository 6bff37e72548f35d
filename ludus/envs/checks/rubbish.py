"""Checks that an environment answers malformed actions."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from ludus.core.errors import EpisodeTimeout, counted
from ludus.core.modules import told
from ludus.core.types import Message, ToolCall
from ludus.envs.base import Env
from ludus.envs.checks.play import Player
from ludus.envs.checks.subject import Subject

RUBBISH = {
    "an empty action": Message(role="assistant", content=""),
    "white space": Message(role="assistant", content=" \n\t\n "),
    "an action of 1 MB": Message(role="assistant", content="go " * 350_000),
    "unicode and control characters": Message(role="assistant", content="Ω\x00\u202e🜁\r\n%s{}\\"),
    "JSON": Message(role="assistant", content='{"action": null}'),
    "a call of an unknown tool": Message(
        role="assistant", tool_calls=[ToolCall(name="no_such_tool", arguments={"x": [1, None]})]
    ),
    "two calls without arguments": Message(
        role="assistant", tool_calls=[ToolCall(name="act"), ToolCall(name="")]
    ),
}
"""Malformed actions. An environment must answer each and raise on none."""

NUM_SPOILT = 4
"""Different actions of the expert, by their first words, that are spoilt."""


async def check_rubbish(subject: Subject, player: Player) -> None:
    """Play each malformed action, in an episode of its own where there is time."""
    failed: dict[tuple[type, str], list[tuple[str, str]]] = {}  # by kind and place
    env: Env | None = None
    actions = RUBBISH if player.slow else RUBBISH | spoilt(chain(*subject.played.values()))
    for number, (name, action) in enumerate(actions.items()):
        if not player.fits(1):
            left = len(actions) - number
            player.left_out.append(f"{left} of {counted(len(actions), 'malformed action')}")
            break
        if env is None:
            env = await player.new()
            await player.reset(env, subject.tasks[0])
        broken = False
        try:
            broken = (await player.step(env, action)).done
        except EpisodeTimeout:
            raise
        except Exception as error:
            broken = True
            text = _printable(told(error, 100))
            place = text.rpartition(" [")[2] if text.endswith("]") else text
            failed.setdefault((type(error), place), []).append((name, text))
        if broken or not player.slow:  # each has an episode of its own where there is time
            await player.close_env(env)
            env = None
    if env is not None:
        await player.close_env(env)
    for (name, reason), *more in failed.values():
        others = f" (so did {counted(len(more), 'other action')})" if more else ""
        text = f"{name} raised {reason}{others}; answer the model with a message instead"
        subject.error("rubbish", text)


def _printable(text: str) -> str:
    """The text with escapes for what a terminal would obey, not print."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def spoilt(actions: Iterable[str]) -> dict[str, Message]:
    """The expert's actions as a model gets them wrong: without their last word, with another one,
    with a number that is too large, and with a word too many."""
    known = dict.fromkeys(action for action in actions if len(action) <= 80 and action.split())
    by_verb = {action.split()[0]: action.split() for action in reversed(known)}
    texts: list[str] = []
    for words in list(by_verb.values())[:NUM_SPOILT]:
        wrong = [words[:-1], [*words[:-1], "abc"], [*words[:-1], "9" * 20]] if words[1:] else []
        texts += [" ".join(each) for each in (*wrong, [*words, "abc"])]
    return {
        f"the action {text!r:.60}": Message(role="assistant", content=text)
        for text in texts
        if text not in known
    }
