"""TRL's side of `success.py`: BabyAI in its `environment_factory`, or in a `rollout_func`.

An environment of TRL cannot end an episode directly, but a reply that exceeds the completion can:
TRL drops the reply, and the conversation ends. Both methods therefore see the same texts, end
episodes at the same point as ludus, and train on the sampled tokens only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from datasets import Dataset
from step_trl import (
    AfterStep,
    encode,
    generate,
    lean_config,
    silent_folder,
    trl_tokenizer,
)
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOTrainer

from ludus.config.schema import OptimizerConfig
from ludus.core.types import Message, Task
from ludus.envs.babyai.env import BabyAI
from ludus.train.learner import learning_rate

ROOM = 400
"""Tokens after the prompt; eight turns of six and the longest observations take fewer."""
NO_ROOM = " ".join(["wall"] * (ROOM + 1))


class ActingTokenizer(PreTrainedTokenizerFast):
    """To whom a turn that was ended is an action: a call of the environment's tool."""

    def parse_response(self, response: Any, *_: Any, **__: Any) -> dict[str, Any]:
        turn: dict[str, Any] = {"role": "assistant", "content": ""}
        if response[-1] == self.eos_token_id:
            call = {"name": "act", "arguments": {"action": self.decode(response[:-1])}}
            turn["tool_calls"] = [{"type": "function", "function": call}]
        return turn


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


def rollouts(tokenizer: ActingTokenizer, max_turns: int) -> Callable[..., dict[str, Any]]:
    """A `rollout_func`: all episodes take a turn, those that go on take the next."""
    world_of = environment(max_turns)

    def play(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        worlds = [world_of() for _ in prompts]
        seen: list[str] = []
        for prompt, world in zip(prompts, worlds, strict=True):
            level, seed = prompt[0]["content"].split()
            seen.append(world.reset(level, int(seed)))
        prompt_ids = [encode(tokenizer, text) for text in seen]
        ids = [list(prompt) for prompt in prompt_ids]
        mask: list[list[int]] = [[] for _ in prompts]
        active = list(range(len(prompts)))
        while active:
            turns = generate(trainer, tokenizer, [ids[i] for i in active])
            going = []
            for i, turn in zip(active, turns, strict=True):
                ids[i] += turn
                mask[i] += [1] * len(turn)
                if turn[-1] != tokenizer.eos_token_id:
                    continue
                reply = worlds[i].act(tokenizer.decode(turn[:-1]))
                if reply is not NO_ROOM:
                    given = encode(tokenizer, reply)
                    ids[i] += given
                    mask[i] += [0] * len(given)
                    going.append(i)
            active = going
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [a[len(b) :] for a, b in zip(ids, prompt_ids, strict=True)],
            "logprobs": None,
            "env_mask": mask,
            "earned": [world.get_reward() for world in worlds],
        }

    return play


def earned_reward(earned: list[float], **_: Any) -> list[float]:
    return earned


def sides(
    mode: str, tasks: Sequence[Task], tokenizer: ActingTokenizer, max_turns: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of TRL's dataset, and what the trainer is given to play them."""
    if mode == "environment":
        rows = [{"prompt": [{"role": "user", "content": ""}], **task.data} for task in tasks]
        return rows, {"environment_factory": environment(max_turns), "reward_funcs": []}
    texts = [f"{task.data['level']} {task.data['seed']}" for task in tasks]
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in texts]
    return rows, {"rollout_func": rollouts(tokenizer, max_turns), "reward_funcs": earned_reward}


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
    tokenizer = trl_tokenizer(plain, ActingTokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = plain.eos_token_id, plain.pad_token_id
    samples = rl.groups_per_step * rl.group_size
    rows, own = sides(mode, tasks[: steps * rl.groups_per_step], tokenizer, rollout.max_turns)
    with silent_folder() as output:
        args = lean_config(
            output,
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
        trainer = GRPOTrainer(
            model=model,
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            optimizers=optimizer_of(model, rl.optimizer, steps),
            **own,
        )
        trainer.add_callback(Watch(trainer, after_step))
        trainer.train()


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


class Watch(AfterStep):
    """Counts what TRL samples, and stops it."""

    def __init__(
        self, trainer: GRPOTrainer, after_step: Callable[[Any, float, dict[str, float]], bool]
    ) -> None:
        super().__init__(time.process_time, lambda: None)
        self.trainer, self.after_step = trainer, after_step
        self.rollout_s = 0.0
        self.inner = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = self.counted

    def counted(self, inputs: Any) -> Any:
        start = time.process_time()
        found = self.inner(inputs)
        self.rollout_s += time.process_time() - start
        sampled = found["completion_mask"] * found["tool_mask"]
        self.tokens = {
            "sampled_tokens": float(sampled.sum()),
            "tokens": float(found["completion_mask"].sum() + found["prompt_mask"].sum()),
            "reward": self.trainer._metrics["train"]["reward"][-1],
        }
        return found

    def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
        super().on_step_end()
        figures = {**self.tokens, "rollout_s": self.rollout_s}
        if not self.after_step(self.trainer.model, sum(self.seconds), figures):
            control.should_training_stop = True
