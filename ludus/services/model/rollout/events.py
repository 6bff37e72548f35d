"""Settings, events and decisions of a roll-out: the lines of its log.

    {"kind": "rollout", "format": 1, "champion": "a", "challenger": "b", "settings": {...}, ...}
    {"kind": "ended", "t": 12.5, "id": "chatcmpl-...", "variant": "challenger", "unit": "9f2c...",
     "end": "ok", "seconds": 0.8}
    {"kind": "scored", "t": 19.0, "id": "chatcmpl-...", "score": 1.0}
    {"kind": "decision", "t": 19.0, "action": "increase", "share": 0.1, "reason": "...", ...}

`t` is Unix time in seconds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ludus.core.errors import ConfigError

FORMAT = 1

FIRST_TIME, LAST_TIME = -62_135_596_800.0, 253_402_300_799.0
"""Years 1 to 9999: others have no date."""

MIN_SHARE, MIN_ALPHA = 0.0001, 1e-9
"""Of new roll-outs: less has no effect. Logs may have less, and replay all the same."""

SHARES_TAKEN = (
    f"from 1 to 100 shares, each from {100 * MIN_SHARE:g} to {100 - 100 * MIN_SHARE:g} (%)"
)

Time = Annotated[float, Field(ge=FIRST_TIME, le=LAST_TIME, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]


class Variant(StrEnum):
    """Champion: the model that is served. Challenger: the model that may replace it."""

    CHAMPION = "champion"
    CHALLENGER = "challenger"


class Line(BaseModel):
    """A line of the log."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RolloutSettings(Line):
    """Rules for the increase and the end of a roll-out.

    shares: the challenger's share of the traffic, step by step.
    min_samples: scored units of the challenger before the next step.
    step_s: seconds that a share lasts at least.
    max_samples: scored units of the challenger after which the roll-out ends without an answer.
    alpha: probability that a challenger which is as good ends with a wrong decision.
    margin: the challenger may be worse by so much: it has to be better than champion - margin.
    max_error_increase: the challenger's share of failed requests may be higher by so much.
    max_latency_ratio: its requests may take longer by this factor.
    feedback_s: seconds after the end of a request in which its score counts.
    answer_s: seconds in which an answer has to be whole; later, the request has failed.
    """

    shares: tuple[Share, ...] = Field((0.05, 0.1, 0.25, 0.5), min_length=1, max_length=100)
    min_samples: int = Field(50, ge=1, le=10**6)
    step_s: float = Field(300.0, ge=0, allow_inf_nan=False)
    max_samples: int = Field(10_000, ge=1, le=10**6)
    alpha: float = Field(0.05, gt=0, le=0.5, allow_inf_nan=False)
    margin: float = Field(0.0, ge=0, lt=1, allow_inf_nan=False)
    max_error_increase: float = Field(0.01, ge=0, lt=1, allow_inf_nan=False)
    max_latency_ratio: float = Field(1.5, ge=1, allow_inf_nan=False)
    feedback_s: float = Field(86_400.0, gt=0, allow_inf_nan=False)
    answer_s: float = Field(300.0, gt=0, allow_inf_nan=False)

    def check(self) -> None:
        """Errors: ConfigError for shares that do not increase, or values that cannot work."""
        if min(self.shares) < MIN_SHARE or max(self.shares) > 1 - MIN_SHARE:
            raise ConfigError(f"--shares {self._percent()}: {SHARES_TAKEN}")
        pairs = zip(self.shares, self.shares[1:], strict=False)
        if any(first >= second for first, second in pairs):
            raise ConfigError(
                f"--shares {self._percent()}: each share must be larger than the one before"
            )
        if self.alpha < MIN_ALPHA:
            raise ConfigError(
                f"--alpha {self.alpha:g}: from {MIN_ALPHA:g} to 0.5; with less, nothing is decided"
            )
        if self.max_samples < self.min_samples * len(self.shares):
            raise ConfigError(
                f"--max-samples {self.max_samples}: {len(self.shares)} shares of --min-samples "
                f"{self.min_samples} need at least {self.min_samples * len(self.shares)}"
            )

    def _percent(self) -> str:
        return ",".join(f"{100 * share:g}" for share in self.shares)


class Header(Line):
    """The first line of a log. `salt`: of the hash that splits the traffic."""

    kind: Literal["rollout"] = "rollout"
    format: int
    t: Time
    champion: str
    challenger: str
    salt: str
    settings: RolloutSettings


class Ended(Line):
    """A request has ended. `unit`: hash of its session's key; `gone`: its client disconnected."""

    kind: Literal["ended"] = "ended"
    t: Time
    id: str
    variant: Variant
    unit: str
    end: Literal["ok", "failed", "gone"]
    seconds: float = Field(ge=0, allow_inf_nan=False)


class Scored(Line):
    """A client has scored an answer."""

    kind: Literal["scored"] = "scored"
    t: Time
    id: str
    score: float = Field(ge=0, le=1, allow_inf_nan=False)


Action = Literal["start", "increase", "hold", "resume", "promote", "roll_back"]


class Decision(Line):
    """A decision; `share` is the challenger's from now on."""

    kind: Literal["decision"] = "decision"
    t: Time
    action: Action
    share: float
    reason: str


Event = Ended | Scored
