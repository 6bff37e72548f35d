"""Aggregates one route's answers over all worker processes.

Clients do not know about workers, and a connection may reach any of them. The worker that accepts a
request asks the others and answers for all.

Prometheus gets a series per worker, with a label `worker`. A sum would fall when a worker restarts
or is silent, and `rate` reads a falling counter as a reset, so it would count everything twice.
`sum without (worker) (rate(...))` is always right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import JSONResponse, Response

Answers = Mapping[int, bytes | None]
"""Response body by worker; None if the worker did not answer."""

Aggregate = Callable[[Answers], Response]


def health(count: str) -> Aggregate:
    """Aggregate `/health`: the first worker's answer, with the field `count` summed."""

    def aggregate(answers: Answers) -> Response:
        bodies = [json.loads(answer) for answer in answers.values() if answer is not None]
        total = sum(body[count] for body in bodies)
        workers = {"workers": len(answers), "silent_workers": silent(answers)}
        return JSONResponse({**bodies[0], count: total, **workers})

    return aggregate


def metrics(answers: Answers) -> Response:
    """All samples, labelled by worker, and `ludus_worker_up`."""
    return Response(generate_latest(_WorkerMetrics(answers)), media_type=CONTENT_TYPE_LATEST)


def concatenated(key: str) -> Aggregate:
    """Aggregate JSON lists into one, with the largest `key` first."""

    def aggregate(answers: Answers) -> Response:
        items = [item for answer in answers.values() if answer for item in json.loads(answer)]
        missing = ",".join(map(str, silent(answers)))
        headers = {"x-ludus-silent-workers": missing} if missing else {}
        return JSONResponse(sorted(items, key=lambda item: -item[key]), headers=headers)

    return aggregate


def silent(answers: Answers) -> Sequence[int]:
    """Workers that did not answer in time."""
    return sorted(worker for worker, answer in answers.items() if answer is None)


class _WorkerMetrics:
    """A Prometheus collector over the metrics of all workers."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        up = GaugeMetricFamily(
            "ludus_worker_up", "Whether the worker answered in time", labels=["worker"]
        )
        for worker, answer in sorted(self._answers.items()):
            up.add_metric([str(worker)], float(answer is not None))
            for metric in text_string_to_metric_families((answer or b"").decode()):
                target = merged.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type)
                )
                target.samples += [
                    sample._replace(labels={**sample.labels, "worker": str(worker)})
                    for sample in metric.samples
                ]
        return [up, *merged.values()]
