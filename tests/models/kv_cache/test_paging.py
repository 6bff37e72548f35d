"""Prefix tree of blocks: computed, shared and released blocks."""

from __future__ import annotations

import random

import pytest

from ludus.models.kv_cache.paging import BLOCK, Block, BlockTree
from ludus.models.kv_cache.step_inputs import StepInputs, StepInputsBuilder


class Storage:
    """A cache whose slots hold the conversation's ids up to their position."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[int, ...]] = {}
        self.tree = BlockTree(self.copy)
        self.num_copied = 0

    def copy(self, source: int, target: int, count: int) -> None:
        for offset in range(count):
            if BLOCK * source + offset in self.slots:
                self.slots[BLOCK * target + offset] = self.slots[BLOCK * source + offset]
                self.num_copied += 1

    def run(self, batch: StepInputs) -> list[tuple[int, ...]]:
        """Compute step inputs chunk by chunk and check each token's context; returns the
        conversations of the outputs."""
        outputs: dict[int, tuple[int, ...]] = {}
        for part, rows in batch.chunks(7):
            values = {}
            written = set(part.write_tokens.tolist())
            for token, (position, row) in enumerate(zip(part.positions, part.rows, strict=True)):
                table = part.tables[row]
                if token not in written:
                    slot = BLOCK * int(table[position // BLOCK]) + int(position) % BLOCK
                    values[token] = self.slots[slot]
                    continue
                # In the order of positions, so that those before are written by now.
                values[token] = (*self._seen(table, int(position)), int(part.ids[token]))
                for write, slot in zip(part.write_tokens, part.write_slots, strict=True):
                    if write == token:
                        self.slots[int(slot)] = values[token]
            for row, token in zip(rows, part.outputs, strict=True):
                outputs[int(row)] = values[int(token)]
        return [outputs[row] for row in range(len(batch.outputs))]

    def _seen(self, table: list[int], position: int) -> tuple[int, ...]:
        """Returns the conversation before a position."""
        if not position:
            return ()
        at = position - 1
        return self.slots[BLOCK * int(table[at // BLOCK]) + at % BLOCK]

    def admit(
        self, sessions: dict[str, list[Block]], prompts: dict[str, list[int]]
    ) -> tuple[int, int]:
        """Admit prompts in one step; returns the numbers of computed tokens and of used blocks."""
        builder = StepInputsBuilder()
        for name, prompt in prompts.items():
            sessions[name] = self.tree.admit(sessions.get(name, []), prompt, builder)
        found = self.run(builder.build())
        assert found == [tuple(prompt) for prompt in prompts.values()]
        return len(builder.ids), self.tree.num_used


def ids(*spans: tuple[int, int]) -> list[int]:
    return [100 * start + i for start, count in spans for i in range(count)]


def test_a_group_shares_one_prefill() -> None:
    storage = Storage()
    prompt = ids((1, 40))
    computed, used = storage.admit({}, dict.fromkeys("abcdefgh", prompt))
    assert computed == 40
    assert used == 2 + 8  # two whole blocks, and a last one each to go on in
    assert storage.num_copied == 0  # the last block's tokens were written to all


def test_later_sessions_reuse_cached_blocks() -> None:
    storage, sessions = Storage(), {}
    assert storage.admit(sessions, {"a": ids((1, 40))}) == (40, 3)
    assert storage.admit(sessions, {"b": ids((1, 40), (2, 3))}) == (3, 4)
    assert storage.admit(sessions, {"c": ids((1, 32))}) == (1, 4)  # its last token, for its logits
    assert storage.admit(sessions, {"d": ids((1, 20), (3, 2))}) == (2, 5)
    assert storage.num_copied == 8 + 4
    for blocks in sessions.values():
        storage.tree.release(blocks)
    assert storage.tree.num_used == 0
    assert storage.admit({}, {"e": ids((1, 40))}) == (40, 3)  # nothing is left of them


def test_a_branch_keeps_the_common_tokens() -> None:
    storage, sessions = Storage(), {}
    storage.admit(sessions, {"a": ids((1, 20)), "b": ids((1, 20))})
    assert storage.admit(sessions, {"a": ids((1, 18), (2, 4))})[0] == 4
    assert storage.admit(sessions, {"b": ids((1, 20), (4, 1))})[0] == 1
    assert storage.admit(sessions, {"a": ids((1, 18), (2, 4))})[0] == 1


def test_rows_of_one_pass_fork_anywhere() -> None:
    storage = Storage()
    prompts = {str(n): ids((1, n), (n + 2, 33 - n)) for n in range(33)}
    computed, _ = storage.admit({}, prompts)
    assert computed == len({tuple(p[: i + 1]) for p in prompts.values() for i in range(len(p))})


@pytest.mark.parametrize("seed", range(8))
def test_random_conversations(seed: int) -> None:
    """Sessions open, continue, branch and close at random. Every token sees its own context, no
    cached prompt token is computed again, and no block leaks."""
    rng = random.Random(seed)
    storage, sessions = Storage(), {}
    texts: dict[str, list[int]] = {}
    for _ in range(60):
        for name in [name for name in sessions if rng.random() < 0.2]:
            storage.tree.release(sessions.pop(name))
            del texts[name]
        prompts = {}
        for name in sorted(rng.sample("abcdefgh", rng.randrange(1, 6))):
            base = texts.get(name) or rng.choice([*texts.values(), []])
            cut = len(base) if rng.random() < 0.5 else rng.randrange(len(base) + 1)
            tail = [rng.randrange(2) for _ in range(rng.randrange(1, 25))]
            prompts[name] = base[:cut] + tail
        wanted, held, kept = (
            {tuple(text[: i + 1]) for text in some for i in range(len(text))}
            for some in (
                prompts.values(),
                texts.values(),
                [text for name, text in texts.items() if name not in prompts],
            )
        )
        computed, used = storage.admit(sessions, prompts)
        # A branching session releases blocks during the step. The last token of a fully cached
        # prompt is computed for its logits.
        again = sum(tuple(prompt) in held for prompt in prompts.values())
        assert len(wanted - held) <= computed <= len(wanted - kept) + again
        texts |= prompts
        assert used <= sum(-(-len(text) // BLOCK) for text in texts.values())
    for blocks in sessions.values():
        storage.tree.release(blocks)
    assert storage.tree.num_used == 0


def test_a_session_grows_block_by_block() -> None:
    storage, sessions = Storage(), {}
    storage.admit(sessions, {"a": ids((1, BLOCK))})
    storage.tree.extend(sessions["a"], ids((1, BLOCK)))
    assert len(sessions["a"]) == 2
    assert storage.tree.num_used == 2
    assert storage.admit(sessions, {"b": ids((1, BLOCK), (2, 1))}) == (1, 3)
