"""Publish a checkpoint on a Hugging Face hub, with a model card.

The token comes from `HF_TOKEN` or the hub's own login (`hf auth login`), and is never printed.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ludus.config import yaml12
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, LudusError, StoreError, described
from ludus.evaluate.results import Evaluation
from ludus.pipeline.evaluation.evaluate import export_checkpoint
from ludus.report.collect import read_evaluations
from ludus.store import RunStore
from ludus.store.folders import RunFolder, find_run
from ludus.store.settings import run_config
from ludus.train.checkpoint.listing import CheckpointInfo
from ludus.train.checkpoint.policy import find_checkpoint

PRIVATE = {"runs_dir", "store", "mirror", "metrics", "budget"}
"""Sections that the card leaves out: places and accounts of the run, not settings of training."""

SECRET = re.compile(r"key|token|secret|password|credential", re.I)
ANSWER_S = 120.0
"""Limit of the wait for one answer of the hub, or for one piece of an upload to be taken."""

WEIGHTS = ["*.safetensors", "*.safetensors.index.json", "config.json", "adapter_config.json"]
"""Files of an earlier version, removed by an update unless it has them too."""


def push(
    run: str,
    runs_dir: str,
    repo: str,
    *,
    checkpoint: str | None,
    licence: str | None,
    private: bool,
    revision: str | None,
    merge: bool,
    update: bool,
    dry_run: bool,
    say: Callable[[str], object],
) -> None:
    """Export a checkpoint and upload it as one commit; a dry run prints files and card only.

    Args:
        licence: for the card, by the hub's name: apache-2.0, mit, other.
        revision: branch; created where it is absent. None: the main branch.
        update: commit to a repository that exists.

    Errors: ConfigError; LudusError where the hub refuses or cannot be reached.
    """
    _check_names(repo, licence)
    folder = find_run(runs_dir, run)
    info = find_checkpoint(folder, checkpoint)
    with tempfile.TemporaryDirectory(prefix="ludus-push-") as temporary:
        path = Path(temporary) / repo.rpartition("/")[2]
        export_checkpoint(run, runs_dir, info.path.name, path, merge=merge, overwrite=False)
        card = model_card(folder, info, repo, str(licence), (path / "README.md").read_text("utf-8"))
        (path / "README.md").write_text(card, encoding="utf-8")
        if dry_run:
            for file in sorted(path.iterdir()):
                say(f"{file.stat().st_size:>12,} bytes  {file.name}")
            say(f"\n{card}")
            say(f"dry run: nothing was uploaded to {repo}")
            return
        message = f"{folder.id}/{info.path.name}, trained with ludus"
        say(_upload(path, repo, private, revision, update, message))


@contextmanager
def _given_up() -> Iterator[None]:
    """Limit the wait for each answer of the hub: its own client waits without a limit."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def limited() -> Any:
        client = default_client_factory()
        client.timeout = ANSWER_S
        return client

    set_client_factory(limited)
    try:
        yield
    finally:
        set_client_factory(default_client_factory)


def _check_names(repo: str, licence: str | None) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"{repo!r} cannot name a repository: {error}") from None
    if licence is None or not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", licence):
        wrong = "is required" if licence is None else f"{licence!r} is not a name of the hub's list"
        raise ConfigError(f"--license {wrong}: e.g. apache-2.0, mit, or other")


def _upload(
    path: Path, repo: str, private: bool, revision: str | None, update: bool, message: str
) -> str:
    """Upload a folder as one commit; returns its address. Errors: LudusError."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="ludus")
    with _explained(api.endpoint, repo) as remedies, _given_up():
        existed = _exists_or_create(api, repo, private, update)
        remedies.append("; nothing was committed: repeat the command with --update")
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=path,
            revision=revision,
            commit_message=message,
            delete_patterns=WEIGHTS if existed else None,
        )
    return str(commit.commit_url)


def _exists_or_create(api: Any, repo: str, private: bool, update: bool) -> bool:
    """Returns whether the repository exists; else creates it. Errors: ConfigError."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api.create_repo(repo, private=private, exist_ok=False)
    except HfHubHTTPError as error:
        if error.response.status_code != 409:
            raise
        if not update:
            raise ConfigError(
                f"the repository {repo} exists already at {api.endpoint}: add a commit to it with "
                "--update, or choose another name"
            ) from None
        return True
    return False


@contextmanager
def _explained(endpoint: str, repo: str) -> Iterator[list[str]]:
    """Turn the hub's errors into sentences; yields a list of what to append to them.

    Errors: LudusError.
    """
    from huggingface_hub.errors import HfHubHTTPError

    remedies: list[str] = []
    try:
        yield remedies
    except LudusError:
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise LudusError(
                f"{endpoint} does not allow writing to {repo} ({status}): set HF_TOKEN to a token "
                "with write access, or log in with `hf auth login`"
            ) from None
        reason = " ".join((error.server_message or str(error)).split())[:200]
        told = f"{endpoint} answered {status} for {repo}: {reason}"
        raise LudusError(told + "".join(remedies)) from None
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise LudusError(
            f"{endpoint} does not answer as a Hugging Face hub ({described(error):.200}): set "
            "HF_ENDPOINT to the address of one, or leave it out for huggingface.co"
        ) from None
    except Exception as error:  # the HTTP client's own classes differ by the hub's version
        errors = [error, *filter(None, [error.__cause__])]
        late = any("Timeout" in type(each).__name__ for each in errors)
        reasons = [" ".join(str(each).split())[:200] or type(each).__name__ for each in errors]
        reason = f"no answer for {ANSWER_S:g} s" if late else ": ".join(reasons)
        told = f"{repo} cannot be uploaded to {endpoint}: {reason}"
        raise LudusError(told + "".join(remedies)) from None


def model_card(
    folder: RunFolder, info: CheckpointInfo, repo: str, licence: str, exported: str
) -> str:
    """Returns the card: the exported one, with a licence, training, data, results, versions."""
    config = run_config(folder)
    measured = "" if info.metric is None else f", {info.metric_name} {info.metric:.4g}"
    head, _, body = exported.removeprefix("---\n").partition("---\n")
    body = body.replace(f'"{folder.id}, {info.path.name}"', f'"{repo}"')
    body = body.replace(f"# {folder.id}, {info.path.name}\n", f"# {repo}\n")
    if config.model.path and Path(config.model.path).expanduser().exists():
        # A path of this machine is no model of the hub.
        head = re.sub(r"base_model: .*\n", "", head)
    parts = [
        f"---\nlicense: {licence}\n{head}---\n{body.rstrip()}\n",
        f"## Training\n\nRun `{folder.id}`, checkpoint `{info.path.name}`{measured}.\n\n"
        + _training(config, info),
        "## Data and environment\n\n" + _data(config),
        "## Held-out results\n\n" + _results(read_evaluations(folder, config)),
        f"## Configuration\n\n```yaml\n{_settings(config)}```\n",
        "## Versions\n\n" + _versions(folder, config),
    ]
    return "\n".join(parts)


def _training(config: RunConfig, info: CheckpointInfo) -> str:
    """The stages up to the checkpoint, and their steps until then."""
    lines = []
    if config.sft:
        steps = info.step if info.stage == "sft" else config.sft.steps
        episodes = config.sft.episodes_per_step
        lines.append(f"- SFT: {_steps(steps, config.sft.steps)} of {episodes} conversations")
    if config.rl and info.stage == "rl":
        rl = config.rl
        told = _steps(info.step, max(rl.steps, info.step))  # more with what SFT left unused
        lines.append(
            f"- RL: {rl.algorithm.name}, {told} of {rl.groups_per_step} tasks with "
            f"{rl.group_size} episodes each"
        )
    return "\n".join(lines) + "\n"


def _steps(done: int, planned: int) -> str:
    return f"{done} steps" if done == planned else f"{done} steps (of {planned} planned)"


def _data(config: RunConfig) -> str:
    rows: dict[str, Any] = {"environment": config.env, "judge": config.judge}
    rows |= {"training tasks": config.tasks.train, "held-out tasks": config.tasks.heldout}
    lines = [
        f"- {name}: `{yaml12.inline(_public(spec.model_dump(mode='json')))}`"
        for name, spec in rows.items()
        if spec is not None
    ]
    if config.sft and config.sft.data:
        lines.append(f"- conversations: `{Path(config.sft.data).name}`")
    elif config.demonstrations:
        count = config.demonstrations.num_episodes
        lines.append(f"- demonstrations: up to {count} episodes of the environment's expert")
    return "\n".join(lines) + "\n"


def _results(evaluations: Mapping[str, Evaluation]) -> str:
    if not evaluations:
        return "The run was not evaluated on held-out tasks.\n"
    level = f"{100 * next(iter(evaluations.values())).confidence:g} %"
    lines = [
        f"Success with {level} intervals over the tasks.\n",
        "| | tasks | success | mean score | sampling |",
        "|---|---|---|---|---|",
    ]
    for name, result in evaluations.items():
        left_out = f"; {result.excluded_episodes} left out" if result.num_excluded else ""
        lines.append(
            f"| {name} | {result.success.num_tasks}{left_out} | {result.success} | "
            f"{result.score.value:.3f} | {result.sampling} |"
        )
    return "\n".join(lines) + "\n"


def _settings(config: RunConfig) -> str:
    settings = config.model_dump(mode="json")
    return yaml12.dump(_public({k: v for k, v in settings.items() if k not in PRIVATE}))


def _public(value: Any) -> Any:
    """Returns the value without the values of keys that may hold a secret."""
    if isinstance(value, dict):
        return {
            key: "(removed)" if SECRET.search(key) and isinstance(item, str) else _public(item)
            for key, item in value.items()
        }
    return [_public(item) for item in value] if isinstance(value, list) else value


def _versions(folder: RunFolder, config: RunConfig) -> str:
    try:
        with RunStore.open(config.store, folder.path.parent, read_only=True) as store:
            versions = dict(store.run(folder.id).versions)
    except StoreError as error:
        return f"Unknown: {error}\n"
    machine = {"platform", "processor", "cores"}
    known = (f"{name} {value}" for name, value in versions.items() if name not in machine)
    return ", ".join(known) + "\n"
