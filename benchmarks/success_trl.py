"""TRL's side of `success.py`: BabyAI in its `environment_factory`, or in a `rollout_func`.

An environment of TRL cannot end an episode directly, but a reply that exceeds the completion can:
TRL drops the reply, and the conversation ends. Both methods therefore see the same texts, end
episodes at the same point as ludus, and train on the sampled tokens only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from step_trl import ActingTokenizer, Stopwatch, rollout_func, run_trainer, trl_tokenizer
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM

from ludus.config.schema import OptimizerConfig
from ludus.core.types import Message, Task
from ludus.envs.babyai.env import BabyAI
from ludus.train.learner import learning_rate

ROOM = 400
"""Tokens after the prompt; eight turns of six and the longest observations take fewer."""
NO_ROOM = " ".join(["wall"] * (ROOM + 1))


class EndedTurns(ActingTokenizer):
    """Parses a turn as a call only if the turn was ended."""

    def action_of(self, turn: list[int]) -> list[int] | None:
        return turn[:-1] if turn[-1] == self.eos_token_id else None


def now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("it waits")


def environment(max_turns: int) -> type:
    class World:
        """BabyAI as TRL's environment: `act` is its tool."""

        def __init__(self) -> None:
            self._env = BabyAI()

        def reset(self, level: str, seed: int, **_: Any) -> str:
            self._reward, self._turns = 0.0, 0
            task = Task(id=f"{level}/{seed}", data={"level": level, "seed": seed})
            return str(now(self._env.reset(task)).messages[0].content)

        def act(self, action: str) -> str:
            """Take one action.

            Args:
                action: one of the actions.
            """
            result = now(self._env.step(Message(role="assistant", content=action.strip())))
            self._reward, self._turns = self._reward + (result.reward or 0.0), self._turns + 1
            if result.done or self._turns == max_turns:
                return NO_ROOM
            return str(result.messages[0].content)

        def get_reward(self) -> float:
            return self._reward

    return World


class Worlds:
    """Episodes of BabyAI, from texts of level and seed."""

    def __init__(self, texts: list[str], tokenizer: EndedTurns, max_turns: int) -> None:
        self.tokenizer = tokenizer
        world_of = environment(max_turns)
        self.worlds = [world_of() for _ in texts]
        starts = zip(self.worlds, map(str.split, texts), strict=True)
        self.texts = [world.reset(level, int(seed)) for world, (level, seed) in starts]

    def reply(self, turns: dict[int, list[int]]) -> dict[int, str]:
        actions = {i: self.tokenizer.action_of(turn) for i, turn in turns.items()}
        replies = {
            i: self.worlds[i].act(self.tokenizer.decode(action))
            for i, action in actions.items()
            if action is not None
        }
        return {i: reply for i, reply in replies.items() if reply is not NO_ROOM}

    def columns(self) -> dict[str, Any]:
        return {"earned": [world.get_reward() for world in self.worlds]}


def earned_reward(earned: list[float], **_: Any) -> list[float]:
    return earned


def sides(
    mode: str, tasks: Sequence[Task], tokenizer: EndedTurns, max_turns: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of TRL's dataset, and what the trainer is given to play them."""
    if mode == "environment":
        rows = [{"prompt": [{"role": "user", "content": ""}], **task.data} for task in tasks]
        return rows, {"environment_factory": environment(max_turns), "reward_funcs": []}
    texts = [f"{task.data['level']} {task.data['seed']}" for task in tasks]
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in texts]
    play = rollout_func(tokenizer, lambda texts: Worlds(texts, tokenizer, max_turns))
    return rows, {"rollout_func": play, "reward_funcs": earned_reward}


def train(
    mode: str,
    settings: Any,
    plain: Any,
    folder: str,
    tasks: Sequence[Task],
    micro_batch: int,
    steps: int,
    after_step: Callable[[Any, float, dict[str, float]], bool],
) -> None:
    """GRPO from the weights in `folder` on, with ludus's settings.

    Args:
        mode: environment, rollout.
        settings: a run configuration with its `rl` section.
        after_step: given the model, the seconds of training so far, and what was played; whether
            to go on. Its own time does not count.
    """
    rl, rollout = settings.rl, settings.rollout
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    tokenizer = trl_tokenizer(plain, EndedTurns, model)
    samples = rl.groups_per_step * rl.group_size
    rows, own = sides(mode, tasks[: steps * rl.groups_per_step], tokenizer, rollout.max_turns)
    own["optimizers"] = optimizer_of(model, rl.optimizer, steps)

    def go_on(watch: Stopwatch) -> bool:
        figures = {
            "sampled_tokens": watch.sampled_tokens,
            "tokens": watch.tokens,
            "reward": watch.trainer._metrics["train"]["reward"][-1],
            "rollout_s": sum(watch.rollouts),
        }
        return after_step(watch.trainer.model, sum(watch.seconds), figures)

    run_trainer(
        model,
        tokenizer,
        rows,
        own,
        time.process_time,
        go_on,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=samples // micro_batch,
        num_generations=rl.group_size,
        max_completion_length=ROOM,
        max_tool_calling_iterations=rollout.max_turns,
        generation_kwargs={"max_new_tokens": rollout.max_tokens_per_turn},
        temperature=rollout.temperature,
        shuffle_dataset=False,
        seed=settings.seed,
        max_steps=steps,
        max_grad_norm=rl.optimizer.max_grad_norm,
        bf16=False,
    )


def optimizer_of(model: Any, config: OptimizerConfig, steps: int) -> tuple[AdamW, LambdaLR]:
    """Fused AdamW with ludus's schedule, whose warm-up does not begin with a rate of 0."""
    optimizer = AdamW(
        model.parameters(),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    return optimizer, LambdaLR(optimizer, lambda k: learning_rate(config, k, steps) / config.lr)
