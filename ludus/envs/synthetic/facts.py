"""Facts about invented persons: the answers stand in documents, which the tool `search` finds.

    user        where does Ada Kern live ?
    assistant   <search> Ada Kern </search>
                <information>[1] Ada Kern
                Ada Kern lives in Tilsit , works as a baker and keeps a goat .</information>
                <answer> Tilsit </answer>

The documents are made from fixed lists of words, so each run and each machine has the same. In a
configuration, the tool is `{name: "ludus.envs.synthetic.facts:documents"}`. The expert searches in
the format `code`, with markers as in Search-R1 (Jin et al. 2025, arXiv:2503.09516).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Annotated, ClassVar

from pydantic import Field

from ludus.core.errors import EnvError, did_you_mean
from ludus.core.types import Message, Observation, StepResult, Task
from ludus.envs.base import Env, NoExpert
from ludus.tools.base import Tool
from ludus.tools.passages import Passage


def _words(text: str) -> list[str]:
    return text.split()


FIRST = _words("""Ada Bela Carl Dora Emil Flora Gerd Hanna Ivan Jana Karl Lena Milo Nora Otto Petra
    Quinn Rosa Sven Tina Udo Vera Wim Xenia Yara Zeno Alma Boris Clara Dirk""")
LAST = _words("""Adler Bauer Conrad Dietz Engel Falk Graf Hahn Imhof Jung Kern Lang Moser Nagel
    Opitz Prinz Quast Roth Sauer Thal Ulrich Vogt Wolf Yxkull Zorn Arndt Beck Cramer Dorn Eich""")
VALUES = {
    "home": _words("""Tilsit Riga Lund Turku Narva Visby Bergen Aarhus Odense Malmo Kalmar Tartu
    Vaasa Kiel Emden Husum Lubeck Stade"""),
    "work": _words("""baker smith tailor miller cooper potter weaver tanner mason joiner saddler
    glazier printer brewer fisher hunter farmer sailor"""),
    "animal": _words("""goat horse cat dog hen duck goose sheep pig mule donkey parrot rabbit turtle
    ferret canary falcon pony"""),
}
QUESTIONS = {
    "home": "where does {} live ?",
    "work": "what is the work of {} ?",
    "animal": "what animal does {} keep ?",
}
MADE_BY = "facts/world-1"
"""Seed of the world; another one makes other facts."""


class Facts(Env):
    """A question about a person, answered by one word. The tier is the kind of question.

    A task's data is `{"person": "Ada Kern", "asks": "home"}`. Reward 1 for the exact word.
    """

    blocking: ClassVar[bool] = False
    cheap_reset: ClassVar[bool] = True
    max_turns: ClassVar[int] = 1

    def __init__(self) -> None:
        self._asked: tuple[str, str] | None = None

    async def reset(self, task: Task) -> Observation:
        person, kind = task.data.get("person"), task.data.get("asks")
        if person not in people():
            near = did_you_mean(str(person), people())
            raise EnvError(f"facts: task {task.id!r}: data.person is {person!r:.80}{near}")
        if kind not in QUESTIONS:
            known = ", ".join(QUESTIONS)
            raise EnvError(f"facts: task {task.id!r}: data.asks is {kind!r:.80}, not of {known}")
        self._asked = person, kind
        question = QUESTIONS[kind].format(person)
        return Observation(messages=[Message(role="user", content=question)])

    async def step(self, action: Message) -> StepResult:
        if self._asked is None:
            raise EnvError("facts: the episode is over, or was never reset; call reset first")
        (person, kind), self._asked = self._asked, None
        hit = action.content.strip() == people()[person][kind]
        reply = Message(role="user", content="correct." if hit else "wrong.")
        return StepResult(messages=[reply], reward=float(hit), terminated=True)

    async def close(self) -> None:
        self._asked = None

    def expert_code(self) -> str:
        """The query: the person's name, with spaces as in a text."""
        return f" {self._question()[0]} "

    def expert_action(self) -> str:
        person, kind = self._question()
        return f" {people()[person][kind]} "

    def _question(self) -> tuple[str, str]:
        if self._asked is None:
            raise NoExpert("facts: no episode is being played")
        return self._asked

    @classmethod
    def tiers(cls) -> Sequence[str]:
        return tuple(QUESTIONS)

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """The seed draws the person; without a tier, the kinds of questions take turns."""
        kind = tier or cls.tiers()[seed % 3]
        cls.check_tier(kind)
        person = random.Random(f"facts/{kind}/{seed}").choice(sorted(people()))
        return Task(
            id=f"facts/{kind}/{seed}",
            data={"person": person, "asks": kind},
            answer=people()[person][kind],
            tier=kind,
            source="facts",
        )


@cache
def people() -> dict[str, dict[str, str]]:
    """The facts of each person."""
    rng = random.Random(MADE_BY)
    return {
        f"{first} {last}": {kind: rng.choice(values) for kind, values in VALUES.items()}
        for first in FIRST
        for last in LAST
    }


def documents(
    top_k: Annotated[int, Field(ge=1, le=100, description="Passages of an answer.")] = 1,
) -> Tool:
    """The tool `search` over a document of each person. Errors: MissingDependency."""
    from ludus.tools.search import search_in

    text = "{} lives in {home} , works as a {work} and keeps a {animal} ."
    passages = [Passage(name, text.format(name, **facts)) for name, facts in people().items()]
    return search_in(passages, top_k=top_k)
