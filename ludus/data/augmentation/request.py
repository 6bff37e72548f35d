"""Settings of an augmentation, and its seed tasks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.core.errors import ConfigError, DataError
from ludus.core.types import Spec, Task
from ludus.judges.proposals.parse import Proposal, parse_proposal
from ludus.tasks.readers import read_tasks


@dataclass(frozen=True, slots=True)
class Seed:
    """A seed task: its id, and its question and answer as texts."""

    id: str
    question: str
    answer: str

    @property
    def form(self) -> str:
        """The seed in the form in which the model writes a task."""
        return f"<question>{self.question}</question>\n\\boxed{{{self.answer}}}"


@dataclass(frozen=True, slots=True)
class Model:
    """A model at an endpoint."""

    name: str
    base_url: str
    api_key: str | None = None
    temperature: float = 1.0
    max_tokens: int = 1024


@dataclass(frozen=True, slots=True)
class Solver:
    """A model that attempts each new task, `attempts` times, and the band of solved attempts in
    which a task is kept."""

    model: Model
    attempts: int
    system_prompt: str | None = None
    min_solved: float = 0.2
    max_solved: float = 0.8

    def __post_init__(self) -> None:
        if self.min_solved > self.max_solved:
            raise ConfigError(
                f"--min-solved {self.min_solved:g} is above --max-solved {self.max_solved:g}"
            )


@dataclass(frozen=True, slots=True)
class AugmentRequest:
    """The settings of an augmentation."""

    seeds: Sequence[Seed]
    model: Model
    judge: Spec
    num_tasks: int = 100
    max_requests: int = 1000
    shots: int = 3
    instructions: str | None = None
    max_similarity: float = 0.6
    solver: Solver | None = None
    seed: int = 0
    concurrency: int = 16

    def settings(self) -> dict[str, Any]:
        """The settings that the model's texts depend on; the same for all requests of a folder."""
        seeds = json.dumps([[s.id, s.question, s.answer] for s in self.seeds])
        solver, model = self.solver, self.model
        solving: dict[str, Any] = {"solver": None}
        if solver is not None:
            solving = {
                "solver": solver.model.name,
                "solver_temperature": solver.model.temperature,
                "solver_max_tokens": solver.model.max_tokens,
                "solver_prompt": solver.system_prompt,
            }
        return {
            "seeds": hashlib.sha256(seeds.encode()).hexdigest()[:32],
            "model": model.name,
            "temperature": model.temperature,
            "max_tokens": model.max_tokens,
            "shots": self.shots,
            "instructions": self.instructions,
            "judge": self.judge.model_dump(),
            "seed": self.seed,
            **solving,
        }

    def selection(self) -> dict[str, Any]:
        """The settings that only choose among the texts; another run may change them."""
        solver = self.solver
        band: dict[str, Any] = {}
        if solver is not None:
            band = {
                "attempts": solver.attempts,
                "min_solved": solver.min_solved,
                "max_solved": solver.max_solved,
            }
        return {
            "num_tasks": self.num_tasks,
            "max_requests": self.max_requests,
            "max_similarity": self.max_similarity,
            "num_seeds": len(self.seeds),
            **band,
        }


def read_seeds(
    path: Path, prompt: str = "prompt", answer: str = "answer", limit: int | None = None
) -> list[Seed]:
    """The seed tasks of a file of JSON lines. Errors: ConfigError, DataError with the line."""
    args: dict[str, Any] = {"path": str(path), "prompt": prompt, "answer": answer, "limit": limit}
    tasks = read_tasks(Spec(name="json", args={k: v for k, v in args.items() if v is not None}))
    return [_seed(task, tasks.rows, path) for task in tasks]


def _seed(task: Task, rows: dict[str, int], path: Path) -> Seed:
    said = [message.content for message in task.prompt if message.role == "user"]
    answers = task.answer if isinstance(task.answer, list) else [task.answer]
    answer = answers[0] if answers else None
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DataError(
            f"{path}:{rows[task.id]}: the answer must be a text or a number, got {answer!r:.60}"
        )
    seed = Seed(task.id, "\n\n".join(said).strip(), str(answer).strip())
    read = parse_proposal(seed.form)
    if read != Proposal(seed.question, seed.answer):
        reason = "it is read otherwise" if isinstance(read, Proposal) else read.reason
        raise DataError(
            f"{path}:{rows[task.id]}: cannot be shown to the model as <question>...</question> "
            f"\\boxed{{answer}}: {reason}"
        )
    return seed
