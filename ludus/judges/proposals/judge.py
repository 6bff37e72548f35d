"""The judge `curriculum`: rewards proposals by the votes of an executor on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

from pydantic import Field

from ludus.config.sections import Markers
from ludus.core.errors import ConfigError, Unscorable
from ludus.core.modules import require
from ludus.core.types import NO_ENV, Group, Message, Score, Spec, Status, Task, Trajectory
from ludus.judges.base import CpuSeconds, Digits, final_answer
from ludus.judges.proposals.parse import QUESTION_MARKERS, Proposal, Refused, parse_proposal
from ludus.judges.proposals.repetition import cluster_sizes
from ludus.judges.proposals.rewards import (
    Weights,
    proposal_reward,
    repetition,
    tool_bonus,
    uncertainty,
)
from ludus.judges.proposals.votes import ANSWER_MARKERS, Extract, Vote, Voter, mean_tool_calls

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LABEL = "votes"
"""Stage of the executor's episodes, in their ids and seeds."""

MAX_EXPLANATION = 4000
"""Characters of an explanation that are kept."""


class Player(Protocol):
    """The executor: answers each task k times, and runs `finish` with the number of each task, from
    0 on, and its group."""

    async def stream(
        self,
        tasks: Sequence[Task],
        label: str,
        step: int,
        k: int,
        finish: Callable[[int, Group], Coroutine[Any, Any, None]],
    ) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """The executor's answers to a proposal. `vote` is the reason where there is none."""

    vote: Vote | str
    tool_calls: float
    agrees: bool | None = None


class CurriculumJudge:
    r"""Agent0's reward of a curriculum agent (arXiv 2511.16043).

        R_C = R_format * max(0, uncertainty * R_unc + tool * R_tool - R_rep)

    A proposal is `<question>...</question>` followed by `\boxed{answer}`. The executor answers
    each distinct question `num_answers` times. With p, the share of the answers that agree with
    the majority:

        R_unc   1 - 2 |p - 0.5|
        R_tool  gamma * min(mean executed tool calls of an answer, max_tool_calls)
        R_rep   repetition * size of the question's cluster / number of proposals in the step

    Clusters join by average linkage while 1 - BLEU is below `bleu_distance`. Proposals of a step
    are scored together (`score_groups`); one alone has a score of its format (`__call__`).

    A text that is no proposal earns 0, and is not played. Where the infrastructure failed more than
    half of the executor's episodes, the proposal is excluded with the reason.

    Parts: `format`; `uncertainty`, `tool`, `repetition` (R_unc, R_tool, R_rep); `consistency` (p),
    `tool_calls`, `cluster_size`, `unparsed` (share of the answers); `claim` (the proposal's own
    answer agrees with the majority; it earns nothing).
    """

    def __init__(
        self,
        executor: Annotated[
            str | None,
            Field(
                min_length=1,
                description="YAML file of the executor's configuration; null: the format counts.",
            ),
        ] = None,
        num_answers: Annotated[
            int, Field(ge=2, le=1024, description="Answers of the executor to a question (k).")
        ] = 10,
        uncertainty: Annotated[Weight, Field(description="Weight of R_unc.")] = 1.0,
        tool: Annotated[Weight, Field(description="Weight of R_tool.")] = 0.6,
        gamma: Annotated[Weight, Field(description="Scale of R_tool.")] = 1.0,
        max_tool_calls: Annotated[
            Weight, Field(description="Tool calls of an answer that count (C).")
        ] = 4.0,
        repetition: Annotated[Weight, Field(description="Weight of R_rep.")] = 1.0,
        bleu_distance: Annotated[
            float, Field(gt=0, le=1, description="Mean distance below which clusters join.")
        ] = 0.5,
        question_markers: Annotated[
            Markers, Field(description="Start and end of a question.")
        ] = QUESTION_MARKERS,
        answer_markers: Annotated[
            Markers,
            Field(description="Start and end of an executor's answer: its `markers.answer`."),
        ] = ANSWER_MARKERS,
        extract: Annotated[
            Extract,
            Field(description="Part of an executor's last message: `boxed`, or what is found."),
        ] = "auto",
        digits: Digits = 6,
        limit_s: CpuSeconds = 1.0,
        workers: Annotated[
            int, Field(ge=1, le=256, description="Votes at once, each in its process.")
        ] = 2,
        make_player: Callable[[str], Player] | None = None,
    ) -> None:
        for package in ("math_verify", "sacrebleu", "scipy"):
            require(package, "coevolve", "the judge `curriculum`")
        self._num_answers = num_answers
        self._weights = Weights(uncertainty, tool, gamma, max_tool_calls, repetition)
        self._bleu_distance = bleu_distance
        self._question_markers, self._answer_markers = question_markers, answer_markers
        self._extract = extract
        self._voter = Voter(extract, answer_markers, digits, limit_s, workers)
        self._player = make_player(executor) if make_player and executor else None

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        """The format alone: the rest takes the other proposals of the step."""
        found = self._proposal(trajectory)
        well = float(isinstance(found, Proposal))
        told = found.reason if isinstance(found, Refused) else ""
        return Score(value=well, parts={"format": well}, explanation=told)

    def parse(self, text: str) -> Proposal | Refused:
        """Read a proposal from the text of a message."""
        return parse_proposal(text, self._question_markers)

    async def vote(self, answers: Sequence[Trajectory], claims: Sequence[str] = ()) -> Vote:
        """Take the vote of an executor's answers. Errors: Unscorable where too few count."""
        return await self._voter(answers, claims)

    def _proposal(self, trajectory: Trajectory) -> Proposal | Refused:
        try:
            return self.parse(final_answer(trajectory).content)
        except Unscorable:
            return Refused("the curriculum agent wrote nothing")

    async def score_groups(self, groups: Sequence[Group], step: int) -> list[Group]:
        """Score the proposals of a step together.

        Returns new groups. Trajectories that are excluded already stay as they are, and are not in
        the batch.

        Errors: ConfigError without an executor; what the player raises.
        """
        player = self._executor()
        batch = [t for g in groups for t in g.trajectories if t.status.trainable and not t.dropped]
        parsed = {t.id: self._proposal(t) for t in batch}
        proposals = {key: found for key, found in parsed.items() if isinstance(found, Proposal)}
        questions = [proposal.question for proposal in proposals.values()]
        verdicts, sizes = await asyncio.gather(
            self._verdicts(player, proposals, step),
            asyncio.to_thread(cluster_sizes, questions, self._bleu_distance),
        )
        clusters = dict(zip(proposals, sizes, strict=True))
        scored: dict[str, Trajectory] = {}
        for trajectory in batch:
            found, key = parsed[trajectory.id], trajectory.id
            if isinstance(found, Refused):
                scored[key] = _refused(trajectory, found)
            else:
                size = clusters[key]
                scored[key] = self._scored(trajectory, found, verdicts[key], size, len(batch))
        return [
            replace(group, trajectories=[scored.get(t.id, t) for t in group.trajectories])
            for group in groups
        ]

    async def _verdicts(
        self, player: Player, proposals: dict[str, Proposal], step: int
    ) -> dict[str, Verdict]:
        """The executor's verdict on each proposal. A question that repeats is played once."""
        asked: dict[str, list[str]] = {}
        for key, proposal in proposals.items():
            asked.setdefault(proposal.question, []).append(key)
        if not asked:
            return {}
        tasks = [self.task(keys[0], question) for question, keys in asked.items()]
        keys_of = list(asked.values())
        verdicts: dict[str, Verdict] = {}

        async def judge(number: int, group: Group) -> None:
            keys, calls = keys_of[number], mean_tool_calls(group.trajectories)
            claims = [proposals[key].answer for key in keys]
            try:
                vote = await self.vote(group.trajectories, claims)
            except Unscorable as error:
                verdicts.update({key: Verdict(str(error), calls) for key in keys})
                return
            for key, agrees in zip(keys, vote.claims, strict=True):
                verdicts[key] = Verdict(vote, calls, agrees)

        await player.stream(tasks, LABEL, step, self._num_answers, judge)
        return verdicts

    def task(self, id: str, question: str) -> Task:
        """The executor's task of a question. Its judge notes whether there is an answer."""
        args = {"extract": self._extract, "markers": list(self._answer_markers)}
        return Task(
            id=id,
            prompt=[Message(role="user", content=question)],
            env=NO_ENV,
            judge=Spec(name="ludus.judges.proposals.votes:Answered", args=args),
        )

    def _scored(
        self, trajectory: Trajectory, proposal: Proposal, verdict: Verdict, size: int, batch: int
    ) -> Trajectory:
        vote, calls, w = verdict.vote, verdict.tool_calls, self._weights
        if isinstance(vote, str):
            return replace(trajectory, status=Status.UNSCORABLE, reward=None, error=vote)
        reward = proposal_reward(vote.p, calls, size, batch, w)
        parts = {
            "format": 1.0,
            "uncertainty": uncertainty(vote.p),
            "tool": tool_bonus(calls, w.gamma, w.max_tool_calls),
            "repetition": repetition(size, batch, w.repetition),
            "consistency": vote.p,
            "tool_calls": calls,
            "cluster_size": float(size),
            "unparsed": vote.num_unparsed / vote.num_answers,
            "claim": float(bool(verdict.agrees)),
        }
        told = _explanation(vote, proposal, verdict, size, batch)
        return replace(trajectory, reward=reward, scores=parts, explanation=told[:MAX_EXPLANATION])

    def _executor(self) -> Player:
        """The executor. Errors: ConfigError where there is none."""
        if self._player is None:
            raise ConfigError(
                "judge: `curriculum` scores the proposals of a step by an executor's answers: set "
                "its `executor`"
            )
        return self._player

    async def close(self) -> None:
        """Close the executor."""
        if self._player is not None:
            player, self._player = self._player, None
            await player.close()


def _refused(trajectory: Trajectory, refused: Refused) -> Trajectory:
    return replace(
        trajectory, reward=0.0, scores={"format": 0.0}, explanation=f"no proposal: {refused.reason}"
    )


def _explanation(vote: Vote, proposal: Proposal, verdict: Verdict, size: int, batch: int) -> str:
    """Two lines: the vote; the claim, the tool calls, the cluster."""
    classes = [f"{_short(text)} {count}" for text, count in vote.counts[:4]]
    classes += [f"{len(vote.counts) - 4} more"] * (len(vote.counts) > 4)
    classes += [f"unread {vote.num_unparsed}"] * (vote.num_unparsed > 0)
    tie = ", a tie" if vote.tie else ""
    agrees = {True: "the majority agrees", False: "the majority differs", None: "not read"}
    return (
        f"p {vote.p:.2f} of {vote.num_answers} answers{tie}: {', '.join(classes)}\n"
        f"claimed {_short(proposal.answer)}: {agrees[verdict.agrees]}; "
        f"{verdict.tool_calls:.2g} tool calls an answer; cluster of {size} in {batch}"
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
