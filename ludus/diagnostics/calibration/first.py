"""The configuration that a recipe begins with: model, tokenizer, tasks, lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, DataError
from ludus.core.types import Spec
from ludus.data.conversations import Conversation
from ludus.data.splits import Splits, read_splits
from ludus.diagnostics.calibration import choices, tokens
from ludus.diagnostics.calibration.pretrained import device
from ludus.diagnostics.calibration.subject import Subject, config_tasks
from ludus.tasks.readers import NoHeldoutTask
from ludus.train.kernels.bindings import kernels

TOKENIZERS = (
    (Spec(name="bytes"), 256.0),
    (Spec(name="bpe", args={"vocab_size": 288}), 512.0),
    (Spec(name="bpe", args={"vocab_size": 512}), 512.0),
    (Spec(name="bpe", args={"vocab_size": 1024}), math.inf),
)
"""Tokenizers that encode any text, from fine to coarse, and the most tokens of a mean episode."""

NUM_COUNTED = 200
"""Episodes that tell how long they are with one of them."""

OBSERVATION_WEIGHT = 0.2
"""Weight of prompts and observations in SFT of a model from scratch, which learns the words of an
environment from what it reads too (docs/log.md)."""

FROM_SCRATCH = {"name": "muon", "schedule": "wsd"}
"""Optimizer and schedule of SFT of a model from scratch. After the same steps of two levels,
success was 2.8 and 5.5 times that of AdamW at a constant rate (docs/log.md)."""

FREE_TURN = 200
"""Tokens of a turn of a pretrained model, where no expert shows how long a turn is."""


def base(
    subject: Subject, seed: int, model: str | None, data_file: str, *, shows: bool
) -> RunConfig:
    """The recipe before any measurement of tokens.

    Args:
        data_file: of the conversations of a data set, for `sft.data`.
        shows: there are demonstrations.
    """
    data: dict[str, Any] = {
        "name": subject.name,
        "seed": seed,
        "model": {"path": model, "device": device(), "context_length": 4096}
        if model
        else {
            "architecture": {"name": "qwen3", "args": {"induction_heads": True}},
            "tokenizer": {"name": "words"},
            "chat_template": "plain",
            "context_length": 4096,
        },
        "env": subject.env,
        "judge": subject.judge,
        "tasks": {"train": subject.reader_of(64, 0)},
        "demonstrations": {"num_episodes": 1000} if subject.env and shows else None,
        "sft": {
            "steps": 1000,
            "until": {"success": choices.TARGET, "every": 10},
            "observation_weight": 0.0 if model else OBSERVATION_WEIGHT,
            "optimizer": {"lr": 2e-3, "warmup_steps": 10} | ({} if model else FROM_SCRATCH),
        }
        if shows
        else None,
        "rl": {
            "algorithm": {"name": "grpo"},
            "steps": 100,
            "groups_per_step": 32,
            "group_size": 8,
            "minibatches": 4,
            "optimizer": {"lr": 3e-4, "eps": 1e-5, "warmup_steps": 10, "schedule": "linear"},
        },
        "rollout": {"concurrency": 256},
    }
    if subject.env is None and shows:
        data["sft"]["data"] = data_file
    return RunConfig.model_validate(data)


def tokenizer_for(
    config: RunConfig,
    shown: Sequence[Conversation],
    new: Sequence[Conversation],
    heldout: Sequence[Conversation] = (),
) -> tuple[RunConfig, int, tuple[float, float]]:
    """`words` where unseen episodes have its words, else the finest of TOKENIZERS with which a
    mean episode keeps its limit; a model's own tokenizer stays.

    `heldout`: episodes of held-out levels, where the environment has its own; their words are not
    learned, for only the kind of tokenizer follows from them.

    Answers with new words are put together from parts. A model from scratch learns that from
    letters in a fraction of the steps that it takes from larger parts (docs/log.md).
    """
    if config.model.path is not None:
        return config, len(tokens.trained(config, (), ())), (0.0, 0.0)

    kinds = [new or shown, *([heldout] if heldout else [])]

    def most_unknown() -> tuple[int, float, float]:
        sizes, in_turns, in_prompts = zip(
            *(tokens.unknown_shares(config, shown, kind) for kind in kinds), strict=True
        )
        return sizes[0], max(in_turns), max(in_prompts)

    size, in_turns, in_prompts = most_unknown()
    if tokens.fits_words(size, in_turns, in_prompts):
        return config, size, (in_turns, in_prompts)
    for spec, most in TOKENIZERS:
        model = config.model.model_copy(update={"tokenizer": spec})
        config = config.model_copy(update={"model": model})
        few = shown[:NUM_COUNTED]
        if tokens.lengths(config, tokens.trained(config, few, ()), few).episode_mean <= most:
            break
    size, in_turns, in_prompts = most_unknown()
    return config, size, (in_turns, in_prompts)


def tokenizer_name(config: RunConfig) -> str:
    """The name of the tokenizer to train."""
    spec = config.model.tokenizer
    return spec.name if isinstance(spec, Spec) else "the model's own"


def with_tasks(
    config: RunConfig,
    subject: Subject,
    distinct: float,
    reset_s: float,
    most: int = choices.NUM_HELDOUT,
) -> RunConfig:
    """The two splits, of a subject with about `distinct` different tasks.

    Args:
        reset_s: of a task whose world a run compares.
        most: held-out tasks.
    """
    if subject.kind == "env":
        if subject.heldout_tiers:  # of about as many different tasks
            num_train = choices.training_tasks(distinct, reset_s, share=1.0)
            num_heldout = int(min(most, distinct))
        else:
            num_train = choices.training_tasks(distinct, reset_s)
            num_heldout = choices.heldout_tasks(distinct, most)
    else:
        num_heldout = max(min(subject.rows // 5, most), 1)
        num_train = subject.rows - num_heldout
    return config.model_copy(update={"tasks": config_tasks(subject, num_train, num_heldout)})


def with_splits(config: RunConfig, subject: Subject) -> tuple[RunConfig, Splits]:
    """The configuration with so few training tasks that held-out tasks are left.

    Errors: ConfigError, DataError.
    """
    while True:
        try:
            return config, read_splits(config)
        except DataError as error:
            train = config.tasks.train
            number = int(train.args.get("num_tasks", 0)) // 2
            if number < 8:
                if not isinstance(error, NoHeldoutTask):
                    raise
                raise ConfigError(
                    f"{subject.given}: its seeds open too few different worlds to hold any out, by "
                    "the opening observations. If tasks that open alike differ, override `world`, "
                    "so that it names what differs (docs/tasks.md, Splits), or leave out "
                    "`cheap_reset`; else let the seed change more"
                ) from error
            smaller = train.model_copy(update={"args": {**train.args, "num_tasks": number}})
            tasks = config.tasks.model_copy(update={"train": smaller})
            config = config.model_copy(update={"tasks": tasks})


def with_lengths(
    config: RunConfig,
    subject: Subject,
    expert_turns: Sequence[int],
    conversations: Sequence[Conversation],
    searches: bool = False,
) -> tuple[RunConfig, choices.Lengths]:
    """Turns, tokens of a turn, the context and episodes of a step, by the expert's episodes.
    `searches`: the expert knows what an agent must find out first."""
    tokenizer = tokens.trained(config, conversations, ())
    lengths = tokens.lengths(config, tokenizer, conversations)
    maker = subject.maker()
    own_limit = maker.max_turns if maker else 1
    if not expert_turns:  # nobody has shown how long a turn is
        own: dict[str, Any] = {
            "turn_max": FREE_TURN,
            "turn_mean": FREE_TURN,
            "per_turn_max": 2 * FREE_TURN,
        }
        lengths = replace(lengths, **own)
    room = choices.tokens_per_turn(lengths)
    most = choices.turns(expert_turns or [own_limit], own_limit, searches)
    context = choices.context(lengths, most, room)
    rollout = config.rollout.model_copy(
        update={
            "max_tokens_per_turn": min(room, context - 1),
            "max_turns": most if subject.env else None,
        }
    )
    model = config.model.model_copy(update={"context_length": context})
    if model.architecture is not None and lengths.episode_mean <= choices.SHORT_EPISODE:
        args = model.architecture.args | {"head_dim": choices.WIDE_HEADS}
        wide = model.architecture.model_copy(update={"args": args})
        model = model.model_copy(update={"architecture": wide})
    trains_fast = model.architecture is not None and kernels(torch.float32) is not None
    if trains_fast and choices.detaches(lengths, expert_turns):
        learner = config.learner.model_copy(update={"detach_observations": True})
        config = config.model_copy(update={"learner": learner})
    batch = max(8192, context)
    sft = config.sft
    if sft is not None:
        number = choices.episodes_per_step(
            lengths, sft.episodes_per_step, from_scratch=config.model.path is None
        )
        sft = sft.model_copy(update={"tokens_per_batch": batch, "episodes_per_step": number})
    rl = config.rl.model_copy(update={"tokens_per_batch": batch}) if config.rl else None
    return config.model_copy(
        update={"model": model, "rollout": rollout, "sft": sft, "rl": rl}
    ), lengths
