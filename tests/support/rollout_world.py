"""A small policy that plays `Say`, trained from scratch on the three formats and thinking."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import torch
from played_envs import COLOURS, SAY, Say, task_of

from ludus.config.schema import ModelConfig, RolloutConfig
from ludus.core.types import Message, Spec, Trajectory
from ludus.data.expert import Format, run_expert
from ludus.models.build import build_model
from ludus.models.chat.by_task import TaskRenderers
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.models.samplers.engine import InProcessSampler
from ludus.rollout.collect import Collector
from ludus.rollout.replay import replay
from ludus.rollout.sessions.session import with_system_prompt
from ludus.train.batches.samples import rows

CONTEXT = 256
STYLES = {"plain": "plain", "react": "react", "tools": "tools", "think": "plain"}
EXTRA = ["that is no colour .", "grey is not for calling .", "done .", "the colour is red", "shout"]


def demonstration(style: str, seed: int) -> list[Message]:
    """The expert's episode as a conversation; in the style `think`, it thinks in each turn."""
    format: Format = STYLES[style]  # type: ignore[assignment]
    messages = asyncio.run(run_expert(Say(), task_of(seed), format)).messages
    if style != "think":
        return messages
    return [
        m.model_copy(update={"thinking": f"the colour is {m.content}"})
        if m.role == "assistant"
        else m
        for m in messages
    ]


@dataclass
class World:
    """A trained policy, its tokenizer, and collectors."""

    tokenizer: Any
    model: Any

    def renderer(self, style: str = "plain", thinking: str = "keep") -> Renderer:
        tools = [SAY] if style == "tools" else []
        return Renderer(self.tokenizer, None, tools, thinking)  # type: ignore[arg-type]

    def sampler(self, **kwargs: Any) -> Recording:
        decode = self.tokenizer.decode
        kwargs = {"context_length": CONTEXT, **kwargs}
        return Recording(self.model, decode=decode, **kwargs)

    def collector(
        self,
        env: str | None = "Say",
        style: str = "plain",
        thinking: str = "keep",
        sampler: Any = None,
        judge: Any = None,
        on_episode: Any = None,
        inline: bool = False,
        seed: int = 0,
        **settings: Any,
    ) -> Collector:
        settings = {
            "format": STYLES[style],
            "system_prompt": style,
            "max_tokens_per_turn": 40,
            "step_deadline_s": 20.0,
            **settings,
        }
        return Collector(
            sampler=sampler or self.sampler(),
            renderers=TaskRenderers(self.renderer(style, thinking)),
            config=RolloutConfig(**settings),
            env=Spec(name=f"played_envs:{env}") if env else None,
            judge=judge,
            on_episode=on_episode,
            inline=inline,
            seed=seed,
        )


class Recording(InProcessSampler):
    """The in-process sampler; records its prompts and completions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.turns: dict[str, list[tuple[list[int], Completion]]] = {}

    @property
    def open_sessions(self) -> list[str]:
        return list(self._scheduler.sessions)

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, *, session: str
    ) -> Completion:
        completion = await super().sample(prompt_ids, params, session=session)
        self.turns.setdefault(session, []).append((list(prompt_ids), completion))
        return completion


class Scripted:
    """A sampler with scripted turns: one text a turn, the same in each episode.

    A turn ends with the end-of-turn token; a trailing `...` marks a truncated turn.
    """

    def __init__(self, renderer: Renderer, *texts: str | Message, context_length: int = CONTEXT):
        self.renderer = renderer
        self.texts = texts
        self.context_length = context_length
        self.turns: dict[str, list[tuple[list[int], Completion]]] = {}
        self.sessions: set[str] = set()

    def open(self, session: str) -> None:
        self.sessions.add(session)
        self.turns.pop(session, None)

    def close(self, session: str) -> None:
        self.sessions.discard(session)

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, *, session: str
    ) -> Completion:
        assert session in self.sessions
        await asyncio.sleep(0)
        said = self.turns.setdefault(session, [])
        text = self.texts[len(said) % len(self.texts)]
        cut = isinstance(text, str) and text.endswith("...")
        if isinstance(text, str):
            # Encoded as it is, markers included: a model samples tokens, not messages.
            ids = self.renderer.tokenizer.encode(text.removesuffix("..."), add_special_tokens=False)
            ids = ids if cut else [*ids, self.renderer.stop_token_ids[0]]
        else:
            ids = self.renderer.assistant(text)
        completion = Completion(
            ids, [-0.5] * len(ids), "length" if cut else "stop", policy_version=7
        )
        said.append((list(prompt_ids), completion))
        return completion


def make_world() -> World:
    """Train a policy from scratch on all styles: takes a few seconds."""
    conversations = {s: [demonstration(s, seed) for seed in range(24)] for s in STYLES}
    said = [
        text
        for messages in conversations["think"] + conversations["react"]
        for message in messages
        for text in (message.content, message.thinking or "")
    ]
    texts = [*said, *STYLES, *EXTRA, *COLOURS, *(f'{{"word": "{c}"}}' for c in COLOURS)]
    tokenizer = train_tokenizer(Spec(name="words"), texts, "plain", [SAY])
    config = ModelConfig(
        architecture=Spec(
            name="qwen3",
            args={
                "hidden_size": 48,
                "num_layers": 2,
                "num_heads": 2,
                "num_kv_heads": 1,
                "head_dim": 24,
                "intermediate_size": 96,
            },
        ),
        tokenizer=Spec(name="words"),
        context_length=CONTEXT,
    )
    world = World(tokenizer, build_model(config, tokenizer, seed=1))
    teach(world, conversations)
    return world


def teach(
    world: World, conversations: dict[str, list[list[Message]]], num_steps: int = 130
) -> None:
    """Train on the demonstrations: enough for well-formed turns, not for correct ones."""
    found = []
    for style, messages in conversations.items():
        renderer = world.renderer(style)
        for conversation in messages:
            trajectory = replay(
                with_system_prompt(conversation, style), renderer, Trajectory("", "", "")
            )
            found += rows(trajectory, 1.0)
    found.sort(key=lambda row: len(row.token_ids))
    optimizer = torch.optim.AdamW(world.model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        start = int(torch.randint(0, len(found) - 11, (1,), generator=generator))
        batch = found[start : start + 12]
        width = max(len(row.token_ids) for row in batch)
        ids = torch.tensor([r.token_ids + [0] * (width - len(r.token_ids)) for r in batch])
        mask = torch.tensor([r.loss_mask + [False] * (width - len(r.token_ids)) for r in batch])
        logits = world.model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[mask[:, 1:]], ids[:, 1:][mask[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    world.model.eval()
