"""The policies of a run's roles: those that train, and fixed ones.

open_policies(config, backend, ...)  -> the back end of all, the roles in training and evaluation

model      a back end of its own, with a sampler, an optimizer and checkpoints
weights    a model and a sampler
past       a model and a sampler for each older version of the run's policy
endpoint   a client
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ludus.backends import BACKENDS
from ludus.backends.base import Backend
from ludus.backends.local import LocalBackend, make_sampler
from ludus.backends.several import Follower, SeveralPolicies
from ludus.config.load import dump_config
from ludus.config.policies import POLICY, FixedEndpointConfig, PastConfig, Roles
from ludus.config.schema import ModelConfig, RunConfig
from ludus.core.errors import ConfigError
from ludus.core.files import atomic_folder, atomic_write
from ludus.core.seeds import derive_seed
from ludus.core.types import Spec
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import load_tokenizer
from ludus.models.samplers.base import PolicySampler, Sampler
from ludus.models.vocabulary import fingerprint
from ludus.rollout.roles import Player, Role
from ludus.store.folders import RunFolder
from ludus.telemetry.logs import get_logger
from ludus.train.checkpoint.loading import load
from ludus.train.checkpoint.policy import build_policy
from ludus.train.checkpoint.state import all_tensors
from ludus.train.checkpoint.store import CheckpointStore

if TYPE_CHECKING:
    from ludus.models.endpoint.client import Endpoint

log = get_logger(__name__)

IN_PROCESS = Spec(name="in_process")


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
            league = League(
                settings.past,
                self._local(f"policies.{name}.past"),
                partial(self._start, self._folder / name),
                self._folder / name,
                self._config,
            )
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
        if settings.context_length < config.model.context_length:
            raise ConfigError(
                f"policies.{name}.model.context_length: {settings.context_length} is below that of "
                f"`model`, {config.model.context_length}: all roles have the same limit"
            )
        _require_tokenizer(f"policies.{name}.model", settings.path, tokenizer)
        seed = derive_seed(config.seed, "policy", name)
        config = config.model_copy(update={"model": settings})
        alone = {"seed": seed, "roles": {}, "policies": {}}
        evaluate = config.evaluate.model_copy(update={"roles": None})
        _write_run(
            RunFolder(self._folder / name),
            RunFolder(self._folder.parent).tokenizer,
            config.model_copy(update={**alone, "evaluate": evaluate}),
        )

        def make_model() -> Any:
            built = build_policy(settings, tokenizer, seed)
            share_base(self._local(f"policies.{name}.model").model, built)
            return built

        backend: Backend = BACKENDS.build(
            config.backend,
            "backend",
            make_model=make_model,
            renderer=self._renderer,
            config=config,
            run_dir=self._folder / name,
        )
        return backend

    def _fixed(self, name: str, weights: str) -> Fixed:
        if weights == "start":
            return self._start(self._folder / name)
        from ludus.services.model.policy import ModelOverrides, load_policy

        own = self._config.model
        overrides = ModelOverrides(own.device, own.dtype, own.context_length)
        where = f"policies.{name}.weights"
        try:
            policy = load_policy(weights, self._config.runs_dir, overrides)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        _same_tokenizer(where, policy.tokenizer, self._renderer.tokenizer)
        return self._sampled(policy.model, self._folder / name)

    def _start(self, folder: Path) -> Fixed:
        """The run's model as it began."""
        model = build_policy(self._config.model, self._renderer.tokenizer, self._config.seed)
        share_base(self._local("policies").model, model)
        return self._sampled(model, folder)

    def _local(self, where: str) -> LocalBackend:
        """The run's back end. Errors: ConfigError where its weights are elsewhere."""
        if not isinstance(self._backend, LocalBackend):
            raise ConfigError(f"{where} needs `backend: local`, which has the weights")
        return self._backend

    def _sampled(self, model: Any, folder: Path) -> Fixed:
        # A served sampler has the weights of the run's policy.
        spec = IN_PROCESS if self._config.sampler.name != IN_PROCESS.name else None
        tokenizer = self._renderer.tokenizer
        model.requires_grad_(False).eval()
        return Fixed(model, make_sampler(self._config, model, tokenizer, folder, spec=spec))


@dataclass(slots=True)
class Fixed:
    """Weights that do not change, with their sampler."""

    model: Any
    sampler: PolicySampler

    def started(self, version: int) -> None:
        pass

    def published(self, version: int) -> None:
        pass

    def restored(self, version: int) -> None:
        pass

    def close(self) -> None:
        self.sampler.shutdown()


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
        backend: LocalBackend,
        make: Callable[[], Fixed],
        folder: Path,
        config: RunConfig,
    ) -> None:
        self._every, self._most = settings.every, settings.most
        self._backend, self._make, self._folder, self._seed = backend, make, folder, config.seed
        # A resumed run needs the members of its checkpoint, from which later ones have taken over.
        behind = config.checkpoint.every * config.checkpoint.keep_last
        self._most_saved = settings.most + math.ceil(behind / settings.every) + 1
        self._members: list[tuple[int, Fixed]] = []
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
            self._save(version)
        self._open(version)

    def published(self, version: int) -> None:
        if self._has_started and version % self._every == 0:  # not in SFT
            full = len(self._members) >= self._most
            self._join(version, self._members.pop(0)[1] if full else self._make())
            self._save(version)

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
        self.close()
        infos = sorted(self._store().list(), key=lambda info: info.step)
        for info in [info for info in infos if info.step <= version][-self._most :]:
            member = self._make()
            load(info.path, model=member.model)
            member.sampler.publish(info.step)
            self._members.append((info.step, member))
        found = bool(self._members)
        if not found:
            self._join(version, self._make())
        return found

    def close(self) -> None:
        for _, member in self._members:
            member.close()
        self._members = []

    def _join(self, version: int, member: Fixed) -> None:
        own = all_tensors(self._backend.model)
        with torch.no_grad():
            for name, tensor in all_tensors(member.model).items():
                if tensor.data_ptr() != own[name].data_ptr():  # else the shared base
                    tensor.copy_(own[name])
        member.sampler.publish(version)
        self._members.append((version, member))

    def _save(self, version: int) -> None:
        self._store().save("past", version, model=self._backend.model, state={})

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


def share_base(policy: Any, model: Any) -> None:
    """Let the frozen tensors of a model be those of the run's policy where they are equal: adapters
    on one base take the memory of one base."""
    own = {name: p for name, p in policy.named_parameters() if not p.requires_grad}
    for name, parameter in model.named_parameters():
        base = own.get(name)
        if base is None or parameter.requires_grad or base.shape != parameter.shape:
            continue
        if base.dtype == parameter.dtype and torch.equal(base, parameter):
            parameter.data = base.data


def _endpoint(name: str, settings: FixedEndpointConfig) -> Endpoint:
    from ludus.models.endpoint.client import Endpoint, check_url

    where = f"policies.{name}.endpoint"
    check_url(settings.base_url, f"{where}.base_url")
    key = None
    if settings.api_key is not None:
        key = os.environ.get(settings.api_key[1:])
        if not key:
            raise ConfigError(f"{where}.api_key: {settings.api_key} is not set in the environment")
    return Endpoint(settings.base_url, settings.model, key, tokens=False)


def _require_tokenizer(where: str, path: str | None, own: Any) -> None:
    """Errors: ConfigError for a pretrained model with another tokenizer than the run's."""
    if path is not None:
        _same_tokenizer(f"{where}.path", load_tokenizer(path), own)


def _same_tokenizer(where: str, tokenizer: Any, own: Any) -> None:
    if fingerprint(tokenizer) != fingerprint(own):
        raise ConfigError(
            f"{where}: it has another tokenizer than the run's `model`, so its ids would be other "
            "tokens: serve it with `ludus serve model`, and name its `endpoint`"
        )
