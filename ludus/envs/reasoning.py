"""reasoning-gym: procedurally generated single-turn tasks with verifiers (Stojanovski et al. 2025,
arXiv:2505.24760).

    user        State the final answer to the following arithmetic problem: 6 + 4 =
    assistant   <answer>10</answer>
    user        correct.

The answer is the content of the last `<answer>...</answer>`, or else the whole text. The score is
the library's: 1 for a correct answer; some data sets give partial scores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Annotated, Any, ClassVar

import reasoning_gym
from pydantic import Field
from reasoning_gym.factory import CURRICULA, DATASETS

from ludus.core.errors import ConfigError, EnvError, did_you_mean
from ludus.core.types import Message, Observation, StepResult, Task
from ludus.envs.actions import OneTool, tool_spec
from ludus.envs.actions import answer as reply_to
from ludus.envs.base import NoExpert
from ludus.envs.reasoning_steps import STEPS

NO_ANSWER = "its tasks have no reference answer"
EXECUTES = "its verifier executes the answer as a program, without limits"
UNSTEADY = "the same seed gives different tasks in different processes"

REFUSED = {
    "bf": "it prints to standard output",
    "boxnet": NO_ANSWER,
    "codeio": "it runs programs that use the global random generator",
    "composite": "it combines other data sets; name those instead",
    "game_of_life_halting": "its verifier gives any text the full score if the answer is no",
    "graph_color": NO_ANSWER,
    "intermediate_integration": EXECUTES,
    "isomorphic_strings": UNSTEADY,
    "knight_swap": UNSTEADY,
    "list_functions": "it uses the global random generator",
    "polynomial_multiplication": EXECUTES,
    "pool_matrix": "it seeds NumPy's global random generator",
    "propositional_logic": NO_ANSWER,
    "ransom_note": UNSTEADY,
    "rubiks_cube": NO_ANSWER,
    "rush_hour": NO_ANSWER,
    "simple_integration": EXECUTES,
    "sokoban": "some of its boards take longer than 15 seconds to generate",
    "word_ladder": UNSTEADY,
}
"""Data sets of the library (0.1.25) that are refused, with reasons."""

ARITHMETIC = re.compile(r"(?:[\d\s+\-/()]|(?<!\*)\*(?!\*)){0,200}")
LISTS = re.compile(r"[A-Za-z0-9\s,'\"\[\]#-]{0,4000}")
QUEENS = re.compile(r"[Q_\s,'\"\[\]]{0,4000}")
EVALUATED = {
    "binary_matrix": LISTS,
    "countdown": ARITHMETIC,
    "n_queens": QUEENS,
    "puzzle24": ARITHMETIC,
    "spiral_matrix": LISTS,
    "string_insertion": LISTS,
}
"""Data sets whose verifiers call Python's `eval` on the answer. Only answers made of these
characters reach them, which cannot express calls, attributes or powers."""

EXPRESSIONS = {"basic_arithmetic", "chain_sum", "products"}
"""Data sets whose question is an expression of Python."""

READS_TEXTS = {
    "arc_1d",
    "arc_agi",
    "emoji_mystery",
    "group_anagrams",
    "letter_counting",
    "letter_jumble",
    "needle_haystack",
    "sentence_reordering",
    "spell_backward",
    "word_sequence_reversal",
    "word_sorting",
}
"""Data sets that read texts or grids when they are made, in 5 to 1,500 ms, and whose entry depends
on seed + index alone: one of each is made, and its entry number `seed` is the task of that seed."""

QUICK = {
    "ab",
    "acre",
    "aiw",
    "arc_1d",
    "base_conversion",
    "basic_arithmetic",
    "binary_alternation",
    "caesar_cipher",
    "chain_sum",
    "circuit_logic",
    "count_bits",
    "count_primes",
    "course_schedule",
    "decimal_chain_sum",
    "dice",
    "emoji_mystery",
    "family_relationships",
    "gcd",
    "largest_island",
    "lcm",
    "leg_counting",
    "letter_counting",
    "letter_jumble",
    "maze",
    "modulo_grid",
    "needle_haystack",
    "number_filtering",
    "number_format",
    "number_sequence",
    "number_sorting",
    "path_star",
    "products",
    "rotate_matrix",
    "rotten_oranges",
    "self_reference",
    "sentence_reordering",
    "simple_equations",
    "simple_geometry",
    "spell_backward",
    "string_manipulation",
    "string_splitting",
    "string_synthesis",
    "syllogism",
    "word_sequence_reversal",
    "word_sorting",
}
"""Data sets whose tasks, at the library's difficulty, are made in less than 2 ms (an AMD EPYC, 60
seeds), and whose verifiers compare texts, lists or decimal numbers, in as little for 20,000
characters: no worker thread is needed."""

Level = Annotated[int, Field(ge=0)]

LONGEST_ANSWER = 20_000
"""Characters; a longer answer counts as wrong."""

GUIDE = "Think as long as you need, and give your answer once, as <answer>...</answer>."


class Reasoning(OneTool):
    """A task of a reasoning-gym data set; the tier is the data set's name.

    `StepResult.info` has `success`, `dataset` and `score`. A task's data is
    `{"dataset": name, "seed": n}`.
    """

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    success_at: ClassVar[float] = 1.0
    max_turns: ClassVar[int] = 1
    cheap_reset: ClassVar[bool] = True
    several_processes: ClassVar[bool] = True
    tool = tool_spec(
        "answer", "Give the answer.", text={"type": "string", "description": "The answer alone."}
    )

    def __init__(
        self,
        level: Annotated[
            Level | dict[str, Level] | None,
            Field(
                description="Difficulty in the library's curricula, for all data sets or by name; "
                "null or no entry: the library's defaults."
            ),
        ] = None,
        guide: Annotated[
            bool, Field(description="Open with instructions on the answer's format.")
        ] = False,
        steps: Annotated[
            bool,
            Field(
                description="The expert writes its steps before the answer of chain_sum and "
                "letter_counting, in the format `plain`."
            ),
        ] = True,
    ) -> None:
        for name in level if isinstance(level, dict) else ():
            check_name(name)
        self.level, self.guide, self.steps = level, guide, steps
        self._entry: dict[str, Any] | None = None

    async def reset(self, task: Task) -> Observation:
        name, seed = str(task.data.get("dataset")), task.data.get("seed")
        try:
            check_name(name)
        except ConfigError as error:
            raise EnvError(f"reasoning: task {task.id!r}: {error}") from None
        if type(seed) is not int or seed < 0:
            raise EnvError(f"reasoning: task {task.id!r}: data.seed is {seed!r:.40}, not 0 or more")
        self._name = name
        self._dataset, self._entry = generated(name, seed, level_of(self.level, name))
        question = self._entry["question"]
        text = f"{GUIDE}\n\n{question}" if self.guide else question
        return Observation(
            messages=[Message(role="user", content=text)], info={"dataset": self._name}
        )

    async def step(self, action: Message) -> StepResult:
        if self._entry is None:
            raise EnvError("reasoning: the episode is over, or was never reset; call reset first")
        text = action.content
        if action.tool_calls:
            try:
                text = self.text_of(action.tool_calls[0])
            except ValueError:
                text = ""
        score = self._score(answer_in(text))
        self._entry = None
        success = score >= self.success_at
        verdict = "correct." if success else f"wrong. your score is {score:.2f}."
        return StepResult(
            messages=reply_to(action, verdict),
            reward=score,
            terminated=True,
            info={"success": success, "dataset": self._name, "score": score},
        )

    def _score(self, answer: str) -> float:
        """The verifier's score; an exception of the verifier counts as a wrong answer."""
        pattern = EVALUATED.get(self._name)
        if len(answer) > LONGEST_ANSWER or (pattern and not pattern.fullmatch(answer)):
            return 0.0
        try:
            score = float(self._dataset.score_answer(answer, self._entry))
        except Exception:
            return 0.0
        return min(1.0, max(0.0, score))

    async def close(self) -> None:
        self._entry = None

    def expert_action(self) -> str:
        if self._entry is None:
            raise NoExpert("reasoning: no episode is being played")
        return f"<answer>{self._entry['answer']}</answer>"

    def expert_steps(self) -> str | None:
        if self._entry is None or not self.steps or self._name not in STEPS:
            return None
        return STEPS[self._name](self._entry["metadata"])

    def expert_code(self) -> str | None:
        if self._entry is None:
            raise NoExpert("reasoning: no episode is being played")
        return code_for(self._name, self._entry["metadata"])

    @classmethod
    def blocks(cls, task: Task, **args: Any) -> bool:
        """False for a data set that is QUICK at the library's own difficulty."""
        name = str(task.data.get("dataset"))
        return level_of(args.get("level"), name) is not None or name not in QUICK

    @classmethod
    def tiers(cls) -> Sequence[str]:
        """The supported data sets in alphabetical order, since difficulties do not compare."""
        return sorted(DATASETS.keys() - REFUSED.keys())

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """The data set's task of that seed; without a tier, data sets take turns.

        Small data sets may give the same question for different seeds.
        """
        names = cls.tiers()
        name = names[seed % len(names)] if tier is None else tier
        check_name(name)
        data = {"dataset": name, "seed": seed}
        return Task(id=f"reasoning/{name}/{seed}", data=data, tier=name, source="reasoning")


def level_of(level: int | dict[str, int] | None, name: str) -> int | None:
    """The level of a data set; None: the library's own difficulty."""
    return level.get(name) if isinstance(level, dict) else level


def code_for(name: str, known: Mapping[str, Any]) -> str | None:
    """Python code that prints the answer of an arithmetic or algebra task; None for others."""
    if name in EXPRESSIONS:
        return f"print({known['expression']})"
    if name in ("gcd", "lcm"):
        numbers = ", ".join(map(str, known["numbers"]))
        return f"import math; print(math.{name}({numbers}))"
    if name == "simple_equations":
        left, _, right = known["equation"].partition(" = ")
        return f"import sympy; print(sympy.solve('{left} - ({right})')[0])"
    return None


def check_name(name: str) -> None:
    """Refuse unknown and unsupported data sets. Errors: ConfigError with the reason."""
    if name in REFUSED:
        raise ConfigError(f"{name!r} of reasoning-gym is not supported: {REFUSED[name]}")
    if name not in DATASETS:
        near = did_you_mean(name, Reasoning.tiers())
        raise ConfigError(f"{name!r:.80} is not a data set of reasoning-gym{near}")


@lru_cache(maxsize=256)
def generated(name: str, seed: int, level: int | None) -> tuple[Any, dict[str, Any]]:
    """The data set and the entry of a task. The episodes of a group, which have the same task,
    generate it once.

    Errors: as `make_dataset`.
    """
    shared = name in READS_TEXTS
    dataset = shared_dataset(name, level) if shared else make_dataset(name, seed, level)
    return dataset, dataset[seed if shared else 0]


def make_dataset(name: str, seed: int, level: int | None) -> Any:
    """The data set with the single task of this seed; `level` applies to each of its difficulties.

    Errors: EnvError if the data set has no levels, or not this level.
    """
    if level is None:
        return reasoning_gym.create_dataset(name, seed=seed, size=1)
    if name not in CURRICULA:
        raise EnvError(f"reasoning: {name} has no difficulty levels: leave env.args.level out")
    curriculum: Any = CURRICULA[name]()
    try:
        for attribute, definition in curriculum.attributes.items():
            curriculum.set_attr_level(attribute, min(level, len(definition.levels) - 1))
        return DATASETS[name][0](curriculum.generate_configuration({"seed": seed, "size": 1}))
    except (AssertionError, ValueError) as error:
        raise EnvError(f"reasoning: {name} has no level {level}: {error}") from error


@cache
def shared_dataset(name: str, level: int | None) -> Any:
    """The data set of seed 0, made once a process. Errors: as `make_dataset`."""
    return make_dataset(name, 0, level)


def answer_in(text: str) -> str:
    """The content of the last `<answer>...</answer>`, or the whole text without such tags."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end].strip() if start >= 0 else text.strip()
