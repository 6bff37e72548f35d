"""A model service for tests: a tiny model, in a thread of this process or as the command."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import uvicorn

from ludus.config.load import dump_config
from ludus.config.schema import ModelConfig, RunConfig
from ludus.core.seeds import derive_seed
from ludus.core.types import Message, Spec, ToolCall, ToolSpec
from ludus.models.build import build_model
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.services.model.policy import ModelOverrides, load_policy
from ludus.services.model.service import ModelOptions, model_service
from ludus.services.model.serving import make_engine
from ludus.services.server.app import Settings
from ludus.services.server.connections import ConnectionLimits
from ludus.services.server.serve import server_config
from ludus.train.checkpoint.export import export_hf
from ludus.train.checkpoint.state import trained_tensors
from ludus.train.checkpoint.store import CheckpointStore

CONTEXT = 2048
TEXTS = ["turn left and pick up the red ball", "the door is open", "go forward, 12 steps: done."]
SHAPE = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 32,  # the least that vLLM takes
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


def model_config(vocab_size: int = 320, **changes: Any) -> ModelConfig:
    return ModelConfig(
        architecture=Spec(name="qwen3", args=SHAPE),
        tokenizer=Spec(name="bpe", args={"vocab_size": vocab_size}),
        context_length=CONTEXT,
        **changes,
    )


def make_tokenizer(vocab_size: int = 320) -> Any:
    return train_tokenizer(Spec(name="bpe", args={"vocab_size": vocab_size}), TEXTS, "qwen3")


def make_folder(path: Path, seed: int) -> Path:
    """A Hugging Face folder."""
    tokenizer = make_tokenizer()
    model = build_model(model_config(), tokenizer, seed)
    return export_hf(model, tokenizer, path)


PLAIN, THINKS, CALLS = "open the door", "think first", "press red"
ANSWERS = {
    PLAIN: Message(role="assistant", content="the door is open, 12 steps"),
    THINKS: Message(role="assistant", content="go left", thinking="left or not?"),
    CALLS: Message(
        role="assistant",
        content="I press.",
        tool_calls=[ToolCall(name="press", arguments={"lever": "red"})],
    ),
}
"""Greedy answers of the model of `taught`; the last uses the tool."""


def taught(path: Path, answers: Mapping[str, Message] = ANSWERS) -> Path:
    """A Hugging Face folder of a model that has memorized answers."""
    tokenizer = make_tokenizer()
    model = build_model(model_config(), tokenizer, 0).train()
    rows = []
    for asked, answer in answers.items():
        tools = [ToolSpec(**TOOL["function"])] if answer.tool_calls else []
        renderer = Renderer(tokenizer, None, tools)
        prompt = renderer.open([Message(role="user", content=asked)])
        rows.append((prompt, renderer.assistant(answer)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(400):
        losses = []
        for prompt, answer_ids in rows:
            ids = torch.tensor([prompt + answer_ids])
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
            losses.append(F.cross_entropy(logits, ids[0, len(prompt) :]))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        if max(losses).item() < 0.02:
            break
    return export_hf(model, tokenizer, path)


def make_run(path: Path, vocab_size: int = 320, **model: Any) -> Path:
    """A run folder with one checkpoint, of policy version 7."""
    config = RunConfig(
        name="tiny",
        model=model_config(vocab_size, **model),
        tasks={"train": {"name": "jsonl"}},
        seed=3,
    )
    path.mkdir()
    (path / "config.yaml").write_text(dump_config(config))
    tokenizer = make_tokenizer(vocab_size)
    tokenizer.save_pretrained(path / "tokenizer")
    store = CheckpointStore(path / "checkpoints")
    policy = build_model(config.model, tokenizer, derive_seed(config.seed, "model"))
    for tensor in trained_tensors(policy).values():  # as if it had been trained
        tensor.data.mul_(1.5)
    store.save("sft", 1, model=policy, state={"policy_version": 7})
    return path


def slowly(policy: Any, engine: Any) -> None:
    """Let each step take 10 ms more, so that a turn is still under way when something happens."""
    sampler = engine.sampler
    at_once = sampler._run

    def later(batch: Any) -> Any:
        time.sleep(0.01)
        return at_once(batch)

    sampler._run = later


@contextmanager
def served(
    checkpoint: Path | str,
    *,
    tokens: tuple[str, ...] = (),
    sampler: Spec | str = "in_process",
    folder: Path = Path("unused"),
    rigged: Any = None,
    connections: ConnectionLimits | None = None,
    **options: Any,
) -> Iterator[str]:
    """A service in a thread; yields its address. `rigged` may change policy and engine first."""
    policy = load_policy(str(checkpoint), "runs", ModelOverrides())
    engine = make_engine(policy, Spec.model_validate(sampler), folder)
    if rigged:
        rigged(policy, engine)
    app = model_service(policy, engine, Settings(tokens), ModelOptions("tiny", **options))
    try:
        with running(app, connections) as address:
            yield address
    finally:
        engine.close()


@contextmanager
def running(app: Any, connections: ConnectionLimits | None = None) -> Iterator[str]:
    """An application, served in a thread; yields its address."""
    config = server_config(app, connections or ConnectionLimits())
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
