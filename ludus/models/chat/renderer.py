"""Renders messages to token ids by appending; sampled ids are never rendered again.

    open([user])           prompt ids P0, up to the start of the assistant's turn
    (sampled)              A0, as the engine returned it
    extend([user], A0)     E0: end of the turn, new messages, next generation prompt
    (sampled)              A1
    ...                    the conversation is P0 + A0 + E0 + A1 + ...

All framing is derived by probing the chat template, so any Hugging Face template works; reasons:
docs/decisions/0001-renderer.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from ludus.core.errors import ConfigError
from ludus.core.types import Message, ToolCall, ToolSpec
from ludus.models.chat.parsing import (
    CALL_FORM,
    CALL_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    Parsed,
    Thinking,
    ToolParser,
    split_thinking,
)
from ludus.models.chat.template import (
    SENTINEL,
    THOUGHT,
    ChatTemplate,
    Encoder,
    end_of_turn,
    load_template,
)

if TYPE_CHECKING:  # `ludus rollout` and `ludus serve env` work without transformers
    from transformers import PreTrainedTokenizerFast

_USER: dict[str, Any] = {"role": "user", "content": "u"}
_TURN: dict[str, Any] = {"role": "assistant", "content": SENTINEL}

MAX_CACHED, MAX_CACHED_LENGTH = 4_000_000, 4096
"""Limits of the rendering cache: characters of all entries' messages, and of one entry's."""

MAX_TURNS, MAX_TURN_IDS = 4096, 32
"""Limits of the cache of decoded turns: entries, and ids of an entry."""


class Renderer:
    """Renders conversations for a tokenizer, a template and a set of tools.

    `chat_template` is a shipped name (plain, qwen3), a file, or None for the tokenizer's own.
    `thinking` is the policy for thinking blocks. "keep" and "strip" allow them; with "strip", the
    caller replaces a sampled turn by its `strip_thinking` in a new branch. "forbid" renders with
    `enable_thinking=False`, and `parse` reports a block as an error.
    `result_markers`: tool messages stand between these markers inside the assistant's turn
    (`inline`), not in turns of their own.

    Content never becomes a special token: `<|im_end|>` in an observation is tokenised as ordinary
    text. This protection is not possible for a template whose framing is ordinary text to the
    tokenizer; its turns end with the tokenizer's eos token.

    Errors: ConfigError where the template cannot be appended to, writes tool calls in a form other
    than `<tool_call>{json}</tool_call>`, or has no token that ends a turn.
    """

    stop_token_ids: list[int]
    """Ids that end a turn: the template's end-of-turn token, then the tokenizer's eos."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        chat_template: str | None = None,
        tools: Sequence[ToolSpec] = (),
        thinking: Thinking = "keep",
        result_markers: tuple[str, str] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.thinking = thinking
        self.tools = tuple(tools)
        self.result_markers = result_markers
        source = _source(tokenizer, chat_template)
        variables = {"enable_thinking": False} if thinking == "forbid" else {}
        self._template = ChatTemplate(tokenizer, source, **variables)
        self._encoder = Encoder(tokenizer, source)
        self._tools = self._encoder.tools(tools)
        self._parser = ToolParser(tools) if tools else None
        self._cache: dict[str, list[int]] = {}
        self._cached_length = 0
        self._texts: dict[tuple[int, ...], str] = {}
        self._find_end()
        self._probe_turn()
        self._probe_thinking()
        if tools:
            self._check_tools(tools[0])

    def open(self, messages: Sequence[Message]) -> list[int]:
        """Returns the ids of the opening messages and tools, up to the assistant's turn."""

        def render() -> list[int]:
            fields = [self._encoder.message(message) for message in messages]
            return self._encoder.encode(self._template.render(fields, self._tools, prompt=True))

        return self._cached("open", messages, render)

    def extend(self, messages: Sequence[Message], after: Sequence[int]) -> list[int]:
        """Returns the ids to append after the sampled turn `after`, up to the next assistant turn.

        They begin with the end-of-turn token unless `after` ends with it. Hence a turn that ended
        by length, a stop string or another id is closed and never altered.
        """
        ended = bool(after) and after[-1] == self.stop_token_ids[0]

        def render() -> list[int]:
            text = self._after_turn([self._encoder.message(message) for message in messages])
            if not self._end_in_template:
                return self._encoder.encode_after(self._end, text)
            if ended:
                return self._encoder.encode_after(self._end, text.partition(self._end)[2])
            return self._encoder.encode(text)

        return self._cached("after its end" if ended else "after", messages, render)

    def with_tools(self, tools: Sequence[ToolSpec]) -> Renderer:
        """A renderer of the same template that shows other tools; its probes are not repeated."""
        other = copy(self)
        other.tools, other._cache, other._cached_length = tuple(tools), {}, 0
        other._tools = self._encoder.tools(tools)
        other._parser = ToolParser(tools) if tools else None
        return other

    def inline(self, message: Message) -> list[int]:
        """Returns the ids of a tool's result inside the assistant's turn, with its markers."""
        assert self.result_markers is not None
        opening, closing = self.result_markers
        text = f"\n{opening}\n{self._encoder.defuse(message.content)}\n{closing}\n"
        return self._encoder.encode(text)

    def shorten(self, text: str, max_tokens: int) -> str:
        """Returns the text; if it has more than `max_tokens` tokens, its head and its tail.

        A note between them tells the number of characters that were left out.
        """
        return self._encoder.shorten(text, max_tokens)

    def text(self, token_ids: Sequence[int]) -> str:
        """Returns sampled ids as text, without the end of the turn."""
        ids = list(token_ids)
        return self._decode(ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids)

    def assistant(self, message: Message, *, begins: bool = True, ends: bool = True) -> list[int]:
        """Returns the ids a model would sample for `message`, including the end-of-turn id.

        With "forbid", the message's thinking is omitted. Not `begins`: the message continues a turn
        after a result (`inline`). Not `ends`: a result follows in the turn.
        """
        if not (begins and ends):
            text = (self._lead if begins else "") + self._encoder.defuse(message.content)
            text += self._closing + self._end if ends else ""
            return self._encoder.encode_after(self._end, text)
        lead = self._think_close if self._think_prompted else self._lead
        if message.thinking is not None and self.thinking != "forbid":
            thought = self._encoder.defuse(message.thinking)
            lead = self._think_open + thought + self._think_close
        text = lead + self._body(message) + self._closing + self._end
        return self._encoder.encode_after(self._end, text)

    def parse(self, token_ids: Sequence[int]) -> Parsed:
        """Parse a sampled turn; malformed output gives an error text, never an exception."""
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = self._turn_text(ids).removeprefix(self._lead)
        if self.thinking == "forbid" and (THINK_OPEN in text or THINK_CLOSE in text):
            refusal = f"Thinking is not allowed: answer without {THINK_OPEN} blocks."
            return Parsed(Message(role="assistant", content=text), refusal)
        thought, content, closed = split_thinking(text, opened=self._think_prompted)
        calls: list[ToolCall] = []
        error = None if closed else f"The thinking block was never closed with {THINK_CLOSE}."
        if self._parser and not error:
            content, calls, error = self._parser.parse(content)
        message = Message(role="assistant", content=content, thinking=thought, tool_calls=calls)
        return Parsed(message, error)

    @property
    def begins_with_answer(self) -> bool:
        """True if a sampled turn begins with the message's content."""
        return not self._lead and not self._think_prompted

    @property
    def lead(self) -> str:
        """Text of the template at the start of each sampled turn; no part of the message."""
        return self._lead

    def parse_calls(self, content: str) -> list[ToolCall]:
        """The tool calls in a turn's content; none without tools, or if a part is malformed."""
        forbidden = self.thinking == "forbid" and (THINK_OPEN in content or THINK_CLOSE in content)
        return self._parser.parse(content)[1] if self._parser and not forbidden else []

    def strip_thinking(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the sampled ids without the thinking block: a slice, never re-tokenised.

        The slice starts after the token that completes `</think>` and the newlines after it. If the
        block was never closed, only the stop id remains.
        """
        ids = list(token_ids)
        text = self._decode(ids)
        thought, _, closed = split_thinking(text, opened=self._think_prompted)
        if thought is None:
            return ids
        if not closed:
            return [i for i in ids[-1:] if i in self.stop_token_ids]
        cut = bisect_left(range(len(ids)), True, key=lambda k: THINK_CLOSE in self._decode(ids[:k]))
        while cut < len(ids) and self._decode(ids[cut : cut + 1]).strip("\n") == "":
            cut += 1
        return ids[cut:]

    def _cached(
        self, kind: str, messages: Sequence[Message], render: Callable[[], list[int]]
    ) -> list[int]:
        """Render once: episodes of a group share their opening and often their observations."""
        key = f"{kind}: {[message.__dict__ for message in messages]}"
        if len(key) > MAX_CACHED_LENGTH:
            return render()
        ids = self._cache.get(key)
        if ids is None:
            if self._cached_length + len(key) > MAX_CACHED:
                self._cache, self._cached_length = {}, 0
            ids = self._cache[key] = render()
            self._cached_length += len(key)
        return list(ids)

    def _turn_text(self, ids: list[int]) -> str:
        """The text of a turn; short turns are often alike."""
        if len(ids) > MAX_TURN_IDS:
            return self._decode(ids)
        key = tuple(ids)
        text = self._texts.get(key)
        if text is None:
            if len(self._texts) >= MAX_TURNS:
                self._texts = {}
            text = self._texts[key] = self._decode(ids)
        return text

    def _decode(self, ids: list[int]) -> str:
        return str(
            self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _after_turn(self, messages: Sequence[dict[str, Any]]) -> str:
        """Returns the template's text after an assistant turn's content."""
        text = self._template.render([_USER, _TURN, *messages], prompt=True)
        return text.rpartition(SENTINEL)[2]

    def _body(self, message: Message) -> str:
        """Returns the template's text between a turn's header and its end, without thinking."""
        fields = self._encoder.message(message.model_copy(update={"thinking": None}))
        text = self._template.render([_USER, fields, _USER])
        if not (text.startswith(self._before) and text.endswith(self._after)):
            raise ConfigError(
                "model.chat_template: the template frames an assistant turn differently for its "
                f"content {message.content[:80]!r} and {len(message.tool_calls)} tool calls"
            )
        return text[len(self._before) : len(text) - len(self._after)]

    def _find_end(self) -> None:
        """Find the token that ends a turn, from the template, else the tokenizer's eos."""
        found = end_of_turn(self._template, self._encoder.special)
        eos = self.tokenizer.eos_token
        if found is None and eos is None:
            raise ConfigError(
                "model.chat_template: no special token ends an assistant turn, and the tokenizer "
                "has no eos token"
            )
        self._end_in_template = found is not None
        self._closing, self._end = found or ("", str(eos))
        ids = [self.tokenizer.convert_tokens_to_ids(self._end), self.tokenizer.eos_token_id]
        self.stop_token_ids = list(dict.fromkeys(i for i in ids if i is not None))

    def _probe_turn(self) -> None:
        """Find the text around a turn; refuse a template that cannot be appended to."""
        text = self._template.render([_USER, _TURN, _USER])
        if text.count(SENTINEL) != 1:
            raise ConfigError(
                f"model.chat_template: the template writes an assistant's content "
                f"{text.count(SENTINEL)} times; it must be written exactly once, unchanged"
            )
        self._before, _, self._after = text.partition(SENTINEL)
        long = self._template.render([_USER, _TURN, _USER, _TURN, _USER], prompt=True)
        if long.rpartition(SENTINEL)[2] != self._after_turn([_USER]):
            raise ConfigError(
                "model.chat_template: the template's text after a turn depends on earlier turns, "
                "so messages cannot be appended; use plain or qwen3"
            )

    def _probe_thinking(self) -> None:
        """Find the start of a turn, the frame of thinking, and whether the prompt opens it."""
        prompt = self._template.render([_USER], prompt=True)
        self._think_prompted = prompt.rstrip().endswith(THINK_OPEN)
        if self._think_prompted and self.thinking == "forbid":
            raise ConfigError(
                f"model.thinking: forbid is not possible, since the template opens each turn with "
                f"{THINK_OPEN}; use keep or strip, or another chat_template"
            )
        # Llama 2 and Mistral insert a space before the content, gpt-oss a channel name.
        follows = self._before.startswith(prompt) and not self._think_prompted
        self._lead = self._before.removeprefix(prompt) if follows else ""
        self._think_open = "" if self._think_prompted else f"{self._lead}{THINK_OPEN}\n"
        self._think_close = f"\n{THINK_CLOSE}\n\n"
        text = self._template.render([_USER, {**_TURN, "reasoning_content": THOUGHT}])
        opening, marker, rest = text.partition(THOUGHT)
        if marker and opening.startswith(prompt) and SENTINEL in rest:
            self._think_open = opening[len(prompt) :]
            self._think_close = rest.partition(SENTINEL)[0]

    def _check_tools(self, tool: ToolSpec) -> None:
        """Refuse a template that omits tools or writes calls that `parse` cannot read."""
        call = ToolCall(name=tool.name, arguments={"x": 1})
        prompt = self._template.render([_USER], self._tools, prompt=True)
        try:
            body = self._body(Message(role="assistant", tool_calls=[call]))
        except ConfigError:  # e.g. gpt-oss: another header for turns that call tools
            body = ""
        parser = ToolParser([ToolSpec(name=tool.name)])
        if tool.name not in prompt:
            problem = "does not show tools to the model"
        elif CALL_OPEN not in body or parser.parse(body)[1] != [call]:
            problem = f"does not write tool calls as {CALL_FORM}"
        else:
            return
        raise ConfigError(
            f"model.chat_template: the template {problem}; use chat_template: qwen3 or plain, or "
            "rollout.format: react"
        )


def _source(tokenizer: PreTrainedTokenizerFast, chat_template: str | None) -> str:
    """Returns the Jinja source; refuses tokenizers that cannot be used for rendering."""
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"model.tokenizer: {type(tokenizer).__name__} is not a 'fast' tokenizer "
            "(tokenizer.json), which rendering requires"
        )
    if chat_template is not None:
        return load_template(chat_template)
    if not tokenizer.chat_template:
        raise ConfigError(
            "model.chat_template: the tokenizer has no chat template of its own; set "
            "`model.chat_template: plain` (or qwen3, or the path of a Jinja file)"
        )
    return str(tokenizer.get_chat_template())
