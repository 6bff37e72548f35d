"""Versions and code that a run's results depend on, and what changed of them since it started."""

from __future__ import annotations

import json
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ludus import __version__
from ludus.config.schema import RunConfig
from ludus.core.code import code_hash
from ludus.core.files import atomic_write
from ludus.core.system.machine import num_cores
from ludus.pipeline.parts.registries import plugin_files
from ludus.store.folders import RunFolder, read_facts

PACKAGES = ("torch", "transformers", "tokenizers", "peft", "numpy", "minigrid", "sqlalchemy")


def versions() -> dict[str, str]:
    """Returns the versions of machine, Python and packages that results depend on."""
    facts = {
        "ludus": __version__,
        "code": code_hash(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": str(num_cores()),
    }
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            facts[package] = version(package)
    return facts


def write_code(config: RunConfig, folder: RunFolder) -> None:
    """Write the versions, and the SHA-256 of each plug-in's file, to the run's folder."""
    code = {**plugin_files(config), **_packages()}
    atomic_write(folder.code, json.dumps(code, indent=1))


def code_changes(config: RunConfig, folder: RunFolder) -> list[str]:
    """Returns the plug-ins and packages that changed since the run last started.

    Plug-ins that the run did not have then are not compared.
    """
    then = read_facts(folder.code)
    changes = [
        f"the code of {name}"
        for name, digest in plugin_files(config).items()
        if then.get(name, digest) != digest
    ]
    changes += [
        f"{name} from {then[name]} to {now}"
        for name, now in _packages().items()
        if then.get(name, now) != now
    ]
    return changes


def _packages() -> dict[str, str]:
    return {name: value for name, value in versions().items() if name in ("ludus", *PACKAGES)}


def processor() -> str:
    """Returns the name of the processor's model; of its architecture where none is known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
