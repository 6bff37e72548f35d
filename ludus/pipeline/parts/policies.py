"""The policies of a run's roles: those that train, and fixed ones.

open_policies(config, backend, ...)  -> the back end of all, the roles in training and evaluation

model      a back end of its own, with a sampler, an optimizer and checkpoints
weights    a model and a sampler
past       a model and a sampler for each older version of the run's policy
endpoint   a client
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ludus.backends import BACKENDS
from ludus.backends.base import Backend
from ludus.backends.fixed import FixedPolicies, FixedPolicy, share_base
from ludus.backends.local import LocalBackend
from ludus.backends.several import Follower, SeveralPolicies
from ludus.config.load import dump_config
from ludus.config.policies import POLICY, FixedEndpointConfig, PastConfig, Roles
from ludus.config.schema import ModelConfig, RunConfig
from ludus.core.errors import ConfigError
from ludus.core.files import atomic_folder, atomic_write
from ludus.core.seeds import derive_seed
from ludus.core.types import Spec
from ludus.models.chat.renderer import Renderer
from ludus.models.samplers.base import Sampler
from ludus.pipeline.parts.policy_checks import (
    START,
    check_trained,
    checked_key,
    require_same_tokenizer,
    require_tokenizer,
)
from ludus.rollout.roles import Player, Role
from ludus.store.folders import RunFolder
from ludus.telemetry.logs import get_logger
from ludus.train.checkpoint.policy import build_policy
from ludus.train.checkpoint.store import CheckpointStore

if TYPE_CHECKING:
    from ludus.models.endpoint.client import Endpoint

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of a run.

    Args:
        backend: trains the policies that train, and closes all but the endpoints.
        roles: in training; empty for a run of one role.
        evaluated: the roles in evaluations.
        endpoints: to be closed in the event loop of the episodes.
    """

    backend: Backend
    roles: list[Role]
    evaluated: list[Role]
    endpoints: list[Endpoint]


def open_policies(
    config: RunConfig, backend: Backend, renderer: Renderer, run_dir: Path
) -> Policies:
    """Open the policies of a configuration beside `backend`, which has the run's `model`.

    An error closes what it has opened, but not `backend`. Errors: ConfigError, CheckpointError.
    """
    if not config.roles:
        return Policies(backend, [], [], [])
    opener = _Opener(config, backend, renderer, run_dir / "policies")
    with ExitStack() as opened:
        opened.callback(opener.close)
        players = {POLICY: Player(POLICY, lambda _: backend.sampler)}
        players |= {name: opener.open(name) for name in config.policies}
        opened.pop_all()

    def roles(given: Roles) -> list[Role]:
        return [Role(name, given[name], players) for name in config.roles]

    several = SeveralPolicies(backend, opener.backends, opener.followers)
    return Policies(
        several, roles(config.roles), roles(config.evaluate.roles or config.roles), opener.endpoints
    )


class _Opener:
    """Opens the policies of a configuration one by one."""

    def __init__(
        self, config: RunConfig, backend: Backend, renderer: Renderer, folder: Path
    ) -> None:
        self._config, self._backend, self._renderer = config, backend, renderer
        self._folder = folder
        self.backends: dict[str, Backend] = {}
        self.followers: list[Follower] = []
        self.endpoints: list[Endpoint] = []

    def open(self, name: str) -> Player:
        """Open a policy of the configuration."""
        settings = self._config.policies[name]
        if settings.model is not None:
            trained = self._trained(name, settings.model)
            self.backends[name] = trained
            return Player(name, lambda _: trained.sampler)
        if settings.endpoint is not None:
            endpoint = _endpoint(name, settings.endpoint)
            self.endpoints.append(endpoint)
            return Player(name, None, endpoint, trains=False)
        if settings.past is not None:
            backend, folder = self._fixed_policies(f"policies.{name}.past"), self._folder / name
            make = partial(backend.fixed_policy, self._start, folder)
            league = League(settings.past, backend, make, folder, self._config)
            self.followers.append(league)
            return Player(name, league.sampler_of, trains=False)
        assert settings.weights is not None
        fixed = self._fixed(name, settings.weights)
        self.followers.append(fixed)
        return Player(name, lambda _: fixed.sampler, trains=False)

    def close(self) -> None:
        for follower in self.followers:
            follower.close()
        for backend in self.backends.values():
            backend.close()

    def _trained(self, name: str, model: Any) -> Backend:
        settings: ModelConfig = self._config.model if model == "same" else model
        config, tokenizer = self._config, self._renderer.tokenizer
        check_trained(f"policies.{name}.model", settings, config.model)
        require_tokenizer(f"policies.{name}.model", settings.path, tokenizer)
        seed = derive_seed(config.seed, "policy", name)
        evaluate = config.evaluate.model_copy(update={"roles": None})
        changes = {"model": settings, "seed": seed, "evaluate": evaluate}
        alone = config.model_copy(update={**changes, "roles": {}, "policies": {}})
        folder = RunFolder(self._folder / name)
        _write_run(folder, RunFolder(self._folder.parent).tokenizer, alone)

        def make_model() -> Any:
            built = build_policy(settings, tokenizer, seed)
            if isinstance(self._backend, LocalBackend):
                share_base(self._backend.model, built)
            return built

        backend: Backend = BACKENDS.build(
            _of_another(config.backend),
            "backend",
            make_model=make_model,
            renderer=self._renderer,
            config=alone,
            run_dir=self._folder / name,
        )
        return backend

    def _fixed(self, name: str, weights: str) -> Fixed:
        where, config = f"policies.{name}", self._config
        tokenizer = self._renderer.tokenizer
        if weights == START:
            make_model: Callable[[], Any] = self._start
        else:
            make_model = partial(_loaded, f"{where}.weights", weights, config, tokenizer)
        return Fixed(self._fixed_policies(where).fixed_policy(make_model, self._folder / name))

    @property
    def _start(self) -> Callable[[], Any]:
        """Makes the run's model as it began."""
        config = self._config
        return partial(build_policy, config.model, self._renderer.tokenizer, config.seed)

    def _fixed_policies(self, where: str) -> FixedPolicies:
        """The run's back end. Errors: ConfigError where it offers no fixed policies."""
        backend: Any = self._backend
        if not hasattr(backend, "fixed_policy"):
            raise ConfigError(f"{where} needs `backend: local` or `ray`")
        return cast(FixedPolicies, backend)


class Fixed:
    """A follower whose weights do not change."""

    def __init__(self, policy: FixedPolicy) -> None:
        self.sampler = policy.sampler
        self.close = policy.close

    def started(self, version: int) -> None:
        pass

    def published(self, version: int) -> None:
        pass

    def restored(self, version: int) -> None:
        pass


class League:
    """Older versions of the run's policy, each with a model and a sampler in memory.

    A version joins every `every` steps, the first as RL begins. They are kept in `folder`, so a
    resumed run has the same: a version that joins again has the same bits.

    Args:
        make: returns a model like the policy, with a sampler.
    """

    def __init__(
        self,
        settings: PastConfig,
        backend: FixedPolicies,
        make: Callable[[], FixedPolicy],
        folder: Path,
        config: RunConfig,
    ) -> None:
        self._every, self._most = settings.every, settings.most
        self._backend, self._make, self._folder, self._seed = backend, make, folder, config.seed
        # A resumed run needs the members of its checkpoint, from which later ones have taken over.
        behind = config.checkpoint.every * config.checkpoint.keep_last
        self._most_saved = settings.most + math.ceil(behind / settings.every) + 1
        self._members: list[tuple[int, FixedPolicy]] = []
        self._has_started = False

    def sampler_of(self, group_id: str) -> Sampler:
        """The sampler of the version that a group plays against, drawn by its id."""
        if not self._members:  # an evaluation before the stage
            self._open(self._backend.policy_version)
        drawn = derive_seed(self._seed, "league", group_id) % len(self._members)
        return self._members[drawn][1].sampler

    def started(self, version: int) -> None:
        self._has_started = True
        if not self._store().list():
            self._save(version, self._backend.present_model())
        self._open(version)

    def published(self, version: int) -> None:
        if self._has_started and version % self._every == 0:  # not in SFT
            full = len(self._members) >= self._most
            model = self._backend.present_model()
            self._join(version, model, self._members.pop(0)[1] if full else self._make())
            self._save(version, model)

    def restored(self, version: int) -> None:
        if not self._open(version) and version:
            log.warning(
                "the league has no version as old as this checkpoint: it is the policy itself",
                folder=str(self._folder),
                version=version,
            )

    def _open(self, version: int) -> bool:
        """Load the versions that had joined by this one. Without any, the policy itself joins.

        Returns whether there were any.
        """
        spare = [member for _, member in self._members]  # each may be processes of its own
        self._members = []
        infos = sorted(self._store().list(), key=lambda info: info.step)
        joined = [info for info in infos if info.step <= version][-self._most :]
        try:
            for info in joined:
                member = spare.pop() if spare else self._make()
                self._members.append((info.step, member))
                member.restore(info.path, info.step)
            if not joined:
                member = spare.pop() if spare else self._make()
                self._join(version, self._backend.present_model(), member)
        finally:
            for member in spare:
                member.close()
        return bool(joined)

    def close(self) -> None:
        for _, member in self._members:
            member.close()
        self._members = []

    def _join(self, version: int, model: Any, member: FixedPolicy) -> None:
        self._members.append((version, member))
        member.take(model, version)

    def _save(self, version: int, model: Any) -> None:
        self._store().save("past", version, model=model, state={})

    def _store(self) -> CheckpointStore:
        return CheckpointStore(self._folder / "checkpoints", self._most_saved, keep_best=0)


def _write_run(folder: RunFolder, tokenizer: Path, config: RunConfig) -> None:
    """Make the folder of a policy one of a run, from which its checkpoints are served, exported and
    evaluated. Where the run has no folder of its own, nothing is written."""
    if folder.config.exists() or not tokenizer.exists():
        return
    folder.path.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder.tokenizer) as copy:
        shutil.copytree(tokenizer, copy, dirs_exist_ok=True)
    atomic_write(folder.config, dump_config(config))


def _of_another(spec: Spec) -> Spec:
    """The back end of another policy, without what only the run's policy needs."""
    without = getattr(BACKENDS.load(spec.name), "of_other_policies", {})
    return spec.model_copy(update={"args": {**spec.args, **without}})


def _loaded(where: str, weights: str, config: RunConfig, tokenizer: Any) -> Any:
    """Returns the model of a run, a checkpoint or a folder. Errors: ConfigError."""
    from ludus.services.model.policy import ModelOverrides, load_policy

    own = config.model
    overrides = ModelOverrides(own.device, own.dtype, own.context_length)
    try:
        policy = load_policy(weights, config.runs_dir, overrides)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    require_same_tokenizer(where, policy.tokenizer, tokenizer)
    return policy.model


def _endpoint(name: str, settings: FixedEndpointConfig) -> Endpoint:
    from ludus.models.endpoint.client import Endpoint

    key = checked_key(f"policies.{name}.endpoint", settings)
    return Endpoint(settings.base_url, settings.model, key, tokens=False)
