"""Tasks of an environment service that speaks AgentJet's protocol
(https://github.com/modelscope/AgentJet): `POST /get_env_profile` lists the ids of a split.

Every request is `{env_type, task_id, instance_id, messages, params}`, every answer
`{"success": true, "data": ...}`.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from pydantic import Field

from ludus.core.errors import ConfigError, DataError, ToolError
from ludus.core.remote import Blamed, RemoteClient
from ludus.core.types import Spec, Task
from ludus.tasks.readers import TaskList, TaskMaker

PROFILE_S = 60.0
"""Seconds of `/get_env_profile`, which some services compute."""

Url = Annotated[str, Field(description="The service's address, http://host:port.")]
EnvType = Annotated[str, Field(min_length=1, description="The environment, by the service's name.")]
TokenEnv = Annotated[
    str | None, Field(description="Environment variable with the service's token; null: none.")
]


def request_of(env_type: str = "default", **fields: Any) -> dict[str, Any]:
    """The body of a request, with all fields of the protocol."""
    empty: dict[str, Any] = {"task_id": None, "instance_id": None, "messages": {}, "params": {}}
    return {"env_type": env_type, **empty, **fields}


def data_of(answer: Any) -> Any:
    """The data of an answer. Errors: ValueError with the reason for any other answer."""
    if not isinstance(answer, dict):
        raise ValueError(f"an answer must be an object, got {answer!r:.60}")
    if answer.get("success") is False:
        raise ValueError(f"success is false: {answer.get('detail') or answer!s:.200}")
    if "data" not in answer:
        raise ValueError(f"an answer must have the field data, got {sorted(map(str, answer))!r}")
    return answer["data"]


async def task_ids(
    client: RemoteClient, env_type: str, split: str, params: dict[str, Any]
) -> list[str]:
    """Ids of a split's tasks. Errors: ToolError; ValueError for an answer without ids."""
    body = request_of(env_type, params={"split": split, **params})
    try:
        found = data_of(await client.post(body, "/get_env_profile", deadline_s=PROFILE_S))
    except Blamed as error:
        raise ToolError(f"{client.url}: {error}") from error
    if not isinstance(found, list) or not all(type(id) in (str, int) for id in found):
        raise ValueError(f"/get_env_profile must give a list of ids, got {found!r:.60}")
    return [str(id) for id in found]


def read_agentjet(
    url: Annotated[
        str | None, Field(description="The service; null: that of the run's env.")
    ] = None,
    env_type: Annotated[
        str | None, Field(description="The environment, by its name there; null: the run's.")
    ] = None,
    split: Annotated[
        str, Field(min_length=1, description="The split, for example test.")
    ] = "train",
    limit: Annotated[
        int | None, Field(ge=1, description="Only the first tasks; null: all.")
    ] = None,
    params: Annotated[
        dict[str, Any] | None, Field(description="Further fields of the request's params.")
    ] = None,
    token_env: TokenEnv = None,
    maker: TaskMaker | None = None,
) -> TaskList:
    """Tasks of an environment service of AgentJet's protocol, by their ids."""
    own_url, own_type = getattr(maker, "url", None), getattr(maker, "env_type", None)
    url, name = url or own_url, env_type or own_type
    if url is None or name is None:
        raise ConfigError(
            "the reader 'agentjet' needs url and env_type, or an `env` of the name agentjet"
        )
    token_env = token_env or getattr(maker, "token_env", None)
    try:
        ids = _run(_ask(url, name, split, params or {}, token_env))
    except (ToolError, ValueError) as error:
        told = str(error) if isinstance(error, ToolError) else f"{url}: {error}"
        raise DataError(f"the tasks of {name!r}, split {split}: {told}") from error
    env = None
    if (url.rstrip("/"), name) != (own_url, own_type):
        args = {"url": url, "env_type": name, **({"token_env": token_env} if token_env else {})}
        env = Spec(name="agentjet", args=args)
    return TaskList(
        Task(id=f"{name}/{id}", env=env, data={"task_id": id}, source="agentjet")
        for id in ids[:limit]
    )


async def _ask(
    url: str, env_type: str, split: str, params: dict[str, Any], token_env: str | None
) -> list[str]:
    client = RemoteClient(url, token_env=token_env, attempts=2, idempotent=True)
    try:
        return await task_ids(client, env_type, split, params)
    finally:
        await client.close()


def _run(asking: Any) -> list[str]:
    """The result of a coroutine, also where this thread has a running event loop."""
    with ThreadPoolExecutor(1) as thread:
        ids: list[str] = thread.submit(asyncio.run, asking).result()
        return ids
