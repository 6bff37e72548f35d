"""Rewards of a kernel: named parts by default; Kevin's and a ladder as alternatives.

    reward = KernelReward()                              {"kind": "parts"}
    scored = reward.score(measured)                      Scored(value, parts, explanation)

    parts    compilation 0.30, correctness 0.30, performance 0.25, efficiency 0.10, quality 0.05,
             and bonuses; a part that is not measured is left out, and the others share its weight
    kevin    0.3 * correct + speed-up * correct (Baronio et al. 2025, arXiv:2507.11948)
    ladder   -0.5 does not compile, -0.3 wrong, -0.1 slower, then 0.2 to 1.0 by the speed-up

A speed-up is measured on a GPU or it is absent: no value stands in for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field, field_validator, model_validator

from ludus.config.sections import Section
from ludus.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of a kernel that its reward depends on.

    `speedup` None: it was not timed. `efficiency` and `quality`: 0 to 1, of a right kernel.
    `decoy`: it was refused, as a kernel that cheats is. `unbelieved`: it was timed, and the time is
    not believed.
    """

    compiles: bool
    correct: bool
    speedup: float | None = None
    efficiency: float = 0.0
    quality: float = 0.0
    decoy: bool = False
    unbelieved: bool = False


@dataclass(frozen=True, slots=True)
class Scored:
    """The value, the same without bonuses (`base`), the named parts before their weights, and how
    they add up."""

    value: float
    base: float
    parts: Mapping[str, float] = field(default_factory=dict)
    explanation: str = ""


MAX_NUMBER = 1e6
UNBELIEVED = "no speed-up: the time is not believed"
OF_WEIGHT = {
    "performance": {"full_speedup"},
    "efficiency": {"occupancy", "spills", "patterns", "spill_bytes", "pattern_cost"},
    "spills": {"spill_bytes"},
    "patterns": {"pattern_cost"},
    "speedup_bonus": {"speedup_bonus_at"},
}
"""Numbers that have no effect where a weight is 0."""


class Parts(Section):
    """Weights of the named parts, bonuses, and the numbers behind performance and efficiency."""

    compilation: float = Field(0.30, ge=0, description="Weight: it compiles, and can be launched.")
    correctness: float = Field(
        0.30, gt=0, description="Weight: the values of all trials are right."
    )
    performance: float = Field(0.25, ge=0, description="Weight: the speed-up, where it is timed.")
    efficiency: float = Field(0.10, ge=0, description="Weight: occupancy, spills, slow patterns.")
    quality: float = Field(0.05, ge=0, description="Weight: no findings of risk.")
    full_speedup: float = Field(2.0, gt=0, description="Speed-up with all of performance's weight.")
    occupancy: float = Field(0.5, ge=0, description="Weight of the occupancy in efficiency.")
    spills: float = Field(0.25, ge=0, description="Weight of spilled registers in efficiency.")
    patterns: float = Field(0.25, ge=0, description="Weight of slow patterns in efficiency.")
    spill_bytes: int = Field(256, ge=1, description="Spilled bytes that leave nothing of `spills`.")
    pattern_cost: float = Field(0.25, ge=0, le=1, description="Part of `patterns` that each costs.")
    speedup_bonus: float = Field(0.1, ge=0, description="Added at a speed-up of speedup_bonus_at.")
    speedup_bonus_at: float = Field(2.0, gt=0, description="Speed-up from which it is added.")
    improvement_bonus: float = Field(
        0.1,
        ge=0,
        description="Added: this times what a later right kernel adds to the best right one.",
    )

    @model_validator(mode="after")
    def _has_weight(self) -> Parts:
        for name in type(self).model_fields:
            if not getattr(self, name) <= MAX_NUMBER:
                raise ValueError(f"{name} is at most {MAX_NUMBER:g}")
        if not self.occupancy + self.spills + self.patterns > 0:
            raise ValueError("occupancy, spills and patterns cannot all be 0")
        for weight, numbers in OF_WEIGHT.items():
            for name in sorted(numbers & self.model_fields_set):
                if getattr(self, weight) == 0 and getattr(self, name) != 0:
                    raise ValueError(f"{name} has no effect with {weight}: 0")
        return self


class Kevin(Section):
    """S = correct * (0.3 + speed-up)."""

    correct: float = Field(0.3, gt=0, description="Value of a right kernel.")
    speedup: float = Field(1.0, ge=0, description="Weight of its speed-up, where it is timed.")
    max_speedup: float = Field(10.0, gt=0, description="Larger speed-ups count as this.")


class Ladder(Section):
    """Steps by the speed-up."""

    compile_failure: float = Field(-0.5, description="It does not compile, or has no launch.")
    wrong: float = Field(-0.3, description="It compiles, and its values are wrong.")
    slower: float = Field(-0.1, description="It is right, and slower than the first step.")
    decoy: float = Field(-1.0, description="It was refused: it does what a kernel must not do.")
    steps: dict[float, float] = Field(
        default={1.0: 0.2, 1.2: 0.4, 1.5: 0.6, 2.0: 0.8, 3.0: 1.0},
        min_length=1,
        description="Speed-up: value from this speed-up on.",
    )

    @field_validator("steps")
    @classmethod
    def _rising(cls, steps: dict[float, float]) -> dict[float, float]:
        ordered = dict(sorted(steps.items()))
        if min(ordered) <= 0 or list(ordered.values()) != sorted(ordered.values()):
            raise ValueError("a higher speed-up, above 0, cannot have a lower value")
        return ordered

    @model_validator(mode="after")
    def _wrong_below_right(self) -> Ladder:
        if not max(self.compile_failure, self.wrong, self.decoy) < self.slower:
            raise ValueError("slower, the value of a right kernel, has to be above all failures")
        if self.slower > min(self.steps.values()):
            raise ValueError("slower cannot be above the first of steps")
        return self


class KernelReward(Section):
    """A kind of reward with its numbers."""

    kind: Literal["parts", "kevin", "ladder"] = Field("parts", description="Form of the reward.")
    parts: Parts = Field(default_factory=Parts, description="Of the kind `parts`.")
    kevin: Kevin = Field(default_factory=Kevin, description="Of the kind `kevin`.")
    ladder: Ladder = Field(default_factory=Ladder, description="Of the kind `ladder`.")

    @model_validator(mode="after")
    def _own_numbers(self) -> KernelReward:
        for name in ("parts", "kevin", "ladder"):
            if name in self.model_fields_set and name != self.kind:
                raise ValueError(f"{name} has no effect with kind: {self.kind}")
        return self

    def check(self, *, timed: bool, asked: bool, rounds: int) -> None:
        """Refuse numbers without an effect. `asked`: kernels are timed where there is a GPU.

        Errors: ConfigError.
        """
        if rounds == 1 and "improvement_bonus" in self.parts.model_fields_set:
            raise ConfigError(
                "reward: parts.improvement_bonus is for later turns: set rounds, or remove it"
            )
        if timed:
            return
        if self.kind == "ladder":
            raise ConfigError(
                "reward: the ladder is one of speed-ups, and nothing is timed here: set timing: "
                "gpu on a machine with a GPU, or another kind"
            )
        if asked:
            return
        numbers: Parts | Kevin = self.parts if self.kind == "parts" else self.kevin
        of_time = {"performance", "full_speedup", "speedup_bonus", "speedup_bonus_at"}
        of_time |= {"speedup", "max_speedup"}
        if without := sorted(of_time & numbers.model_fields_set):
            raise ConfigError(
                f"reward: {self.kind}.{without[0]} has no effect: nothing is timed (timing: off)"
            )

    def score_range(self, *, timed: bool, rounds: int) -> tuple[float, float]:
        """The lowest and the highest value of a kernel."""
        if self.kind == "ladder":
            numbers = self.ladder
            low = min(numbers.compile_failure, numbers.wrong, numbers.decoy)
            return low, max(numbers.steps.values())
        if self.kind == "kevin":
            own = self.kevin
            return 0.0, own.correct + own.speedup * own.max_speedup * timed
        bonus = self.parts.improvement_bonus * (rounds > 1) + self.parts.speedup_bonus * timed
        return 0.0, 1.0 + bonus

    def success_at(self, *, timed: bool) -> float:
        """The value from which a kernel is right."""
        if self.kind == "ladder":
            return self.ladder.slower
        if self.kind == "kevin":
            return self.kevin.correct
        weights = self._weights(timed)
        return (weights["compilation"] + weights["correctness"]) / sum(weights.values()) - 1e-9

    def score(self, measured: Measured, *, timed: bool, best: float | None = None) -> Scored:
        """The value of a kernel. `best`: the highest `base` of the earlier right kernels; None:
        there is none, so nothing to improve on."""
        if self.kind == "kevin":
            return self._kevin(measured)
        if self.kind == "ladder":
            return self._ladder(measured)
        return self._parts(measured, timed, best)

    def _weights(self, timed: bool) -> dict[str, float]:
        names = ("compilation", "correctness", "performance", "efficiency", "quality")
        weights = {name: float(getattr(self.parts, name)) for name in names}
        if not timed:
            del weights["performance"]
        return weights

    def _parts(self, measured: Measured, timed: bool, best: float | None) -> Scored:
        numbers, right = self.parts, measured.correct
        weights = self._weights(timed)
        parts = {"compilation": float(measured.compiles), "correctness": float(right)}
        if timed:
            speedup = measured.speedup or 0.0
            parts["performance"] = min(speedup / numbers.full_speedup, 1.0) * right
        parts["efficiency"] = measured.efficiency * right
        parts["quality"] = measured.quality * right
        total = sum(weights.values())
        base = sum(weights[name] * parts[name] for name in weights) / total
        told = " + ".join(f"{w:g} * {parts[name]:.3g} {name}" for name, w in weights.items())
        if abs(total - 1.0) > 1e-9:
            told = f"({told}) / {total:g}"
        if not timed:
            told += "; performance is left out: nothing was timed"
        elif measured.unbelieved:
            told += f"; {UNBELIEVED}"
        bonuses = {}
        if timed and right and (measured.speedup or 0.0) >= numbers.speedup_bonus_at:
            bonuses["speedup_bonus"] = numbers.speedup_bonus
        if right and best is not None and base > best:
            bonuses["improvement_bonus"] = numbers.improvement_bonus * (base - best)
        told += "".join(f"; {value:+.3g} {name}" for name, value in bonuses.items())
        value = base + sum(bonuses.values())
        return Scored(value, base, {**parts, **bonuses}, f"{told}; together {value:.3g}")

    def _kevin(self, measured: Measured) -> Scored:
        numbers, correct = self.kevin, float(measured.correct)
        parts = {"correctness": correct}
        told = f"{numbers.correct:g} * {correct:g} correct"
        value = numbers.correct * correct
        if measured.speedup is not None:
            counted = min(measured.speedup, numbers.max_speedup)
            parts["speedup"] = measured.speedup
            value += numbers.speedup * counted * correct
            told += f" + {numbers.speedup:g} * {counted:.3g} speed-up * {correct:g}"
        elif measured.correct:
            told += f"; {UNBELIEVED if measured.unbelieved else 'no speed-up: nothing was timed'}"
        return Scored(value, value, parts, f"{told}; together {value:.3g}")

    def _ladder(self, measured: Measured) -> Scored:
        numbers = self.ladder
        if measured.decoy:
            value, told = numbers.decoy, "refused"
        elif not measured.compiles:
            value, told = numbers.compile_failure, "does not compile"
        elif not measured.correct:
            value, told = numbers.wrong, "wrong"
        else:
            speedup = measured.speedup or 0.0
            reached = [step for step in numbers.steps if speedup >= step]
            value = numbers.steps[max(reached)] if reached else numbers.slower
            told = f"right, speed-up {speedup:.3g}"
            if measured.unbelieved:
                told = f"right, {UNBELIEVED}"
        parts = {"compilation": float(measured.compiles), "correctness": float(measured.correct)}
        if measured.speedup is not None:
            parts["speedup"] = measured.speedup
        return Scored(value, value, parts, f"{told}: {value:g}")
