"""The configuration of each run: shared keys, the role's keys, and those that the flow sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeGuard

from ludus.coevolve.storage import Storage
from ludus.config.coevolve import CoevolveConfig
from ludus.config.load import dump_config, load_config
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError
from ludus.core.files import atomic_write
from ludus.core.seeds import derive_seed
from ludus.core.types import Spec
from ludus.data.splits import read_split
from ludus.envs import ENVS
from ludus.judges import JUDGES
from ludus.judges.proposals.judge import CurriculumJudge
from ludus.judges.proposals.parse import visible
from ludus.tasks.readers import TaskList

Role = Literal["curriculum", "executor"]
ROLES: tuple[Role, Role] = ("curriculum", "executor")

SET_BY_FLOW = {
    "start": {"name", "runs_dir", "seed", "store", "mirror"},
    "curriculum": {
        "name", "runs_dir", "seed", "store", "mirror", "judge", "sft", "demonstrations", "evaluate",
    },
    "executor": {"name", "runs_dir", "seed", "store", "mirror", "sft", "demonstrations"},
}  # fmt: skip
"""Keys that a section may not have."""

JUDGED_BY = {"name": "math"}
"""The executor's judge without a `judge` in the recipe."""


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with the keys of `over`; a mapping with `name` is replaced whole."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if _has_keys(old) and _has_keys(value):
            result[key] = merged(old, value)
        else:
            result[key] = value
    return result


def _has_keys(value: object) -> TypeGuard[Mapping[str, Any]]:
    """True for a mapping of keys, which is no plug-in."""
    return isinstance(value, Mapping) and "name" not in value


def run_name(role: str, iteration: int) -> str:
    """`start`, or e.g. `curriculum-2`: name of the run, and of the model that it makes."""
    return role if role == "start" else f"{role}-{iteration}"


def role_keys(config: CoevolveConfig, role: Role) -> dict[str, Any]:
    """The keys of a role's runs: its own over those of `shared`."""
    return merged(config.shared, getattr(config, role))


def trains_curriculum(config: CoevolveConfig) -> bool:
    """Returns whether the curriculum agent trains."""
    return role_keys(config, "curriculum").get("rl") is not None


def has_heldout(config: CoevolveConfig) -> bool:
    """Returns whether there are tasks to evaluate the executor on."""
    return (role_keys(config, "executor").get("tasks") or {}).get("heldout") is not None


def check_roles(config: CoevolveConfig) -> None:
    """Refuse keys that the flow sets. Errors: ConfigError, with the key."""
    sections = {"start": config.start or {}, "curriculum": config.curriculum}
    sections["executor"] = config.executor
    faults = []
    for name, section in {**sections, "shared": config.shared}.items():
        refused = SET_BY_FLOW.get(name, SET_BY_FLOW["start"])
        faults += [
            f"{name}.{key}: the co-evolution sets it itself: remove it"
            for key in section
            if key in refused
        ]
        if name == "shared":
            faults += [
                f"shared.{key}: only the first run has it: move it to `start`"
                for key in ("sft", "demonstrations")
                if section.get(key) is not None
            ]
        if name == "executor" and "train" in (section.get("tasks") or {}):
            faults.append(
                "executor.tasks.train: the executor trains on the kept problems: remove it"
            )
        if name in ("executor", "shared") and (section.get("tasks") or {}).get("curriculum"):
            faults.append(f"{name}.tasks.curriculum: the kept problems have no tiers: remove it")
        if name == "curriculum" and (section.get("tasks") or {}).get("heldout") is not None:
            faults.append(
                "curriculum.tasks.heldout: the curriculum agent is not evaluated: remove it"
            )
    if faults:
        raise ConfigError("\n".join(faults))


class Roles:
    """Makes the configurations of a co-evolution's runs and players.

    Errors of all methods: ConfigError, with the section's name.
    """

    def __init__(self, config: CoevolveConfig, storage: Storage) -> None:
        check_roles(config)
        self.config, self.storage = config, storage

    def start(self) -> RunConfig:
        """The run whose model both roles start from.

        Without an environment it has, unless the recipe says otherwise, the curriculum agent's
        tasks and the executor's judge: SFT on a file plays neither, but a run needs both.
        """
        assert self.config.start is not None
        keys = merged(self.config.shared, self.config.start)
        if keys.get("env") is None:
            proposer = role_keys(self.config, "curriculum")
            tasks = keys.get("tasks") or {}
            train = (proposer.get("tasks") or {}).get("train")
            if "train" not in tasks and train is not None and proposer.get("env") is None:
                keys["tasks"] = {**tasks, "train": train}
            judge = role_keys(self.config, "executor").get("judge")
            keys.setdefault("judge", judge or JUDGED_BY)
        return self._load("start", keys, "start", 0)

    def training(self, role: Role, iteration: int) -> RunConfig:
        """The run that trains a role in an iteration."""
        keys = self._keys(role, iteration - 1)
        if role == "curriculum":
            keys["judge"] = self._judge(str(self._opponent_file(iteration))).model_dump()
        else:
            keys["tasks"] = {
                **keys.get("tasks", {}),
                "train": self._problems(iteration, keys),
                "heldout": None,
            }
            keys.setdefault("judge", JUDGED_BY)
            keys.pop("evaluate", None)
        return self._load(role, keys, role, iteration)

    def opponent(self, iteration: int) -> RunConfig:
        """The executor that rewards the curriculum agent in an iteration's training."""
        version = iteration - (2 if self.config.side_by_side and iteration > 1 else 1)
        return self.answering(version, iteration)

    def write_opponent(self, iteration: int) -> None:
        """Write the configuration that the judge of the curriculum agent's run names."""
        self.storage.configs.mkdir(parents=True, exist_ok=True)
        atomic_write(self._opponent_file(iteration), dump_config(self.opponent(iteration)))

    def _opponent_file(self, iteration: int) -> Path:
        return self.storage.configs / f"answers-{iteration}.yaml"

    def _problems(self, iteration: int, keys: Mapping[str, Any]) -> dict[str, Any]:
        args: dict[str, Any] = {
            "path": str(self.storage.questions(iteration, "problems")),
            "prompt": "question",
            "answer": "answer",
            "id": "id",
            "consistency": "consistency",
        }
        if keys.get("env") is not None:
            args["env"] = {"name": "none"}
        return {"name": "json", "args": args}

    def answering(self, version: int, iteration: int) -> RunConfig:
        """The executor after `version` iterations, as it answers proposals in an iteration."""
        answers = self.config.answers
        changes: dict[str, Any] = {"temperature": answers.temperature, "top_p": answers.top_p}
        for key in ("max_turns", "max_tokens_per_turn"):
            if (value := getattr(answers, key)) is not None:
                changes[key] = value
        keys = self._keys("executor", version)
        keys["rollout"] = {**keys.get("rollout", {}), **changes}
        keys["judge"] = None
        return self._player("executor", keys, f"answers-{iteration}", iteration)

    def proposing(self, version: int, iteration: int) -> RunConfig:
        """The curriculum agent after `version` iterations, as it generates proposals."""
        keys = self._keys("curriculum", version)
        keys["judge"] = self._judge(None).model_dump()  # of the format
        return self._player("curriculum", keys, f"proposals-{iteration}", iteration)

    def solving(self, version: int, name: str) -> RunConfig:
        """The executor after `version` iterations, as it is evaluated."""
        keys = self._keys("executor", version)
        keys.setdefault("judge", JUDGED_BY)
        return self._player("executor", keys, name, 0)

    def frontier(self) -> RunConfig:
        """The first iteration's executor, as it answers the kept problems of all iterations."""
        config = self.answering(1, 0)
        judge = self._keys("executor", 1).get("judge") or JUDGED_BY
        return load_config({**config.model_dump(mode="json"), "judge": judge, "name": "frontier"})

    def judge(self) -> CurriculumJudge:
        """The judge of proposals, without an executor: for `parse`, `task` and `vote`."""
        built = JUDGES.build(self._judge(None), "reward")
        assert isinstance(built, CurriculumJudge)
        return built

    def _judge(self, executor: str | None) -> Spec:
        """Votes read an answer where the executor writes it, unless `reward` says otherwise.

        Errors: ConfigError with the key of `reward`.
        """
        markers = list(self.answering(0, 1).rollout.markers.answer)
        args = {"answer_markers": markers, **self.config.reward, "executor": executor}
        args["num_answers"] = self.config.answers.number
        for key in ("executor", "num_answers"):
            if key in self.config.reward:
                raise ConfigError(f"reward.{key}: the co-evolution sets it itself: remove it")
        try:
            JUDGES.check(Spec(name="curriculum", args=args), "reward")
        except ConfigError as error:
            raise ConfigError(str(error).replace("reward.args.", "reward.")) from None
        return Spec(name="curriculum", args=args)

    def heldout(self, config: RunConfig) -> TaskList:
        """The held-out tasks of the executor. Errors: as `read_splits`."""
        assert config.tasks.heldout is not None
        env = ENVS.build(config.env, "executor.env") if config.env else None
        return read_split(config, env, config.tasks.heldout, "executor.tasks.heldout")

    def heldout_questions(self) -> set[str]:
        """The questions of held-out tasks with a prompt: no problem may equal one."""
        config = self.solving(0, "evaluate")
        if config.tasks.heldout is None:
            return set()
        return {visible(task.prompt[-1].content) for task in self.heldout(config) if task.prompt}

    def _player(self, role: Role, keys: dict[str, Any], name: str, iteration: int) -> RunConfig:
        """A model that does not train. Its training tasks are not read."""
        tasks = keys.get("tasks") or {}
        keys["tasks"] = {
            **tasks,
            "train": tasks.get("train") or {"name": "env", "args": {"num_tasks": 1}},
        }
        keys["rl"] = None
        return self._load(role, keys, name, iteration)

    def _keys(self, role: Role, version: int) -> dict[str, Any]:
        """The role's keys, with its model after `version` iterations."""
        keys = role_keys(self.config, role)
        if role == "curriculum" and not trains_curriculum(self.config):
            version = 0
        name = run_name(role, version) if version else "start" if self.config.start else None
        if name is not None:
            model = {k: v for k, v in (keys.get("model") or {}).items() if k != "architecture"}
            keys["model"] = {**model, "path": str(self.storage.model(name)), "tokenizer": None}
        return keys

    def _load(self, section: str, keys: dict[str, Any], name: str, iteration: int) -> RunConfig:
        run = run_name(section, iteration) if name == section else name
        keys = {
            **keys,
            "name": run,
            "runs_dir": str(self.storage.runs),
            "seed": derive_seed(self.config.seed, "coevolve", run) % 2**31,
        }
        try:
            return load_config(keys)
        except ConfigError as error:
            lines = [line.removeprefix("config: ") for line in str(error).splitlines()]
            raise ConfigError("\n".join(f"{section}.{line}" for line in lines)) from None
