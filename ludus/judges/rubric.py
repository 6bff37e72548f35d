"""A rubric: a model scores each criterion by itself, and weights add the scores up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from ludus.config import yaml12
from ludus.core.errors import ConfigError, Unscorable, first_fault
from ludus.core.types import Score, Task, Trajectory, Wire
from ludus.judges.model import (
    CASE,
    VERDICT,
    Asker,
    Cache,
    Key,
    Model,
    Parallel,
    Seconds,
    Tokens,
    Url,
    rendered,
    template_of,
)
from ludus.tools.limits.limiter import Limits

PROMPT = (
    CASE
    + """\
# Criteria
{% for criterion in criteria %}- {{ criterion.name }}: {{ criterion.text }}
{% endfor %}
For each criterion, give a score from 0 (not met) to 1 (met) and a short explanation.\
"""
)


class Criterion(Wire):
    """A criterion of a rubric. A negative weight is for a fault, which costs points if met."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    text: Annotated[str, Field(min_length=1)]
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0


_Criteria = TypeAdapter(list[Criterion])


class _File(Wire):
    criteria: list[Criterion]


class RubricJudge:
    """Scores by weighted criteria, each judged by a model.

        criteria:
          - {name: cites, text: names its source, weight: 2}
          - {name: invents, text: states what no source says, weight: -3}

    Criteria may stand in a file, `criteria_file`; `ludus rubric` lets a model write it. A task's
    own criteria, in `data["rubric"]`, replace those of the configuration. The score is
    HealthBench's (Arora et al. 2025, arXiv 2505.08775): sum(weight * score) / sum(positive
    weights), cut to 0..1. Criteria are scored pointwise, from 0 to 1, in one request; the model,
    the retries and the cache are those of the judge `model`.

    Parts: each criterion's score, by its name.

    Errors: Unscorable as in the judge `model`, and for a task's criteria that are wrong.
    """

    def __init__(
        self,
        base_url: Url,
        model: Model,
        criteria: Annotated[
            list[Criterion] | None, Field(description="Name, text and weight of each criterion.")
        ] = None,
        criteria_file: Annotated[
            str | None,
            Field(description="YAML file of `criteria`, such as `ludus rubric` writes."),
        ] = None,
        key_from: Key = None,
        cache: Cache = None,
        parallel: Parallel = 16,
        max_tokens: Tokens = 2048,
        timeout_s: Seconds = 120.0,
        limits: Limits | None = None,
    ) -> None:
        self._asker = Asker(
            base_url, model, key_from, cache, parallel, max_tokens, timeout_s, limits
        )
        self._template = template_of(PROMPT)
        if criteria is not None and criteria_file is not None:
            raise ConfigError("criteria, criteria_file: give one of them")
        if criteria_file is not None:
            criteria = read_criteria(Path(criteria_file).expanduser())
        self._criteria = criteria
        if criteria is not None and (fault := fault_of(criteria)):
            raise ConfigError(f"criteria: {fault}")

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        criteria = self._of(task)
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {c.name: {**VERDICT, "description": c.text} for c in criteria},
            "required": [c.name for c in criteria],
            "additionalProperties": False,
        }
        prompt = rendered(self._template, task, trajectory, criteria=criteria)
        verdict = await self._asker.ask(prompt, schema)
        scores = {c.name: float(verdict[c.name]["score"]) for c in criteria}
        total = sum(c.weight * scores[c.name] for c in criteria)
        best = sum(c.weight for c in criteria if c.weight > 0)
        told = (f"{name} {scores[name]:.3g}: {verdict[name]['explanation']}" for name in scores)
        return Score(
            value=min(max(total / best, 0.0), 1.0), parts=scores, explanation="\n".join(told)
        )

    def _of(self, task: Task) -> list[Criterion]:
        given = task.data.get("rubric")
        if given is None:
            if self._criteria is None:
                raise Unscorable(f"task {task.id} has no rubric, and the judge has no criteria")
            return self._criteria
        try:
            criteria = _Criteria.validate_python(given)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, ("rubric", *first["loc"])))
            raise Unscorable(f"task {task.id}: data.{place}: {first['msg']}") from error
        if fault := fault_of(criteria):
            raise Unscorable(f"task {task.id}: data.rubric: {fault}")
        return criteria


def read_criteria(path: Path) -> list[Criterion]:
    """The criteria of a YAML file. Errors: ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"criteria_file: {str(path)!r} cannot be read: {error}") from None
    content, _ = yaml12.parse(text, f"criteria_file: {str(path)!r}")
    try:
        criteria = _File.model_validate(content).criteria
    except ValidationError as error:
        raise ConfigError(f"criteria_file: {str(path)!r}: {first_fault(error)}") from None
    if fault := fault_of(criteria):
        raise ConfigError(f"criteria_file: {str(path)!r}: {fault}")
    return criteria


def fault_of(criteria: list[Criterion]) -> str | None:
    """Tells of two criteria of one name, and of criteria without a positive weight."""
    names = [criterion.name for criterion in criteria]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        return f"two criteria have the name {twice[0]!r}"
    if not any(criterion.weight > 0 for criterion in criteria):
        return "at least one weight has to be positive"
    return None
