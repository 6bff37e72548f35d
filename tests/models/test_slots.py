"""The key-value cache: what a pass writes, reads and masks."""

from __future__ import annotations

import pytest
import torch

from ludus.models.slots import GROWTH, SlotCache

CPU = torch.device("cpu")


def states(positions: list[list[int]], slots: list[int], layer: int = 0) -> torch.Tensor:
    """Keys [R, 2, L, 3] that spell their slot, position, head and layer; -1 where padded."""
    keys = torch.tensor(
        [
            [[-1] if p < 0 else [1000 * slot + 10 * p + layer] for p in row]
            for row, slot in zip(positions, slots, strict=True)
        ],
        dtype=torch.float32,
    )
    keys = keys[:, None].expand(-1, 2, -1, 3).clone()
    keys[:, 1] += 0.5
    return keys


def test_a_padded_pass_and_one_from_the_cache() -> None:
    cache = SlotCache(num_layers=2)
    positions, mask = cache.prepare([2, 0], [0, 0], [1, 3], CPU)
    assert positions.tolist() == [[0, 0, 0], [0, 1, 2]]
    assert mask.shape == (2, 1, 3, 3)
    assert mask[1, 0].tolist() == torch.ones(3, 3, dtype=torch.bool).tril().tolist()
    assert mask[0, 0, -1].tolist() == [True, False, False]
    assert mask.any(-1).all()  # no softmax over nothing
    for layer in range(2):
        new = states([[-1, -1, 0], [0, 1, 2]], [2, 0], layer)
        keys, values = cache.update(new, -new, layer)
        assert keys.shape == (2, 2, 3, 3)
        assert torch.equal(keys[1], new[1])
        assert torch.equal(keys[0, :, 0], new[0, :, 2])
        assert torch.equal(values, -keys)
        assert not (keys == -1).any()  # padding is never stored

    positions, mask = cache.prepare([0, 2], [3, 1], [1, 1], CPU)
    assert positions.tolist() == [[3], [1]]
    assert mask[:, 0, 0].tolist() == [[True] * 4, [True, True, False, False]]
    keys, _ = cache.update(states([[3], [1]], [0, 2]), states([[3], [1]], [0, 2]), 0)
    assert torch.equal(keys[0], states([[0, 1, 2, 3]], [0])[0])
    assert torch.equal(keys[1, :, :2], states([[0, 1]], [2])[0])


def test_a_slot_is_rewritten_from_the_branch_on() -> None:
    cache = SlotCache(num_layers=1)
    cache.prepare([0], [0], [5], CPU)
    old = states([[0, 1, 2, 3, 4]], [0])
    cache.update(old, old, 0)
    cache.prepare([0], [2], [2], CPU)
    new = states([[2, 3]], [9])
    keys, _ = cache.update(new, new, 0)
    assert torch.equal(keys, torch.cat([old[:, :, :2], new], dim=2))


def test_growth_keeps_what_is_stored() -> None:
    cache = SlotCache(num_layers=1)
    cache.prepare([0], [0], [2], CPU)
    first = states([[0, 1]], [0])
    cache.update(first, first, 0)
    cache.prepare([0, 3], [2, 0], [GROWTH, GROWTH], CPU)
    rest = states([list(range(2, GROWTH + 2)), list(range(GROWTH))], [0, 3])
    keys, _ = cache.update(rest, rest, 0)
    assert keys.shape[2] == GROWTH + 2
    assert torch.equal(keys[0, :, :2], first[0])
    assert torch.equal(keys[0, :, 2:], rest[0])
    assert torch.equal(keys[1, :, :GROWTH], rest[1])
    assert (cache.num_slots, cache.capacity) == (4, 2 * GROWTH)


@pytest.mark.parametrize("slots", [[0, 1, 2], [1, 2, 4]])
def test_rows_read_their_own_slots(slots: list[int]) -> None:
    """Slots 0, 1, 2 are read in place, others are gathered: to the same effect."""
    cache = SlotCache(num_layers=1)
    cache.prepare(list(range(5)), [0] * 5, [4] * 5, CPU)
    everything = states([[0, 1, 2, 3]] * 5, list(range(5)))
    cache.update(everything, everything, 0)
    cache.prepare(slots, [4, 1, 2], [1, 1, 1], CPU)
    new = states([[4], [1], [2]], slots)
    keys, _ = cache.update(new, new, 0)
    for row, (slot, stop) in enumerate(zip(slots, (5, 2, 3), strict=True)):
        assert torch.equal(keys[row, :, :stop], states([list(range(stop))], [slot])[0])
