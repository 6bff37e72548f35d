"""Clients of `ludus serve evaluation`.

    from ludus import EvaluationClient

    with EvaluationClient("http://127.0.0.1:8100") as client:
        client.evaluate("so \\\\boxed{14/2}", "7").value                     # 1.0
        client.evaluate_many(outputs, truths, judge="math")                # a list, in order

A status of `unscorable`, `failed` or `deadline` has the value None, never 0.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from pydantic import ValidationError

from ludus.core.errors import ConfigError, DataError, ToolError, first_fault
from ludus.core.remote import Blamed, RefusedError, RemoteClient
from ludus.core.types import Message, Spec
from ludus.judges.remote.wire import Evaluation, Evaluations, EvaluationStatus

T = TypeVar("T")
Output = str | Sequence[Message | Mapping[str, Any]]

BATCH_CHARS = 2_000_000
"""Characters of a request's items, above which the items go into another request."""

MAX_ANSWER = 64_000_000

GRACE_S = 5.0
"""Seconds beyond its deadline in which the service's answer has to arrive. A connection that hangs
is given up then, and the request sent again."""


class AsyncEvaluationClient:
    """Scores outputs by an evaluation service. Use it in one event loop.

    A request that fails is sent again: to score has no effect beyond the answer. A service that is
    down or busy is waited for, up to `patience_s`.

    Args:
        deadline_s: seconds that the service may take for a request (at most its `--max-deadline`).
        patience_s: seconds of a request beyond that: sending it again, waiting for the service.
        batch: outputs in a request.
        max_in_flight: requests at the same time.
        token_env: name of an environment variable with the service's token.

    Errors: ConfigError for a wrong URL, a token that is missing or refused, a judge or arguments
    that the service does not allow; ToolError where it gives no answer.
    """

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float = 30.0,
        patience_s: float = 60.0,
        batch: int = 256,
        max_in_flight: int = 8,
        token_env: str | None = None,
    ) -> None:
        if batch < 1:
            raise ConfigError(f"batch: {batch} is below 1")
        self._deadline_s, self._batch = deadline_s, batch
        self._places = asyncio.Semaphore(max_in_flight)
        self._client = RemoteClient(
            url,
            deadline_s=deadline_s + patience_s,
            attempts=None,
            attempt_s=deadline_s + GRACE_S,
            max_bytes=MAX_ANSWER,
            max_in_flight=max_in_flight,
            token_env=token_env,
            idempotent=True,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.close()

    async def evaluate(
        self,
        output: Output,
        truth: Any = None,
        judge: str | Spec = "math",
        *,
        prompt: Output = "",
        data: Mapping[str, Any] | None = None,
    ) -> Evaluation:
        """Score an output. Errors: as the class; DataError for what JSON cannot hold."""
        item = {"output": output, "truth": truth, "prompt": prompt, "data": data or {}}
        return (await self._post([_plain(item, "the item")], judge))[0]

    async def evaluate_many(
        self,
        outputs: Sequence[Output],
        truths: Sequence[Any],
        judge: str | Spec = "math",
        *,
        prompts: Sequence[Output] | None = None,
        data: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Evaluation]:
        """Score outputs; the results are in their order.

        The items of a request that gets no answer are `failed`, so that what is scored is kept.

        Errors: ConfigError; DataError for lists of different lengths, and what JSON cannot hold.
        """
        columns: dict[str, Sequence[Any]] = {"output": outputs, "truth": truths}
        columns |= {} if prompts is None else {"prompt": prompts}
        columns |= {} if data is None else {"data": data}
        for name, column in columns.items():
            if len(column) != len(outputs):
                raise DataError(f"{name}: {len(column)} of them for {len(outputs)} outputs")
        items = [
            _plain(dict(zip(columns, row, strict=True)), f"item {number}")
            for number, row in enumerate(zip(*columns.values(), strict=True))
        ]
        batches = list(_batches(items, self._batch))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._batch_of(batch, judge)) for batch in batches]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [result for task in tasks for result in task.result()]

    async def check(self, judge: str | Spec) -> None:
        """Check that the service allows a judge and its arguments. Errors: as the class."""
        await self._post([], judge)

    async def _batch_of(self, items: list[dict[str, Any]], judge: str | Spec) -> list[Evaluation]:
        """The results; `failed` ones where the service gives no answer."""
        try:
            return await self._post(items, judge)
        except ToolError as error:
            failed = Evaluation(status=EvaluationStatus.FAILED, error=str(error))
            return [failed.model_copy() for _ in items]

    async def _post(self, items: list[dict[str, Any]], judge: str | Spec) -> list[Evaluation]:
        """Errors: ConfigError, ToolError."""
        spec = Spec(name=judge) if isinstance(judge, str) else judge
        body = {
            "items": items,
            "judge": _plain({"name": spec.name, "args": spec.args}, "judge"),
            "deadline_s": self._deadline_s,
        }
        try:
            async with self._places:  # the deadline begins with the turn
                answer = await self._client.post(body, "/evaluate")
            results = Evaluations.model_validate(answer).results
        except Blamed as error:
            raise ConfigError(f"{self._client.url}/evaluate: {error}") from None
        except RefusedError as error:
            raise ConfigError(f"{error}: is it a `ludus serve evaluation`?") from None
        except ValidationError as error:
            fault = first_fault(error)
            raise ToolError(
                f"{self._client.url}/evaluate: not an evaluation's answer: {fault}"
            ) from None
        if len(results) != len(items):
            told = f"{len(results)} results for {len(items)} outputs"
            raise ToolError(f"{self._client.url}/evaluate: {told}")
        return results


class EvaluationClient:
    """Scores outputs by an evaluation service, from any thread; also where an event loop runs.

    Arguments and errors are those of AsyncEvaluationClient.
    """

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float = 30.0,
        patience_s: float = 60.0,
        batch: int = 256,
        max_in_flight: int = 8,
        token_env: str | None = None,
    ) -> None:
        self._client = AsyncEvaluationClient(
            url,
            deadline_s=deadline_s,
            patience_s=patience_s,
            batch=batch,
            max_in_flight=max_in_flight,
            token_env=token_env,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="ludus-evaluation", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if not self._loop.is_closed():
            self._run(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def evaluate(
        self,
        output: Output,
        truth: Any = None,
        judge: str | Spec = "math",
        *,
        prompt: Output = "",
        data: Mapping[str, Any] | None = None,
    ) -> Evaluation:
        """As AsyncEvaluationClient.evaluate."""
        return self._run(self._client.evaluate(output, truth, judge, prompt=prompt, data=data))

    def evaluate_many(
        self,
        outputs: Sequence[Output],
        truths: Sequence[Any],
        judge: str | Spec = "math",
        *,
        prompts: Sequence[Output] | None = None,
        data: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Evaluation]:
        """As AsyncEvaluationClient.evaluate_many."""
        return self._run(
            self._client.evaluate_many(outputs, truths, judge, prompts=prompts, data=data)
        )

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise ConfigError("the EvaluationClient is closed")
        waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return waiting.result()
        except BaseException:  # Ctrl-C: the request ends too
            waiting.cancel()
            raise


def _batches(items: list[dict[str, Any]], most: int) -> Iterator[list[dict[str, Any]]]:
    """The items in lists of at most `most`, of at most BATCH_CHARS characters of outputs each."""
    batch: list[dict[str, Any]] = []
    chars = 0
    for item in items:
        size = sum(len(str(value)) for value in item.values())
        if batch and (len(batch) == most or chars + size > BATCH_CHARS):
            yield batch
            batch, chars = [], 0
        batch.append(item)
        chars += size
    if batch:
        yield batch


def _plain(value: Any, place: str) -> Any:
    """The value as JSON has it, with `?` for lone surrogates. Errors: DataError with the place."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        if value - value != 0:
            raise DataError(f"{place}: {value} is no number of JSON")
        return value
    if isinstance(value, Message | Spec):
        return _plain(value.model_dump(exclude_defaults=True), place)
    try:
        if isinstance(value, Mapping):
            return {
                str(_plain(str(key), place)): _plain(item, f"{place}.{key}")
                for key, item in value.items()
            }
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
            return [_plain(item, f"{place}.{index}") for index, item in enumerate(value)]
    except RecursionError:
        raise DataError(f"{place.partition('.')[0]}: nested too deeply") from None
    raise DataError(f"{place}: a {type(value).__name__} is no value of JSON")
