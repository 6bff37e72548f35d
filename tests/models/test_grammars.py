"""Constrained turns: what a schema allows, and the same distribution in sampler and learner."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import validate
from model_world import model_config

from ludus.core.errors import SchemaError, TrainingError
from ludus.core.types import Constraint, Group, Segment, Spec, Task, ToolSpec, Trajectory
from ludus.models.build import build_model
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.models.exact.sampler import ExactSampler
from ludus.models.grammars import MAX_SCHEMA, Grammars, grammar_of
from ludus.models.samplers.base import SamplingParams
from ludus.models.samplers.engine import InProcessSampler
from ludus.models.vocabulary import Vocabulary
from ludus.train.batches.packing import pack
from ludus.train.batches.samples import rows
from ludus.train.forward import Forward
from ludus.train.scoring import Scorer
from ludus.train.verify import ExactForward, unscored, verify

pytest.importorskip("llguidance", reason="needs the extra agents")

TEXTS = ['{"color": "red", "n": 12} "blue" [3, 4]', "the colour is red", '{"a": 5} : ,', '"green"']
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "n": {"type": "integer"}},
    "required": ["color", "n"],
    "additionalProperties": False,
}
TOOLS = [
    ToolSpec(
        name="a",
        parameters={
            "type": "object",
            "properties": {"n": {"type": "integer"}},
            "required": ["n"],
            "additionalProperties": False,
        },
    ),
    ToolSpec(name="red"),
]


@pytest.fixture(params=["words", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return train_tokenizer(Spec(name=request.param), TEXTS)


def constraint_of(tokenizer: Any, schema: Any = SCHEMA, **how: Any) -> Constraint:
    return Constraint(grammar_of(schema, **how), (tokenizer.eos_token_id,))


def drawn(grammars: Grammars, constraint: Constraint, seed: int, limit: int = 200) -> list[int]:
    """A turn of uniformly drawn tokens."""
    matcher, draw, ids = grammars.matcher(constraint), np.random.default_rng(seed), []
    while len(ids) < limit:
        ids.append(int(draw.choice(np.flatnonzero(matcher.allowed()))))
        matcher.advance(ids[-1])
        if ids[-1] in constraint.stop_token_ids:
            break
    return ids


def test_every_turn_is_a_value_of_the_schema(tokenizer: Any) -> None:
    grammars, constraint = Vocabulary.of(tokenizer).grammars, constraint_of(tokenizer)
    found = set()
    for seed in range(20):
        *ids, last = drawn(grammars, constraint, seed)
        assert last == tokenizer.eos_token_id
        text = tokenizer.decode(ids)
        validate(json.loads(text), SCHEMA)
        assert text == json.dumps(json.loads(text))
        found.add(text)
    assert len(found) > 5


def test_tool_calls_are_an_alternative_where_tools_are_offered(tokenizer: Any) -> None:
    grammars = Vocabulary.of(tokenizer).grammars
    constraint = constraint_of(tokenizer, tools=TOOLS)
    texts = [tokenizer.decode(drawn(grammars, constraint, seed)) for seed in range(40)]
    calls = [text for text in texts if text.startswith("<tool_call>")]
    assert 0 < len(calls) < len(texts)
    for text in calls:
        for call in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.S):
            called = json.loads(call)
            assert (called["name"] == "red") == ("n" not in called["arguments"]), text
    assert all(text.startswith('{"color": ') for text in texts if text not in calls)
    bare = constraint_of(tokenizer)
    assert not any("<tool_call>" in tokenizer.decode(drawn(grammars, bare, s)) for s in range(40))


def test_a_schema_may_contain_any_text() -> None:
    tokenizer = train_tokenizer(Spec(name="bpe"), TEXTS)
    schema = {"description": "calls: %calls\n \\u0000 %json {", "enum": ["red", 'a "b" \\ \n', "é"]}
    grammars = Vocabulary.of(tokenizer).grammars
    for tools in ([], TOOLS):
        constraint = constraint_of(tokenizer, schema, tools=tools)
        texts = [tokenizer.decode(drawn(grammars, constraint, seed)[:-1]) for seed in range(20)]
        values = {json.loads(text) for text in texts if not text.startswith("<tool_call>")}
        assert "red" in values
        assert values <= {*schema["enum"]}


def test_ids_without_a_token_and_special_ones_are_never_allowed(tokenizer: Any) -> None:
    grammars = Grammars(tokenizer, len(tokenizer) + 7)
    matcher = grammars.matcher(constraint_of(tokenizer, {"type": "string"}))
    for id in tokenizer('"red', add_special_tokens=False)["input_ids"]:
        matcher.advance(id)
    allowed = np.flatnonzero(matcher.allowed())
    assert len(allowed) > 5
    assert not set(allowed) & {*tokenizer.all_special_ids, *range(len(tokenizer), 1000)}


def test_a_value_that_no_token_can_continue_ends_the_turn() -> None:
    tokenizer = train_tokenizer(Spec(name="words"), ['{"a": 5}'])
    grammars = Vocabulary.of(tokenizer).grammars
    ids = drawn(grammars, constraint_of(tokenizer, {"enum": ["zebra"]}), 0)
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]) == '"'


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "obj"}, "Invalid type: obj"),
        ({"$ref": "http://example.com/x"}, "does not fetch"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"type": "object", "properties": 5}, "properties must be an object"),
        ({"enum": [float("nan")]}, "no JSON"),
        (["type"], "it has to be an object"),
        ({"$ref": "#"}, "cannot be followed"),
        ({"type": "string", "pattern": "^(a{1000}){1000}$"}, "too many expressions"),
        ({"properties": {f"p{i}": {"type": "integer"} for i in range(600)}}, "Current row has"),
        (
            {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(24)]},
            "more than 3 s",
        ),
        ({"description": "x" * MAX_SCHEMA}, "at most 100,000"),
    ],
)
def test_schemas_that_cannot_be_followed(schema: Any, told: str) -> None:
    tokenizer = train_tokenizer(Spec(name="words"), TEXTS)
    with pytest.raises(SchemaError, match=told) as caught:
        Vocabulary.of(tokenizer).grammars.check(grammar_of(schema))
    assert "\n" not in str(caught.value)


def model_of(tokenizer: Any) -> Any:
    model = build_model(model_config(), tokenizer, seed=0)
    with torch.no_grad():  # a distribution that is far from uniform
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


async def play(sampler: Any, tokenizer: Any, **params: Any) -> list[Trajectory]:
    """Eight turns in one batch, every second one constrained."""
    prompt = tokenizer("the colour is", add_special_tokens=False)["input_ids"]
    stops = (tokenizer.eos_token_id,)

    async def turn(n: int) -> Trajectory:
        grammar = grammar_of(SCHEMA) if n % 2 else None
        given = SamplingParams(40, stop_token_ids=stops, seed=n, grammar=grammar, **params)
        sampler.open(f"s{n}")
        done = await sampler.sample(prompt, given, session=f"s{n}")
        sampler.close(f"s{n}")
        turn = Segment(0, done.token_ids, done.logprobs, policy_version=0)
        turn.constraint = given.constraint
        return Trajectory(f"t{n}", "g", "t", [Segment(-1, prompt), turn], reward=1.0)

    return list(await asyncio.gather(*(turn(n) for n in range(8))))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_sampler_and_learner_have_the_same_distribution(
    tokenizer: Any, temperature: float
) -> None:
    model = model_of(tokenizer)
    sampler = InProcessSampler(model, context_length=128, tokenizer=tokenizer)
    trajectories = await play(sampler, tokenizer, temperature=temperature)
    for number, trajectory in enumerate(trajectories):
        if number % 2 and trajectory.segments[1].token_ids[-1] == tokenizer.eos_token_id:
            validate(json.loads(tokenizer.decode(trajectory.segments[1].token_ids[:-1])), SCHEMA)
    forward = Forward(
        model,
        temperature=temperature,
        context_length=128,
        vocabulary=Vocabulary.of(tokenizer),
    )
    [group] = Scorer(forward, 4096, 0)([Group("g", Task(id="t"), trajectories)], "learner_logprobs")
    forced = 0
    for trajectory in group.trajectories:
        turn = trajectory.segments[1]
        assert turn.learner_logprobs == pytest.approx(turn.logprobs, abs=2e-4)  # large logits
        forced += sum(abs(x) < 1e-6 for x in turn.logprobs or [])
    assert forced > 20  # where a schema leaves no choice
    for trajectory in trajectories:
        trajectory.segments[1].constraint = None
    [group] = Scorer(forward, 4096, 0)([Group("g", Task(id="t"), trajectories)], "learner_logprobs")
    far = [t.segments[1] for t in group.trajectories[1::2]]
    assert all(sum(s.learner_logprobs or []) < sum(s.logprobs or []) - 1 for s in far)


@pytest.mark.parametrize("layout", ["tree", "single"])
async def test_gradients_are_those_of_the_constrained_distribution(layout: Any) -> None:
    """By hand: autograd through the masked logits of each turn alone."""
    tokenizer = train_tokenizer(Spec(name="bpe"), TEXTS)
    model, vocabulary = model_of(tokenizer), Vocabulary.of(tokenizer)
    sampler = InProcessSampler(model, context_length=128, tokenizer=tokenizer)
    trajectories = await play(sampler, tokenizer)
    samples = [row for n, t in enumerate(trajectories) for row in rows(t, (-1.0) ** (n // 2))]
    weights = [[float(x) for x in sample.loss_mask] for sample in samples]
    batch = pack(samples, weights, tokens_per_batch=512, pad_id=0, layout=layout)
    forward = Forward(model, context_length=128, vocabulary=vocabulary)
    for micro_batch in batch.micro_batches:
        with forward.passes(micro_batch):
            logprobs_N, entropy_N = forward.logprobs(micro_batch)
            (logprobs_N * micro_batch.advantages_N + 0.1 * entropy_N).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for sample in samples:
        first = sample.loss_mask.index(True)
        logits = model(torch.tensor([sample.token_ids])).logits[0, first - 1 : -1]
        logits = vocabulary.select(logits)
        for start, stop, constraint in sample.constraints:
            assert start == first
            bits = vocabulary.grammars.allowed(constraint, sample.token_ids[start:stop])
            allowed = vocabulary.grammars.unpacked(bits)
            logits = logits.masked_fill(~torch.from_numpy(allowed), -1e30)
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum()
        picked = logprobs.gather(1, torch.tensor(sample.token_ids[first:])[:, None]).sum()
        (picked * sample.advantages[first] + 0.1 * entropy).backward()
    for name, parameter in model.named_parameters():
        difference = (found[name] - parameter.grad).abs().max()
        assert difference <= 1e-4 * parameter.grad.abs().max(), name


async def test_exact_sampler_and_learner_agree_bit_by_bit() -> None:
    tokenizer = train_tokenizer(Spec(name="bpe"), TEXTS)
    model = model_of(tokenizer)
    sampler = ExactSampler(model, context_length=128, tokenizer=tokenizer)
    trajectories = await play(sampler, tokenizer)
    forward = ExactForward(model, context_length=128, vocabulary=Vocabulary.of(tokenizer))
    batch = unscored(trajectories, 4096, 0, forward.layout)
    assert await verify(forward, batch, 0) == sum(t.num_sampled_tokens for t in trajectories)


def test_tokens_that_a_grammar_forbids_are_an_error() -> None:
    tokenizer = train_tokenizer(Spec(name="bpe"), TEXTS)
    ids = tokenizer('{"colour": "red"}', add_special_tokens=False)["input_ids"]
    turn = Segment(0, ids, [-1.0] * len(ids), constraint=constraint_of(tokenizer))
    group = Group("g", Task(id="t"), [Trajectory("t", "g", "t", [Segment(-1, [5]), turn])])
    forward = Forward(model_of(tokenizer), context_length=128, vocabulary=Vocabulary.of(tokenizer))
    with pytest.raises(TrainingError, match=r"token \d+ of a turn, id \d+, is outside of the gram"):
        Scorer(forward, 4096, 0)([group], "learner_logprobs")
