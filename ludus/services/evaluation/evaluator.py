"""Scores the items of requests, within limits of time, memory and share."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ludus.core.errors import LudusError, Unscorable, described
from ludus.core.types import Message, Segment, Task, Trajectory
from ludus.judges.base import Judge
from ludus.judges.remote.wire import (
    Evaluation,
    EvaluationRequest,
    Evaluations,
    EvaluationStatus,
    Item,
)
from ludus.services.evaluation.config import ServedJudge
from ludus.services.evaluation.kept import KeptJudges, TooManyJudges
from ludus.services.evaluation.turns import Turns
from ludus.services.server.app import BUCKETS_S, ServiceError
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_TEXT = 2_000
"""Characters of an explanation, and of an error, that are sent back."""

MAX_ARGS = 10_000
"""Characters and values of a judge's arguments from a client: they are read for every output."""

END_S = 5.0
"""Seconds that a cancelled judge may take to end before it is left alone."""


@dataclass(frozen=True)
class EvaluationLimits:
    """Limits of requests, and of all requests together.

    `max_chars` counts an item's characters and values. `max_pending_chars` is shared equally by the
    clients' tokens, and so is `max_judges`: the judges with arguments of clients.
    """

    max_items: int = 4_096
    max_chars: int = 100_000
    max_pending_chars: int = 128_000_000
    max_judges: int = 16
    deadline_s: float = 30.0
    max_deadline_s: float = 300.0
    max_body_bytes: int = 16_000_000


class Evaluator:
    """Carries out requests."""

    def __init__(
        self,
        judges: Sequence[ServedJudge],
        limits: EvaluationLimits,
        num_tokens: int,
        registry: CollectorRegistry,
    ) -> None:
        self._judges = {served.name: served for served in judges}
        self._limits, self._metrics = limits, _Metrics(registry)
        self._turns = {served.name: Turns(served.concurrent) for served in judges}
        self._kept = KeptJudges(limits.max_judges, max(1, limits.max_judges // max(1, num_tokens)))
        self._pending = _Pending(limits.max_pending_chars // max(1, num_tokens))
        self.num_items = 0
        Gauge(
            "ludus_evaluation_in_flight", "Outputs that wait or are scored", registry=registry
        ).set_function(lambda: self.num_items)
        Gauge(
            "ludus_evaluation_judges", "Judges kept, by name and arguments", registry=registry
        ).set_function(lambda: len(self._kept))

    async def close(self) -> None:
        await self._kept.close()

    async def evaluate(self, request: EvaluationRequest, tenant: str) -> Evaluations:
        """Errors: ServiceError for a wrong request, or one above the tenant's share."""
        started = time.perf_counter()
        served = self._served(request)
        items = request.all_items
        if len(items) > self._limits.max_items:
            told = f"{len(items)} of them, at most {self._limits.max_items} in a request"
            raise ServiceError.invalid("items", told)
        seconds = self._deadline_s(request)
        if (size := _size(request.judge.args)) > MAX_ARGS:
            told = f"{size:,} characters and values, at most {MAX_ARGS:,}"
            raise ServiceError.invalid("judge.args", told)
        sizes = [size_of(item) for item in items]
        end = "gone"
        with self._pending.holding(tenant, sum(sizes)):
            try:
                self.num_items += len(items)
                spec = served.with_args(request.judge.args)
                own = not request.judge.args
                async with self._kept.using(spec, tenant, is_operators=own) as judge:
                    scoring = _Scoring(
                        judge, served.name, self._turns[served.name], tenant, self._metrics
                    )
                    lanes = min(len(items), served.concurrent)
                    pairs = list(zip(items, sizes, strict=True))
                    results = await scoring.all(pairs, lanes, seconds, self._limits.max_chars)
                end = "complete" if all(one.scored for one in results) else "partial"
            except TooManyJudges as error:
                end = "refused"
                told = f"{error}: send it again later"
                raise ServiceError(429, "too_many_judges", told) from None
            except LudusError as error:
                end = "refused"
                raise ServiceError(422, "invalid", _text(str(error))) from error
            except RecursionError:
                end = "refused"
                raise ServiceError.invalid("judge.args", "nested too deeply") from None
            finally:
                self.num_items -= len(items)
                self._metrics.requests.labels(served.name, end).inc()
        return Evaluations(
            judge=served.name, results=results, seconds=round(time.perf_counter() - started, 6)
        )

    def _served(self, request: EvaluationRequest) -> ServedJudge:
        """Errors: ServiceError."""
        served = self._judges.get(request.judge.name)
        if served is None:
            known = ", ".join(sorted(self._judges))
            raise ServiceError.invalid(
                "judge", f"{_text(request.judge.name)[:100]!r} is not served here (served: {known})"
            )
        return served

    def _deadline_s(self, request: EvaluationRequest) -> float:
        """Errors: ServiceError."""
        limits = self._limits
        if request.deadline_s is not None and request.deadline_s > limits.max_deadline_s:
            told = f"{request.deadline_s:g}, at most {limits.max_deadline_s:g} on this service"
            raise ServiceError.invalid("deadline_s", told)
        return limits.deadline_s if request.deadline_s is None else request.deadline_s


@dataclass(frozen=True)
class _Scoring:
    """The scoring of one request's items."""

    judge: Judge
    name: str
    turns: Turns
    tenant: str
    metrics: _Metrics

    async def all(
        self, items: Sequence[tuple[Item, int]], lanes: int, seconds: float, max_chars: int
    ) -> list[Evaluation]:
        """The results in order; `deadline` for those that are not there in time."""
        late = Evaluation(
            status=EvaluationStatus.DEADLINE, error=f"not scored within {seconds:g} s"
        )
        results = [late] * len(items)
        todo = iter(enumerate(items))

        async def lane() -> None:
            for index, (item, size) in todo:
                await asyncio.sleep(0)  # a judge may never wait: other requests and the deadline
                if size > max_chars:
                    told = f"the item has {size:,} characters, at most {max_chars:,} are scored"
                    results[index] = Evaluation(status=EvaluationStatus.UNSCORABLE, error=told)
                else:
                    async with self.turns.turn(self.tenant):
                        results[index] = await self._one(item, index)

        tasks = [asyncio.ensure_future(lane()) for _ in range(lanes)]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=seconds)
        finally:
            running = [task for task in tasks if not task.done()]
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running, timeout=END_S)
        for result in results:
            self.metrics.scores.labels(self.name, result.status).inc()
        return [
            result.model_copy(update={"id": item.id and _text(item.id)})
            for result, (item, _) in zip(results, items, strict=True)
        ]

    async def _one(self, item: Item, index: int) -> Evaluation:
        """The result of an item; an error of the judge is a status."""
        started = time.perf_counter()
        task, trajectory = episode_of(item, index)
        try:
            score = await self.judge(task, trajectory)
            if not math.isfinite(score.value):
                raise Unscorable(f"the judge gave the value {score.value}")
        except Unscorable as error:
            return _without_score(EvaluationStatus.UNSCORABLE, str(error))
        except LudusError as error:
            return _without_score(EvaluationStatus.FAILED, str(error))
        except (Exception, SystemExit) as error:
            told = f"the judge raised {described(error)}"
            log.error("a judge failed", judge=self.name, error=told)
            return _without_score(EvaluationStatus.FAILED, told)
        finally:
            self.metrics.seconds.labels(self.name).observe(time.perf_counter() - started)
        return Evaluation(
            status=EvaluationStatus.SCORED,
            value=score.value,
            success=score.succeeded,
            parts={_text(k): v for k, v in score.parts.items() if math.isfinite(v)},
            explanation=_text(score.explanation),
        )


class _Metrics:
    """Counts and times of a service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "ludus_evaluation_requests",
            "Requests by judge and end: all scored, some, refused, or the client gone",
            ["judge", "end"],
            registry=registry,
        )
        self.scores = Counter(
            "ludus_evaluation_scores",
            "Outputs by judge and status",
            ["judge", "status"],
            registry=registry,
        )
        self.seconds = Histogram(
            "ludus_evaluation_seconds",
            "Time of a judge for an output",
            ["judge"],
            registry=registry,
            buckets=BUCKETS_S,
        )


class _Pending:
    """Characters of the requests under way, by tenant."""

    def __init__(self, share: int) -> None:
        self._share = share
        self._held: Counts[str] = Counts()
        self._requests: Counts[str] = Counts()

    @contextmanager
    def holding(self, tenant: str, chars: int) -> Iterator[None]:
        """Errors: ServiceError 429 above the share; a request alone is always let in."""
        if self._requests[tenant] and self._held[tenant] + chars > self._share:
            raise ServiceError(
                429,
                "too_many_evaluations",
                f"requests of {self._held[tenant]:,} characters are under way, and {self._share:,} "
                "are your share: send it again later",
            )
        self._requests[tenant] += 1
        self._held[tenant] += chars
        try:
            yield
        finally:
            self._requests[tenant] -= 1
            self._held[tenant] -= chars
            if not self._requests[tenant]:
                del self._requests[tenant], self._held[tenant]


def episode_of(item: Item, index: int = 0) -> tuple[Task, Trajectory]:
    """The task and the trajectory that a judge reads."""
    id = item.id or str(index)
    prompt = item.prompt
    if isinstance(prompt, str):
        prompt = [Message(role="user", content=prompt)] if prompt else []
    output = item.output
    if isinstance(output, str):
        output = [Message(role="assistant", content=output)]
    segments = [
        Segment(place - 1, [], [] if message.role == "assistant" else None, message)
        for place, message in enumerate(output)
    ]
    task = Task(id=id, prompt=prompt, answer=item.truth, data=item.data)
    return task, Trajectory(id, id, id, segments)


def size_of(item: Item) -> int:
    """Characters and values of an item: what a judge may have to read."""
    if isinstance(item.output, str) and isinstance(item.truth, str) and not item.data:
        prompt = item.prompt if isinstance(item.prompt, str) else ""
        if not item.prompt or prompt:
            return len(item.output) + len(item.truth) + len(prompt)
    return _size(item.output, item.truth, item.prompt, item.data)


def _size(*values: Any) -> int:
    """Characters and values in nested lists and mappings."""
    size = 0
    waiting: list[Any] = list(values)
    while waiting:
        value = waiting.pop()
        size += 1
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, Message):
            size += len(value.content) + len(value.thinking or "")
            waiting += [call.arguments for call in value.tool_calls]
    return size


def _without_score(status: EvaluationStatus, error: str) -> Evaluation:
    return Evaluation(status=status, error=_text(error))


def _text(text: str) -> str:
    """A text that UTF-8 can hold, of at most MAX_TEXT characters."""
    cut = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."
    return cut.encode("utf-8", "replace").decode()
