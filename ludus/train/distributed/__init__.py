"""The learner over several processes: FSDP2 shards, a split by tokens, DCP checkpoints."""

from __future__ import annotations

from ludus.train.distributed.settings import Rank, ShardSettings, open_listener
from ludus.train.distributed.trainer import ShardedTrainer

__all__ = ["Rank", "ShardSettings", "ShardedTrainer", "open_listener"]
