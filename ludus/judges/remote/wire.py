"""The wire format of `POST /evaluate`.

{"output": "so \\\\boxed{7}", "truth": "7", "judge": "math"}
{"items": [{"output": ..., "truth": ...}, ...], "judge": {"name": "qa", "args": {"metric": "f1"}}}

-> {"judge": "math", "results": [{"status": "scored", "value": 1.0, "success": true, ...}], ...}
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from ludus.core.errors import ToolError, Unscorable
from ludus.core.types import Message, Score, Spec, Wire

MATH = Spec(name="math")


class EvaluationStatus(StrEnum):
    """Outcome of an output's scoring. Only `scored` has a value."""

    SCORED = "scored"
    UNSCORABLE = "unscorable"  # the judge has no score to give; another attempt does not help
    FAILED = "failed"  # a sandbox, an endpoint or the judge itself failed
    DEADLINE = "deadline"  # not scored in time


class Item(Wire):
    """An output and its ground truth.

    `output` is a text, or the messages from the first sampled one on. `data` holds the task's other
    fields, such as the options of a multiple choice or the tests of a program.
    """

    output: Annotated[str | list[Message], Field(description="A text, or a list of messages.")]
    truth: Annotated[Any, Field(description="The right answer, as the judge reads it.")] = None
    id: Annotated[str | None, Field(max_length=256, description="Comes back with the result.")] = (
        None
    )
    prompt: Annotated[
        str | list[Message], Field(description="The question, for judges that read it.")
    ] = ""
    data: dict[str, Any] = Field(default_factory=dict, description="Other fields of the task.")


class EvaluationRequest(Wire):
    """One output (`output`, `truth`, ...) or many (`items`), for one judge."""

    items: Annotated[
        list[Item] | None,
        Field(description="Outputs to score. An empty list checks the judge alone."),
    ] = None
    output: Annotated[
        str | list[Message] | None, Field(description="One output, in place of `items`.")
    ] = None
    truth: Any = None
    id: Annotated[str | None, Field(max_length=256)] = None
    prompt: str | list[Message] = ""
    data: dict[str, Any] = Field(default_factory=dict)
    judge: Annotated[Spec, Field(description="A name, or name and args.")] = MATH
    deadline_s: Annotated[
        float | None,
        Field(gt=0, allow_inf_nan=False, description="Seconds; null: the service's default."),
    ] = None

    @model_validator(mode="after")
    def _one_form(self) -> EvaluationRequest:
        if self.items is None and self.output is None:
            raise ValueError("give `output` (one output) or `items` (a list of them)")
        if self.items is not None:
            of_one = {"output", "truth", "id", "prompt", "data"} & self.model_fields_set
            if of_one:
                raise ValueError(f"`{min(of_one)}` stands beside `items`: put it into each item")
        return self

    @property
    def all_items(self) -> list[Item]:
        """The items of both forms."""
        if self.items is not None:
            return self.items
        assert self.output is not None
        return [
            Item.model_construct(
                output=self.output,
                truth=self.truth,
                id=self.id,
                prompt=self.prompt,
                data=self.data,
            )
        ]


class Evaluation(BaseModel):
    """The result of an output. `value` and `success` are null unless `status` is `scored`.

    `success` is the judge's word, or else a value of at least 1.
    """

    status: EvaluationStatus
    value: float | None = None
    success: bool | None = None
    parts: dict[str, float] = Field(default_factory=dict)
    explanation: str = ""
    error: str | None = None
    id: str | None = None

    @property
    def scored(self) -> bool:
        return self.status is EvaluationStatus.SCORED

    def score(self) -> Score:
        """The score. Errors: Unscorable; ToolError for `failed` and `deadline`."""
        if self.status is EvaluationStatus.UNSCORABLE:
            raise Unscorable(self.error or "the judge has no score to give")
        if self.value is None or not self.scored:
            raise ToolError(self.error or f"no score: {self.status}")
        return Score(
            value=self.value,
            parts=self.parts,
            explanation=self.explanation,
            success=self.success,
        )


class Evaluations(BaseModel):
    """The results, in the order of the outputs."""

    judge: str
    results: list[Evaluation]
    seconds: float
