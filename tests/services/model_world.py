"""A model service for tests: a tiny model, in a thread of this process or as the command."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from ludus.core.config import dump_config
from ludus.core.schema import ModelConfig, RunConfig
from ludus.core.types import Spec
from ludus.models.build import build_model
from ludus.models.tokenizers import train_tokenizer
from ludus.services.app import Settings
from ludus.services.model_engine import EngineThread
from ludus.services.model_serving import make_engine
from ludus.services.model_service import ModelOptions, model_service
from ludus.services.model_source import Policy, Wish, open_policy
from ludus.train.checkpoint import CheckpointStore
from ludus.train.export import export_hf

CONTEXT = 2048
TEXTS = ["turn left and pick up the red ball", "the door is open", "go forward, 12 steps: done."]
SHAPE = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "press",
        "description": "Press a lever.",
        "parameters": {
            "type": "object",
            "properties": {"lever": {"type": "string"}},
            "required": ["lever"],
        },
    },
}


def model_config(**changes: Any) -> ModelConfig:
    return ModelConfig(
        architecture=Spec(name="qwen3", args=SHAPE),
        tokenizer=Spec(name="bpe", args={"vocab_size": 320}),
        context_length=CONTEXT,
        **changes,
    )


def make_tokenizer() -> Any:
    return train_tokenizer(Spec(name="bpe", args={"vocab_size": 320}), TEXTS, "qwen3")


def make_folder(path: Path, seed: int) -> Path:
    """A Hugging Face folder."""
    tokenizer = make_tokenizer()
    model = build_model(model_config(), tokenizer, seed)
    return export_hf(model, tokenizer, path)


def make_run(path: Path, **model: Any) -> Path:
    """A run's folder with one checkpoint, of policy version 7."""
    config = RunConfig(
        name="tiny", model=model_config(**model), tasks={"train": {"name": "jsonl"}}, seed=3
    )
    path.mkdir()
    (path / "config.yaml").write_text(dump_config(config))
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(path / "tokenizer")
    store = CheckpointStore(path / "checkpoints")
    policy = build_model(config.model, tokenizer, 99)
    store.save("sft", 1, model=policy, state={"policy_version": 7})
    return path


@contextmanager
def served(
    checkpoint: Path | str,
    *,
    tokens: tuple[str, ...] = (),
    sampler: str = "in_process",
    rigged: Any = None,
    **options: Any,
) -> Iterator[str]:
    """A service of this process; its address. `rigged` may change policy and engine before."""
    policy = open_policy(str(checkpoint), "runs", Wish())
    engine = make_engine(policy, Spec(name=sampler), Path("unused"))
    engine.set_version(policy.version)
    if rigged:
        rigged(policy, engine)
    app = model_service(policy, engine, Settings(tokens), ModelOptions("tiny", **options))
    config = uvicorn.Config(app, log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
