"""A whole GRPO step of ludus against TRL's `GRPOTrainer`.

    python benchmarks/step.py

The same model, tokenizer, prompts' length, groups of 8 and sampled tokens: one turn, or several
turns of an environment (TRL's `environment_factory`, its multi-turn mode). All turns have a fixed
number of tokens, rewards are random, so that both do the same work whatever the weights are. Steps
alternate: TRL trains, and after each of its steps ludus takes one.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from common import Spread, arguments, machine, make_model, ratios, table, write

import torch  # isort: skip - after common, which sets the threads' policy
from fixed import FRAME, LudusSteps, Work, make_tokenizer, words
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ONE, LONG = Work(prompt=64), Work(prompt=256)
FOUR, EIGHT = Work(prompt=64, turn=16, turns=4), Work(prompt=64, turn=16, turns=8)
CASES = [
    ("0.9 M", ONE, False),
    ("0.9 M", LONG, False),
    ("0.9 M", FOUR, False),
    ("0.9 M", EIGHT, False),
    ("5.8 M", ONE, False),
    ("0.9 M", LONG, True),
    ("0.9 M", EIGHT, True),
    ("5.8 M", ONE, True),
]
"""Model, work, whether both train in bfloat16 (autocast; the weights stay in float32)."""
MICRO_BATCHES = (64, 32, 16, 8)
"""Samples of one forward pass that TRL is tried with."""

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
        {{- '<|' + message.role + '|>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


NO_RACE = """
Time to success on BabyAI is not compared: in TRL's environment mode an environment cannot end an
episode (only a turn without a tool call does, or the limit of turns), so the two would not learn
the same task. With its `rollout_func` they would, but then the rollouts are not TRL's.
""".strip()


class ActingTokenizer(PreTrainedTokenizerFast):
    """To whom every turn is an action: a call of the environment's tool."""

    def parse_response(self, response: Any, *_: Any, **__: Any) -> dict[str, Any]:
        call = {"name": "act", "arguments": {"action": self.decode(response)}}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        }


def environment(work: Work) -> type:
    """TRL's side of `FixedEnv`."""

    class Talk:
        def __init__(self) -> None:
            self.random = random.Random()

        def reset(self, **_: Any) -> None:
            """The prompt is the dataset's."""

        def act(self, action: str) -> str:
            """Say something.

            Args:
                action: what to say.
            """
            return words(self.random, work.observation - FRAME)

        def get_reward(self) -> float:
            return self.random.random()

    return Talk


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


def train_trl(
    model_name: str,
    work: Work,
    half: bool,
    micro_batch: int,
    steps: int,
    then: Callable[[], None],
    clock: Callable[[], float],
) -> tuple[list[float], list[float]]:
    """Seconds of TRL's steps, and of their rollouts."""
    model = make_model(model_name)
    plain = make_tokenizer(model.config.vocab_size)
    tokenizer = ActingTokenizer(
        tokenizer_object=plain.backend_tokenizer,
        pad_token=plain.pad_token,
        unk_token=plain.unk_token,
        eos_token=plain.eos_token,
    )
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, {"defaults": {}}
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = plain.eos_token_id, plain.pad_token_id
    from datasets import Dataset

    rng = random.Random(0)
    rows = [
        [{"role": "user", "content": words(rng, work.prompt - FRAME)}]
        for _ in range(work.groups * (steps + 1))
    ]
    own = {"environment_factory": environment(work)} if work.turns > 1 else {}
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=[]
            if own
            else lambda completions, **_: [rng.random() for _ in completions],
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=work.samples // micro_batch,
                num_generations=work.group_size,
                max_completion_length=work.length - work.prompt,
                max_tool_calling_iterations=work.turns - 1,
                generation_kwargs={"min_new_tokens": work.turn, "max_new_tokens": work.turn},
                max_steps=steps,
                learning_rate=1e-6,
                optim="adamw_torch_fused",
                loss_type="grpo",
                beta=0.0,
                use_cpu=True,
                bf16=half,
                gradient_checkpointing=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": rows}),
            processing_class=tokenizer,
            **own,
        )
        rollouts: list[float] = []
        generate = trainer._generate_and_score_completions

        def timed(inputs: Any) -> Any:
            start = clock()
            found = generate(inputs)
            rollouts.append(clock() - start)
            sampled = found.get("tool_mask", found["completion_mask"]) * found["completion_mask"]
            if int(sampled.sum()) != work.sampled_tokens:
                raise SystemExit(f"TRL sampled {int(sampled.sum())}, not {work.sampled_tokens}")
            return found

        trainer._generate_and_score_completions = timed
        after = AfterStep(clock, then)
        trainer.add_callback(after)
        trainer.train()
    return after.seconds, rollouts


def measure(
    model_name: str, work: Work, half: bool, repeats: int, *, tune: bool = True
) -> dict[str, Any]:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    tried: dict[int, float] = {}
    for size in MICRO_BATCHES if tune else ():
        seconds, _ = train_trl(model_name, work, half, size, 2, lambda: None, clock)
        tried[size] = statistics.median(seconds[1:])
    best = min(tried, key=lambda size: tried[size]) if tune else work.samples
    ours: list[float] = []
    our_rollouts: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        learner = {"dtype": "bfloat16" if half else "float32"}
        ludus = LudusSteps(make_model(model_name), work, Path(folder), clock=clock, learner=learner)

        def step() -> None:
            start = clock()
            ludus.step()
            ours.append(clock() - start)
            our_rollouts.append(ludus.rollout_s)

        theirs, their_rollouts = train_trl(model_name, work, half, best, repeats + 1, step, clock)
    ours, our_rollouts, theirs = ours[1:], our_rollouts[1:], theirs[1:]
    # One rollout serves all micro-batches of a step; the calls that hand it on do not count.
    assert len(their_rollouts) == repeats + 1
    their_rollouts = their_rollouts[1:]
    row = {
        "model": model_name,
        "work": work.show() + (", bfloat16" if half else ""),
        "micro_batch": best,
        "micro_batches_tried": tried,
        "trl": Spread.of(theirs),
        "trl_rollout": Spread.of(their_rollouts),
        "trl_train": Spread.of([a - b for a, b in zip(theirs, their_rollouts, strict=True)]),
        "ludus": Spread.of(ours),
        "ludus_rollout": Spread.of(our_rollouts),
        "ludus_train": Spread.of([a - b for a, b in zip(ours, our_rollouts, strict=True)]),
        "ratio": ratios(theirs, ours),
        "seconds": {"trl": theirs, "ludus": ours},
    }
    print(model_name, row["work"], f"TRL {row['trl'].show('.2f')} s;", end=" ")
    print(f"ludus {row['ludus'].show('.2f')} s; {row['ratio'].show('.2f')} times", flush=True)
    return row


def main() -> None:
    args = arguments(__doc__ or "")
    facts = machine(args.threads)
    if args.quick:
        measure("0.9 M", Work(prompt=16, turn=4, turns=2, groups=8), False, 2, tune=False)
        return
    rows = [measure(*case, args.repeats) for case in CASES]
    facts["load_after"] = machine(args.threads)["load"]
    publish(rows, facts, args.repeats)


def publish(rows: list[dict[str, Any]], facts: dict[str, Any], repeats: int) -> None:
    from importlib.metadata import version

    facts |= {name: version(name) for name in ("trl", "accelerate")}

    def split(row: dict[str, Any], name: str) -> str:
        parts = (row[f"{name}_rollout"], row[f"{name}_train"])
        return " + ".join(f"{part.median:.2f}" for part in parts)

    cells = [
        [
            row["model"],
            row["work"],
            row["trl"].show(".2f"),
            split(row, "trl"),
            str(row["micro_batch"]),
            row["ludus"].show(".2f"),
            split(row, "ludus"),
            f"**{row['ratio'].median:.2f}** ({row['ratio'].low:.2f} to {row['ratio'].high:.2f})",
            f"{row['trl_rollout'].median / row['ludus_rollout'].median:.1f}, "
            f"{row['trl_train'].median / row['ludus_train'].median:.1f}",
        ]
        for row in rows
    ]
    head = ["parameters", "tokens of an episode", "TRL, s", "rollout + training", "micro-batch"]
    head += ["ludus, s", "rollout + training", "TRL / ludus", "of rollout, of training"]
    lost = [f"{row['model']}, {row['work']}" for row in rows if row["ratio"].median < 1]
    text = f"""
# A GRPO step against TRL

{chr(10).join((__doc__ or "").strip().splitlines()[4:])}

64 samples a step, in 8 groups. Cells: median (quartiles) of {repeats} steps, after one that is not
counted, in float32; *bfloat16*: both train under autocast, and sample in float32. The last column
is by how much each part is faster.

{table(head, cells)}

TRL is faster in: {"; ".join(lost) or "none of these"}.

TRL {facts["trl"]} is tuned: the micro-batch is the fastest of {", ".join(map(str, MICRO_BATCHES))}
samples, for each case; no reference model, no checkpointing of activations, fused AdamW, no
logging, no log-probabilities computed twice. It samples with `generate`. In its environment mode
every turn is a call of the environment's one tool; the tool is not described in the prompt, so that
both read as many tokens. ludus runs as it is by default.

{NO_RACE}

    python benchmarks/step.py
"""
    write("step", text, facts, rows)


if __name__ == "__main__":
    main()
