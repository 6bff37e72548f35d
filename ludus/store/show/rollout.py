"""A rollout, turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from ludus.core.errors import counted, printable
from ludus.core.types import Message, Segment, Trajectory
from ludus.core.versions import spell_runs
from ludus.store.show.tables import facts_table, number, numbers, rule
from ludus.store.store import RunStore

Decode = Callable[[list[int]], str]

_INDENT = 4
_GIVEN, _SAMPLED = "dim", "green"


def render_trajectory(
    store: RunStore, run_id: str, trajectory_id: str, decode: Decode | None = None
) -> RenderableType:
    """Returns one rollout, turn by turn, with its branches.

    With `decode` (token ids to text) the text is that of the engine's tokens; otherwise the text is
    that of the messages.
    """
    record = store.record(run_id, trajectory_id)
    row, trajectory = record.row, record.trajectory
    facts = {
        "trajectory": row.id,
        "recorded": f"{run_id}, {row.stage} step {row.step}",
        "task": row.task_id + (f" (tier {row.tier})" if row.tier else ""),
        "group": row.group_id,
        "role": f"{row.role}, policy {row.policy}",
        "status": row.status.value,
        "reward": number(row.reward),
        "scores": numbers(row.scores),
        "judge": row.explanation,
        "metrics": numbers(row.metrics),
        "length": f"{counted(row.num_turns, 'turn')}, {counted(row.num_tokens, 'token')}, "
        f"{row.num_sampled_tokens} of them sampled",
        "error": row.error,
        "dropped": row.dropped,
    }
    taught = any(map(_taught, trajectory.segments))
    origin = "demonstrated" if taught else "sampled by the policy"
    legend = f"lines that begin with + were {origin}: only they have loss"
    if weight := store.run(run_id).observation_weight(row.stage):
        legend = f"lines that begin with + were {origin}: they have loss with weight 1, all others "
        legend += f"with {weight:g} (sft.observation_weight)"
    if row.stage == "evaluate/sft":  # of `sft.until`
        legend = f"lines that begin with + were {origin}; none has loss: it measures SFT"
    elif row.stage.startswith("evaluate/"):
        legend = f"lines that begin with + were {origin}; none has loss: the task is held out"
    elif row.dropped is not None or not row.status.trainable:
        reason = printable(row.dropped or f"status {row.status.value}")
        legend = f"lines that begin with + were {origin}; none has loss ({reason})"
    return Group(facts_table(facts), Text(legend, "dim"), *_turns(trajectory, decode))


def render_verdict(trajectory: Trajectory) -> RenderableType:
    """Returns the parts of a rollout's score and the judge's explanation, where there are any."""
    return facts_table({"scores": numbers(trajectory.scores), "judge": trajectory.explanation})


def render_turns(trajectory: Trajectory, decode: Decode | None = None) -> RenderableType:
    """Returns the turns of a rollout that is not in a store."""
    return Group(*_turns(trajectory, decode))


# Parts of a rollout


@dataclass(frozen=True, slots=True)
class _Marked:
    """Text whose lines, including wrapped lines, begin with a mark."""

    text: Text
    mark: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        margin = Text(" " * _INDENT + self.mark, self.text.style)
        for line in self.text.wrap(console, max(8, options.max_width - len(margin))):
            yield Text.assemble(margin, line)


def _turns(trajectory: Trajectory, decode: Decode | None) -> Iterator[RenderableType]:
    shown: set[int] = set()
    turns = 0
    leaves = trajectory.leaves()
    for branch, leaf in enumerate(leaves, start=1):
        fresh = [index for index in trajectory.path(leaf) if index not in shown]
        if len(leaves) > 1:
            parent = trajectory.segments[fresh[0]].parent
            origin = "from the start" if parent < 0 else f"continues after [{parent}]"
            yield rule(f"branch {branch} of {len(leaves)}, {origin}")
        for index in fresh:
            segment = trajectory.segments[index]
            turns += segment.sampled
            yield _heading(index, segment, turns, decode)
            style, mark = (_SAMPLED, "+ ") if segment.sampled else (_GIVEN, "  ")
            yield _Marked(Text(printable(_body(segment, decode)), style), mark)
        shown.update(fresh)


def _heading(index: int, segment: Segment, turn: int, decode: Decode | None) -> Text:
    role = segment.message.role if segment.message else "assistant" if segment.sampled else "given"
    title = Text(f"[{index}] {role}", "bold")
    facts = [counted(len(segment.token_ids), "token")]
    if segment.sampled:
        title.append(f", turn {turn}")
        facts = [f"{'demonstrated' if _taught(segment) else 'sampled'} {facts[0]}"]
        if segment.runs:
            facts.append(f"policy {spell_runs(segment.runs)}")
    if segment.constraint is not None:
        facts.append("follows a schema")
    if segment.logprobs and not _taught(segment):
        least = min(range(len(segment.logprobs)), key=segment.logprobs.__getitem__)
        mean = sum(segment.logprobs) / len(segment.logprobs)
        token = segment.token_ids[least]
        name = f'"{printable(decode([token]))}"' if decode else f"id {token}"
        facts.append(f"logprob mean {mean:.2f}, least {segment.logprobs[least]:.2f} ({name})")
    if segment.reward is not None:
        facts.append(f"reward {number(segment.reward)}")
    if segment.metrics:
        facts.append(numbers(segment.metrics))
    return title.append(f": {', '.join(facts)}", "not bold dim")


def _taught(segment: Segment) -> bool:
    """True if the turn is a demonstration's: it has a loss, but no policy sampled it."""
    return segment.sampled and segment.policy_version is None and not any(segment.logprobs or ())


def _body(segment: Segment, decode: Decode | None) -> str:
    if decode is not None and (segment.token_ids or segment.message is None):
        return decode(segment.token_ids)
    if segment.message is not None:
        return _message(segment.message)
    return " ".join(map(str, segment.token_ids))


def _message(message: Message) -> str:
    lines = [f"(thinking) {message.thinking}"] if message.thinking else []
    lines += [message.content] if message.content else []
    lines += [
        f"(calls {call.name}: {', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})"
        for call in message.tool_calls
    ]
    return "\n".join(lines)
