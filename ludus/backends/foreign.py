"""A host of another framework, in the process of `ludus train`: what all of them have.

Its environment has an interpreter of its own; its process is `python -m SIDE JOB.json`. It keeps
checkpoints as verl does: `latest_checkpointed_iteration.txt`, `global_step_N/`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from ludus.backends.hosts import HostPlay, Table
from ludus.backends.ray.cluster import require_answer
from ludus.config.schema import RunConfig
from ludus.core.errors import CheckpointError, ConfigError

RAY_FOLDER = "ludus-ray-"
LATEST = "latest_checkpointed_iteration.txt"

CPU_SAMPLER = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "RAY_prestart_worker_first_driver": "0",  # idle workers, one for each logical CPU
}
"""Environment variables of vLLM and Ray on a CPU."""

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HYDRA_FULL_ERROR": "1",
}


class ForeignHost:
    """A host with an environment of its own.

    Args:
        python: its interpreter; default: $LUDUS_NAME_PYTHON, else .venv-NAME/bin/python.
        own: its own keys, of `backend.args.NAME`.
    """

    is_host: ClassVar[bool] = True
    name: ClassVar[str]
    table: ClassVar[Table]
    tied: ClassVar[frozenset[str]]
    """Keys and sections that tie it to the run: `backend.args.NAME` cannot set them."""
    side: ClassVar[str]
    """The module of its process."""
    cpu: ClassVar[Mapping[str, str]]
    """Further environment variables on a CPU."""
    names: ClassVar[Mapping[str, str]]
    """Its metrics with a name of ours; the later wins."""

    def __init__(self, python: str | None, own: Mapping[str, Any]) -> None:
        default = f".venv-{self.name}/bin/python"
        self.python = python or os.environ.get(self._variable) or default
        self.own = dict(_flat(own))

    @property
    def _variable(self) -> str:
        return f"LUDUS_{self.name.upper()}_PYTHON"

    def job(self, config: RunConfig, folder: Path, model: Path) -> dict[str, Any]:
        """Returns the job: the host's `settings` by dotted key, and the `device`."""
        raise NotImplementedError

    def check(self, config: RunConfig) -> list[str]:
        """Check keys, environment and the host's settings. Errors: ConfigError."""
        self.table.require_honoured(config)
        self._refuse_ours(config)
        if address := os.environ.get("RAY_ADDRESS"):
            require_answer(address.removeprefix("ray://"), "RAY_ADDRESS")
        with tempfile.TemporaryDirectory(prefix=f"ludus-{self.name}-") as folder:
            job = Path(folder) / "job.json"
            job.write_text(json.dumps(self.job(config, Path(folder), Path(folder))))
            self._run_check(config, job)
        return self.table.adaptations(config)

    def settings(self, config: RunConfig) -> dict[str, Any]:
        """The recipe's values by the host's dotted keys."""
        return self.table.settings(config)

    def own_name(self, key: str) -> str | None:
        """The present name of a key of the host's in the table; None where it has none."""
        return key

    def _refuse_ours(self, config: RunConfig) -> None:
        """Errors: ConfigError for a key of the host that the recipe or the run sets."""
        settings = self.settings(config)
        ours = {key.removeprefix("+") for key in (*settings, *dict(_flat(settings)))}
        for own in self.own:
            name = own.removeprefix("+")
            tied = any(name == key or name.startswith(f"{key}.") for key in self.tied)
            within = sorted(key for key in ours | self.tied if key.startswith(f"{name}."))
            if name in ours or tied:
                by = self._source(name)
                how = f"set {by} in the recipe instead" if by else f"it ties {self.name} to the run"
                raise ConfigError(f"backend.args.{self.name}.{name}: ludus sets it: {how}")
            if within:
                raise ConfigError(
                    f"backend.args.{self.name}.{name}: ludus sets keys in it, {within[0]} for one: "
                    "give those of yours by name"
                )

    def _source(self, name: str) -> str | None:
        """The recipe key that sets a key of the host, or the section that has it."""
        sources = {self.own_name(to): row.key for row in self.table.rows for to in row.to}
        parts = name.split(".")
        names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((sources[key] for key in names if key in sources), None)

    def _run_check(self, config: RunConfig, job: Path) -> None:
        name = self.name
        if shutil.which(self.python) is None:
            raise ConfigError(
                f"backend: {name}: there is no interpreter {self.python}: `make {name}` creates an "
                f"environment with {name}; ${self._variable} or backend.args.python names another"
            )
        done = subprocess.run(
            [self.python, "-m", self.side, "--check", str(job)],
            env={**os.environ, **self.environment(config, job)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode == 0:
            return
        if done.returncode == 3:
            raise ConfigError(done.stdout.strip())
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(
            f"backend: {name}: {self.python} cannot run {name} ({last:.300}): `make {name}` "
            "creates an environment with it"
        )

    def chosen(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the defaults that the host's own keys leave."""
        own = {key.removeprefix("+") for key in self.own}
        return {k: v for k, v in defaults.items() if k.removeprefix("+") not in own}

    def environment(self, config: RunConfig, job: Path) -> dict[str, str]:
        """The environment variables of the host's processes."""
        root = str(Path(__file__).parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        threads = config.threads or (1 if config.model.device == "cpu" else 0)
        return {
            **_QUIET,
            **(self.cpu if config.model.device == "cpu" else {}),
            **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
            "PYTHONPATH": os.pathsep.join(paths),  # the workers are of this very ludus
            "LUDUS_HOST_JOB": str(job),
        }

    def steps_done(self, folder: Path) -> int:
        """The steps of the newest checkpoint. Errors: CheckpointError for a damaged file."""
        path = folder / "checkpoints" / LATEST
        try:
            return int(path.read_text())
        except FileNotFoundError:
            return 0
        except ValueError:
            raise CheckpointError(f"{path} is damaged: it holds no number") from None

    def weights(self, folder: Path, step: int) -> Path:
        """The Hugging Face folder of a checkpoint. Errors: CheckpointError."""
        path = folder / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface"
        if not path.is_dir():
            raise CheckpointError(f"{self.name} left no weights of step {step}: {path} is missing")
        return path

    def renamed(self, values: Mapping[str, float]) -> dict[str, float]:
        """A step's metrics; those without a name of ours are `HOST/NAME`."""
        found: dict[str, float] = {}
        for name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                found[self.names.get(name, f"{self.name}/{name}")] = float(value)
        return found


def played(play: HostPlay, episodes: Path) -> dict[str, Any]:
    """The part of a job that the workers play; they append finished groups in `episodes`."""
    return {
        "opener": play.opener,
        "run": str(play.run),
        "model": str(play.model),
        "env": None if play.env is None else play.env.model_dump(),
        "tasks": {"train": str(play.train), "heldout": str(play.heldout)},
        "episodes": str(episodes),
    }


def new_ray_folder() -> Path:
    """A folder for a Ray of the host's own. Short: paths of sockets have at most 107 characters."""
    return Path(tempfile.gettempdir()) / f"{RAY_FOLDER}{secrets.token_hex(4)}"


def remove_left(folder: str | None) -> None:
    """Remove the folder of Ray that an earlier process of the run left, which was killed."""
    if folder and Path(folder).name.startswith(RAY_FOLDER):
        shutil.rmtree(folder, ignore_errors=True)


def last_job(path: Path) -> dict[str, Any]:
    """The job of an earlier process of the run; {} where there is none."""
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    return {}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted keys and values of keys that may be nested, dotted or both."""
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and not name.startswith("+"):
            found += _flat(value, f"{name}.")
        else:
            found.append((name, value))
    return found
