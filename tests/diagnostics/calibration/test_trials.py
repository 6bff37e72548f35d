"""The trials of `ludus init`."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

from ludus.config.schema import RunConfig
from ludus.core.types import Message, Spec, Task
from ludus.data.conversations import Conversation
from ludus.diagnostics.calibration.first import base
from ludus.diagnostics.calibration.subject import Subject
from ludus.diagnostics.calibration.tokens import trained
from ludus.diagnostics.calibration.trials import Trial, unseen_loss
from ludus.pipeline.build import Run
from ludus.pipeline.tokenizer import make_renderers


def recipe(context: int) -> RunConfig:
    subject = Subject("env", "babyai", "babyai", Spec(name="babyai"), ["GoToObj"])
    config = base(subject, 0, None, "sft.jsonl", shows=True)
    model = config.model.model_copy(update={"context_length": context})
    return config.model_copy(update={"model": model})


def test_unseen_episodes_that_all_exceed_the_context_favour_no_rate() -> None:
    config = recipe(context=16)
    messages = [
        Message(role="user", content="go " * 20),
        Message(role="assistant", content="turn left"),
    ]
    conversation = Conversation(Task(id="t"), messages, None, None)
    renderers: Any = make_renderers(config, trained(config, [conversation], ()))
    backend = SimpleNamespace(trainer=None)
    made = cast(Run, SimpleNamespace(config=config, renderers=renderers, backend=backend))
    loss = unseen_loss(made, [conversation])
    assert loss == math.inf
    assert Trial(losses={2e-3: loss, 1e-3: loss}).rate == 1e-3
