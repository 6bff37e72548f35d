"""In-process engine: log-probabilities, KV cache, sessions, unsupported models."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
import time
from typing import Any

import pytest
import torch
from engine_helpers import (
    CONTEXT,
    FAMILIES,
    GROUPED,
    VOCAB,
    episode,
    expected_logprobs,
    sampler,
    tiny,
    tokens,
)
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    JambaConfig,
    Llama4TextConfig,
    MambaConfig,
    MistralConfig,
    OpenAIGPTConfig,
    Qwen2Config,
    Qwen3Config,
)

from ludus.config.schema import LoraConfig
from ludus.core.errors import ConfigError, ContextOverflow, TrainingError
from ludus.models.build import _with_lora
from ludus.models.kv_cache.step_inputs import StepInputs
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.models.samplers.engine import InProcessSampler

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1], [3], [30, 31, 32, 33, 34], [7, 7]]
MIXED = [
    SamplingParams(max_tokens=5, temperature=0.7, seed=1),
    SamplingParams(max_tokens=9, temperature=1.3, top_k=7, seed=2),
    SamplingParams(max_tokens=3, temperature=1.0, top_p=0.6, seed=3),
    SamplingParams(max_tokens=7, temperature=0.9, top_k=20, top_p=0.9, seed=4),
    SamplingParams(max_tokens=4, temperature=0.0),
]


async def gathered(*episodes: Any) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*episodes), 60)


async def check_exact(model: Any, engine: InProcessSampler) -> None:
    """Episodes of 1 to 5 turns, three at a time: slots and blocks are reused."""
    queue = [
        (f"{number}", prompt, [*MIXED[number:], *MIXED[:number]][: number + 1])
        for number, prompt in enumerate(PROMPTS)
    ]
    played = []

    async def worker() -> None:
        while queue:
            played.append(await episode(engine, *queue.pop(0)))

    await gathered(*[worker() for _ in range(3)])
    assert sum(map(len, played)) == 1 + 2 + 3 + 4 + 5
    for prompt, params, completion in [turn for turns in played for turn in turns]:
        assert len(completion.token_ids) == params.max_tokens
        assert completion.logprobs == pytest.approx(
            expected_logprobs(model, prompt, completion, params), abs=1e-4
        )


@pytest.mark.parametrize("family", FAMILIES)
async def test_logprobs_match_a_plain_pass(family: str) -> None:
    model = tiny(family)
    engine = sampler(model)
    await check_exact(model, engine)
    prefilled = 0
    for number, prompt in enumerate(PROMPTS):
        prefilled += len(prompt)
        # Of a later turn, the cache lacks the last sampled token and the observation.
        prefilled += sum(1 + 3 + turn for turn in range(number))
    assert engine.num_prefill_tokens == prefilled  # nothing is computed twice


async def test_logprobs_with_adapters() -> None:
    torch.manual_seed(0)  # the adapters' first matrices are drawn
    model = _with_lora(tiny(), LoraConfig(rank=2, dropout=0.5))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                # small, as adapters are: merged, large ones round by more than is allowed below
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    engine = sampler(model)
    model.train()  # as the learner leaves it; dropout must not reach the sampler
    await check_exact(model.eval(), engine)
    model.train()
    [(prompt, params, completion)] = await episode(engine, "a", [1, 2, 3], MIXED[:1])
    assert completion.logprobs == pytest.approx(
        expected_logprobs(model.eval(), prompt, completion, params), abs=1e-4
    )


async def test_a_branch_reuses_the_common_prefix_only() -> None:
    model = tiny()
    engine = sampler(model)
    engine.open("a")
    params = SamplingParams(max_tokens=4, seed=5)
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9], [1, 2, 3, 9, 9], [8, 8], [1, 2]]
    computed = [6, 2, 1, 2, 2]
    for prompt, new in zip(prompts, computed, strict=True):
        before = engine.num_prefill_tokens
        completion = await engine.sample(prompt, params, session="a")
        assert engine.num_prefill_tokens - before == new
        assert completion.logprobs == pytest.approx(
            expected_logprobs(model, prompt, completion, params), abs=1e-4
        )


@pytest.mark.parametrize("path", ["fast", "generic"])
@pytest.mark.parametrize("closed", ["a", "b"])
async def test_blocks_of_a_twin_outlive_the_other(path: str, closed: str) -> None:
    """Two sessions sample the same tokens into blocks of their own; one closes."""
    model = tiny()
    engine = sampler(model, path=path, deterministic=False)
    params = SamplingParams(max_tokens=60, seed=4)
    prompt = [5, 6, 7, 8, 9, 10, 11]
    for name in "ab":
        engine.open(name)
    turns = await gathered(*[engine.sample(prompt, params, session=name) for name in "ab"])
    assert turns[0].token_ids == turns[1].token_ids
    engine.close(closed)
    before = engine.num_prefill_tokens
    longer = [*prompt, *turns[0].token_ids[:-1], 1, 2, 3, 4]
    params = SamplingParams(max_tokens=3)
    [(_, _, completion)] = await episode(engine, "c", longer, [params])
    assert engine.num_prefill_tokens - before == 4
    assert completion.logprobs == pytest.approx(
        expected_logprobs(model, longer, completion, params), abs=1e-4
    )


async def test_cache_storage_grows() -> None:
    config = Qwen3Config(**{**GROUPED, "max_position_embeddings": 600})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    engine = sampler(model, context_length=600)
    params = SamplingParams(max_tokens=6)
    first = [i % VOCAB for i in range(250)]
    played = await gathered(
        episode(engine, "a", first, [params] * 2), episode(engine, "b", first[:3], [params] * 2)
    )
    played += await gathered(episode(engine, "c", first * 2, [params]))
    for prompt, params, completion in [turn for turns in played for turn in turns]:
        assert completion.logprobs == pytest.approx(
            expected_logprobs(model, prompt, completion, params), abs=1e-4
        )


# Seeds and independence


async def test_samples_depend_on_the_seed_only() -> None:
    model = tiny()
    turns = [SamplingParams(max_tokens=20, seed=s) for s in (1, 1, 2)]
    sets = [tokens(await episode(sampler(model), "a", [1, 2], [turn]))[0] for turn in turns]
    assert sets[0] == sets[1] != sets[2]


async def test_samples_do_not_depend_on_the_batch() -> None:
    """In float64, where rounding does not change a sampled token."""
    model = tiny(dtype=torch.float64)
    alone = [
        tokens(await episode(sampler(model), str(i), prompt, MIXED))
        for i, prompt in enumerate(PROMPTS)
    ]
    engine = sampler(model)
    together = await gathered(
        *[episode(engine, str(i), prompt, MIXED) for i, prompt in enumerate(PROMPTS)]
    )
    assert [tokens(played) for played in together] == alone


async def test_greedy_is_argmax() -> None:
    model = tiny()
    params = SamplingParams(max_tokens=12, temperature=0.0)
    [(prompt, _, completion)] = await episode(sampler(model), "a", [4, 2], [params])
    ids = list(prompt)
    for token in completion.token_ids:
        with torch.no_grad():
            assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)


# Ends of a turn


async def test_ends_of_a_turn() -> None:
    engine = sampler(tiny(), decode=lambda ids: "".join(map(spelled, ids)))
    engine.open("a")

    async def ends(**options: Any) -> Completion:
        params = SamplingParams(**{"max_tokens": 12, "seed": 4, "temperature": 20.0, **options})
        return await engine.sample([1, 2, 3], params, session="a")

    full = await ends()
    assert (full.finish_reason, len(full.token_ids)) == ("length", 12)
    assert full.token_ids[4] not in full.token_ids[:4], "the test needs a token of its own"

    by_id = await ends(stop_token_ids=(full.token_ids[4],))
    assert (by_id.token_ids, by_id.finish_reason) == (full.token_ids[:5], "stop")
    text = "".join(map(spelled, full.token_ids))
    across = (
        spelled(full.token_ids[2])[-1] + spelled(full.token_ids[3]) + spelled(full.token_ids[4])[:1]
    )
    assert text.count(across) == 1, "the test needs a stop string that is spelled once"
    by_text = await ends(stop=("never", across))
    assert (by_text.token_ids, by_text.finish_reason) == (full.token_ids[:5], "stop")
    assert by_text.logprobs == pytest.approx(full.logprobs[:5], abs=1e-5)
    one = await ends(max_tokens=1)
    assert (one.token_ids, one.finish_reason) == (full.token_ids[:1], "length")
    last = await ends(max_tokens=5, stop_token_ids=(full.token_ids[4],))
    assert (last.token_ids, last.finish_reason) == (full.token_ids[:5], "stop")


def spelled(token: int) -> str:
    """A text of three characters for each token."""
    return f"{chr(97 + token % 26)}{token:02d}"


async def test_a_stop_string_that_the_prompt_ends_with_does_not_stop() -> None:
    engine = sampler(tiny(), decode=lambda ids: "".join(map(spelled, ids)))
    engine.open("a")
    params = SamplingParams(max_tokens=3, stop=(spelled(1) + spelled(2),), seed=3)
    completion = await engine.sample([1, 2], params, session="a")
    assert completion.finish_reason == "length"


async def test_invalid_calls_are_refused() -> None:
    engine = sampler(tiny())
    params = SamplingParams(max_tokens=4)
    engine.open("a")
    with pytest.raises(ContextOverflow, match=r"93 prompt tokens and 4 to sample exceed"):
        await engine.sample([1] * (CONTEXT - 3), params, session="a")
    assert len((await engine.sample([1] * (CONTEXT - 4), params, session="a")).token_ids) == 4
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        await engine.sample([1], SamplingParams(max_tokens=1, stop=("x",)), session="a")
    with pytest.raises(ValueError, match="session 'b' is not open"):
        await engine.sample([1], params, session="b")
    with pytest.raises(ValueError, match="session 'a' is open already"):
        engine.open("a")
    with pytest.raises(ValueError, match="at least one prompt token"):
        await engine.sample([], params, session="a")
    both = await asyncio.gather(
        engine.sample([1], params, session="a"),
        engine.sample([1], params, session="a"),
        return_exceptions=True,
    )
    assert isinstance(both[0], Completion)
    assert "is sampling a turn already" in str(both[1])


@pytest.mark.parametrize("path", ["fast", "static", "generic"])
@pytest.mark.parametrize("wrong", [VOCAB, -1, 10**9, 2**40, 10**30, 1.5, "a"], ids=str)
async def test_ids_that_the_model_lacks_end_their_turn_only(path: str, wrong: Any) -> None:
    engine = sampler(tiny(), path=path)
    engine.open("a")
    engine.open("b")
    params = SamplingParams(max_tokens=6)
    other = asyncio.create_task(engine.sample([1, 2, 3], params, session="b"))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match=r"has the id|must be a list of integers"):
        await engine.sample([1, wrong, 3], params, session="a")
    again = await asyncio.gather(other, engine.sample([1, 2, 3], params, session="a"))
    fresh = await episode(sampler(tiny(), path=path), "b", [1, 2, 3], [params])
    assert [turn.token_ids for turn in again] == [*tokens(fresh), *tokens(fresh)]


# Sessions that come, go, fail


async def test_closed_and_cancelled_sessions_do_not_block_others() -> None:
    model = tiny()
    engine = sampler(model)
    long = [SamplingParams(max_tokens=30, seed=1)] * 2
    engine.open("never samples")
    engine.open("given up")
    others = [asyncio.create_task(episode(engine, f"{i}", PROMPTS[i], long)) for i in range(2)]
    given_up = asyncio.create_task(engine.sample([1, 2], long[0], session="given up"))
    await asyncio.sleep(0.02)
    assert not any(task.done() for task in others)  # they wait for the silent session
    engine.close("never samples")
    while engine.num_decode_tokens < 9:
        await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    engine.close("given up")
    engine.close("given up")  # idempotent
    again = asyncio.create_task(episode(engine, "given up", [1, 2], long[:1]))  # anew, same name
    await asyncio.sleep(0)
    played = await gathered(*others, again)
    for prompt, params, completion in [*played[0], *played[1], *played[2]]:
        assert completion.logprobs == pytest.approx(
            expected_logprobs(model, prompt, completion, params), abs=1e-4
        )


async def test_closing_a_session_cancels_its_turn() -> None:
    engine = sampler(tiny(), deterministic=False)
    engine.open("a")
    turn = asyncio.create_task(engine.sample([1], SamplingParams(max_tokens=50), session="a"))
    while engine.num_decode_tokens < 3:
        await asyncio.sleep(0)
    engine.close("a")
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert engine.num_decode_tokens < 10
    assert len(await episode(engine, "b", [1], MIXED)) == 5


@pytest.mark.parametrize("when", ["prefill", "decoding"])
async def test_logits_that_are_not_finite_end_every_turn(when: str) -> None:
    model = tiny()
    engine = sampler(model)
    weight = model.get_input_embeddings().weight
    healthy = weight.detach().clone()

    def spoil() -> None:
        with torch.no_grad():
            weight.fill_(float("nan"))
        engine.publish(1)

    if when == "prefill":
        spoil()
    for name in "ab":
        engine.open(name)
    params = SamplingParams(max_tokens=8)
    turns = [asyncio.create_task(engine.sample([1, 2], params, session=name)) for name in "ab"]
    if when == "decoding":
        while engine.num_decode_tokens < 4:
            await asyncio.sleep(0)
        spoil()
    results = await asyncio.wait_for(asyncio.gather(*turns, return_exceptions=True), 10)
    for result in results:
        assert isinstance(result, TrainingError)
        assert "logits are not finite" in str(result)
    for name in "ab":
        engine.close(name)
    with torch.no_grad():
        weight.copy_(healthy)
    engine.publish(2)
    await check_exact(model, engine)  # nothing of the failure is left


def test_engine_works_in_several_event_loops() -> None:
    engine = sampler(tiny())
    first = asyncio.run(episode(engine, "a", [1, 2], MIXED))
    assert tokens(asyncio.run(episode(engine, "a", [1, 2], MIXED))) == tokens(first)


# Determinism


def record_batches(engine: InProcessSampler) -> list[Any]:
    """Records rows, positions and tokens of every later forward pass."""
    passes: list[Any] = []
    original = engine.decoder.forward

    def recording(batch: StepInputs) -> Any:
        passes.append((batch.rows.tolist(), batch.positions.tolist(), batch.ids.tolist()))
        return original(batch)

    engine.decoder.forward = recording  # type: ignore[method-assign]
    return passes


async def play_with_delays(
    engine: InProcessSampler, seed: int, concurrency: int = 3
) -> dict[str, Any]:
    """Nine episodes, three concurrently, with environments of random speed, some in threads."""
    rng = random.Random(seed)
    names = [f"episode {i}" for i in range(9)]
    played: dict[str, Any] = {}

    async def pause() -> None:
        kind, seconds = rng.randrange(3), rng.random() * 0.004
        if kind == 1:
            await asyncio.sleep(seconds)
        elif kind == 2:
            await asyncio.to_thread(time.sleep, seconds)

    async def worker() -> None:
        while names:
            name = names.pop(0)
            number = int(name[-1])
            turns = [
                SamplingParams(max_tokens=2 + (number + turn) % 4, seed=10 * number + turn)
                for turn in range(1 + number % 3)
            ]
            if number == 4:
                turns = []  # ends before it ever samples
            played[name] = await episode(engine, name, [1 + number] * (1 + number), turns, pause)

    await gathered(*[worker() for _ in range(concurrency)])
    return {
        name: [(c.token_ids, c.logprobs) for _, _, c in turns] for name, turns in played.items()
    }


@pytest.mark.parametrize("path", ["fast", "generic"])
async def test_batches_do_not_depend_on_timing(path: str) -> None:
    model = tiny()
    seen = []
    for seed in range(5):
        engine = sampler(model, path=path)
        passes = record_batches(engine)
        played = await play_with_delays(engine, seed)
        seen.append((played, passes))
    assert len(seen[0][0]) == 9
    for played, batches in seen[1:]:
        assert batches == seen[0][1]
        assert played == seen[0][0]  # to the bit, log-probabilities included
    assert threading.active_count() < 50


async def test_engine_resets_without_sessions() -> None:
    engine = sampler(tiny())
    passes = record_batches(engine)
    first = await play_with_delays(engine, 0)
    fresh = list(passes)
    await gathered(*[episode(engine, f"{i}", [1] * 60, MIXED[:1]) for i in range(7)])
    passes.clear()
    assert await play_with_delays(engine, 1) == first
    assert passes == fresh


async def test_non_deterministic_mode_does_not_wait() -> None:
    model = tiny()
    engine = sampler(model, deterministic=False)
    engine.open("away for good")  # in deterministic mode this session would block the others
    played = await gathered(
        *[episode(engine, f"{i}", prompt, MIXED) for i, prompt in enumerate(PROMPTS)]
    )
    for prompt, params, completion in [turn for turns in played for turn in turns]:
        assert completion.logprobs == pytest.approx(
            expected_logprobs(model, prompt, completion, params), abs=1e-4
        )


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"seed": -1}, "seed is -1: it must be 0 or more"),
        ({"stop_token_ids": (3, 2**63)}, f"stop id {2**63} is not a 64-bit integer"),
        ({"stop_token_ids": (-(2**63) - 1,)}, "is not a 64-bit integer"),
    ],
)
async def test_a_refused_turn_takes_no_slot(wrong: dict[str, Any], told: str) -> None:
    engine = sampler(tiny())
    engine.open("a")
    await engine.sample([1, 2, 3], SamplingParams(max_tokens=2), session="a")
    slots = engine._scheduler._slots
    free = sorted(slots.free)
    for _ in range(3):
        with pytest.raises(ValueError, match=told):
            await engine.sample([1], SamplingParams(**{"max_tokens": 2, **wrong}), session="a")
        with pytest.raises((ValueError, OverflowError)):
            slots.acquire(SamplingParams(**{"max_tokens": 2, **wrong}))
    assert sorted(slots.free) == free
    done = await engine.sample([1, 2, 3], SamplingParams(max_tokens=2), session="a")
    assert len(done.token_ids) == 2


# New weights


def nudge(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


async def test_new_weights_clear_the_cache() -> None:
    model = tiny()
    engine = sampler(model)
    engine.open("a")
    first = await engine.sample([1, 2, 3], MIXED[0], session="a")
    prompt = [1, 2, 3, *first.token_ids, 4, 5]
    nudge(model)
    engine.publish(1)
    second = await engine.sample(prompt, MIXED[3], session="a")
    assert (first.policy_version, second.policy_version) == (0, 1)
    fresh = sampler(model)
    fresh.open("a")
    expected = await fresh.sample(prompt, MIXED[3], session="a")
    assert second.token_ids == expected.token_ids
    assert second.logprobs == expected.logprobs


@pytest.mark.parametrize("path", ["fast", "static", "generic"])
async def test_new_weights_during_a_turn(path: str) -> None:
    """Each token has the version that sampled it, from keys and values of that version."""
    model, prompt = tiny(), list(range(20))
    engine = sampler(model, path=path, deterministic=False)
    engine.open("a")
    engine.open("idle")
    await engine.sample([*prompt, 50], SamplingParams(max_tokens=2), session="idle")
    params, done = SamplingParams(max_tokens=30, seed=1), engine.num_decode_tokens
    turn = asyncio.create_task(engine.sample(prompt, params, session="a"))
    by_version, counts = [], []
    for version, count in ((4, 6), (9, 15)):
        while engine.num_decode_tokens - done < count:
            await asyncio.sleep(0)
        by_version.append(copy.deepcopy(model))
        counts.append(engine.num_decode_tokens - done)
        nudge(model)
        engine.publish(version)
        assert engine.num_blocks == 0  # no keys or values of older weights remain
    engine.open("late")  # it begins like the others, but reads none of their old entries
    late = await engine.sample([*prompt, 50], SamplingParams(max_tokens=3, seed=2), session="late")
    completion = await turn
    first, second = counts[0], counts[1] - counts[0]
    assert completion.version_runs == [(0, first), (4, second), (9, 30 - counts[1])]
    assert completion.policy_version == 0
    by = [expected_logprobs(m, prompt, completion, params) for m in (*by_version, model)]
    expected = by[0][:first] + by[1][first : counts[1]] + by[2][counts[1] :]
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)
    for at, older, newer in ((first, by[0], by[1]), (counts[1], by[1], by[2])):
        assert older[at - 1 : at + 1] != pytest.approx(newer[at - 1 : at + 1], abs=1e-3)
    assert (late.policy_version, late.version_runs) == (9, None)
    expected = expected_logprobs(model, [*prompt, 50], late, SamplingParams(1))
    assert late.logprobs == pytest.approx(expected, abs=1e-4)


async def test_versions_of_a_preempted_turn() -> None:
    """Tokens that are computed again keep the version that sampled them."""
    engine = sampler(tiny(), deterministic=False)
    engine.open("a")
    turn = asyncio.create_task(engine.sample([1, 2, 3], SamplingParams(max_tokens=6), session="a"))
    for version in range(1, 4):
        while engine.num_decode_tokens < 2 * version - 1:
            await asyncio.sleep(0)
        engine.publish(version)
    done = await turn
    assert [version for version, _ in done.runs] == [0, 1, 2, 3]
    assert sum(count for _, count in done.runs) == 6


# Models that cannot be served


def from_config(config: Any, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, **options)


@pytest.mark.parametrize("path", ["auto", "generic"])
async def test_sliding_windows_shorter_than_the_context(path: str) -> None:
    config = MistralConfig(**GROUPED, sliding_window=32)
    other = Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    for model in (from_config(c, attn_implementation="sdpa") for c in (config, other)):
        params = SamplingParams(max_tokens=20, seed=3)
        played = await episode(sampler(model, path=path), "a", list(range(1, 41)), [params] * 2)
        for prompt, _, completion in played:
            expected = expected_logprobs(model, prompt, completion, params)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_the_models_own_attention_serves_too() -> None:
    model = from_config(Qwen3Config(**GROUPED), attn_implementation="eager")
    assert sampler(model, path="generic").decoder.name == "generic"


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (MambaConfig(hidden_size=16, num_hidden_layers=1), {}, "layers of type linear_attention"),
        (OpenAIGPTConfig(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2), {}, "a trial pass"),
        (
            Qwen3Config(**GROUPED),
            {"attn_implementation": "flex_attention"},
            "its attention is 'flex_attention'; load it with attn_implementation='sdpa'",
        ),
        (
            JambaConfig(**GROUPED, use_mamba_kernels=False),
            {"attn_implementation": "sdpa"},
            "layers of type",
        ),
        (
            Llama4TextConfig(**GROUPED, num_local_experts=1, intermediate_size_mlp=32),
            {"attn_implementation": "sdpa"},
            "layers of type chunked_attention",
        ),
    ],
    ids=["mamba", "openai-gpt", "flex", "jamba", "llama4"],
)
def test_unsupported_models_are_refused(config: Any, options: Any, reason: str) -> None:
    model = from_config(config, **options)
    with pytest.raises(ConfigError, match=rf"the in-process sampler cannot serve .*{reason}"):
        sampler(model)


def test_a_non_causal_model_is_refused() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        initializer_range=0.3,
        is_decoder=False,
        attn_implementation="sdpa",
    )
    with pytest.raises(ConfigError, match=r"its logits differ from those of a plain pass by"):
        sampler(BertLMHeadModel(config))


def test_a_model_with_a_failing_cached_pass_is_refused() -> None:
    model = tiny("gpt2")
    plain = model.forward

    def without_cache(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if past_key_values is not None:
            raise TypeError("no cache here")
        return plain(*args, **kwargs)

    model.forward = without_cache
    with pytest.raises(ConfigError, match="a trial pass failed: TypeError: no cache here"):
        sampler(model)
