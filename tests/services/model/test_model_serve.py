"""`ludus serve model`: start, answer, clean shutdown; errors in one line."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from model_world import make_folder, make_run
from service_world import until

from ludus.core.errors import LudusError
from ludus.core.types import Spec
from ludus.services.model.policy import ModelOverrides
from ludus.services.model.serving import serve_model
from ludus.services.server.connections import ConnectionLimits

COMMAND = [sys.executable, "-m", "ludus", "serve", "model"]


IMPATIENT = """
import sys
from ludus.cli import main
from ludus.services.server import serve
serve.GRACE_S = 0.01
sys.argv = ["ludus", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(COMMAND[:3], id="5 s to end"),
        pytest.param([sys.executable, "-c", IMPATIENT], id="no time to end"),
    ],
)
def test_run_is_served_until_a_signal(tmp_path: Path, start: list[str]) -> None:
    make_run(tmp_path / "tiny-1", lora={"rank": 2})
    words = ["tiny-1", "--runs-dir", str(tmp_path), "--port", "0", "--name", "mine"]
    process = subprocess.Popen(
        [*start, "serve", "model", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        said = process.stdout.readline()
        found = re.fullmatch(
            r"mine \(tiny-1/sft-000001\): (http://[\d.:]+)/v1 \(description: .*\)\n", said
        )
        assert found, said + process.stderr.read()
        url = found[1]
        until(lambda: httpx.get(f"{url}/health").status_code == 200)
        asked = {"model": "mine", "prompt": "go", "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()
        assert answer["policy_version"] == 7
        endless = {**asked, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=endless, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) in (0, -signal.SIGTERM)
        assert process.stdout.read() == ""
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("served") / "model", 1)


@pytest.mark.slow
def test_option_error_is_one_line(folder: Path) -> None:
    done = subprocess.run(
        [*COMMAND, str(folder), "--port", "0", "--dtype", "float8"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("ludus: --dtype must be one of float32, bfloat16")


def failure(checkpoint: Path, **options: Any) -> str:
    """The error that prevents the start."""
    given = {
        "host": "127.0.0.1",
        "port": 0,
        "name": None,
        "runs_dir": "nowhere",
        "overrides": ModelOverrides(),
        "sampler": Spec(name="in_process"),
        "max_turns": 8,
        "max_turns_per_token": 0,
        "connections": ConnectionLimits(),
        "say": print,
    }
    with pytest.raises(LudusError) as caught:
        serve_model(str(checkpoint), **{**given, **options})
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host": "0.0.0.0"}, "set a token in LUDUS_TOKENS"),
        ({"sampler": Spec(name="vlm")}, "'vlm' is not a known sampler (did you mean vllm?)"),
        ({"sampler": Spec(name="in_process", args={"pth": "fast"})}, "pth is not an argument"),
        ({"overrides": ModelOverrides(context_length=99999)}, "99999 exceeds the model's 2048"),
        (
            {"overrides": ModelOverrides(chat_template="qwn3")},
            "'qwn3' is neither a shipped template",
        ),
    ],
)
def test_option_errors(folder: Path, options: dict[str, Any], said: str) -> None:
    message = failure(folder, **options)
    assert said in message
    assert "\n" not in message


def test_checkpoint_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "neither a run" in failure(tmp_path)
    assert "there is no run" in failure(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    assert "describes no model" in failure(tmp_path)
    monkeypatch.setenv("LUDUS_ADMIN_TOKEN", "short")
    assert "LUDUS_ADMIN_TOKEN" in failure(tmp_path)
