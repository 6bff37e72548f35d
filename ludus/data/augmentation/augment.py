r"""`ludus augment`: new tasks of a model from seed tasks, deduplicated and filtered.

    request i of the model, which shows seeds chosen by i
      -> read      <question>...</question> and \boxed{answer}
      -> checked   the judge accepts the answer, and not every answer
      -> new       no duplicate of a seed or of an earlier valid task
      -> solved    in a band of shares, by attempts of a solver (if there is one)

The folder holds:

    tasks.jsonl      kept tasks, for the reader `json`
    rejected.jsonl   the others, each with its reason
    card.json        counts, spreads and settings; README.md is its readable form
    texts.jsonl      the journal of the models' texts; a stopped run resumes from it

A request depends on its number and the settings alone, and requests are decided in order until
enough tasks are kept. So the files do not depend on the number of requests at once, nor on stops
in between, where the endpoint answers the same request in the same way.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from ludus.core.errors import DataError, Unscorable
from ludus.core.files import atomic_write
from ludus.core.seeds import derive_seed
from ludus.core.system.signals import run
from ludus.core.types import Message
from ludus.data.augmentation.card import Outcome, card_of, rendered
from ludus.data.augmentation.checks import fault_of, solved, task_of
from ludus.data.augmentation.duplicates import Questions
from ludus.data.augmentation.request import AugmentRequest, Solver
from ludus.data.augmentation.texts import JOURNAL, Asker, Text, prompt_of, shots_of
from ludus.data.journal import Journal
from ludus.judges import JUDGES
from ludus.judges.base import check_all, close_all, refuse_of_steps
from ludus.judges.proposals.parse import Refused, parse_proposal

MARGIN = 1e-9
TIMEOUT_S = 600.0
NUM_TRIED = 8
"""Seeds on which the judge is tried before the first request."""

Log = Callable[[str], object]
T = TypeVar("T")


def augment(request: AugmentRequest, folder: Path, log: Log = lambda _: None) -> int:
    """Ask for the texts that the folder does not have yet, select, and write the tasks.

    Returns the number of kept tasks.
    Errors: ConfigError for wrong settings, or a judge that accepts no seed; MissingDependency;
    DataError where the folder was written with other settings, where an endpoint is down, and
    where no task is kept.
    """
    with Journal(folder, request.settings(), Text, JOURNAL) as journal:
        try:
            outcomes = run(_Augmenter(request, journal, log).outcomes())
        except KeyboardInterrupt as stop:
            raise type(stop)("stopped; the same command continues the augmentation") from None
    _write(folder, request, outcomes)
    kept = sum(outcome.reason is None for outcome in outcomes)
    if not kept:
        counts = card_of(outcomes, {}).rejected
        raise DataError(f"{folder}: no task is kept: {json.dumps(counts)}; see rejected.jsonl")
    return kept


class _Augmenter:
    """Asks the models for the missing texts of a request, and decides on the tasks."""

    def __init__(self, request: AugmentRequest, journal: Journal[Text], log: Log) -> None:
        self._request, self._journal, self._log = request, journal, log
        self._judge = JUDGES.build(request.judge, "--judge")
        refuse_of_steps(self._judge, "--judge")
        self._questions = Questions(request.max_similarity)
        self._slots = asyncio.Semaphore(request.concurrency)
        self._writer = Asker(request.model, TIMEOUT_S)
        self._solver = Asker(request.solver.model, TIMEOUT_S) if request.solver else None

    async def outcomes(self) -> list[Outcome]:
        """The requests' outcomes, in order, up to the last task that was needed."""
        try:
            await check_all([self._judge])
            await self._try_judge()
            return await self._play()
        finally:
            await close_all([self._judge])
            await self._writer.close()
            if self._solver is not None:
                await self._solver.close()

    async def _play(self) -> list[Outcome]:
        request = self._request
        for seed in request.seeds:
            self._questions.add(seed.id, seed.question)
        decided: list[Outcome] = []
        kept = 0
        while kept < request.num_tasks and len(decided) < request.max_requests:
            last = min(len(decided) + request.concurrency, request.max_requests)
            wave = await _together(self._proposed(n) for n in range(len(decided), last))
            for outcome in wave:
                self._compare(outcome)
            if request.solver is not None:
                solver = request.solver
                await _together(self._attempt(o, solver) for o in wave if o.reason is None)
            for outcome in wave:
                decided.append(outcome)
                kept += outcome.reason is None
                if kept == request.num_tasks:
                    break
            self._log(f"{len(decided)} requests: {kept} of {request.num_tasks} tasks")
        return decided

    async def _try_judge(self) -> None:
        """Errors: DataError where the judge accepts none of the first seeds."""
        faults = []
        for seed in self._request.seeds[:NUM_TRIED]:
            fault = await fault_of(self._judge, task_of(seed.id, seed.question, seed.answer))
            if fault is None:
                return
            faults.append(f"{seed.id}: {fault}")
        name = self._request.judge.name
        raise DataError(f"--judge {name} accepts the answer of no seed: {faults[0]}")

    async def _proposed(self, number: int) -> Outcome:
        """The task of a request, read and checked."""
        shots = shots_of(self._request, number)
        outcome = Outcome(number, [seed.id for seed in shots])
        blank = Text(kind="task", number=number)
        prompt = prompt_of(shots, self._request.instructions)
        text = await self._text(self._writer, prompt, blank)
        if text.failure is not None:
            outcome.reject("the model gave no text", text.failure)
            return outcome
        read = parse_proposal(text.text)
        if isinstance(read, Refused):
            outcome.reject("cut at --max-tokens" if text.cut else "not a task", read.reason)
            return outcome
        outcome.question, outcome.answer = read.question, read.answer
        fault = await fault_of(self._judge, task_of(outcome.id, read.question, read.answer))
        if fault is not None:
            reason, _, detail = fault.partition(": ")
            outcome.reject(reason, detail or None)
        return outcome

    def _compare(self, outcome: Outcome) -> None:
        """Reject a duplicate; remember any other valid task, of whatever difficulty."""
        if outcome.reason is not None or outcome.question is None:
            return
        nearest = self._questions.nearest(outcome.question)
        outcome.nearest, outcome.similarity = nearest.id, nearest.similarity
        if nearest.reason is not None:
            detail = f"of {nearest.id}, similarity {nearest.similarity:.2f}"
            outcome.reject(nearest.reason, detail)
            return
        self._questions.add(outcome.id, outcome.question)

    async def _attempt(self, outcome: Outcome, solver: Solver) -> None:
        """Let the solver attempt a task; reject it outside of the band."""
        numbers = range(solver.attempts)
        texts = await _together(self._solve(outcome, solver, number) for number in numbers)
        verdicts = [text.solved for text in texts if text.solved is not None]
        outcome.attempts = len(verdicts)
        if not verdicts:
            told = next(
                (text.failure for text in texts if text.failure), "the judge has no verdict"
            )
            outcome.reject("no attempt could be counted", told)
            return
        outcome.solved = share = sum(verdicts) / len(verdicts)
        if share < solver.min_solved - MARGIN:
            outcome.reject("too hard for the solver")
        elif share > solver.max_solved + MARGIN:
            outcome.reject("too easy for the solver")

    async def _solve(self, outcome: Outcome, solver: Solver, attempt: int) -> Text:
        """An attempt and the judge's verdict."""
        assert self._solver is not None
        task = task_of(outcome.id, outcome.question or "", outcome.answer or "")
        prompt = list(task.prompt)
        if solver.system_prompt is not None:
            prompt.insert(0, Message(role="system", content=solver.system_prompt))

        async def judged(text: Text) -> Text:
            if text.failure is not None:
                return text
            try:
                verdict = await solved(self._judge, task, text.text)
            except Unscorable as error:
                return text.model_copy(update={"failure": f"not scored: {error}"})
            return text.model_copy(update={"solved": verdict})

        blank = Text(kind="attempt", number=outcome.number, attempt=attempt)
        return await self._text(self._solver, prompt, blank, judged)

    async def _text(
        self,
        asker: Asker,
        prompt: Sequence[Message],
        blank: Text,
        finish: Callable[[Text], Awaitable[Text]] | None = None,
    ) -> Text:
        """The journal's text of a request; asked for if it has none."""
        if not self._journal.has(blank.key):
            seed = derive_seed(self._request.seed, "augment", *blank.key)
            async with self._slots:
                text = await asker.ask(prompt, seed, blank)
                self._journal.add(text if finish is None else await finish(text))
        return self._journal.records[blank.key]


async def _together(work: Iterable[Awaitable[T]]) -> list[T]:
    """The results, in order; the first error ends the others."""

    async def wait(one: Awaitable[T]) -> T:
        return await one

    tasks = [asyncio.ensure_future(wait(one)) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _write(folder: Path, request: AugmentRequest, outcomes: Sequence[Outcome]) -> None:
    """Write the files, each atomically. Errors: DataError."""
    card = card_of(outcomes, {**request.settings(), **request.selection()})
    kept = [outcome.row() for outcome in outcomes if outcome.reason is None]
    others = [outcome.rejected_row() for outcome in outcomes if outcome.reason is not None]
    files = {
        "rejected.jsonl": _lines(others),
        "card.json": json.dumps(card.model_dump(), indent=2, ensure_ascii=False) + "\n",
        "README.md": rendered(card, outcomes),
        "tasks.jsonl": _lines(kept),
    }
    for name, text in files.items():
        try:
            atomic_write(folder / name, text)
        except OSError as error:
            raise DataError(f"{folder / name}: cannot be written: {error.strerror}") from error


def _lines(rows: Sequence[object]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
