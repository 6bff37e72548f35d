"""Metrics of a roll-out, by variant. They count from the start of the service."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ludus.services.model.rollout.controller import Controller
from ludus.services.server.app import BUCKETS_S

SCORE_BUCKETS = tuple(step / 10 for step in range(11))


class RolloutMetrics:
    """The collectors; the service counts with them."""

    def __init__(
        self, registry: CollectorRegistry, share: Callable[[], float], controller: Controller
    ) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ludus_rollout_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"ludus_rollout_{name}", text, ["variant"], registry=registry, buckets=buckets
            )

        self.requests = counter("requests", "Requests by variant and end", "variant", "end")
        self.seconds = histogram("seconds", "Time to a whole answer", BUCKETS_S)
        self.scores = histogram("score", "Scores of answers", SCORE_BUCKETS)
        self.feedback = counter("feedback", "Calls of /feedback by receipt", "receipt")
        self.decisions = counter("decisions", "Decisions, those of earlier starts too", "action")
        gauge = Gauge("ludus_rollout_share", "Challenger's share of traffic", registry=registry)
        gauge.set_function(share)
        p_value = Gauge(
            "ludus_rollout_p_value",
            "Always-valid p-value, adjusted for the number of tests",
            ["test"],
            registry=registry,
        )
        for test in controller.evidence():
            p_value.labels(test).set_function(lambda test=test: controller.evidence()[test])
