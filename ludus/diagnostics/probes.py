"""Checks of installed packages, each in a new Python process: their imports may crash or hang."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ludus.core.modules import DISTRIBUTION

TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check; `fix` says how to correct a failure.

    ludus does not work if an `essential` check fails.
    """

    name: str
    ok: bool
    detail: str
    fix: str = ""
    essential: bool = False


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package; None: it is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def if_installed(package: str, check: Callable[[str], Check]) -> list[Check]:
    """Returns the result of a package's check; nothing where it is absent."""
    return [check(package)] if installed_version(package) else []


@dataclass(frozen=True, slots=True)
class Probe:
    """The JSON that a script printed as its last line, or the reason of a failure."""

    result: dict[str, Any]
    problem: str = ""


def probe(script: str, timeout_s: float = TIMEOUT_S) -> Probe:
    """Run a script that prints one JSON object, in a new Python process."""
    command = [sys.executable, "-c", script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Probe({}, f"no answer after {timeout_s:g} s")
    if done.returncode < 0:
        return Probe({}, f"killed by signal {-done.returncode}")
    if done.returncode:
        return Probe({}, (done.stderr.strip().splitlines() or ["failed"])[-1])
    return Probe(json.loads(done.stdout.strip().splitlines()[-1]))


TORCH = """
import json, torch
a = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64) % 7
exact = (a.long() @ a.long()).float()
def right(device, dtype):
    b = a.to(device, dtype)
    error = ((b @ b).float().cpu() - exact).abs().max()
    return bool(error <= (0 if dtype == torch.float32 else exact.max() / 128))
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
devices = ["cpu"] + [f"cuda:{i}" for i in range(len(gpus))]
print(json.dumps({
    "version": torch.__version__, "gpus": gpus, "threads": torch.get_num_threads(),
    "capability": torch.backends.cpu.get_cpu_capability(),
    "wrong": [f"{d} {t}" for d in devices for t in (torch.float32, torch.bfloat16)
              if not right(d, t)]}))
"""


def check_torch(package: str) -> Check:
    """Check torch's build, its devices, and matrix products in float32 and bfloat16."""
    probed = probe(TORCH)
    if probed.problem:
        fix = "reinstall torch: pip install --force-reinstall torch"
        return Check(package, False, f"cannot be used: {probed.problem}", fix, essential=True)
    torch = probed.result
    gpus = ", ".join(torch["gpus"]) or "no GPU"
    detail = f"{torch['version']}, {torch['capability']}, {torch['threads']} threads, {gpus}"
    if torch["wrong"]:
        detail += f"; wrong products: {', '.join(torch['wrong'])}"
        return Check(package, False, detail, "install another build of torch", essential=True)
    return Check(package, True, f"{detail}; float32 and bfloat16 products are correct")


THREADS = """
import json, os, sys
import ludus.models
print(json.dumps({"early": "torch" not in sys.modules, "policy": os.environ["OMP_WAIT_POLICY"]}))
"""


def check_threads(package: str) -> Check:
    """Check that torch's idle threads sleep and leave the cores to environments."""
    probed = probe(THREADS)
    name = "OMP_WAIT_POLICY"
    if probed.problem:
        return Check(name, False, f"ludus.models: {probed.problem}", "reinstall ludus", True)
    policy, early = probed.result["policy"], probed.result["early"]
    if policy.upper() != "PASSIVE":
        return Check(name, False, f"{policy}: idle threads spin", f"export {name}=PASSIVE")
    when = "set before torch is loaded" if early else "but set after torch was loaded"
    return Check(name, early, f"PASSIVE, {when}", "" if early else f"export {name}=PASSIVE")


NATIVE = """
import json
from ludus.models.decoders import native
print(json.dumps({"absence": native.absence(), "remedy": native.REMEDY}))
"""


def check_native(package: str) -> Check:
    """Check that a C compiler builds the kernels of sampler and learner for the CPU."""
    probed = probe(NATIVE)
    absence = probed.problem or probed.result["absence"]
    if absence:
        fix = probed.result.get("remedy", "reinstall ludus")
        return Check("native code", False, f"none, {package} computes on a CPU: {absence}", fix)
    return Check("native code", True, "compiled: sampler and learner use it on a CPU")


def check_transformers(package: str) -> Check:
    """Check that a model's code imports, with all dependencies of transformers."""
    probed = probe(
        "import json, transformers, transformers.models.qwen3.modeling_qwen3\n"
        "print(json.dumps({'version': transformers.__version__}))"
    )
    if probed.problem:
        fix = "see torchvision and torchaudio, or: pip install --force-reinstall transformers"
        return Check(package, False, f"cannot be used: {probed.problem}", fix, essential=True)
    return Check(package, True, f"{probed.result['version']}, imports its models")


def check_companion(package: str) -> Check:
    """Check torchvision or torchaudio: optional, but a wrong build breaks transformers."""
    probed = probe(f"import json, {package}\nprint(json.dumps({{'ok': True}}))")
    versions = f"{installed_version(package)} beside torch {installed_version('torch')}"
    if probed.problem:
        fix = f"pip uninstall {package} (ludus does not need it)"
        return Check(package, False, f"{versions} does not import: {probed.problem}", fix, True)
    return Check(package, True, f"{versions}, not needed")


def check_postgres(package: str) -> Check:
    """Check that the PostgreSQL client and its C library load."""
    probed = probe("import json, psycopg\nprint(json.dumps({'libpq': psycopg.pq.version()}))")
    if probed.problem:
        fix = f"pip install '{DISTRIBUTION}[postgres]'"
        return Check("PostgreSQL client", False, f"cannot be used: {probed.problem}", fix)
    libpq = f"libpq {probed.result['libpq'] // 10000}"
    return Check("PostgreSQL client", True, f"{package} {installed_version(package)}, {libpq}")


def check_wandb(package: str) -> Check:
    """Report the folder of Weights & Biases. The login is not checked."""
    detail = (
        f"{installed_version(package)}: the sink writes to the run's folder; upload with "
        "`wandb sync`, or set `mode: online`"
    )
    return Check(package, True, detail)
