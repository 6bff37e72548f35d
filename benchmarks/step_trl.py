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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

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
    """To whom every turn is an action: a call of the environment's tool."""

    def parse_response(self, response: Any, *_: Any, **__: Any) -> dict[str, Any]:
        call = {"name": "act", "arguments": {"action": self.decode(response)}}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        }


def trl_tokenizer(plain: Any, kind: type[PreTrainedTokenizerFast]) -> Any:
    """ludus's tokenizer as one that TRL takes."""
    tokenizer = kind(
        tokenizer_object=plain.backend_tokenizer,
        pad_token=plain.pad_token,
        unk_token=plain.unk_token,
        eos_token=plain.eos_token,
    )
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, {"defaults": {}}
    return tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    """A user's message, up to where the next turn begins."""
    ids: list[int] = tokenizer.encode(f"<|user|>{text}<|assistant|>", add_special_tokens=False)
    return ids


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


def rollouts(work: Work, tokenizer: Any, wait: Wait | None) -> Callable[..., dict[str, Any]]:
    """A `rollout_func`: all episodes take a turn, then wait for their environments together."""
    rng = random.Random()

    async def pause(count: int) -> None:
        if wait is not None:
            await asyncio.gather(*(wait() for _ in range(count)))

    def play(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        prompt_ids = [encode(tokenizer, prompt[0]["content"]) for prompt in prompts]
        ids = [list(prompt) for prompt in prompt_ids]
        mask: list[list[int]] = [[] for _ in prompts]
        for turn in range(work.turns):
            if turn:
                asyncio.run(pause(len(prompts)))
                for i in range(len(prompts)):
                    given = encode(tokenizer, words(rng, work.observation - FRAME))
                    ids[i] += given
                    mask[i] += [0] * len(given)
            for i, said in enumerate(generate(trainer, tokenizer, ids)):
                ids[i] += said
                mask[i] += [1] * len(said)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [a[len(b) :] for a, b in zip(ids, prompt_ids, strict=True)],
            "logprobs": None,
            "env_mask": mask,
        }

    return play


class AfterStep(TrainerCallback):
    """Times TRL's steps, and has the other program take one after each."""

    def __init__(self, clock: Callable[[], float], then: Callable[[], None]) -> None:
        self.clock, self.then = clock, then
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = self.clock()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(self.clock() - self.started)
        self.then()


@contextlib.contextmanager
def silent_folder() -> Iterator[str]:
    """A folder to train in; what is printed meanwhile is dropped."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield folder


def lean_config(folder: str, **own: Any) -> GRPOConfig:
    """GRPO as ludus has it by default, on a CPU, and nothing computed that it does not need."""
    return GRPOConfig(
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
        **own,
    )


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
    tokenizer = trl_tokenizer(plain, ActingTokenizer)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = plain.eos_token_id, plain.pad_token_id
    rng = random.Random(0)
    rows = [
        [{"role": "user", "content": words(rng, work.prompt - FRAME)}]
        for _ in range(work.groups * (steps + 1))
    ]

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [rng.random() for _ in completions]

    own: dict[str, Any] = {"reward_funcs": reward}
    if work.turns > 1 and mode == "environment":
        own = {"reward_funcs": [], "environment_factory": environment(work, wait)}
    elif work.turns > 1:
        own["rollout_func"] = rollouts(work, tokenizer, wait)
    with silent_folder() as folder:
        trainer = GRPOTrainer(
            model=model,
            args=lean_config(
                folder,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=work.samples // micro_batch,
                num_generations=work.group_size,
                max_completion_length=work.length - work.prompt,
                max_tool_calling_iterations=work.turns - 1,
                generation_kwargs={"min_new_tokens": work.turn, "max_new_tokens": work.turn},
                max_steps=steps,
                learning_rate=1e-6,
                bf16=half,
            ),
            train_dataset=Dataset.from_dict({"prompt": rows}),
            processing_class=tokenizer,
            **own,
        )
        spent = timed_rollouts(trainer, work, clock)
        after = AfterStep(clock, then)
        trainer.add_callback(after)
        trainer.train()
    return after.seconds, spent


def timed_rollouts(trainer: Any, work: Work, clock: Callable[[], float]) -> list[float]:
    """A list that will have the seconds of each rollout. Errors: SystemExit where it samples other
    numbers of tokens than the work has."""
    spent: list[float] = []
    inner = trainer._generate_and_score_completions

    def timed(inputs: Any) -> Any:
        start = clock()
        found = inner(inputs)
        spent.append(clock() - start)
        sampled = found.get("tool_mask", found["completion_mask"]) * found["completion_mask"]
        if int(sampled.sum()) != work.sampled_tokens:
            raise SystemExit(f"TRL sampled {int(sampled.sum())}, not {work.sampled_tokens}")
        return found

    trainer._generate_and_score_completions = timed
    return spent
