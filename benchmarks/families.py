"""The sampler's fast path against its generic path, and against the plain Llama shape, by family.

    python benchmarks/families.py
    python benchmarks/families.py --torch       without native code

Models of random weights with the same sizes: a family differs from Llama in its own parts only. A
mixture of experts has as many parameters per token as Llama has. Prompts are longer than the
sliding windows. In each case the log-probabilities of both paths are compared first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from common import (
    KEYS,
    SHAPES,
    Spread,
    alternate,
    arguments,
    clock,
    machine,
    ratios,
    sample_turns,
    tabulate,
    write,
)

import torch  # isort: skip - after common, which sets the threads' policy
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from ludus.config.schema import LoraConfig
from ludus.models.build import _with_lora
from ludus.models.decoders.lean import LeanDecoder
from ludus.models.decoders.llama import read
from ludus.models.samplers.engine import InProcessSampler

PROMPT, COMPLETION, BATCH, WINDOW, CONTEXT = 64, 64, 16, 48, 256
EXPERTS, TOP = 8, 2
SAME = 1e-3
"""Largest difference of log-probabilities between the paths, in nats."""

Make = Callable[[dict[str, Any]], Any]
FAMILIES: dict[str, Make] = {
    "Llama": lambda sizes: LlamaConfig(**sizes),
    "Qwen3": lambda sizes: Qwen3Config(**sizes),
    "Mistral, window": lambda sizes: MistralConfig(**sizes, sliding_window=WINDOW),
    "Phi-3": lambda sizes: Phi3Config(**_whole(sizes)),
    "OLMo 2": lambda sizes: Olmo2Config(**_whole(sizes)),
    "OLMo 3, windows": lambda sizes: Olmo3Config(**_whole(sizes), sliding_window=WINDOW),
    "Granite": lambda sizes: GraniteConfig(
        **_whole(sizes),
        attention_multiplier=0.2,
        residual_multiplier=0.5,
        embedding_multiplier=2.0,
        logits_scaling=2.0,
    ),
    "SmolLM3": lambda sizes: SmolLM3Config(**sizes),
    "Gemma 2, windows": lambda sizes: Gemma2Config(
        **sizes, sliding_window=WINDOW, query_pre_attn_scalar=sizes["head_dim"]
    ),
    "Gemma 3, windows": lambda sizes: Gemma3TextConfig(
        **sizes, sliding_window=WINDOW, query_pre_attn_scalar=sizes["head_dim"]
    ),
    "GLM-4": lambda sizes: Glm4Config(**sizes),
    "Qwen3-MoE": lambda sizes: Qwen3MoeConfig(
        **sizes,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP,
        moe_intermediate_size=sizes["intermediate_size"] // TOP,
        norm_topk_prob=True,
    ),
}


def _whole(sizes: dict[str, Any]) -> dict[str, Any]:
    """Sizes for families whose heads have hidden / heads numbers, as those of all shapes here."""
    assert sizes["head_dim"] * sizes["num_attention_heads"] == sizes["hidden_size"]
    return {key: value for key, value in sizes.items() if key != "head_dim"}


def make_family(name: str, shape: str) -> Any:
    torch.manual_seed(0)
    sizes = dict(zip(KEYS, SHAPES[shape], strict=True))
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = FAMILIES[name](
        {**sizes, **tokens, "tie_word_embeddings": True, "max_position_embeddings": CONTEXT}
    )
    return AutoModelForCausalLM.from_config(config).eval()


def make_adapted(name: str, shape: str) -> Any:
    """With adapters that are not 0."""
    model = _with_lora(make_family(name, shape), LoraConfig(rank=8)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.02)
    return model


def make_sampler(
    model: Any, path: Literal["auto", "generic"], dtype: Literal["auto", "bfloat16"] = "auto"
) -> InProcessSampler:
    return InProcessSampler(model, context_length=CONTEXT, path=path, dtype=dtype)


def prompts_of(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, vocab_size, (BATCH, PROMPT), generator=generator).tolist()


def run(sampler: InProcessSampler, prompts: list[list[int]]) -> None:
    sample_turns(sampler, prompts, COMPLETION)


@torch.inference_mode()
def deviation(model: Any, sampler: InProcessSampler, prompts: list[list[int]]) -> float:
    """The largest distance of the sampler's log-probabilities from those of the model's module."""
    [found] = sample_turns(sampler, prompts[:1], COMPLETION)
    ids = torch.tensor([[*prompts[0], *found.token_ids]])
    logprobs = model(ids, use_cache=False).logits[0, PROMPT - 1 : -1].log_softmax(-1)
    exact = logprobs.gather(-1, torch.tensor(found.token_ids)[:, None]).flatten()
    return float((exact - torch.tensor(found.logprobs)).abs().max())


def publish_seconds(sampler: InProcessSampler) -> float:
    """The least time of a publication, adapters merged."""
    times = []
    for version in range(1, 6):
        start = clock()
        sampler.publish(version)
        times.append(clock() - start)
    return min(times)


def measure(
    name: str, shape: str, repeats: int, llama: InProcessSampler, adapters: bool
) -> dict[str, Any]:
    model = make_adapted(name, shape) if adapters else make_family(name, shape)
    prompts = prompts_of(model.config.vocab_size)
    fast, generic = make_sampler(model, "auto"), make_sampler(model, "generic")
    if fast.decoder.name != "native":
        raise SystemExit(f"{name}: the fast path is not native code but {fast.decoder.name}")
    for sampler in (fast, generic):
        if (found := deviation(model, sampler, prompts)) > SAME:
            raise SystemExit(f"{name}, {sampler.decoder.name}: {found:.2g} nats off")
    programs = {
        "llama": lambda: run(llama, prompts),
        "fast": lambda: run(fast, prompts),
        "generic": lambda: run(generic, prompts),
    }
    if not adapters:
        half = make_sampler(model, "auto", "bfloat16")
        programs["half"] = lambda: run(half, prompts)
    seconds = alternate(programs, repeats)
    tokens = BATCH * COMPLETION
    row = {
        "family": name,
        "shape": shape,
        "adapters": adapters,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": seconds,
        **{key: Spread.of([tokens / s for s in seconds[key]]) for key in seconds},
        "over_generic": ratios(seconds["generic"], seconds["fast"]),
        "over_llama": ratios(seconds["fast"], seconds["llama"]),
        "publish": publish_seconds(fast),
    }
    if not adapters:
        row["half_over_fast"] = ratios(seconds["fast"], seconds["half"])
    print(
        f"{name} {shape}{' with adapters' if adapters else ''}: "
        f"{row['over_generic'].show('.1f')} times generic, "
        f"{row['over_llama'].show('.2f')} times Llama's time",
        flush=True,
    )
    return row


def without_native_code(sampler: InProcessSampler, model: Any) -> InProcessSampler:
    """The sampler with the plain torch decoder."""
    decoder = LeanDecoder(read(model, CONTEXT))
    decoder.max_blocks = sampler.decoder.max_blocks
    sampler.decoder = decoder
    sampler._reset()
    return sampler


def measure_torch(name: str, shape: str, repeats: int, llama: InProcessSampler) -> dict[str, Any]:
    """The plain torch path, with and without adapters, over that path for Llama."""
    plain, adapted = make_family(name, shape), make_adapted(name, shape)
    prompts = prompts_of(plain.config.vocab_size)
    lean, lora = (without_native_code(make_sampler(m, "auto"), m) for m in (plain, adapted))
    for model, sampler in ((plain, lean), (adapted, lora)):
        if (found := deviation(model, sampler, prompts)) > SAME:
            raise SystemExit(f"{name}, plain torch: {found:.2g} nats off")
    seconds = alternate(
        {
            "llama": lambda: run(llama, prompts),
            "lean": lambda: run(lean, prompts),
            "lora": lambda: run(lora, prompts),
        },
        repeats,
    )
    tokens = BATCH * COMPLETION
    row = {
        "family": name,
        "shape": shape,
        "seconds": seconds,
        **{key: Spread.of([tokens / s for s in seconds[key]]) for key in seconds},
        "over_llama": ratios(seconds["lean"], seconds["llama"]),
        "lora_over_plain": ratios(seconds["lora"], seconds["lean"]),
    }
    print(f"{name}, torch: {row['over_llama'].show('.2f')} times Llama's time", flush=True)
    return row


def publish_torch(rows: list[dict[str, Any]], facts: dict[str, Any], repeats: int) -> None:
    shown = tabulate(
        rows,
        ("family", lambda r: r["family"]),
        ("plain torch", lambda r: f"{r['lean'].median:,.0f}"),
        ("time / Llama's", lambda r: r["over_llama"].bold()),
        ("with adapters", lambda r: f"{r['lora'].median:,.0f}"),
        ("time / without adapters", lambda r: r["lora_over_plain"].bold()),
    )
    text = f"""
# Model families without native code

The fast path in plain torch, which serves where there is no C compiler, on the 0.9 M models of
[families.md](families.md): sampled tokens/s, and the time over that of the same path for the plain
Llama shape. Adapters (LoRA of rank 8 on all linear layers and experts) are computed in each pass.
Medians (and quartiles) of {repeats} runs in alternating order. Other programs ran on the machine at
the same time.

{shown}

    python benchmarks/families.py --torch
"""
    write("families-torch", text, facts, rows, packages=("peft",))


def main() -> None:
    args = arguments(__doc__ or "", torch="the plain torch path")
    facts = machine(args.threads)
    if args.torch:
        small = make_family("Llama", "0.9 M")
        llama = without_native_code(make_sampler(small, "auto"), small)
        names = ["Gemma 3, windows"] if args.quick else list(FAMILIES)
        found = [measure_torch(name, "0.9 M", args.repeats, llama) for name in names]
        if not args.quick:
            publish_torch(found, facts, args.repeats)
        return
    shapes = ["0.9 M"] if args.quick else ["0.9 M", "5.8 M"]
    names = ["Gemma 3, windows"] if args.quick else list(FAMILIES)
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        llama = make_sampler(make_family("Llama", shape), "auto")
        rows += [measure(name, shape, args.repeats, llama, False) for name in names]
        if shape == shapes[0]:
            rows += [measure(name, shape, args.repeats, llama, True) for name in names]
    if not args.quick:
        publish(rows, facts, args.repeats)


def publish(rows: list[dict[str, Any]], facts: dict[str, Any], repeats: int) -> None:
    def rate(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: f"{row[name].median:,.0f}"

    columns = (
        ("family", lambda r: r["family"]),
        ("parameters", lambda r: f"{r['parameters'] / 1e6:.1f} M"),
        ("generic", rate("generic")),
        ("fast", rate("fast")),
        ("fast / generic", lambda r: r["over_generic"].bold()),
        ("time / Llama's", lambda r: r["over_llama"].bold()),
    )
    half = (
        ("bfloat16", rate("half")),
        ("bfloat16 / fast", lambda r: f"{r['half_over_fast'].median:.2f}"),
    )
    merged = (("publish, ms", lambda r: f"{1000 * r['publish']:.1f}"),)
    plain = [row for row in rows if not row["adapters"]]
    tables = "\n\n".join(
        f"### {shape}\n\n" + tabulate([r for r in plain if r["shape"] == shape], *columns, *half)
        for shape in dict.fromkeys(row["shape"] for row in plain)
    )
    adapted = tabulate([row for row in rows if row["adapters"]], *columns, *merged)
    slow = [
        f"{r['family']} ({r['shape']}, {r['over_llama'].median:.2f})"
        for r in plain
        if r["over_llama"].median > 2
    ]
    text = f"""
# Model families on the fast path

The in-process sampler's two paths on models of random weights, in float32: *fast* is native code,
*generic* the model's own module. All families have the sizes of one shape of
[sampler.md](sampler.md), and differ in their own parts: norms, factors, soft caps, windows of
{WINDOW} tokens. Qwen3-MoE has {EXPERTS} experts, of which a token takes {TOP} with half of the
inner size each: as many parameters per token as the others. {BATCH} rows, prompts of {PROMPT}
tokens, completions of {COMPLETION}, temperature 1, prefill included. Both paths' log-probabilities
are first compared with the module's. Figures are sampled tokens/s.

*Time / Llama's*: the fast path's time for the family over its time for the plain Llama shape, in
neighbouring runs. *bfloat16*: the fast path with `dtype: bfloat16`; this figure depends on the
processor. Medians (and quartiles) of {repeats} runs in alternating order, after one warm-up run.
Other programs ran on the machine at the same time.

{tables}

More than twice Llama's time: {", ".join(slow) or "none"}.

## With adapters

LoRA of rank 8 on all linear layers (and on all experts). Native code merges adapters when weights
are published (*publish*: the least of five publications), so sampling takes as long as without. The
generic path computes them in each pass.

{adapted}

Without native code: see [families-torch.md](families-torch.md). Not measured: a GPU, long prompts.

    python benchmarks/families.py
"""
    write("families", text, facts, rows, packages=("peft",))


if __name__ == "__main__":
    main()
