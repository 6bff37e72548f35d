"""Chat templates: renders messages to text and encodes it; content never becomes special tokens.

A template writes *framing* (role headers, end-of-turn tokens) around *content* (texts of users,
tools and environments). Only framing is encoded as special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateSyntaxError

from ludus.core.errors import ConfigError, did_you_mean
from ludus.core.types import Message, ToolSpec

if TYPE_CHECKING:  # as in the renderer
    from transformers import PreTrainedTokenizerFast

SHIPPED = ("plain", "qwen3")

# Unicode noncharacters, which valid text does not contain. `defuse` replaces them in content, so
# content cannot forge them.
BREAK = "\ufdd0"  # splits the text of a special token inside content; the encoder removes it
SENTINEL = "\ufdd1"  # placeholder for content when probing a template
THOUGHT = "\ufdd2"  # placeholder for thinking when probing a template

LONGEST_TOKEN = 32
"""Characters of a token, for a first cut of long texts: few tokens have more."""

PARSED_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Markers that structure a turn, whether or not a tokenizer has them as special tokens."""

_TOKEN_LIKE = re.compile(
    r"<\|[^<>|\s]+\|>|</?(?:think|tool_call|tool_response)>|<(?:start|end)_of_turn>"
)


def load_template(name: str) -> str:
    """Returns the Jinja source of a shipped template (plain, qwen3) or of a file.

    Errors: ConfigError where the template or file does not exist, or is not a template.
    """
    if name in SHIPPED:
        templates = resources.files("ludus.models.chat") / "templates"
        return (templates / f"{name}.jinja").read_text("utf-8")
    path = Path(name).expanduser()
    if path.is_file():
        try:
            source = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"model.chat_template: {path} cannot be read: {error}") from None
        require_template(source, str(path))
        return source
    raise ConfigError(
        f"model.chat_template: {name!r} is neither a shipped template nor a file"
        f"{did_you_mean(name, SHIPPED)}"
    )


def require_template(source: str, origin: str) -> None:
    """Errors: ConfigError, with the line, where `source` is not a Jinja template."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(conversations=[[]], chat_template=source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"model.chat_template: {origin}, line {error.lineno}: {error.message}"
        ) from None
    except Exception:  # it needs messages
        return


def special_tokens(source: str) -> list[str]:
    """Returns the special tokens in a template's source, in order of first appearance."""
    return list(dict.fromkeys(_TOKEN_LIKE.findall(source)))


def well_formed(value: Any) -> Any:
    """Returns `value` with lone surrogates in its strings replaced, so UTF-8 can encode it."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {well_formed(key): well_formed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [well_formed(item) for item in value]
    return value


class ChatTemplate:
    """A template bound to a tokenizer's special tokens; `variables` are passed to the template."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, source: str, **variables: object
    ) -> None:
        self.source = source
        self._tokenizer = tokenizer
        self._variables = variables

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        prompt: bool = False,
    ) -> str:
        """Render the conversation; with `prompt`, up to the start of the next assistant turn.

        Errors: ConfigError where the template refuses the conversation. Some refuse system or tool
        messages, or require alternating roles.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self.source,
                add_generation_prompt=prompt,
                tokenize=False,
                **self._variables,
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"model.chat_template: the template fails on a conversation with roles "
                f"({roles}): {error}"
            ) from error
        return str(text)


class Encoder:
    """Encodes rendered text: framing as special tokens, content as ordinary text.

    `defuse` inserts BREAK after the first character of each special token in content. A copy of the
    tokenizer first matches special tokens (never across a BREAK), then removes BREAK.
    The whole text is encoded in one pass, so content without special tokens gets the same ids as
    from the tokenizer itself.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, source: str) -> None:
        from tokenizers import Tokenizer

        state = json.loads(tokenizer.backend_tokenizer.to_str())
        self.special: dict[str, int] = {}
        for token in state["added_tokens"]:
            spelling = token["content"]
            structural = token["special"] or spelling in source or spelling in PARSED_TOKENS
            if structural and len(spelling) > 1 and not spelling.isspace():
                token["normalized"] = False  # matched before the normalizer drops BREAK
                self.special[spelling] = token["id"]
        drop = {"type": "Replace", "pattern": {"String": BREAK}, "content": ""}
        rest = [state["normalizer"]] if state["normalizer"] else []
        state["normalizer"] = {"type": "Sequence", "normalizers": [drop, *rest]}
        state.update(post_processor=None, truncation=None, padding=None)
        self._backend = Tokenizer.from_str(json.dumps(state))
        longest_first = sorted(map(re.escape, self.special), key=len, reverse=True)
        self._spelled = re.compile(
            f"(?=({'|'.join(longest_first)}))(.)" if longest_first else "(?!)"
        )
        self._reserved = str.maketrans(dict.fromkeys((BREAK, SENTINEL, THOUGHT), "\ufffd"))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of rendered text whose content was defused."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_after(self, token: str, text: str) -> list[int]:
        """Returns the ids of `text` after the special token `token`, without that token's id."""
        return self.encode(token + text)[1:]

    def defuse(self, value: Any) -> Any:
        """Returns content (a string, or JSON of strings) without intact special tokens."""
        if isinstance(value, str):
            return self._spelled.sub(rf"\2{BREAK}", well_formed(value).translate(self._reserved))
        if isinstance(value, dict):
            return {self.defuse(key): self.defuse(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.defuse(item) for item in value]
        return value

    def shorten(self, text: str, max_tokens: int) -> str:
        """Returns head and tail of a text of more than `max_tokens` tokens, around a note.

        The cuts are between tokens. Only as much of a long text is encoded as could be kept.
        """
        text = str(self.defuse(text))
        reach = LONGEST_TOKEN * max_tokens
        head = self._spans(text[:reach])
        if len(text) <= reach and len(head) <= max_tokens:
            return text.replace(BREAK, "")
        tail, start = (head, 0) if len(text) <= reach else (self._spans(text[-reach:]), -reach)
        start += len(text) if start else 0
        room = max_tokens
        while True:
            num_head = min(len(head), (room + 1) // 2)
            first = head[num_head - 1][1] if num_head else 0
            num_tail = min(len(tail), room // 2)
            last = start + tail[-num_tail][0] if num_tail else len(text)
            cut = max(0, last - first)
            note = f"\n[... {cut:,} characters left out ...]\n"
            kept = text[:first] + note + text[max(first, last) :]
            excess = len(self._spans(kept)) - max_tokens
            if excess <= 0 or room <= 0:
                return kept.replace(BREAK, "")
            room = max(0, room - excess)

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """The characters, from and to, of each token."""
        return list(self._backend.encode(text, add_special_tokens=False).offsets)

    def message(self, message: Message) -> dict[str, Any]:
        """Returns the message in the form templates expect, with defused content."""
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking is not None:
            fields["reasoning_content"] = message.thinking
        if message.tool_calls:
            fields["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in message.tool_calls
            ]
        if message.role == "tool":
            fields |= {"tool_call_id": message.tool_call_id, "name": message.name}
        return {key: self.defuse(value) for key, value in fields.items()}

    def tools(self, tools: Iterable[ToolSpec]) -> list[dict[str, Any]]:
        """Returns the tools in the form templates expect, with defused texts."""
        return [self.defuse({"type": "function", "function": tool.model_dump()}) for tool in tools]


def end_of_turn(template: ChatTemplate, tokens: Iterable[str]) -> tuple[str, str] | None:
    """Returns the end of an assistant turn: (text before the token, the special token).

    It is the first special token after the content, both at the end and inside a conversation.
    Returns None where a turn ends without a special token.
    """
    turn = [{"role": "user", "content": "u"}, {"role": "assistant", "content": SENTINEL}]
    last = template.render(turn).rpartition(SENTINEL)[2]
    inner = template.render([*turn, {"role": "user", "content": "u"}]).rpartition(SENTINEL)[2]
    candidates = [(inner.find(token), -len(token), token) for token in tokens if token in inner]
    if not candidates:
        return None
    start, _, token = min(candidates)
    closing = inner[: start + len(token)]
    return (inner[:start], token) if last.startswith(closing) else None
