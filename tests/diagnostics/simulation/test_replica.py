"""A sampler replica as processor sharing: closed forms, the KV cache, lockstep."""

from __future__ import annotations

import random

import pytest

from ludus.diagnostics.simulation.clock import Clock
from ludus.diagnostics.simulation.replica import PassCost, Replica, Turn


def play(replica: Replica, turns: list[tuple[float, float, float]]) -> list[float]:
    """Ends of turns of (arrival, tokens, prefill), in the order given."""
    ends = [0.0] * len(turns)

    def submit(index: int) -> None:
        _, tokens, prefill = turns[index]

        def done() -> None:
            ends[index] = replica.clock.now
            replica.leave(tokens + prefill)

        replica.enter()
        replica.submit(Turn(tokens, prefill, 0.0, done))

    for index, (arrival, _, _) in enumerate(turns):
        replica.clock.at(arrival, submit, index)
    replica.clock.run()
    return ends


def test_a_turn_alone_takes_a_pass_a_token() -> None:
    replica = Replica(Clock(), PassCost(fixed_s=0.01, row_s=0.001), prefill_s=0.002)
    assert play(replica, [(1.0, 10, 5)]) == [pytest.approx(1.0 + 5 * 0.002 + 10 * 0.011)]
    assert replica.busy_s == pytest.approx(0.12)
    assert (replica.sampled, replica.prefilled) == (pytest.approx(10), 5)


def test_sequences_share_a_pass() -> None:
    """Passes of a fixed time: two turns do not slow each other down. Passes by row: they do."""
    free = Replica(Clock(), PassCost(fixed_s=1.0), 0.0)
    assert play(free, [(0, 10, 0), (4, 3, 0)]) == pytest.approx([10, 7])
    shared = Replica(Clock(), PassCost(row_s=1.0), 0.0)  # egalitarian processor sharing
    assert play(shared, [(0, 10, 0), (4, 3, 0)]) == pytest.approx([13, 10])


def test_a_prefill_stops_decoding() -> None:
    replica = Replica(Clock(), PassCost(fixed_s=1.0), prefill_s=0.5)
    assert play(replica, [(0, 10, 0), (4, 3, 4)]) == pytest.approx([12, 9])


def test_the_slower_of_memory_and_arithmetic() -> None:
    cost = PassCost(read_s=1.0, context_read_s=0.1, row_flop_s=0.5, fixed_s=0.25)
    assert cost.seconds(1, 10) == pytest.approx(2.25)
    assert cost.seconds(8, 10) == pytest.approx(4.25)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_mean_time_in_system_is_that_of_m_m_1_processor_sharing(load: float) -> None:
    """E[T] = E[S] / (1 - load), for any distribution of the work (Kleinrock 1976, section 4.4)."""
    rng, arrival, turns = random.Random(1), 0.0, []
    for _ in range(20_000):
        arrival += rng.expovariate(load)
        turns.append((arrival, rng.expovariate(1.0), 0.0))
    ends = play(Replica(Clock(), PassCost(row_s=1.0), 0.0), turns)
    mean = sum(end - turn[0] for end, turn in zip(ends, turns, strict=True)) / len(turns)
    assert mean == pytest.approx(1 / (1 - load), rel=0.08)


def test_full_caches_make_turns_wait() -> None:
    replica = Replica(Clock(), PassCost(fixed_s=1.0), 0.0, capacity=15)
    assert play(replica, [(0, 10, 0), (1, 10, 0), (2, 5, 0)]) == pytest.approx([10, 20, 15])
    assert replica.peak_tokens <= 15


def test_a_turn_larger_than_the_cache_runs_alone() -> None:
    replica = Replica(Clock(), PassCost(fixed_s=1.0), 0.0, capacity=5)
    assert play(replica, [(0, 10, 0)]) == pytest.approx([10])


def test_evicted_context_is_computed_again() -> None:
    """Two idle episodes of 10 tokens in a cache of 10: half of each is there."""
    replica = Replica(Clock(), PassCost(fixed_s=1.0), prefill_s=0.1, capacity=10)
    for _ in range(2):
        replica.enter()
    replica.idle_tokens = 20.0
    assert replica.hits() == 0.5
    replica.submit(Turn(tokens=1, prefill=2, cached=10, done=lambda: None))
    assert replica.prefilled == pytest.approx(2 + 5)


def test_rounding_of_idle_tokens_is_no_miss() -> None:
    replica = Replica(Clock(), PassCost(fixed_s=1.0), prefill_s=0.1, capacity=10)
    replica.idle_tokens = -1e-9
    assert replica.hits() == 1.0


def test_new_weights_compute_the_context_again() -> None:
    replica = Replica(Clock(), PassCost(fixed_s=1.0), prefill_s=0.1)
    replica.clock.at(4, lambda _: replica.clear_cache())
    assert play(replica, [(0, 6, 20)]) == pytest.approx([2 + 6 + 0.1 * 22])


def test_lockstep_waits_for_all_open_episodes() -> None:
    replica = Replica(Clock(), PassCost(fixed_s=1.0), 0.0, lockstep=True)
    replica.enter()  # an episode that waits for its environment until 5
    replica.clock.at(5, lambda _: replica.leave(0.0))
    assert play(replica, [(0, 3, 0)]) == pytest.approx([8])


def test_pauses_and_speeds() -> None:
    replica = Replica(Clock(), PassCost(fixed_s=1.0), 0.0)
    replica.clock.at(2, lambda _: replica.pause())
    replica.clock.at(5, lambda _: replica.resume())
    replica.clock.at(6, lambda _: replica.set_speed(0.5))
    assert play(replica, [(0, 4, 0)]) == pytest.approx([8])


def test_cancelled_turns_free_their_cache() -> None:
    replica = Replica(Clock(), PassCost(fixed_s=1.0), 0.0, capacity=10)
    ends: list[float] = []
    first = Turn(10, 0, 0, lambda: ends.append(-1.0))
    replica.submit(first)
    replica.submit(Turn(4, 0, 0, lambda: ends.append(replica.clock.now)))
    replica.clock.at(3, lambda _: replica.drop(first))
    replica.clock.run()
    assert ends == pytest.approx([7])


def test_times_stay_exact_late_in_a_long_simulation() -> None:
    replica = Replica(Clock(), PassCost(fixed_s=1e-5), 0.0)
    assert play(replica, [(1e7, 100, 0)]) == pytest.approx([1e7 + 1e-3])
    assert replica.clock.num_events < 10
