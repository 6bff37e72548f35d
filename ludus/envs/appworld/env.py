"""AppWorld: tasks in nine everyday apps, solved with code (Trivedi et al., ACL 2024,
arXiv:2407.18901), on its own engine.

    user        ... Your task: Delete the note titled "Groceries" from my Simple Note account.
    assistant   print(apis.api_docs.show_api_descriptions(app_name="simple_note"))
    user        [{"name": "login", "description": "Login to your account."}, ...]
    assistant   ...
    assistant   apis.simple_note.delete_note(note_id=17, access_token=token)
                apis.supervisor.complete_task()
    user        Execution successful.

An action is Python code. It runs in the sandbox, in an interpreter that stays for the episode; its
API calls are served by a world in another process, and the world's final state is tested in a
third: see `processes`. Tasks are downloaded if the user has them, else generated: see `tasks`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ludus.core.errors import EnvError
from ludus.core.types import Message, Observation, StepResult, Task
from ludus.envs.actions import Guide, MaxSteps, OneTool, answer, tool_spec
from ludus.envs.appworld import tasks
from ludus.envs.appworld.engines import Engine, Episode, engine_of, settings_of
from ludus.envs.appworld.worlds import ensure_task, ensure_world, expert_of
from ludus.envs.base import NoExpert

MAX_CODE = 100_000
"""Characters of an action that are run; the rest is cut off."""

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

GUIDE = """You act for a person (the supervisor) in everyday apps. Answer each time with Python \
code; it is executed, and you see what it prints. Variables stay from answer to answer.
APIs are functions: apis.APP.API(name=value). Look them up instead of guessing:
apis.api_docs.show_api_descriptions(app_name="venmo") lists an app's APIs,
apis.api_docs.show_api_doc(app_name="venmo", api_name="login") describes one.
apis.supervisor.show_account_passwords() has the supervisor's passwords; most APIs need the
access_token that the app's login returns. Long lists come in pages: page_index=0, 1, ...
Change nothing but what the task asks for. When it is done, call apis.supervisor.complete_task();
if the task is a question, complete_task(answer=...)."""


class AppWorld(OneTool):
    """A task in everyday apps. Reward 1 if all tests of the final state pass, else 0.

    An episode ends when the code calls `apis.supervisor.complete_task`. `StepResult.info` of its
    last step has `success`, `passed` and `failed`, the tests by name. A task's data is
    `{"task": name}` of downloaded data, or `{"kind": k, "split": s, "seed": n}`.
    """

    blocking: ClassVar[bool] = True
    max_turns: ClassVar[int] = 30
    tool = tool_spec(
        "execute",
        "Execute Python code; returns what it prints.",
        code={"type": "string", "description": "The code."},
    )

    def __init__(
        self,
        reward: Annotated[
            Literal["success", "share"],
            Field(
                description="success: 1 if all tests pass; share: the share of passed tests, which "
                "is 0.2 to 0.7 for doing nothing."
            ),
        ] = "success",
        data: Annotated[
            str | None,
            Field(description="Folder with AppWorld's downloaded `data`; null: $APPWORLD_ROOT."),
        ] = None,
        python: Annotated[
            str | None,
            Field(description="Python with AppWorld; null: that of `make appworld`."),
        ] = None,
        isolation: Annotated[
            Literal["jail", "none"],
            Field(description="none: no protection from the model's code; warns."),
        ] = "jail",
        timeout_s: Annotated[int, Field(ge=1, description="Seconds that an action may run.")] = 20,
        memory_mb: Annotated[int, Field(ge=128, description="Memory of an action's code.")] = 512,
        max_calls: Annotated[int, Field(ge=1, description="API calls of an action.")] = 1000,
        max_worlds: Annotated[
            int, Field(ge=1, description="Most worlds of a process; each takes about 120 MB.")
        ] = 32,
        max_steps: MaxSteps = None,
        guide: Guide = True,
    ) -> None:
        self._reward, self._root = reward, tasks.data_root(data)
        self.max_steps, self.guide = max_steps, guide
        self._settings = settings_of(
            python,
            isolated=isolation == "jail",
            timeout_s=timeout_s,
            memory_mb=memory_mb,
            max_calls=max_calls,
            max_worlds=max_worlds,
        )
        self._episode: Episode | None = None
        self._expert: list[str] | None = None
        self._scores: dict[str, float] = {}

    async def prepare(self, task: Task) -> None:
        self._prepared(task)

    def _prepared(self, task: Task) -> tuple[str, Engine]:
        """The task's name in the engine's data, and the engine, which runs."""
        name, generated = tasks.name_of(task)
        engine = self._engine(generated, task)
        engine.start()
        if generated:
            ensure_task(engine, ensure_world(engine), name, task.data)
        return name, engine

    async def reset(self, task: Task) -> Observation:
        await self.close()
        name, engine = self._prepared(task)
        self._episode = engine.open(name)
        self._num_steps, self._scores = 0, {}
        expert = expert_of(engine.root, name)
        self._expert = list(expert) if expert is not None else None
        opening = self._episode.opening
        text = _opening_text(opening)
        return Observation(
            messages=[Message(role="user", content=f"{GUIDE}\n\n{text}" if self.guide else text)],
            info={"task": name, "instruction": opening["instruction"]},
        )

    def _engine(self, generated: bool, task: Task) -> Engine:
        if generated:
            return engine_of(tasks.cache_root(), self._settings)
        if self._root is None:
            raise EnvError(
                f"appworld: task {task.id!r} needs downloaded data: set $APPWORLD_ROOT or "
                "env.args.data to the folder in which you called `appworld download data`"
            )
        return engine_of(self._root, self._settings)

    async def step(self, action: Message) -> StepResult:
        if self._episode is None:
            raise EnvError("appworld: the episode is over, or was never reset; call reset first")
        self._num_steps += 1
        try:
            output, completed = self._episode.run(self._code(action))
            truncated = not completed and self._num_steps == self.max_steps
            if not completed and not truncated:
                return StepResult(messages=answer(action, output), reward=0.0)
            report = self._episode.finish()
        except EnvError:
            await self.close()
            raise
        num_calls = self._episode.num_calls
        await self.close()
        success, share = report["success"], len(report["passed"]) / max(1, report["num_tests"])
        self._scores = {"success": float(success), "share": share, "num_calls": float(num_calls)}
        return StepResult(
            messages=answer(action, output),
            reward=float(success) if self._reward == "success" else share,
            terminated=completed,
            truncated=truncated,
            info={name: report[name] for name in ("success", "passed", "failed")},
        )

    def _code(self, action: Message) -> str:
        """The code of an action: of its first tool call, its first fenced block, or all of it."""
        text = action.content
        if action.tool_calls:
            try:
                text = self.text_of(action.tool_calls[0])
            except ValueError as error:
                text = f"raise Exception({str(error)!r})"
        elif fenced := FENCED.search(text):
            text = fenced[1]
        if self._expert and text == self._expert[0]:
            self._expert.pop(0)
        return text[:MAX_CODE]

    async def close(self) -> None:
        if self._episode is not None:
            episode, self._episode = self._episode, None
            episode.close()

    def scores(self) -> dict[str, float]:
        return self._scores

    def expert_action(self) -> str:
        if self._episode is None:
            raise NoExpert("appworld: no episode is being played")
        if not self._expert:
            raise NoExpert("appworld: downloaded tasks have no expert, nor has a finished solution")
        return self._expert[0]

    @classmethod
    def tiers(cls) -> Sequence[str]:
        return tasks.tiers()

    @classmethod
    def check_tier(cls, tier: str) -> None:
        tasks.task_of(tier, 0)

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """The task of a tier and a seed: see `ludus.envs.appworld.tasks`."""
        return tasks.task_of(tier, seed)


def _opening_text(opening: Any) -> str:
    who = opening["supervisor"]
    apps = "\n".join(f"- {name}: {text}" for name, text in opening["apps"].items())
    return (
        f"The supervisor is {who['first_name']} {who['last_name']}, email {who['email']}, phone "
        f"{who['phone_number']}.\nApps:\n{apps}\n\nYour task: {opening['instruction']}"
    )
