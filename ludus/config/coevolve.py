"""The recipe of a co-evolution: two roles that train in turns, and the questions between them.

A role is the recipe of a run (`schema.RunConfig`) without the keys that the flow sets:

    shared       keys of both roles' runs, and of `start`; a role's own keys come over them
    start        a first run, whose model both roles start from (a cold start by SFT); or null
    curriculum   the run that trains the agent that proposes problems
    executor     the run that trains the agent that solves them; its held-out tasks are evaluated

Nested mappings are merged; a plug-in (a mapping with `name`) is replaced whole.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from ludus.config.sections import Section


class AnswersConfig(Section):
    """The executor's answers to a proposed problem, for the reward and for the filter."""

    number: int = Field(10, ge=2, le=1000, description="Answers to each problem (k).")
    temperature: float = Field(0.7, gt=0, description="Sampling temperature of the answers.")
    top_p: float = Field(0.9, gt=0, le=1, description="Nucleus sampling of the answers.")
    max_turns: int | None = Field(
        None, ge=1, description="Most turns of an answer; null: as in the executor's training."
    )
    max_tokens_per_turn: int | None = Field(
        None, ge=1, description="Most tokens of a turn; null: as in the executor's training."
    )


class QuestionsConfig(Section):
    """The problems that the trained curriculum agent proposes, and those that are kept."""

    proposals: int = Field(8000, ge=1, le=10_000_000, description="Proposals of each iteration.")
    min_consistency: float = Field(
        0.25, ge=0, le=1, description="Least p of a kept problem: the share of the majority."
    )
    max_consistency: float = Field(0.75, ge=0, le=1, description="Largest p of a kept problem.")
    ties: Literal["keep", "drop"] = Field(
        "keep",
        description="Problems with several largest classes: the first is the label, or none.",
    )
    max_problems: int | None = Field(
        None, ge=1, description="Most problems of an iteration, the first ones; null: all."
    )
    chunk: int = Field(
        512,
        ge=1,
        description="Problems between two writes to the disk: a kill loses at most these.",
    )

    @model_validator(mode="after")
    def _band(self) -> QuestionsConfig:
        if self.min_consistency > self.max_consistency:
            raise ValueError("`min_consistency` must not exceed `max_consistency`")
        return self


class FrontierConfig(Section):
    """Plays each iteration's problems with the executor of the first iteration."""

    num_tasks: int = Field(200, ge=0, description="Problems of an iteration; 0: none.")


class CoevolveConfig(Section):
    """A co-evolution: the curriculum agent and the executor agent train in turns."""

    name: str = Field(
        "coevolve", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the co-evolution."
    )
    seed: int = Field(0, ge=0, description="Seed of all random numbers of all stages.")
    iterations: int = Field(3, ge=1, le=1000, description="Iterations of both roles.")
    storage: str = Field("coevolve", description="Folder with a folder for each co-evolution.")
    side_by_side: bool = Field(
        False,
        description="Train the curriculum agent of the next iteration, in a second process, while "
        "the executor trains; it is then rewarded by the executor of one iteration earlier.",
    )
    shared: dict[str, Any] = Field(
        default_factory=dict, description="Keys of `start`, `curriculum` and `executor`."
    )
    start: dict[str, Any] | None = Field(
        None, description="The run whose model both roles start from; null: their own `model`."
    )
    curriculum: dict[str, Any] = Field(
        description="The run of the curriculum agent; `rl: null` keeps the agent as it starts."
    )
    executor: dict[str, Any] = Field(description="The run of the executor agent.")
    answers: AnswersConfig = Field(
        default_factory=AnswersConfig, description="The executor's answers to proposed problems."
    )
    reward: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the judge `curriculum`: the weights of the reward.",
    )
    questions: QuestionsConfig = Field(
        default_factory=QuestionsConfig, description="Generated problems, and the filter."
    )
    frontier: FrontierConfig = Field(
        default_factory=FrontierConfig, description="The first executor on later problems."
    )
