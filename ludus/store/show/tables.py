"""Tables and cells of the terminal display. Text comes from models and tasks, so it is untrusted:
control characters are escaped, and markup is not interpreted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ludus.core.errors import printable
from ludus.store.rows import RunRow


def make_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Returns a table without lines; its first column is not wrapped."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        # The first column names its row: in one piece, to be copied into a command.
        table.add_column(column, overflow="fold", no_wrap=not index)
    for row in rows:
        table.add_row(*(plain(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def facts_table(values: Mapping[str, str | None]) -> Table:
    """Returns a table of names and values, without those that are empty."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in values.items():
        if value:
            table.add_row(name, plain(value))
    return table


def plain(text: str) -> Text:
    """Returns untrusted text as a cell: control characters escaped, markup not interpreted."""
    return Text(printable(text))


def rule(title: str) -> Rule:
    """Returns a line that begins with an untrusted title."""
    return Rule(plain(title), align="left", style="dim")


def number(value: float | None) -> str:
    """Four digits of a number; empty for None."""
    return "" if value is None else f"{value:.4g}"


def numbers(values: Mapping[str, float]) -> str:
    """Names and their numbers, with commas between."""
    return ", ".join(f"{printable(name)} {number(value)}" for name, value in values.items())


def moment(time: datetime) -> str:
    """Date and time in this machine's zone."""
    return f"{time.astimezone():%Y-%m-%d %H:%M:%S}"


def progress(stage: str, last: int) -> str:
    """The number of a stage's steps, which count from 0; of evaluations the last one's RL step."""
    if stage.startswith("evaluate/"):
        return f"{stage} {last}" if last else stage
    return f"{stage} {last + 1}"


def took(run: RunRow) -> str:
    """The time of a run; of one that goes on, the time since its last step."""
    if run.finished is not None and run.elapsed_s is not None:
        return _span(timedelta(seconds=run.elapsed_s))
    return f"last step {_span(datetime.now(UTC) - run.last_step)} ago" if run.last_step else ""


def _span(span: timedelta) -> str:
    seconds = max(0, round(span.total_seconds()))
    hours, minutes = seconds // 3600, seconds // 60 % 60
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds % 60:02} s" if minutes else f"{seconds} s"
