"""Structured output: which tokens a JSON schema allows next, by llguidance.

    schema -> grammar (Lark) -> Matcher: allowed ids, given the turn's tokens so far

The sampler draws from the model's distribution over the allowed ids. The learner computes the same
sets from the turn's tokens, so both normalise over the same ids. A turn's whole text is the JSON
value, without a thinking block; where tools are offered, it may be tool calls instead.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludus.core.errors import SchemaError, TrainingError
from ludus.core.modules import require
from ludus.core.types import Constraint, ToolSpec
from ludus.models.samplers.base import Constraining

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray

    from ludus.models.chat.renderer import Renderer

MAX_SCHEMA = 100_000
"""Characters of a schema."""
OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
"""White space as `json.dumps` writes it: free white space would let a model write it without end.
`oneOf` is read as `anyOf`."""
NUM_COMPILED = 16


PROBE = Path(__file__).with_name("grammar_probe.py")
PROBE_MB, PROBE_S = 2048, 3
"""Memory and processor time in which a schema has to compile."""
MAX_CHECKED = 10_000
"""Grammars whose check is remembered."""


def grammar_of(schema: Mapping[str, Any], tools: Sequence[ToolSpec] = ()) -> str:
    """Returns the grammar of a schema's JSON values, or of calls of the tools.

    Errors: SchemaError for a schema that is no JSON object or longer than MAX_SCHEMA.
    """
    if not isinstance(schema, Mapping):
        raise SchemaError(f"the schema is {schema!r:.80}: it has to be an object (a dict)")
    answer = _json(schema)
    if len(answer) > MAX_SCHEMA:
        raise SchemaError(f"the schema has {len(answer):,} characters; at most {MAX_SCHEMA:,}")
    if not tools:
        return f"start: answer\nanswer: {answer}\n"
    call = _json({"anyOf": [_call(tool) for tool in tools]})
    return f"start: answer | calls\nanswer: {answer}\ncall: {call}\n{_CALLS}"


def _call(tool: ToolSpec) -> dict[str, Any]:
    """The schema of a call."""
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": tool.parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _json(schema: Mapping[str, Any]) -> str:
    try:
        text = json.dumps({**schema, "x-guidance": OPTIONS}, ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"the schema is no JSON: {error!s:.80}") from None
    return f"%json {text}"


async def grammar_for(schema: Mapping[str, Any], renderer: Renderer, sampler: Any) -> str:
    """As `checked_grammar`, in a thread: to check a schema or read a vocabulary takes time."""
    return await asyncio.get_running_loop().run_in_executor(
        _threads(), checked_grammar, schema, renderer, sampler
    )


@cache
def _threads() -> ThreadPoolExecutor:
    """Threads of their own: hostile schemas hold up other schemas only."""
    return ThreadPoolExecutor(2, "ludus-schemas")


def checked_grammar(schema: Mapping[str, Any], renderer: Renderer, sampler: Any) -> str:
    """The grammar of a turn that follows a schema, or calls tools where the renderer shows some.

    Errors: SchemaError where the schema, the chat template or the sampler does not allow it;
    MissingDependency.
    """
    if not isinstance(sampler, Constraining):
        raise SchemaError(
            f"the sampler {type(sampler).__name__} does not constrain answers to a schema: ask for "
            "JSON in the prompt, or offer a tool with this schema"
        )
    if not renderer.begins_with_answer:
        raise SchemaError(
            "the chat template writes a text or opens a thinking block before each answer, so a "
            "schema cannot constrain it: ask for JSON in the prompt"
        )
    grammar = grammar_of(schema, renderer.tools)
    try:
        sampler.check_grammar(grammar)
    except SchemaError:
        if not renderer.tools:
            raise
        # The parameters of a tool may be what cannot be followed: let its arguments be any object.
        anything = {"type": "object"}
        free = [tool.model_copy(update={"parameters": anything}) for tool in renderer.tools]
        grammar = grammar_of(schema, free)
        sampler.check_grammar(grammar)
    return grammar


class Grammars:
    """Matchers over the ids of a tokenizer.

    Errors: MissingDependency.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        require("llguidance", "agents", "a JSON schema for answers")
        self._size = size
        self._num_bytes = 4 * ((size + 31) // 32)  # whole words of 32 bits
        self.byte_level = _is_byte_level(tokenizer)
        """True if llguidance reads the tokenizer's file itself, as vLLM lets it."""
        self._tokenizer = _ll_tokenizer(tokenizer, size)
        from ludus.models.chat.parsing import CALL_CLOSE, CALL_OPEN  # needs jsonschema

        known = tokenizer.get_vocab()
        calls = [known[text] for text in (CALL_OPEN, CALL_CLOSE) if text in known]
        never = {*_special(tokenizer, size), *range(size, 8 * self._num_bytes)}.difference(calls)
        self._possible_W = ~_packed(sorted(never), self._num_bytes)
        special = len(calls) == 2 and self._tokenizer.is_special_token(calls[0])
        opening, closing = (
            (CALL_OPEN, CALL_CLOSE) if special else (f'"{CALL_OPEN}"', f'"{CALL_CLOSE}"')
        )
        self._calls = f"({opening} NL? call NL? {closing} NL?)+\nNL: /\\n/"
        self._compiled = lru_cache(NUM_COMPILED)(self._compile)
        self._checked: OrderedDict[bytes, None] = OrderedDict()

    def check(self, grammar: str) -> None:
        """Compile it, in a process of its own first, which may need too much time or memory.

        Errors: SchemaError for a schema that cannot be followed, such as a contradiction.
        """
        digest = hashlib.sha256(grammar.encode()).digest()
        if digest not in self._checked:
            probe(self.expanded(grammar))
            self._checked[digest] = None
            if len(self._checked) > MAX_CHECKED:
                self._checked.popitem(last=False)
        self._compiled(grammar)

    def expanded(self, grammar: str) -> str:
        """The grammar with this tokenizer's form of tool calls, for another engine."""
        bare = grammar.removesuffix(_CALLS)
        return grammar if bare == grammar else f"{bare}calls: {self._calls}\n"

    def matcher(self, constraint: Constraint) -> Matcher:
        """A matcher at the beginning of a turn. Errors: SchemaError, as `check`."""
        compiled = self._compiled(constraint.grammar).deep_copy()
        return Matcher(compiled, self._size, self._possible_W, constraint.stop_token_ids)

    def allowed(self, constraint: Constraint, token_ids: Sequence[int]) -> NDArray[np.uint8]:
        """The ids that were allowed at each token of a turn, as bits [L, size / 8]: `unpacked`.

        Errors: TrainingError for tokens that the grammar forbids.
        """
        import numpy as np

        matcher = self.matcher(constraint)
        bits_LW = np.empty((len(token_ids), self._num_bytes), np.uint8)
        for index, id in enumerate(token_ids):
            bits_LW[index] = matcher.bits()
            if not bits_LW[index, id // 8] >> id % 8 & 1:
                raise TrainingError(
                    f"token {index} of a turn, id {id}, is outside of the grammar that its sampler "
                    "was to follow: the sampler constrains by other rules"
                )
            matcher.advance(id)
        return bits_LW

    def unpacked(self, bits_LW: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Bits as [L, size]."""
        import numpy as np

        return np.unpackbits(bits_LW, axis=1, bitorder="little")[:, : self._size].view(bool)

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, self.expanded(grammar), log_level=0)
        if error := matcher.get_error():
            raise _refusal(error)
        return matcher


def probe(grammar: str) -> None:
    """Compile a grammar in a process with limits. Errors: SchemaError."""
    limits = [str(PROBE_MB), str(PROBE_S)]
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(PROBE), *limits],
            input=grammar,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=20 * PROBE_S,
            env={"RAYON_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        done = None
    if done is not None and done.returncode == 3:
        raise _refusal(done.stdout)
    if done is None or done.returncode != 0:
        raise SchemaError(
            f"the schema takes more than {PROBE_S} s or {PROBE_MB / 1024:g} GB to compile: "
            "simplify its patterns, multiples, and combinations of schemas"
        )


def _refusal(error: str) -> SchemaError:
    """llguidance's error in a line, without the dump of its state."""
    reason = error.partition("JSON schema: ")[2] or error
    for end in ("\n   1 |", "<state>"):
        reason = reason.partition(end)[0]
    return SchemaError(f"the schema cannot be followed: {' '.join(reason.split()):.300}")


class Matcher:
    """The state of one turn.

    Args:
        size: number of ids.
        possible_W: ids that a grammar may allow, as bits. llguidance allows a special one where no
            token fits.
        stop_token_ids: allowed where the value is complete.
    """

    def __init__(
        self,
        compiled: LLMatcher,
        size: int,
        possible_W: NDArray[np.uint8],
        stop_token_ids: Sequence[int],
    ) -> None:
        self._matcher, self._size, self._possible_W = compiled, size, possible_W
        self.failed = False
        """True once the value cannot be completed."""
        self._stops = [id for id in stop_token_ids if id < size]
        self._stop_W = _packed(self._stops, len(possible_W))

    def bits(self) -> NDArray[np.uint8]:
        """The ids that may follow, a bit each."""
        import numpy as np

        bits_W = np.zeros_like(self._possible_W)
        ended = self._matcher.is_stopped()
        if not ended:
            self._matcher.unsafe_compute_mask_ptr(bits_W.ctypes.data, bits_W.nbytes)
        bits_W &= self._possible_W & ~self._stop_W
        complete = self._matcher.is_accepting() or (ended and not self._matcher.get_error())
        # Where no token has the text that has to follow, or a limit is reached, the turn ends.
        self.failed = not complete and not bits_W.any()
        if complete or self.failed:
            bits_W |= self._stop_W
        return bits_W

    def allowed(self) -> NDArray[np.bool_]:
        """The ids that may follow, [size]."""
        import numpy as np

        return np.unpackbits(self.bits(), bitorder="little")[: self._size].view(bool)

    def advance(self, id: int) -> None:
        """Append a token."""
        if id not in self._stops and not self._matcher.is_stopped():
            self._matcher.consume_token(id)


def _packed(ids: Sequence[int], num_bytes: int) -> NDArray[np.uint8]:
    """Ids as bits [num_bytes]."""
    import numpy as np  # here, because the gateway without a model imports this module

    on_V = np.zeros(8 * num_bytes, bool)
    on_V[list(ids)] = True
    return np.packbits(on_V, bitorder="little")


_CALLS = "calls: %calls\n"
"""The last line of a grammar with tool calls; their form depends on the tokenizer."""


def _ll_tokenizer(tokenizer: Any, size: int) -> LLTokenizer:
    """The tokens as bytes: of byte-level tokenizers by llguidance, of others by their decoder."""
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer

    try:
        if _is_byte_level(tokenizer):
            return from_tokenizer(tokenizer, n_vocab=size)
        return LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, size)))
    except Exception as error:  # of a Rust library
        told = " ".join(str(error).split())
        raise SchemaError(f"llguidance cannot read this tokenizer: {told:.200}") from error


def _is_byte_level(tokenizer: Any) -> bool:
    decoder = json.dumps(json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder"))
    return "ByteLevel" in decoder or "ByteFallback" in decoder


def _special(tokenizer: Any, size: int) -> list[int]:
    """The ids of special tokens, and those without a token."""
    ids = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids |= {
        *tokenizer.all_special_ids,
        *set(range(size)).difference(tokenizer.get_vocab().values()),
    }
    return sorted(id for id in ids if id < size)


class _Tokens:
    """A tokenizer as llguidance asks for it. An id without a token, or of a special one, matches
    nothing."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        special = set(_special(tokenizer, size))
        vocabulary = {id: token for token, id in tokenizer.get_vocab().items()}
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = None
        self.special_token_ids = sorted(special)
        self.tokens = [
            vocabulary.get(id, f"<gap {id}>").encode()
            if id in special
            else str(tokenizer.decode([id], clean_up_tokenization_spaces=False)).encode()
            for id in range(size)
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        given = text if isinstance(text, str) else text.decode("utf-8", "replace")
        ids: list[int] = self._tokenizer(given, add_special_tokens=False)["input_ids"]
        return ids
