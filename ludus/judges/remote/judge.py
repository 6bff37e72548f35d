"""The judge `remote`: scores on another machine, by `ludus serve evaluation`.

judge: {name: remote, args: {url: "http://10.0.0.7:8100", judge: math}}
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

from pydantic import Field

from ludus.core.errors import ConfigError, ToolError
from ludus.core.types import Score, Spec, Task, Trajectory
from ludus.judges.base import final_answer
from ludus.judges.remote.client import AsyncEvaluationClient

MATH = Spec(name="math")
START_S = 10.0
"""Seconds in which the service has to answer at the start."""


class RemoteJudge:
    """Scores by the judge of an evaluation service.

    The task's prompt, answer and data and the messages of the trajectory's last branch are sent;
    token ids are not, so `overlong` has to stay here.

    A failure is never a score of 0. A service that is down or busy is asked again, up to
    `patience_s`.

    Errors: Unscorable where the service's judge has no score to give; ToolError, so that the
    episode is retried, where the service gives no answer or its judge fails; ConfigError where it
    refuses the judge or the token.
    """

    def __init__(
        self,
        url: Annotated[str, Field(description="The service's address, http://host:port.")],
        judge: Annotated[
            Spec, Field(description="A judge that the service allows, with its arguments.")
        ] = MATH,
        deadline_s: Annotated[
            float, Field(gt=0, le=3600, description="Seconds that the service may take.")
        ] = 30.0,
        patience_s: Annotated[
            float, Field(ge=0, le=3600, description="Seconds beyond, to reach the service.")
        ] = 60.0,
        max_in_flight: Annotated[
            int, Field(ge=1, le=1024, description="Requests at the same time.")
        ] = 64,
        token_env: Annotated[
            str | None, Field(description="Environment variable with the service's token.")
        ] = None,
    ) -> None:
        self._connect = partial(
            AsyncEvaluationClient,
            url,
            deadline_s=deadline_s,
            patience_s=patience_s,
            max_in_flight=max_in_flight,
            token_env=token_env,
        )
        self._client = self._connect()
        self._judge = judge

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        final_answer(trajectory)  # Unscorable without a request
        messages = [
            message
            for index in trajectory.path()
            if (message := trajectory.segments[index].message) is not None
        ]
        result = await self._client.evaluate(
            messages,
            task.answer,
            self._judge,
            prompt=task.prompt,
            data=task.data,
        )
        return result.score()

    async def check(self) -> None:
        """Check that the service answers and allows the judge. Errors: ToolError, ConfigError."""
        client = self._connect(deadline_s=START_S / 2, patience_s=START_S / 2)
        try:
            await client.check(self._judge)
        except ToolError as error:
            told = "start it with `ludus serve evaluation`, or correct `url`"
            raise ToolError(f"{error}: {told}") from error
        except ConfigError as error:
            raise ConfigError(f"judge.args: {error}") from None
        finally:
            await client.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
        self._client = self._connect()
