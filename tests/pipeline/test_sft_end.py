"""The measured end of SFT."""

from __future__ import annotations

from ludus.config.training import SFTUntilConfig
from ludus.pipeline.sft_end import reason_to_end


def test_success_ends_sft() -> None:
    until = SFTUntilConfig(success=0.4)
    assert reason_to_end(until, []) is None
    assert reason_to_end(until, [0.1, 0.39]) is None
    assert "40% of the sampled episodes" in str(reason_to_end(until, [0.1, 0.3, 0.5]))
    assert "45% of the sampled episodes" in str(reason_to_end(until, [0.45]))


def test_one_lucky_measurement_does_not_end_sft() -> None:
    until = SFTUntilConfig(success=0.4)
    assert reason_to_end(until, [0.3, 0.2, 0.42]) is None
    assert reason_to_end(until, [0.3, 0.42, 0.37]) is None


def test_success_that_no_longer_rises_ends_sft() -> None:
    until = SFTUntilConfig(success=0.9, patience=3)
    assert reason_to_end(until, [0.2, 0.1, 0.2]) is None
    assert "above 20% in 3" in str(reason_to_end(until, [0.2, 0.1, 0.2, 0.15]))
    assert reason_to_end(until, [0.2, 0.1, 0.2, 0.25]) is None


def test_sft_goes_on_where_hardly_any_episode_succeeds() -> None:
    until = SFTUntilConfig(success=0.9, patience=3)
    assert reason_to_end(until, [0.0] * 20) is None
    assert reason_to_end(until, [0.05, *[0.01] * 20]) is None
