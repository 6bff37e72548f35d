"""`import ludus` and the core load no heavy package."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "sqlalchemy", "transformers", "ray", "vllm", "wandb", "tensorboard")


@pytest.mark.parametrize(
    ("module", "also_without"),
    [
        ("ludus", ("pydantic", "yaml", "rich")),
        ("ludus.config.load", ("rich",)),
        ("ludus.telemetry.logs", ("rich", "pydantic", "yaml")),
        ("ludus.telemetry.metrics", ("rich",)),
        ("ludus.config.reference", ()),
        ("ludus.diagnostics.doctor", ()),
        ("ludus.data.rollouts", ("tokenizers",)),
        ("ludus.data.generation", ("tokenizers",)),
        ("ludus.services.envs.service", ("tokenizers",)),
    ],
)
def test_an_import_is_light(module, also_without):
    names = (*HEAVY, *also_without)
    code = f"import sys, {module}; print([name for name in {names!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "module", ["ludus.pipeline.launch", "ludus.diagnostics.calibration.calibrate"]
)
def test_peft_is_loaded_by_models_with_adapters_alone(module: str) -> None:
    """With bitsandbytes and torch's compiler, it takes as long as half of all that is needed."""
    code = f"import sys, {module}; print('peft' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
