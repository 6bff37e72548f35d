"""Adapters of several policies on one base; the members of a league."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ludus.backends.fixed import share_base
from ludus.config.load import load_config
from ludus.config.policies import PastConfig
from ludus.config.schema import LoraConfig, ModelConfig
from ludus.core.types import Spec
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.pipeline.parts.policies import League
from ludus.train.checkpoint.policy import build_policy


def test_adapters_share_the_memory_of_their_base() -> None:
    tokenizer = train_tokenizer(Spec(name="words"), ["one two three"], "plain", [])
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    config = ModelConfig(
        architecture=Spec(name="qwen3", args=sizes),
        tokenizer="words",
        chat_template="plain",
        lora=LoraConfig(rank=2),
    )
    one, two, other = (build_policy(config, tokenizer, seed) for seed in (0, 0, 1))
    share_base(one, two)
    share_base(one, other)
    own = dict(one.named_parameters())
    for name, parameter in two.named_parameters():
        shared = parameter.data_ptr() == own[name].data_ptr()
        assert shared == (not parameter.requires_grad), name
    frozen = [name for name, p in other.named_parameters() if not p.requires_grad]
    differing = [name for name in frozen if "embed" in name or "proj" in name]
    parameters = dict(other.named_parameters())
    assert differing
    assert all(parameters[name].data_ptr() != own[name].data_ptr() for name in differing)
    with torch.no_grad():
        for name, parameter in two.named_parameters():
            if parameter.requires_grad:
                parameter += 1.0
                assert not torch.equal(parameter, own[name])


def test_a_league_keeps_its_members_processes_in_a_resume(tmp_path: Path) -> None:
    """On Ray each member is processes of its own: a start takes seconds to minutes."""
    made: list[Any] = []

    def make() -> Any:
        member = SimpleNamespace(versions=[], is_open=True)
        member.take = lambda model, version: member.versions.append(version)
        member.restore = lambda path, version: member.versions.append(version)
        member.close = lambda: setattr(member, "is_open", False)
        made.append(member)
        return member

    def league() -> League:
        config = load_config({"model": {"path": "x"}, "tasks": {"train": "x"}})
        settings = PastConfig(every=1, most=2)
        return League(settings, backend, make, tmp_path, config)

    backend: Any = SimpleNamespace(policy_version=0, present_model=lambda: torch.nn.Linear(2, 2))
    first = league()
    first.started(0)
    first.published(1)
    assert [member.versions for member in made] == [[0], [1]]
    made.clear()
    resumed = league()
    resumed.started(0)  # then the checkpoint is loaded
    resumed.restored(1)
    assert [member.versions for member in made] == [[0, 0], [1]]
    resumed.restored(0)
    assert [member.is_open for member in made].count(False) == 1
    resumed.close()
    assert not any(member.is_open for member in made)
