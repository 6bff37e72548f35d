"""The controller's rules, on traffic that is simulated or written by hand."""

from __future__ import annotations

import random
import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import ludus
from ludus.core.errors import ConfigError
from ludus.core.modules import load_module
from ludus.services.model.rollout import controller as rules
from ludus.services.model.rollout.controller import Controller
from ludus.services.model.rollout.events import Decision, Ended, RolloutSettings, Scored, Variant

traffic = load_module(str(Path(ludus.__file__).parents[1] / "benchmarks" / "ab_traffic.py"))
Arm = traffic.Arm

QUICK = RolloutSettings(shares=(0.1, 0.5), min_samples=10, step_s=0.0, max_samples=2000)
A, B = Variant.CHAMPION, Variant.CHALLENGER


class Play:
    """A controller fed by hand: one request a second, of a new session unless one is named."""

    def __init__(self, settings: RolloutSettings = QUICK) -> None:
        self.controller = Controller(settings)
        self.decisions: list[Decision] = [self.controller.start(0.0)]
        self.t = 0.0
        self._numbers = count()

    def request(
        self, variant: Variant, end: Any = "ok", seconds: float = 1.0, unit: str = ""
    ) -> str:
        self.t += 1
        number = next(self._numbers)
        id, unit = f"id-{number}", unit or f"unit-{number}"
        event = Ended(t=self.t, id=id, variant=variant, unit=unit, end=end, seconds=seconds)
        self.decisions += self.controller.apply(event)
        return id

    def score(self, id: str, score: float) -> str:
        event = Scored(t=self.t, id=id, score=score)
        receipt = self.controller.receipt(event)
        self.decisions += self.controller.apply(event)
        return receipt

    def scored(self, variant: Variant, score: float, **request: Any) -> str:
        return self.score(self.request(variant, **request), score)

    @property
    def actions(self) -> list[str]:
        return [decision.action for decision in self.decisions]


def ends_of(
    challenger: Any, num: int = 6000, seeds: int = 10, champion: Any = None, **more: Any
) -> list[Any]:
    settings = more.pop("settings", QUICK)
    arms = (champion or Arm(), challenger)
    return [traffic.simulate(settings, *arms, num, seed, **more) for seed in range(seeds)]


def test_better_challenger_is_promoted_after_all_steps() -> None:
    better = Arm(score=lambda draw: float(draw.random() < 0.7))
    for outcome in ends_of(better):
        assert [d.action for d in outcome.decisions] == ["start", "increase", "promote"]
        assert [d.share for d in outcome.decisions] == [0.1, 0.5, 1.0]
        assert outcome.reason.startswith("quality: difference of scores +0.")
        assert outcome.reason.endswith(", shown to be above 0")


@pytest.mark.parametrize(
    ("challenger", "cause"),
    [
        (Arm(score=lambda draw: float(draw.random() < 0.3)), "quality"),
        (Arm(fail_rate=0.2), "errors"),
        (Arm(fail_rate=1.0), "errors"),
        (Arm(median_s=3.0), "latency"),
    ],
    ids=["quality", "errors", "all fail", "latency"],
)
def test_degraded_challenger_is_rolled_back(challenger: Any, cause: str) -> None:
    for outcome in ends_of(challenger):
        assert (outcome.action, outcome.reason.partition(":")[0]) == ("roll_back", cause)
        assert outcome.decisions[-1].share == 0.0
        assert not re.search(r"by -|-0\.0+\b|--", outcome.reason)


def test_challenger_that_fails_has_few_requests() -> None:
    assert max(outcome.num_challenged for outcome in ends_of(Arm(fail_rate=1.0))) <= 20


def test_degradation_after_long_good_operation_is_noticed() -> None:
    def change(number: int) -> tuple[Any, Any]:
        return Arm(), Arm(fail_rate=0.3 if number > 4000 else 0.0)

    for outcome in ends_of(Arm(), change=change, seeds=5):
        assert outcome.action == "roll_back"
        assert 4000 < outcome.num_requests < 4800


@pytest.mark.slow
def test_equal_challenger_ends_wrongly_in_at_most_5_percent() -> None:
    """200 whole roll-outs: four tests and the step rules, looked at after each event."""
    settings = RolloutSettings(shares=(0.05, 0.25, 0.5), min_samples=20, step_s=60)
    same = Arm(fail_rate=0.02)
    ends = ends_of(same, 3000, 200, same, settings=settings)
    assert sum(outcome.action != "running" for outcome in ends) <= 10


@pytest.mark.slow
def test_alike_scores_of_a_session_do_not_count_as_evidence() -> None:
    """Sessions of ten turns with one mood each: counted one by one, they would mislead."""
    sessions = traffic.Traffic(turns=10, session_spread=1.0)
    ends = ends_of(Arm(), 4000, 100, traffic=sessions)
    assert sum(outcome.action != "running" for outcome in ends) <= 8


def test_margin_lets_an_equal_challenger_through() -> None:
    settings = QUICK.model_copy(update={"margin": 0.2})
    for outcome in ends_of(Arm(), settings=settings):
        assert outcome.action == "promote"
        assert "above -0.2" in outcome.reason


def test_no_answer_ends_with_the_champion() -> None:
    settings = QUICK.model_copy(update={"max_samples": 100})
    for outcome in ends_of(Arm(), settings=settings, seeds=5):
        assert outcome.action == "roll_back"
        assert outcome.reason == "no answer after 100 scored sessions"


def test_same_events_give_the_same_decisions() -> None:
    events: list[Any] = []
    better = Arm(score=lambda draw: float(draw.random() < 0.7))
    outcome = traffic.simulate(QUICK, Arm(), better, 6000, 1, on_event=events.append)
    again = Controller(QUICK)
    decisions = [again.start(0.0)]
    for event in events:
        decisions += again.apply(event)
    assert decisions == outcome.decisions


def test_share_grows_with_scores_and_time() -> None:
    play = Play(RolloutSettings(shares=(0.5, 0.6), min_samples=3, step_s=100))
    for _ in range(4):
        play.scored(B, 0.5)
        play.scored(A, 0.5)
    assert play.actions == ["start"]  # enough scores, not enough time
    play.t = 101.0
    play.request(A)
    assert play.actions == ["start", "increase"]
    play.t = 500.0
    for _ in range(2):
        play.scored(B, 0.5)
    assert play.controller.state()["scored_in_step"] == 2
    assert play.actions == ["start", "increase"]


def test_missing_scores_hold_the_share() -> None:
    play = Play()
    for _ in range(200):
        play.request(A)
        play.request(B)
    assert play.actions == ["start"]
    assert play.controller.share == 0.1
    assert play.controller.state()["variants"]["challenger"]["scores"] == 0


def test_receipts_of_scores() -> None:
    settings = QUICK.model_copy(update={"feedback_s": 10.0})
    play = Play(settings)
    id = play.request(B)
    assert play.score(id, 1.0) == "counted"
    assert play.score(id, 1.0) == "repeated"
    assert play.score(id, 0.5) == "conflict"
    assert play.score("chatcmpl-of-somebody", 1.0) == "unknown"
    assert play.score(play.request(B, "failed"), 1.0) == "unknown"
    late = play.request(A)
    play.t += 11
    assert play.score(late, 1.0) == "late"
    assert play.scored(A, 1.0, unit="one") == "counted"
    assert play.scored(B, 1.0, unit="one") == "same_session"
    assert play.scored(B, 1.0, end="gone") == "counted"
    counts = play.controller.state()["variants"]
    assert counts["challenger"]["scores"] == 3
    assert counts["challenger"]["scored_sessions"] == 2
    assert (counts["challenger"]["failed"], counts["challenger"]["gone"]) == (1, 1)
    assert counts["champion"]["mean_score"] == 1.0


def test_repeated_end_and_clock_set_back_change_nothing() -> None:
    play = Play()
    id = play.request(B)
    before = play.controller.state()
    again = Ended(t=-5.0, id=id, variant=B, unit="x", end="ok", seconds=9.0)
    assert play.controller.apply(again) == []
    assert play.controller.state() == before
    assert play.controller.now == play.t


def test_scores_after_the_end_do_not_count() -> None:
    play = Play()
    waiting = play.request(A)
    scored = play.request(A)
    play.score(scored, 0.5)
    while not play.controller.ended:
        play.request(A)
        play.request(B, "failed")
    assert play.actions[-1] == "roll_back"
    assert play.score(waiting, 1.0) == "ended"
    assert play.score(scored, 0.5) == "repeated"
    assert play.score("unknown", 1.0) == "ended"
    assert play.controller.share == 0.0


def test_both_failing_holds_until_one_recovers() -> None:
    play = Play()
    for _ in range(60):
        play.request(A, "failed")
        play.request(B, "failed")
    assert play.actions == ["start", "hold"]
    assert play.controller.phase == "holding"
    assert play.controller.share == 0.1
    for _ in range(100):
        play.scored(A, 0.5)  # the challenger has had no request since: nothing is known of it
    assert play.actions == ["start", "hold"]
    for _ in range(100):
        play.scored(A, 0.5)
        play.scored(B, 0.5)
    assert play.actions == ["start", "hold", "resume", "increase"]


def test_challenger_that_does_not_recover_is_rolled_back() -> None:
    play = Play()
    for _ in range(30):
        play.request(A, "failed")
        play.request(B, "failed")
    for _ in range(300):
        play.request(A)
        if not play.controller.ended:
            play.request(B, "failed")
    assert play.actions == ["start", "hold", "resume", "roll_back"]


def test_failing_champion_alone_decides_nothing() -> None:
    play = Play()
    for _ in range(200):
        play.request(A, "failed")
        play.request(B)
    assert play.actions == ["start"]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("good", [0, 40])
def test_outage_of_both_is_never_blamed_on_the_challenger(share: float, good: int) -> None:
    """From the first request on, or after good ones; whichever variant has more of the traffic."""
    for seed in range(50):
        draw, play = random.Random(seed), Play(QUICK.model_copy(update={"shares": (share,)}))
        for number in range(good + 1000):
            variant = B if draw.random() < share else A
            play.request(variant, "ok" if number < good or number > good + 200 else "failed")
        assert play.actions in (["start"], ["start", "hold", "resume"])
        assert play.controller.phase == "running"


def test_one_session_that_always_fails_is_no_outage() -> None:
    play = Play()
    for _ in range(50):
        play.request(A)
        play.request(B, "failed", unit="one client")
    assert play.actions == ["start"]
    assert play.controller.state()["variants"]["challenger"]["failed"] == 50


def test_sessions_that_fail_later_are_an_outage() -> None:
    """The first requests of the sessions were good: the window sees the others."""
    play = Play()
    for end in ("ok", "failed"):
        for number in range(40):
            play.request(A, unit=f"a{number}")
            play.request(B, end, unit=f"b{number}")
    assert play.actions == ["start", "roll_back"]
    assert play.decisions[-1].reason == "errors: 20 of 20 requests failed"


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_UNSCORED", 5)
    play = Play()
    ids = [play.request(A) for _ in range(8)]
    assert play.score(ids[2], 1.0) == "unknown"
    assert play.score(ids[3], 1.0) == "counted"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"shares": (0.5, 0.1)}, "--shares 50,10: each share must be larger"),
        ({"shares": (0.1, 0.1)}, "--shares 10,10: each share must be larger"),
        ({"max_samples": 100}, "--max-samples 100: 4 shares of --min-samples 50 need at least 200"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RolloutSettings(**settings).check()
