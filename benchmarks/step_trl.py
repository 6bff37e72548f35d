"""TRL's side of `step.py`: episodes of a fixed number of tokens, in one turn or several.

Several turns use either TRL's `environment_factory`, in which every turn is a call of the
environment's one tool, or a `rollout_func`, in which all episodes take a turn together.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import torch
from common import make_model
from datasets import Dataset
from fixed import FRAME, Work, make_tokenizer, words
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

# As ludus's plain template, but tools are not described: prompts have the same length.
TEMPLATE = """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- call.function.name + call.function.arguments | tojson }}
        {%- endfor %}
        {{- '<|end|>' }}
    {%- else %}
        {{- '<|user|>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""
Wait = Callable[[], Awaitable[None]]


class ActingTokenizer(PreTrainedTokenizerFast):
    """Parses a turn as a call of the environment's tool."""

    def action_of(self, turn: list[int]) -> list[int] | None:
        """The tokens of the turn's action; None: the turn is no call."""
        return turn

    def parse_response(self, response: Any, *_: Any, **__: Any) -> dict[str, Any]:
        turn: dict[str, Any] = {"role": "assistant", "content": ""}
        action = self.action_of(response)
        if action is not None:
            call = {"name": "act", "arguments": {"action": self.decode(action)}}
            turn["tool_calls"] = [{"type": "function", "function": call}]
        return turn


def trl_tokenizer(plain: Any, kind: type[PreTrainedTokenizerFast], model: Any) -> Any:
    """ludus's tokenizer as a tokenizer for TRL; the model gets its end and padding tokens."""
    tokenizer = kind(
        tokenizer_object=plain.backend_tokenizer,
        pad_token=plain.pad_token,
        unk_token=plain.unk_token,
        eos_token=plain.eos_token,
    )
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, {"defaults": {}}
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = plain.eos_token_id, plain.pad_token_id
    return tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    """A user's message, up to where the next turn begins."""
    return list(tokenizer.encode(f"<|user|>{text}<|assistant|>", add_special_tokens=False))


@torch.no_grad()
def generate(trainer: GRPOTrainer, tokenizer: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    """One turn of each conversation, its end token included."""
    width = max(map(len, prompts))
    padded = [[tokenizer.pad_token_id] * (width - len(ids)) + ids for ids in prompts]
    real = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
    found = trainer.model.generate(
        input_ids=torch.tensor(padded),
        attention_mask=torch.tensor(real),
        generation_config=trainer.generation_config,
    )[:, width:].tolist()
    end = tokenizer.eos_token_id
    return [turn[: turn.index(end) + 1] if end in turn else turn for turn in found]


def environment(work: Work, wait: Wait | None) -> type:
    """TRL's side of `FixedEnv`."""

    class Talk:
        def __init__(self) -> None:
            self.random = random.Random()

        def reset(self, **_: Any) -> None:
            """The prompt is the dataset's."""

        def get_reward(self) -> float:
            return self.random.random()

        def act(self, action: str) -> str:
            """Say something.

            Args:
                action: what to say.
            """
            return words(self.random, work.observation - FRAME)

    if wait is None:
        return Talk

    class SlowTalk(Talk):
        async def act(self, action: str) -> str:  # type: ignore[override]
            """Say something.

            Args:
                action: what to say.
            """
            await wait()
            return super().act(action)

    return SlowTalk


class Episodes(Protocol):
    """The episodes of one step, made from TRL's prompts."""

    texts: list[str]
    """The first message of each."""

    def reply(self, turns: dict[int, list[int]]) -> dict[int, str]:
        """Given the turns of the open episodes, the next messages of those that go on."""
        ...

    def columns(self) -> dict[str, Any]:
        """Further columns for the reward functions."""
        ...


def rollout_func(
    tokenizer: Any, begin: Callable[[list[Any]], Episodes]
) -> Callable[..., dict[str, Any]]:
    """A `rollout_func`: all open episodes take a turn together."""

    def play(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        episodes = begin([prompt[0]["content"] for prompt in prompts])
        prompt_ids = [encode(tokenizer, text) for text in episodes.texts]
        ids = [list(prompt) for prompt in prompt_ids]
        mask: list[list[int]] = [[] for _ in prompts]
        going = list(range(len(prompts)))
        while going:
            sampled = generate(trainer, tokenizer, [ids[i] for i in going])
            turns = dict(zip(going, sampled, strict=True))
            replies = episodes.reply(turns)
            for i, turn in turns.items():
                given = encode(tokenizer, replies[i]) if i in replies else []
                ids[i] += turn + given
                mask[i] += [1] * len(turn) + [0] * len(given)
            going = list(replies)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [a[len(b) :] for a, b in zip(ids, prompt_ids, strict=True)],
            "logprobs": None,
            "env_mask": mask,
            **episodes.columns(),
        }

    return play


class Talks:
    """Episodes that wait for their environments together."""

    def __init__(self, texts: list[str], work: Work, wait: Wait | None) -> None:
        self.texts, self.work, self.wait = texts, work, wait
        self.turns_left = work.turns
        self.random = random.Random()

    def reply(self, turns: dict[int, list[int]]) -> dict[int, str]:
        self.turns_left -= 1
        if not self.turns_left:
            return {}
        if self.wait is not None:
            asyncio.run(self._waits(self.wait, len(turns)))
        return {i: words(self.random, self.work.observation - FRAME) for i in turns}

    async def _waits(self, wait: Wait, count: int) -> None:
        await asyncio.gather(*(wait() for _ in range(count)))

    def columns(self) -> dict[str, Any]:
        return {}


class Stopwatch(TrainerCallback):
    """Times TRL's steps and rollouts, and counts the tokens of the last rollout.

    Args:
        after_step: called after each step, outside of its time; returns whether to go on.
    """

    def __init__(
        self, trainer: Any, clock: Callable[[], float], after_step: Callable[[Stopwatch], bool]
    ) -> None:
        self.trainer, self.clock, self.after_step = trainer, clock, after_step
        self.seconds: list[float] = []
        self.rollouts: list[float] = []
        self._rollout = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = self.timed_rollout

    def timed_rollout(self, inputs: Any) -> Any:
        start = self.clock()
        batch = self._rollout(inputs)
        self.rollouts.append(self.clock() - start)
        mask = batch["completion_mask"]
        self.sampled_tokens = float((mask * batch.get("tool_mask", mask)).sum())
        self.tokens = float(mask.sum() + batch["prompt_mask"].sum())
        return batch

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = self.clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
        self.seconds.append(self.clock() - self.started)
        control.should_training_stop |= not self.after_step(self)


def run_trainer(
    model: Any,
    tokenizer: Any,
    rows: list[dict[str, Any]],
    own: dict[str, Any],
    clock: Callable[[], float],
    after_step: Callable[[Stopwatch], bool],
    **settings: Any,
) -> Stopwatch:
    """Train with GRPO as ludus has it by default, on a CPU, and compute no more than it needs.

    Args:
        rows: the dataset.
        own: further arguments of the trainer.
        settings: further settings of GRPO.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        config = GRPOConfig(
            output_dir=folder,
            optim="adamw_torch_fused",
            loss_type="grpo",
            epsilon=0.2,
            beta=0.0,
            use_cpu=True,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **settings,
        )
        trainer = GRPOTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            **own,
        )
        watch = Stopwatch(trainer, clock, after_step)
        trainer.add_callback(watch)
        trainer.train()
    return watch


def train_trl(
    model_name: str,
    work: Work,
    half: bool,
    micro_batch: int,
    steps: int,
    then: Callable[[], None],
    clock: Callable[[], float],
    *,
    mode: str = "environment",
    wait: Wait | None = None,
) -> tuple[list[float], list[float]]:
    """Seconds of TRL's steps, and of their rollouts.

    Args:
        mode: environment or rollout, where there are several turns.
        wait: what the environment does before it answers a turn.
    """
    model = make_model(model_name)
    plain = make_tokenizer(model.config.vocab_size)
    tokenizer = trl_tokenizer(plain, ActingTokenizer, model)
    rng = random.Random(0)
    rows = [
        {"prompt": [{"role": "user", "content": words(rng, work.prompt - FRAME)}]}
        for _ in range(work.groups * (steps + 1))
    ]

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [rng.random() for _ in completions]

    own: dict[str, Any] = {"reward_funcs": reward}
    if work.turns > 1 and mode == "environment":
        own = {"reward_funcs": [], "environment_factory": environment(work, wait)}
    elif work.turns > 1:
        own["rollout_func"] = rollout_func(tokenizer, lambda texts: Talks(texts, work, wait))

    def after_step(watch: Stopwatch) -> bool:
        if watch.sampled_tokens != work.sampled_tokens:
            raise SystemExit(f"TRL sampled {watch.sampled_tokens}, not {work.sampled_tokens}")
        then()
        return True

    watch = run_trainer(
        model,
        tokenizer,
        rows,
        own,
        clock,
        after_step,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=work.samples // micro_batch,
        num_generations=work.group_size,
        max_completion_length=work.length - work.prompt,
        max_tool_calling_iterations=work.turns - 1,
        generation_kwargs={"min_new_tokens": work.turn, "max_new_tokens": work.turn},
        max_steps=steps,
        learning_rate=1e-6,
        bf16=half,
    )
    return watch.seconds, watch.rollouts
