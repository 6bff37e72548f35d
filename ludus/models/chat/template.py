"""Chat templates: messages to text, and text to ids in which content can never pose as framing.

A template writes *framing* (role headers, end-of-turn tokens) around *content* (what users, tools
and environments say). Framing may become special tokens; content may not, whatever it spells.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ludus.core.errors import ConfigError, did_you_mean
from ludus.core.types import Message, ToolSpec

SHIPPED = ("plain", "qwen3")

# Noncharacters: Unicode keeps them out of interchange, so no honest text holds them. Content that
# does has them replaced (`defuse`), so neither can be forged.
BREAK = "\ufdd0"  # splits a special token's spelling inside content; the encoder removes it
SENTINEL = "\ufdd1"  # stands for content when the template is probed
THOUGHT = "\ufdd2"  # stands for a thinking block when the template is probed

PARSED_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Markers that give a turn its structure, special in a tokenizer or not."""

_TOKEN_LIKE = re.compile(
    r"<\|[^<>|\s]+\|>|</?(?:think|tool_call|tool_response)>|<(?:start|end)_of_turn>"
)


def load_template(name: str) -> str:
    """The Jinja source of a shipped template (plain, qwen3), or of a file.

    Errors: ConfigError where there is no such template or file, or it is not text.
    """
    if name in SHIPPED:
        return (resources.files("ludus.models.chat") / "templates" / f"{name}.jinja").read_text(
            "utf-8"
        )
    path = Path(name).expanduser()
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"model.chat_template: {path} cannot be read: {error}") from None
    raise ConfigError(
        f"model.chat_template: {name!r} is neither a shipped template nor a file"
        f"{did_you_mean(name, SHIPPED)}"
    )


def special_tokens(source: str) -> list[str]:
    """The tokens that a template's source spells out, in the order of their first appearance."""
    return list(dict.fromkeys(_TOKEN_LIKE.findall(source)))


def well_formed(value: Any) -> Any:
    """`value` with every lone surrogate in its strings replaced: text that UTF-8 can carry."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {well_formed(key): well_formed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [well_formed(item) for item in value]
    return value


class ChatTemplate:
    """A template bound to the special tokens of a tokenizer; `variables` reach the template."""

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
        """The conversation as text; with `prompt`, up to where the next assistant turn begins.

        Errors: ConfigError where the template refuses the conversation (some take no system or
        tool messages, or want the roles to alternate).
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
                f"model.chat_template: the template fails on a conversation of the roles "
                f"({roles}): {error}"
            ) from error
        return str(text)


class Encoder:
    """Text to ids: special tokens where the framing writes them, ordinary text in content.

    `defuse` puts BREAK behind the first character wherever content spells a special token. The
    rendered text goes through a copy of the tokenizer that matches special tokens first (none
    matches across a BREAK) and drops BREAK right after. The ids are those of one pass over the
    whole text, so where content spells no special token they are the tokenizer's own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, source: str) -> None:
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
        """The ids of rendered text, whose content was defused."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_after(self, token: str, text: str) -> list[int]:
        """The ids of `text` where it follows the special token `token` (whose id is left out)."""
        return self.encode(token + text)[1:]

    def defuse(self, value: Any) -> Any:
        """Content (a string, or JSON of strings) in which no special token is spelled out."""
        if isinstance(value, str):
            return self._spelled.sub(rf"\2{BREAK}", well_formed(value).translate(self._reserved))
        if isinstance(value, dict):
            return {self.defuse(key): self.defuse(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.defuse(item) for item in value]
        return value

    def message(self, message: Message) -> dict[str, Any]:
        """The message as templates expect it, content defused."""
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
        """The tools as templates expect them, their texts defused."""
        return [self.defuse({"type": "function", "function": tool.model_dump()}) for tool in tools]


def end_of_turn(template: ChatTemplate, tokens: Iterable[str]) -> tuple[str, str] | None:
    """What ends an assistant turn: (text before the token, the special token itself).

    None where the template ends a turn in text alone. Found by probing: it is the first special
    token after the content, whether the conversation ends there or goes on.
    """
    turn = [{"role": "user", "content": "u"}, {"role": "assistant", "content": SENTINEL}]
    last = template.render(turn).rpartition(SENTINEL)[2]
    inner = template.render([*turn, {"role": "user", "content": "u"}]).rpartition(SENTINEL)[2]
    found = [(inner.find(token), -len(token), token) for token in tokens if token in inner]
    if not found:
        return None
    start, _, token = min(found)
    closing = inner[: start + len(token)]
    return (inner[:start], token) if last.startswith(closing) else None
