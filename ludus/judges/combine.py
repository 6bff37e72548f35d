"""Judges made of judges: weighted sums, and one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from ludus.core.errors import ConfigError, Unscorable, did_you_mean
from ludus.core.types import Score, Spec, Task, Trajectory
from ludus.judges import JUDGES
from ludus.judges.base import Judge, check_all, close_all, refuse_of_steps
from ludus.tools.limits.limiter import Limits


class SumJudge:
    """The weighted sum of several judges' scores, asked at the same time.

        judge:
          name: sum
          args:
            parts: {accuracy: math, length: {name: overlong, args: {max_tokens: 4096, buffer: 512}}}
            weights: {length: 0.5}
            success: accuracy

    Parts: each judge's score before its weight, under its name, and that judge's own parts as
    `NAME/PART`.

    Errors: Unscorable if one of the judges cannot score.
    """

    def __init__(
        self,
        parts: Annotated[dict[str, Spec], Field(min_length=1, description="The judges, by name.")],
        weights: Annotated[
            dict[str, Annotated[float, Field(allow_inf_nan=False)]] | None,
            Field(description="Weights by name; 1 for those that are absent."),
        ] = None,
        success: Annotated[
            str | None,
            Field(description="Name of the judge whose score of 1 is a success; null: the sum's."),
        ] = None,
        limits: Limits | None = None,
    ) -> None:
        for name in [*(weights or {}), *([success] if success else [])]:
            if name not in parts:
                key = "weights" if name in (weights or {}) else "success"
                raise ConfigError(f"{key}: {name!r} is not in `parts`{did_you_mean(name, parts)}")
        self._judges = _build("parts", parts, limits)
        self._weights = {name: (weights or {}).get(name, 1.0) for name in parts}
        self._success = success

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        calls = {name: _ask(name, judge, task, trajectory) for name, judge in self._judges.items()}
        scores = dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
        value = sum(self._weights[name] * score.value for name, score in scores.items())
        success = scores[self._success].succeeded if self._success else None
        return Score(
            value=value, parts=_parts(scores), explanation=_explanation(scores), success=success
        )

    async def check(self) -> None:
        """Check the judges. Errors: ToolError, ConfigError."""
        await check_all(self._judges.values())

    async def close(self) -> None:
        """Close the judges."""
        await close_all(self._judges.values())


class FirstJudge:
    """The first judge that is content decides; a later judge is asked where an earlier one is not.

        judge:
          name: first
          args:
            judges: {rule: math, model: {name: model, args: {base_url: ..., model: ...}}}

    A judge is content if its score is at least `accept`. A lower score, or none, is passed on to
    the next judge, whose word counts: rules miss right answers in an unusual form. With `accept`
    null, only a judge that cannot score is passed over. The last judge decides in any case.

    Parts: the scores of the judges that were asked, under their names, and their own parts as
    `NAME/PART`.

    Errors: Unscorable if the last judge cannot score.
    """

    def __init__(
        self,
        judges: Annotated[
            dict[str, Spec], Field(min_length=1, description="The judges, by name, in order.")
        ],
        accept: Annotated[
            float | None,
            Field(allow_inf_nan=False, description="Score that ends the search; null: any."),
        ] = 1.0,
        limits: Limits | None = None,
    ) -> None:
        self._judges, self._accept = _build("judges", judges, limits), accept

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        asked: dict[str, Score] = {}
        last = list(self._judges)[-1]
        for name, judge in self._judges.items():
            try:
                score = await _ask(name, judge, task, trajectory)
            except Unscorable:
                if name == last:
                    raise
                continue
            asked[name] = score
            if name == last or self._accept is None or score.value >= self._accept:
                break
        return Score(
            value=score.value,
            parts=_parts(asked),
            explanation=_explanation(asked),
            success=score.success,
        )

    async def check(self) -> None:
        """Check the judges. Errors: ToolError, ConfigError."""
        await check_all(self._judges.values())

    async def close(self) -> None:
        """Close the judges."""
        await close_all(self._judges.values())


def _build(key: str, judges: Mapping[str, Spec], limits: Limits | None) -> dict[str, Judge]:
    built = {
        name: JUDGES.build(spec, f"{key}.{name}", limits=limits) for name, spec in judges.items()
    }
    for name, judge in built.items():
        refuse_of_steps(judge, f"{key}.{name}")
    return built


async def _ask(name: str, judge: Judge, task: Task, trajectory: Trajectory) -> Score:
    try:
        return await judge(task, trajectory)
    except Unscorable as error:
        raise Unscorable(f"{name}: {error}") from error


def _parts(scores: Mapping[str, Score]) -> dict[str, float]:
    parts = {name: score.value for name, score in scores.items()}
    own = {f"{name}/{k}": v for name, score in scores.items() for k, v in score.parts.items()}
    return parts | own


def _explanation(scores: Mapping[str, Score]) -> str:
    lines = (f"{name} {score.value:.3g}: {score.explanation}" for name, score in scores.items())
    return "\n".join(line.removesuffix(": ") for line in lines)
