"""GRPO for a multi-turn agent in one file: plain torch, a Qwen3 from scratch, no framework.

    python examples/grpo_one_file.py

The agent walks along a street of five houses. It reads the positions of the goal and of itself, and
goes left or right, one house a turn, six turns at most. An earlier arrival gives a higher reward.
The model starts untrained: it must also learn that a turn holds a direction. One episode, as
tokens (the sampled tokens, which train, in brackets):

    goal 4 at 2 [what? end] what? [right end] at 3 [right goal] at 4

With seeds 0, 1 and 2, the mean reward goes from 0.30 in the first ten steps to 0.85 or more in the
last ten (0.9 is the maximum). The greedy agent then takes the direct way in all 20 tasks.

Contents, from top to bottom: an environment, an episode as token ids with a mask by construction,
batched sampling of episodes, advantages within groups, the clipped loss, the mean over
trajectories, the training loop.

Left out here, present in ludus: text and chat templates (the tokens are words), a KV cache
(each token costs a whole forward pass), packing (rows are padded), branches in an episode, errors,
retries and deadlines, several optimizer steps a batch, a KL term, checkpoints, and held-out tasks
(there are only twenty tasks). The tests compare ludus with the functions of this file.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

# Shape suffixes: B episodes, T positions, V vocabulary, G attempts at one task.

# --------------------------------------------------------------------------------------------------
# The environment: a street of five houses

HOUSES = 5
MAX_TURNS = 6
MAX_TOKENS_PER_TURN = 2
VOCABULARY = ["pad", "end", "goal", "at", "left", "right", "what?"]
PAD, END, GOAL, AT, LEFT, RIGHT, WHAT = range(len(VOCABULARY))
HOUSE = len(VOCABULARY) - 1  # the id of house 1 is one more
VOCABULARY += [str(house) for house in range(1, HOUSES + 1)]

TASKS = [(a, b) for a in range(1, HOUSES + 1) for b in range(1, HOUSES + 1) if a != b]
"""All pairs of a start and a goal."""


def step(house: int, turn: list[int]) -> tuple[int, list[int]]:
    """Returns the house after the first direction in the turn, and the environment's reply."""
    direction = next((token for token in turn if token in (LEFT, RIGHT)), None)
    if direction is None:
        return house, [WHAT]
    house = max(house - 1, 1) if direction == LEFT else min(house + 1, HOUSES)
    return house, [AT, HOUSE + house]


# --------------------------------------------------------------------------------------------------
# An episode: token ids, and the mask of sampled tokens


@dataclass
class Episode:
    """One attempt at a task. Tokens are only ever appended:

        append([GOAL, 10, AT, 8])           given by the environment: no loss
        append([RIGHT, END], [-1.9, -2.6])  sampled, with its log-probabilities: loss

    The mask is therefore correct by construction: exactly the sampled tokens train.
    """

    house: int
    goal: int
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: int = 0
    reward: float = 0.0

    def append(self, ids: list[int], logprobs: list[float] | None = None) -> None:
        self.ids += ids
        self.mask += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs

    def __str__(self) -> str:
        words = [
            f"[{VOCABULARY[token]}]" if sampled else VOCABULARY[token]
            for token, sampled in zip(self.ids, self.mask, strict=True)
        ]
        return " ".join(words).replace("] [", " ")


@torch.no_grad()
def sample_turns(
    model: Qwen3ForCausalLM, prompts: list[list[int]], generator: torch.Generator | None
) -> list[tuple[list[int], list[float]]]:
    """One turn for each prompt: ids up to END, their log-probabilities. No generator: greedy."""
    turns: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    for _ in range(MAX_TOKENS_PER_TURN):
        live = [i for i, (ids, _) in enumerate(turns) if END not in ids]
        if not live:
            break
        ids_BT = pad([prompts[i] + turns[i][0] for i in live], PAD)
        # Padding is on the right: in a causal model the last real token does not attend to it.
        last_B = torch.tensor([len(prompts[i]) + len(turns[i][0]) - 1 for i in live])
        logits_BV = model(ids_BT).logits[torch.arange(len(live)), last_B]
        logprobs_BV = logits_BV.log_softmax(-1)
        if generator is None:
            tokens_B = logprobs_BV.argmax(-1)
        else:
            tokens_B = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)[:, 0]
        for row, (i, token) in enumerate(zip(live, tokens_B.tolist(), strict=True)):
            turns[i][0].append(token)
            turns[i][1].append(logprobs_BV[row, token].item())
    return turns


def play(
    model: Qwen3ForCausalLM, tasks: list[tuple[int, int]], generator: torch.Generator | None
) -> list[Episode]:
    """Play one episode for each task, all in one batch."""
    episodes = [Episode(start, goal) for start, goal in tasks]
    for episode in episodes:
        episode.append([GOAL, HOUSE + episode.goal, AT, HOUSE + episode.house])
    live = episodes
    while live:
        turns = sample_turns(model, [episode.ids for episode in live], generator)
        for episode, (ids, logprobs) in zip(live, turns, strict=True):
            episode.append(ids, logprobs)
            episode.house, reply = step(episode.house, ids)
            episode.append(reply)
            episode.turns += 1
            if episode.house == episode.goal:
                episode.reward = 1 - 0.1 * (episode.turns - 1)  # sooner is better
        live = [e for e in live if not e.reward and e.turns < MAX_TURNS]
    return episodes


# --------------------------------------------------------------------------------------------------
# GRPO: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1


def group_advantages(rewards: list[float], eps: float = 1e-4) -> list[float]:
    """(r - mean) / (std + eps) over the attempts at one task; std with n - 1."""
    rewards_G = torch.tensor(rewards, dtype=torch.float64)
    return ((rewards_G - rewards_G.mean()) / (rewards_G.std() + eps)).tolist()


def token_logprobs(model: Qwen3ForCausalLM, episodes: list[Episode]) -> tuple[Tensor, Tensor]:
    """Log-probability [B, T] of every token given those before it, and the loss mask [B, T].

    The first column is 0 and never sampled: it has no preceding token.
    """
    ids_BT = pad([episode.ids for episode in episodes], PAD)
    mask_BT = pad([episode.mask for episode in episodes], False)
    logprobs_BTV = model(ids_BT).logits[:, :-1].log_softmax(-1)
    logprobs_BT = logprobs_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logprobs_BT, (1, 0)), mask_BT


def clipped_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """-min(r A, clip(r, 1 - c, 1 + c) A): PPO's, Schulman et al. 2017 (arXiv:1707.06347), eq. 7."""
    ratio = (logprobs - old_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def grpo_loss(model: Qwen3ForCausalLM, groups: list[list[Episode]], clip: float = 0.2) -> Tensor:
    """The mean over trajectories of the mean over a trajectory's sampled tokens (equation 3)."""
    episodes = [episode for group in groups for episode in group]
    advantages_B = [a for group in groups for a in group_advantages([e.reward for e in group])]
    logprobs_BT, mask_BT = token_logprobs(model, episodes)
    old_logprobs_BT = pad([episode.logprobs for episode in episodes], 0.0)
    advantages_B1 = torch.tensor(advantages_B, dtype=logprobs_BT.dtype)[:, None]
    loss_BT = clipped_loss(logprobs_BT, old_logprobs_BT, advantages_B1, clip)
    return ((loss_BT * mask_BT).sum(-1) / mask_BT.sum(-1)).mean()


def pad(rows: list[list], value: float) -> Tensor:
    """Returns one tensor of rows with different lengths, padded on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


# --------------------------------------------------------------------------------------------------
# Training


def make_model(seed: int) -> Qwen3ForCausalLM:
    """Returns an untrained Qwen3 with 2 layers and about 100 thousand parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=END,
    )
    return Qwen3ForCausalLM(config)


def train(
    steps: int = 120,
    groups_per_step: int = 16,
    group_size: int = 8,
    lr: float = 1e-3,
    seed: int = 0,
    log_every: int = 10,
) -> tuple[Qwen3ForCausalLM, list[float]]:
    """Train with GRPO; returns the model and the mean reward of each step."""
    model = make_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    task_order = random.Random(seed)
    rewards: list[float] = []
    for number in range(steps):
        tasks = [task_order.choice(TASKS) for _ in range(groups_per_step)]
        episodes = play(model, [task for task in tasks for _ in range(group_size)], generator)
        groups = [episodes[i : i + group_size] for i in range(0, len(episodes), group_size)]
        rewards.append(sum(e.reward for e in episodes) / len(episodes))

        optimizer.param_groups[0]["lr"] = lr * (1 - number / steps)
        loss = grpo_loss(model, groups)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        if log_every and number % log_every == 0:
            print(f"step {number:3d}  reward {rewards[-1]:.2f}  {episodes[0]}")
    return model, rewards


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the agent, then show how it plays.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    started = time.perf_counter()
    model, _ = train(steps=args.steps, seed=args.seed)
    print(f"\nAfter {time.perf_counter() - started:.0f} s, playing greedily:")
    episodes = play(model, TASKS, None)
    for episode in episodes:
        print(f"  {episode}")
    print(f"{sum(e.reward > 0 for e in episodes)} of {len(TASKS)} goals reached")


if __name__ == "__main__":
    main()
