"""What speaks for all worker processes: `/health`, `/metrics` and the list of rollouts.

Whoever asks knows nothing of workers, and a connection reaches any of them; so the one that accepts
it asks the others for theirs, and answers for all.

Counts are added up for `/health`, lists are joined. Prometheus gets each worker's series apart,
with a label `worker`: a sum would fall whenever a worker is started anew or is silent, and `rate`
takes a counter that falls for one that began again at 0 and counts all of it once more.
`sum without (worker) (rate(...))` is right at all times.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from starlette.responses import JSONResponse, Response

Answers = Mapping[int, bytes | None]
"""The body of each worker's answer, by its number; None where it gave none."""


def health(answers: Answers) -> Response:
    """The first answer, with the sessions of all."""
    told = [json.loads(answer) for answer in answers.values() if answer is not None]
    sessions = sum(each["sessions"] for each in told)
    whole = {"workers": len(answers), "silent_workers": silent(answers)}
    return JSONResponse({**told[0], "sessions": sessions, **whole})


def metrics(answers: Answers) -> Response:
    """All samples, each with its worker, and which of the workers answered."""
    return Response(generate_latest(_Joined(answers)), media_type=CONTENT_TYPE_LATEST)


def rollouts(answers: Answers) -> Response:
    """All batches, the oldest first."""
    told = [batch for answer in answers.values() if answer for batch in json.loads(answer)]
    missing = ",".join(map(str, silent(answers)))
    headers = {"x-ludus-silent-workers": missing} if missing else {}
    return JSONResponse(sorted(told, key=lambda b: -b["seconds"]), headers=headers)


JOINED: Mapping[str, Callable[[Answers], Response]] = {
    "/health": health,
    "/metrics": metrics,
    "/rollouts": rollouts,
}
"""The paths whose GET speaks for all."""


def silent(answers: Answers) -> Sequence[int]:
    """The workers that did not answer in time."""
    return sorted(worker for worker, answer in answers.items() if answer is None)


class _Joined:
    """The metrics of all workers, as a collector of Prometheus' library."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def collect(self) -> Iterable[Metric]:
        joined: dict[str, Metric] = {}
        answered = GaugeMetricFamily(
            "ludus_worker_up", "Whether the worker answered in time", labels=["worker"]
        )
        for worker, answer in sorted(self._answers.items()):
            answered.add_metric([str(worker)], float(answer is not None))
            for metric in text_string_to_metric_families((answer or b"").decode()):
                whole = joined.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type)
                )
                whole.samples += [_of(worker, sample) for sample in metric.samples]
        return [answered, *joined.values()]


def _of(worker: int, sample: Sample) -> Sample:
    return sample._replace(labels={**sample.labels, "worker": str(worker)})
