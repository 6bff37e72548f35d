"""Terminal display of runs and rollouts.

Each function returns a rich renderable. A rollout is shown turn by turn; lines sampled by the
policy are green and begin with `+`, like additions in a diff, so they differ without colour too:

    [1] user
          go to the red ball
    [2] assistant, turn 1: sampled 4 tokens, policy 3, logprob mean -0.31, least -0.92 ("left")
        + turn left

Text comes from models and tasks, so it is untrusted: control characters are escaped, and markup is
not interpreted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ludus.core.errors import printable
from ludus.core.types import Message, Segment, Trajectory
from ludus.core.versions import spell_runs
from ludus.store.rows import (
    NO_TURN,
    RunRow,
    RunStatus,
    StageSummary,
    StepRow,
    TrajectoryRow,
)
from ludus.store.store import RunStore

Decode = Callable[[list[int]], str]

NEWEST = 15
"""Rows of a list that is cut."""

LEAST = 12
"""Narrowest column of text that wraps."""

_INDENT = 4
_GIVEN, _SAMPLED = "dim", "green"
_STATUS_STYLES = {
    RunStatus.RUNNING: "cyan",
    RunStatus.COMPLETED: "green",
    RunStatus.INTERRUPTED: "yellow",
    RunStatus.FAILED: "red",
}


def render_runs(store: RunStore, limit: int | None = None) -> RenderableType:
    """Returns a table of the `limit` newest runs, the newest last; None: of all."""
    runs = store.runs()
    if not runs:
        return Text(f"no runs in {store.url}: start one with ludus train RECIPE")
    rows = [
        (
            run.id,
            Text(run.status.value, _STATUS_STYLES[run.status]),
            _moment(run.created),
            _took(run),
            ", ".join(_progress(stage, step) for stage, step in run.stages.items()),
            (run.error or "").partition("\n")[0],
        )
        for run in (runs[-limit:] if limit else runs)
    ]
    table = make_table(("run", "status", "started", "took", "stages", "error"), rows)
    if len(rows) == len(runs):
        return table
    hint = f"{_count(len(runs) - len(rows), 'older run')}: ludus runs --all"
    return Group(Text(hint, "dim"), table)


def render_run(store: RunStore, run_id: str) -> RenderableType:
    """Returns one run: stages, their last metrics, drop reasons, the newest trajectories."""
    run = store.run(run_id)
    facts = _facts(
        {
            "run": run.id,
            "name": run.name,
            "status": run.status.value,
            "started": _moment(run.created),
            "took": _took(run),
            "held-out success": _heldout(store, run),
            "versions": ", ".join(f"{name} {version}" for name, version in run.versions.items()),
            "error": run.error,
        }
    )
    parts: list[RenderableType] = [facts]
    stages = store.summary(run_id)
    if stages:
        parts += [_rule("stages"), _stages(stages)]
    for stage in stages:
        steps = store.steps(run_id, stage.stage)
        if steps and steps[-1].metrics:
            parts += [_rule(f"{stage.stage}: step {steps[-1].step}"), _metrics(steps)]
    reasons = Counter((row.stage, row.reason) for row in store.dropped(run_id))
    if reasons:
        rows = [(*key, str(count)) for key, count in reasons.most_common()]
        parts += [_rule("dropped"), make_table(("stage", "dropped because", "count"), rows)]
    newest = list(store.trajectories(run_id, limit=NEWEST, newest_first=True))
    if newest:
        hint = f"ludus show {run_id} TRAJECTORY shows one trajectory, token by token"
        if (total := sum(stage.num_trajectories for stage in stages)) > len(newest):
            hint += f"\nludus export {run_id} FILE.jsonl writes all {total:,}"
        parts += [_rule("newest trajectories"), _trajectories(newest), Text(hint, "dim")]
    return Group(*parts)


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
        "reward": _number(row.reward),
        "scores": _numbers(row.scores),
        "judge": row.explanation,
        "metrics": _numbers(row.metrics),
        "length": f"{_count(row.num_turns, 'turn')}, {_count(row.num_tokens, 'token')}, "
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
    if row.stage.startswith("evaluate/"):
        legend = f"lines that begin with + were {origin}; none has loss: the task is held out"
    elif row.dropped is not None or not row.status.trainable:
        reason = printable(row.dropped or f"status {row.status.value}")
        legend = f"lines that begin with + were {origin}; none has loss ({reason})"
    return Group(_facts(facts), Text(legend, "dim"), *_turns(trajectory, decode))


def render_verdict(trajectory: Trajectory) -> RenderableType:
    """Returns the parts of a rollout's score and the judge's explanation, where there are any."""
    return _facts({"scores": _numbers(trajectory.scores), "judge": trajectory.explanation})


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
    for number, leaf in enumerate(leaves, start=1):
        fresh = [index for index in trajectory.path(leaf) if index not in shown]
        if len(leaves) > 1:
            parent = trajectory.segments[fresh[0]].parent
            origin = "from the start" if parent < 0 else f"continues after [{parent}]"
            yield _rule(f"branch {number} of {len(leaves)}, {origin}")
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
    facts = [_count(len(segment.token_ids), "token")]
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
        facts.append(f"reward {_number(segment.reward)}")
    if segment.metrics:
        facts.append(_numbers(segment.metrics))
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


# Parts of a run


def _heldout(store: RunStore, run: RunRow) -> str:
    """Success on held-out tasks before RL and in the newest evaluation since, with the gain on the
    tasks of both; empty where none was evaluated."""
    found = {
        label: steps[-1]
        for label in ("before", "rl", "after")
        if (steps := store.steps(run.id, f"evaluate/{label}"))
    }
    told = []
    if before := found.get("before"):
        told.append(f"{_percent(before.metrics.get('evaluate/success'))} before RL")
    if newest := found.get("after") or found.get("rl"):
        when = f"at step {newest.step}"
        if "after" in found:
            when = "after" if before else f"after {'RL' if run.config.get('rl') else 'SFT'}"
        told.append(f"{_percent(newest.metrics.get('evaluate/success'))} {when}")
        names = (f"evaluate/gain{end}" for end in ("", "_low", "_high"))
        gain, low, high = (newest.metrics.get(name) for name in names)
        if gain is not None and low is not None and high is not None:
            level = 100 * (run.config.get("evaluate") or {}).get("confidence", 0.95)
            told[-1] += f" ({100 * gain:+.1f} points on the tasks of both, {level:g} % interval "
            told[-1] += f"{100 * low:.1f} to {100 * high:.1f})"
    return ", ".join(told)


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.1f} %"


def _stages(stages: list[StageSummary]) -> Table:
    rows = [
        (
            stage.stage,
            str(stage.num_steps),
            str(stage.last_step),
            str(stage.num_trajectories - stage.num_without_turn),
            _rewards(stage),
            ", ".join(f"{how} {count}" for how, count in _ends(stage).items()),
        )
        for stage in stages
    ]
    return make_table(("stage", "steps", "last", "trajectories", "mean reward", "ended"), rows)


def _ends(stage: StageSummary) -> dict[str, int]:
    """Counts of the ends of episodes, for each role."""
    ends = {status.value: count for status, count in stage.statuses.items()}
    return ends | ({NO_TURN: stage.num_without_turn} if stage.num_without_turn else {})


def _rewards(stage: StageSummary) -> str:
    """The mean reward; of each role where there are several."""
    means = {role: mean for role, mean in stage.rewards.items() if mean is not None}
    if len(means) < 2:
        return _number(stage.mean_reward)
    return ", ".join(f"{role} {_number(mean)}" for role, mean in means.items())


def _metrics(steps: list[StepRow]) -> Table:
    first, last = steps[0].metrics, steps[-1].metrics
    rows = [(name, _number(first.get(name)), _number(value)) for name, value in last.items()]
    return make_table(("metric", "first", "last"), rows)


@dataclass(frozen=True, slots=True)
class _Listed:
    """A table of trajectories. Ids stay in one piece: where there is no room for both, the task
    stands below its trajectory."""

    columns: Mapping[str, Sequence[str]]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        columns = dict(self.columns)
        room = options.max_width
        for name, cells in columns.items():
            room -= LEAST if name == "dropped" else max(map(len, (name, *cells))) + 2
        if room < 0:
            pairs = zip(columns.pop("trajectory"), columns.pop("task"), strict=True)
            columns = {"trajectory, task": [f"{id}\n  {task}" for id, task in pairs], **columns}
        table = make_table(list(columns), zip(*columns.values(), strict=True))
        for column in table.columns:
            column.no_wrap = column.header != "dropped"
        yield table


def _trajectories(rows: list[TrajectoryRow]) -> _Listed:
    """The columns that the ids do not tell already, and `dropped` where a trajectory was."""
    told = all(row.id.startswith(f"{row.stage}-{row.step:06d}/") for row in rows)
    columns: dict[str, list[str]] = {"trajectory": [row.id for row in rows]}
    if not told:
        columns |= {"stage": [row.stage for row in rows], "step": [str(row.step) for row in rows]}
    columns |= {
        "task": [row.task_id for row in rows],
        "status": [NO_TURN if row.without_turn else row.status.value for row in rows],
        "reward": [_number(row.reward) or "" for row in rows],
        "turns": [str(row.num_turns) for row in rows],
    }
    dropped = ["" if row.without_turn else row.dropped or "" for row in rows]
    if any(dropped):
        columns["dropped"] = dropped
    return _Listed(columns)


# Cells


def make_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Returns a table without lines; its first column is not wrapped."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        # The first column names its row: in one piece, to be copied into a command.
        table.add_column(column, overflow="fold", no_wrap=not index)
    for row in rows:
        table.add_row(*(plain(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def _facts(facts: Mapping[str, str | None]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value:
            table.add_row(name, plain(value))
    return table


def plain(text: str) -> Text:
    """Returns untrusted text as a cell: control characters escaped, markup not interpreted."""
    return Text(printable(text))


def _rule(title: str) -> Rule:
    return Rule(plain(title), align="left", style="dim")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{printable(name)} {_number(value)}" for name, value in values.items())


def _moment(moment: datetime) -> str:
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S}"


def _progress(stage: str, last: int) -> str:
    """The number of a stage's steps, which count from 0; of evaluations the last one's RL step."""
    if stage.startswith("evaluate/"):
        return f"{stage} {last}" if last else stage
    return f"{stage} {last + 1}"


def _took(run: RunRow) -> str:
    if run.finished is not None and run.elapsed_s is not None:
        return _span(timedelta(seconds=run.elapsed_s))
    return f"last step {_span(datetime.now(UTC) - run.last_step)} ago" if run.last_step else ""


def _span(span: timedelta) -> str:
    seconds = max(0, round(span.total_seconds()))
    hours, minutes = seconds // 3600, seconds // 60 % 60
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds % 60:02} s" if minutes else f"{seconds} s"
