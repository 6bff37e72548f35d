"""AgentGym's item ids (`babyai_12`), and its task and conversation files.

AgentEval is a list of `{"item_id": "babyai_12"}`; AgentTraj-L has, beside each id, the
`conversations`: `[{"from": "human" | "gpt", "loss": null | false | true, "value": "..."}]`
(Xi et al. 2024, arXiv:2406.04151). Both come as one JSON list, or as JSON lines. A malformed entry
does not affect the others.

A turn is trained if its `loss` is true (any truthy value). Thoughts are written into the turn, as
`<think>\\n...\\n</think>\\n\\n` before the text, and read back from there.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import Field

from ludus.core.errors import ConfigError, DataError
from ludus.core.types import Message, Task
from ludus.tasks.readers import (
    BadLine,
    OnBadLine,
    TaskList,
    TaskMaker,
    check_unicode,
    parse_line,
)

BABYAI_LEVELS = (
    "GoToRedBallGrey", "GoToRedBall", "GoToRedBallNoDists", "GoToObjS6", "GoToLocalS8N7",
    "GoToObjMazeS7", "GoToImpUnlock", "GoToSeqS5R2", "GoToRedBlueBall", "GoToDoor", "GoToObjDoor",
    "Open", "OpenRedDoor", "OpenDoorLoc", "OpenRedBlueDoorsDebug", "OpenDoorsOrderN4Debug",
    "Pickup", "UnblockPickup", "PickupLoc", "PickupDistDebug", "PickupAbove", "PutNextLocalS6N4",
    "PutNextS7N4Carrying", "Unlock", "UnlockLocalDist", "KeyInBox", "UnlockPickupDist",
    "BlockedUnlockPickup", "UnlockToUnlock", "ActionObjDoor", "FindObjS7", "KeyCorridorS6R3",
    "OneRoomS20", "MoveTwoAcrossS8N9", "SynthS5R2", "SynthLoc", "SynthSeq", "MiniBossLevel",
    "BossLevel", "BossLevelNoUnlock",
)  # fmt: skip
"""AgentGym's levels 1 to 40. An index has level `index % 40 + 1` and seed `index // 40`."""

ITEM = re.compile(r"([a-z]+)_(\d{1,12})")


@dataclass(frozen=True)
class Items:
    """AgentGym's numbering of an environment's tasks.

    `task` makes the task of an index, from the environment's class or an instance.
    """

    prefix: str
    num_ids: int
    task: Callable[[Any, int], Task]
    args: Mapping[str, Any] = field(default_factory=dict)


ITEMS: dict[str, Items] = {
    "alfworld": Items("alfworld", 2620, lambda env, index: Task(id="", data={"index": index})),
    "babyai": Items(
        "babyai",
        40 * 2**31,
        lambda env, index: env.task(BABYAI_LEVELS[index % 40], index // 40),
        {"actions": "macro"},
    ),
    "scienceworld": Items("sciworld", 4639, lambda env, index: env.agentgym_task(index)),
    "textcraft": Items("textcraft", 549, lambda env, index: env.task(None, index)),
    "webshop": Items("webshop", 12_087, lambda env, index: Task(id="", data={"goal": index})),
}
"""By the environment's name in ludus.

TextCraft's indices go by depth, as in AgentGym; the recipe table and so the goals are ours."""


def task_of(name: str, env_class: Any, index: int) -> Task:
    """The task with AgentGym's index. Errors: ConfigError for an unknown index."""
    items = ITEMS[name]
    if not 0 <= index < items.num_ids:
        last = items.num_ids - 1
        raise ConfigError(f"{items.prefix}_{index} is not an item: indices are 0 to {last}")
    made = items.task(env_class, index)
    return made.model_copy(update={"id": f"{items.prefix}_{index}", "source": "agentgym"})


def index_of(name: str, item: str) -> int:
    """Returns 12 for `babyai_12`. Errors: ConfigError for another environment's item."""
    match = ITEM.fullmatch(item)
    if match is None or name not in ITEMS or match[1] != ITEMS[name].prefix:
        form = f"{ITEMS[name].prefix}_0" if name in ITEMS else "numbers only"
        raise ConfigError(f"{item!r:.80} is not an item of {name}, whose items are {form}")
    return int(match[2])


def read_agentgym(
    path: Annotated[str, Field(min_length=1, description="A file of AgentEval or AgentTraj.")],
    name: Annotated[
        str | None, Field(description="Only items of this environment; null: all must be its own.")
    ] = None,
    limit: Annotated[
        int | None, Field(ge=1, description="Read only the first items; null: all.")
    ] = None,
    maker: TaskMaker | None = None,
    on_bad_line: OnBadLine = "refuse",
) -> TaskList:
    """Tasks of AgentGym's items, for the environment in the config."""
    env_names = {items.prefix: env for env, items in ITEMS.items()}
    own = maker.agentgym if maker is not None else None
    if own is None or maker is None:
        raise ConfigError(f"the reader 'agentgym' needs one of {', '.join(sorted(ITEMS))} as env")

    def make(entry: dict[str, Any]) -> Task | None:
        item = _item_id(entry)
        prefix = re.split("[_/]", item)[0]
        if name is not None and name not in (prefix, env_names.get(prefix)):
            return None
        return _own_task(maker, item) or task_of(own, maker, index_of(own, item))

    made, bad = _read(path, make, limit)
    if bad and on_bad_line == "refuse":
        raise DataError(f"{len(bad)} entries are not tasks of {own}: {bad[0]}")
    tasks = {task.id: task for _, task in made}
    return TaskList(tasks.values(), bad, rows={task.id: number for number, task in made})


def has_items(path: str | Path) -> bool:
    """True if items of the file are AgentGym's (`babyai_12`), not tasks made from seeds."""
    items, _ = _read(path, _item_id)
    return any(ITEM.fullmatch(item) for _, item in items)


def is_agentgym(path: str | Path) -> bool:
    """True if the file has AgentGym's format: an entry has an `item_id`."""
    try:
        found, _ = _read(path, lambda entry: True if "item_id" in entry else None, limit=1)
    except DataError:
        return False
    return bool(found)


def _item_id(entry: dict[str, Any]) -> str:
    item = entry.get("item_id")
    if not isinstance(item, str) or not item:
        raise ValueError(f"item_id must be a text such as webshop_6, got {item!r:.40}")
    return item


def _own_task(maker: TaskMaker, item: str) -> Task | None:
    """The task that the environment made from a seed: `textcraft/depth-1/3`; None for others."""
    rest = item.partition("/")[2]
    tier, _, seed = rest.rpartition("/")
    for choice in (tier, None) if re.fullmatch(r"\d{1,18}", seed, re.ASCII) else ():
        with suppress(ConfigError):
            task = maker.task(choice, int(seed))
            if task.id == item:
                return task
    return None


T = TypeVar("T")


def _read(
    path: str | Path, make: Callable[[dict[str, Any]], T | None], limit: int | None = None
) -> tuple[list[tuple[int, T]], list[BadLine]]:
    """Makes a value of each entry of a JSON list, or of JSON lines; None leaves an entry out.

    Returns the first `limit` values with their row numbers, and the malformed entries.
    Errors: DataError for a file that cannot be read, or a list that is not JSON.
    """
    try:
        data = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
        listed = json.loads(data) if data.lstrip().startswith(b"[") else None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except (RecursionError, ValueError) as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    rows: Iterable[tuple[int, Any]] = enumerate(data.split(b"\n") if listed is None else listed, 1)
    made: list[tuple[int, T]] = []
    bad: list[BadLine] = []
    for number, row in rows:
        if limit is not None and len(made) >= limit:
            break
        if listed is None and not row.strip():
            continue
        try:
            value = make(parse_line(row) if listed is None else _entry(row))
        except (ConfigError, ValueError) as error:
            bad.append(BadLine(str(path), number, str(error)))
        else:
            made += [] if value is None else [(number, value)]
    return made, bad


def _entry(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"is not an object but {type(value).__name__}")
    check_unicode(value)
    return value


class Recorded(NamedTuple):
    """A conversation of AgentTraj; `trained` tells for each assistant turn if it is trained."""

    item_id: str
    messages: list[Message]
    trained: list[bool]


def read_conversations(path: str | Path) -> tuple[list[Recorded], list[BadLine]]:
    """The conversations of a file, and the malformed entries with their reasons."""

    def make(entry: dict[str, Any]) -> Recorded:
        return Recorded(_item_id(entry), *messages_of(entry.get("conversations")))

    made, bad = _read(path, make)
    return [conversation for _, conversation in made], bad


def read_trajectories(path: str, on_bad_line: OnBadLine) -> tuple[list[Recorded], list[str]]:
    """The conversations of a file with unique ids, and the skipped entries.

    Repeated items are numbered: `webshop_6`, `webshop_6#2`.

    Errors: DataError for malformed entries (unless they are skipped), and if no entry is left.
    """
    conversations, bad = read_conversations(path)
    if bad and on_bad_line == "refuse":
        raise DataError(
            f"{len(bad)} entries are not conversations (`tasks.on_bad_line: skip` skips them): "
            f"{bad[0]}"
        )
    if not conversations:
        raise DataError(f"{path} holds no conversation" + (f": {bad[0]}" if bad else ""))
    counts: Counter[str] = Counter()
    numbered = []
    for recorded in conversations:
        counts[recorded.item_id] += 1
        count = counts[recorded.item_id]
        suffix = f"#{count}" if count > 1 else ""
        numbered.append(recorded._replace(item_id=recorded.item_id + suffix))
    return numbered, [str(line) for line in bad]


def messages_of(conversations: Any) -> tuple[list[Message], list[bool]]:
    """Converts a conversation of AgentTraj: its messages, and for each turn of the model whether it
    is trained.

    AgentTraj opens with instructions and the model's acknowledgement ("OK.", `loss: false`): the
    instructions become the system prompt, the acknowledgement is dropped. Other untrained turns
    stay, as context.

    Errors: ValueError for malformed turns, for a conversation that the model opens, for two turns
    of the model in a row, and if no turn is trained.
    """
    turns = _turns(conversations)
    messages: list[Message] = []
    if len(turns) > 2 and (turns[1].who, turns[1].loss) == ("gpt", False) and turns[2].who != "gpt":
        messages.append(Message(role="system", content=turns[0].value))
        turns = turns[2:]
    for turn in turns:
        if turn.who == "human":
            messages.append(Message(role="user", content=turn.value))
            continue
        thought, text = _split_thought(turn.value)
        messages.append(Message(role="assistant", content=text, thinking=thought))
    trained = [bool(turn.loss) for turn in turns if turn.who == "gpt"]
    if not any(trained):
        raise ValueError("has no turn of the model with `loss: true`")
    return messages, trained


class _Turn(NamedTuple):
    who: str
    value: str
    loss: Any


def _turns(conversations: Any) -> list[_Turn]:
    if not isinstance(conversations, list) or not conversations:
        raise ValueError(f"conversations must be a list of turns, got {conversations!r:.40}")
    turns: list[_Turn] = []
    for number, turn in enumerate(conversations, start=1):
        if not isinstance(turn, dict) or turn.get("from") not in ("human", "gpt"):
            raise ValueError(f"turn {number} must be from human or gpt, got {turn!r:.60}")
        who, value, loss = turn["from"], turn.get("value"), turn.get("loss")
        if not isinstance(value, str):
            raise ValueError(f"turn {number}: value must be a text, got {value!r:.40}")
        if who == "human" and loss:
            raise ValueError(f"turn {number} is from human, but has `loss`: {loss!r:.40}")
        if who == "gpt" and (not turns or turns[-1].who == "gpt"):
            before = "opens the conversation" if not turns else "follows another turn of gpt"
            raise ValueError(f"turn {number} of gpt {before}")
        turns.append(_Turn(who, value, loss))
    return turns


_THOUGHT = re.compile(r"<think>\n(.*?)\n</think>\n\n(.*)", re.DOTALL)


def _split_thought(value: str) -> tuple[str | None, str]:
    match = _THOUGHT.fullmatch(value)
    return (match[1], match[2]) if match else (None, value)


def conversations_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Converts messages to AgentTraj's format; the inverse of `messages_of`.

    Messages between two turns of the model become one turn, joined by line breaks.

    Errors: ConfigError for what AgentTraj cannot express: tool calls, and turns of the model
    without a message between them or before them.
    """
    turns: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if message.tool_calls or message.role == "tool":
            raise ConfigError("AgentTraj cannot express tool calls: use plain or react")
        after_gpt = not turns or turns[-1]["from"] == "gpt"
        if message.role == "assistant":
            if after_gpt:
                raise ConfigError("AgentTraj needs a message before each turn of the model")
            thought = "" if message.thinking is None else _thought(message.thinking)
            turns.append({"from": "gpt", "loss": True, "value": thought + message.content})
        elif after_gpt:
            turns.append({"from": "human", "loss": None, "value": message.content})
        else:
            turns[-1]["value"] += "\n" + message.content
        followed = index + 1 < len(messages) and messages[index + 1].role != "assistant"
        if index == 0 and message.role == "system" and followed:
            turns.append({"from": "gpt", "loss": False, "value": "OK."})
    return turns


def _thought(thinking: str) -> str:
    return f"<think>\n{thinking}\n</think>\n\n"
