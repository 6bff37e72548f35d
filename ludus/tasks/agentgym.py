"""AgentGym's item ids (`babyai_12`), and its task and conversation files.

AgentEval is a list of `{"item_id": "babyai_12"}`; AgentTraj-L has, beside each id, the
`conversations`: `[{"from": "human" | "gpt", "loss": null | false | true, "value": "..."}]`
(Xi et al. 2024, arXiv:2406.04151). Both come as one JSON list, or as JSON lines.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from ludus.core.errors import ConfigError, DataError
from ludus.core.types import Message, Task
from ludus.tasks.readers import BadLine, OnBadLine, TaskList, TaskMaker

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
    if own is None:
        raise ConfigError(f"the reader 'agentgym' needs one of {', '.join(sorted(ITEMS))} as env")
    tasks: dict[str, Task] = {}
    bad: list[BadLine] = []
    for number, entry in enumerate(entries(path), start=1):
        if limit is not None and len(tasks) >= limit:
            break
        try:
            item = str(entry["item_id"])
            prefix = item.partition("_")[0]
            if name is not None and name not in (prefix, env_names.get(prefix)):
                continue
            tasks[item] = task_of(own, maker, index_of(own, item))
        except (KeyError, TypeError):
            bad.append(BadLine(path, number, "has no item_id"))
        except ConfigError as error:
            bad.append(BadLine(path, number, str(error)))
    if bad and on_bad_line == "refuse":
        raise DataError(f"{len(bad)} entries are not tasks of {own}: {bad[0]}")
    return TaskList(tasks.values(), bad)


def is_agentgym(path: str | Path) -> bool:
    """True if the file has AgentGym's format: its first entry has an `item_id`."""
    try:
        first = next(iter(entries(path)), None)
    except DataError:
        return False
    return isinstance(first, dict) and "item_id" in first


def entries(path: str | Path) -> Iterator[Any]:
    """The entries of a JSON list, or of JSON lines. Errors: DataError."""
    try:
        text = Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    try:
        if text.lstrip().startswith("["):
            yield from json.loads(text)
            return
        for line in text.splitlines():
            if line.strip():
                yield json.loads(line)
    except (RecursionError, ValueError) as error:
        raise DataError(f"{path} is not JSON: {error}") from None


class Recorded(NamedTuple):
    """A conversation of AgentTraj."""

    item_id: str
    messages: list[Message]


def read_conversations(path: str | Path) -> tuple[list[Recorded], list[BadLine]]:
    """The conversations of a file, and the malformed entries with their reasons."""
    conversations: list[Recorded] = []
    bad: list[BadLine] = []
    for number, entry in enumerate(entries(path), start=1):
        try:
            messages = messages_of(entry["conversations"])
            conversations.append(Recorded(str(entry["item_id"]), messages))
        except KeyError as error:
            bad.append(BadLine(str(path), number, f"has no {error.args[0]}"))
        except (AttributeError, TypeError, ValueError) as error:
            bad.append(BadLine(str(path), number, str(error)))
    return conversations, bad


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
        raise DataError(f"{path} holds no conversation")
    counts: Counter[str] = Counter()
    numbered = []
    for item_id, messages in conversations:
        counts[item_id] += 1
        suffix = f"#{counts[item_id]}" if counts[item_id] > 1 else ""
        numbered.append(Recorded(item_id + suffix, messages))
    return numbered, [str(line) for line in bad]


def messages_of(conversations: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Converts a conversation of AgentTraj to messages; all assistant turns are trained.

    AgentTraj opens with instructions and the model's acknowledgement ("OK.") without loss: the
    instructions become the system prompt, the acknowledgement is dropped.

    Errors: ValueError for a later turn without loss, which has no form here.
    """
    turns = [(turn["from"], turn["value"], turn.get("loss")) for turn in conversations]
    for who, value, _ in turns:
        if who not in ("human", "gpt") or not isinstance(value, str):
            raise ValueError(f"a turn must be from human or gpt, with a text, not {who!r:.40}")
    messages: list[Message] = []
    if len(turns) > 2 and turns[1][0] == "gpt" and turns[1][2] is False:
        messages.append(Message(role="system", content=turns[0][1]))
        turns = turns[2:]
    for who, value, loss in turns:
        if who == "gpt" and loss is False:
            raise ValueError("a later turn of the model has `loss: false`")
        messages.append(Message(role="user" if who == "human" else "assistant", content=value))
    if not any(message.role == "assistant" for message in messages):
        raise ValueError("has no turn of the model")
    return messages


def conversations_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Converts messages to AgentTraj's format; the inverse of `messages_of`.

    Errors: ConfigError for tool calls, which AgentTraj cannot express.
    """
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message.tool_calls or message.role == "tool":
            raise ConfigError("AgentTraj cannot express tool calls: use plain or react")
        if message.role == "system":
            turns.append({"from": "human", "loss": None, "value": message.content})
            turns.append({"from": "gpt", "loss": False, "value": "OK."})
        elif message.role == "assistant":
            turns.append({"from": "gpt", "loss": True, "value": message.content})
        elif turns and turns[-1]["from"] == "human":
            turns[-1]["value"] += "\n" + message.content
        else:
            turns.append({"from": "human", "loss": None, "value": message.content})
    return turns
