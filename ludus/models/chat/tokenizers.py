"""Loads any tokenizer, or trains a small one on a recipe's texts.

row    token                                       texts that are encoded losslessly
words  a word, digit or sign with the space        those of known words, digits and signs;
       before it; a white-space character          anything else is <unk>
bytes  a byte                                      all
bpe    a byte sequence                             all
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ludus.core.errors import ConfigError, did_you_mean
from ludus.core.types import Spec, ToolSpec
from ludus.models import TOKENIZERS
from ludus.models.chat.template import (
    SENTINEL,
    SHIPPED,
    ChatTemplate,
    end_of_turn,
    load_template,
    require_template,
    special_tokens,
)

PAD, UNK = "<pad>", "<unk>"

WORDS = r" ?[^\W\d]+| ?\d| ?[^\w\s]|\s"
"""A word (letters and underscores), one digit or one sign, each with the space before it, or one
white-space character. Every text is a concatenation of these."""


def load_tokenizer(path: str, key: str = "model.tokenizer") -> PreTrainedTokenizerFast:
    """Load the tokenizer of a Hugging Face folder or hub name, which the config's `key` names.

    Errors: ConfigError where the folder does not exist (with the nearest name), the hub cannot be
    reached, there is no tokenizer, or its chat template has a wrong syntax.
    """
    own = Path(path).expanduser() / "chat_template.jinja"
    if own.is_file():
        load_template(str(own))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # of transformers' readers and validators
        raise ConfigError(load_error(key, path, error)) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers made one up
        raise ConfigError(
            f"{key}: {path} has no tokenizer (no token but special ones); name "
            "another folder in model.tokenizer, or add its files, such as tokenizer.json"
        )
    if isinstance(tokenizer.chat_template, str):
        require_template(tokenizer.chat_template, f"the chat template of {path}")
    return tokenizer


def load_error(key: str, path: str, error: Exception) -> str:
    """Returns the message for a folder or hub name that cannot be loaded."""
    folder = Path(path).expanduser()
    if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
        return (
            f"{key}: {path} is a run of ludus: export its policy with `ludus checkpoint export "
            f"{folder.name} FOLDER`, and name that folder"
        )
    if folder.is_dir():
        file = folder / "tokenizer.json"
        of_run = (folder.parent / "config.yaml").is_file() and key == "model.tokenizer"
        remedy = f". Restore {file}: it has to be a file" if of_run else ""
        return f"{key}: cannot load from the folder {path}: {_first_line(error)}{remedy}"
    siblings = [item.name for item in folder.parent.glob("*") if item.is_dir()]
    hint = did_you_mean(folder.name, siblings, f"{folder.parent}/{{}}") if "/" in path else ""
    if path.count("/") != 1 or path[0] in "./~":
        return f"{key}: there is no folder {path}{hint}"
    return (
        f"{key}: there is no folder {path}{hint}, and the Hugging Face hub did not provide "
        f"it (unreachable, or unknown name): {_first_line(error)}"
    )


def train_tokenizer(
    spec: Spec, texts: Iterable[str], chat_template: str = "plain", tools: Sequence[ToolSpec] = ()
) -> PreTrainedTokenizerFast:
    """Train a row of TOKENIZERS on `texts`; the same texts give the same files, byte for byte.

    `<pad>`, `<unk>` and the template's special tokens come first. The vocabulary includes the
    template's own text (role names, tool descriptions). eos is the template's end-of-turn token.
    The template is stored with the tokenizer.

    Errors: ConfigError for an unknown row or argument, a vocabulary that is too small, no texts.
    """
    source = load_template(chat_template)
    special = list(dict.fromkeys([PAD, UNK, *special_tokens(source)]))
    bare = _wrap(Tokenizer(models.WordLevel({UNK: 0}, unk_token=UNK)), special, source)
    template = ChatTemplate(bare, source)
    end = end_of_turn(template, special)
    if end is None:
        raise ConfigError(
            f"model.chat_template: {chat_template} ends an assistant turn without a special token, "
            f"so no tokenizer can be trained for it; use {' or '.join(SHIPPED)}"
        )
    backend = TOKENIZERS.build(
        spec,
        where="model.tokenizer",
        texts=texts,
        framing=_framing(template, tools),
        special_tokens=special,
    )
    if not isinstance(backend, Tokenizer):
        raise ConfigError(
            f"model.tokenizer: {spec.name!r} gives {backend!r:.80}: name a function that returns a "
            "`tokenizers.Tokenizer`"
        )
    return _wrap(backend, special, source, eos_token=end[1])


def words(
    texts: Iterable[str],
    framing: Sequence[str],
    special_tokens: Sequence[str],
    vocab_size: Annotated[
        int, Field(ge=16, description="Maximum number of tokens; the rarest words become <unk>.")
    ] = 4096,
    min_count: Annotated[
        int, Field(ge=1, description="Words with fewer occurrences become <unk>.")
    ] = 1,
) -> Tokenizer:
    """One token per word, with the space before it: `turn left` is `turn` and ` left`.

    Texts of known words are encoded losslessly. A word at the start of a text and the same word
    after a space are different tokens (`red` and ` red`).
    """
    trained = Tokenizer(models.WordLevel(unk_token=UNK))
    splitter = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    trained.pre_tokenizer = splitter
    trainer = trainers.WordLevelTrainer(
        vocab_size=2**31, min_frequency=min_count, show_progress=False
    )
    trained.train_from_iterator(texts, trainer)
    counted = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    if not counted:
        raise ConfigError("model.tokenizer: no texts to train on")
    required = [piece for text in framing for piece, _ in splitter.pre_tokenize_str(text)]
    first = list(dict.fromkeys([*special_tokens, " ", "\n", *required]))
    if len(first) >= vocab_size:
        raise ConfigError(
            f"model.tokenizer.args.vocab_size: {vocab_size} is too small: the chat template "
            f"alone needs {len(first)} tokens"
        )
    tokens = list(dict.fromkeys([*first, *(piece for piece, _ in counted)]))[:vocab_size]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.Fuse()
    return backend


def bpe(
    texts: Iterable[str],
    framing: Sequence[str],
    special_tokens: Sequence[str],
    vocab_size: Annotated[
        int, Field(ge=288, description="Tokens: 256 bytes, the special tokens, and merges.")
    ] = 1024,
) -> Tokenizer:
    """Byte-level BPE as in GPT-2, with single digits; encodes any text losslessly."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    if vocab_size < (least := 256 + len(special_tokens)):
        raise ConfigError(
            f"model.tokenizer.args.vocab_size: {vocab_size} is too small: bytes and special tokens "
            f"need {least}"
        )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator((*framing, *texts), trainer)
    return backend


def byte_level(
    texts: Iterable[str], framing: Sequence[str], special_tokens: Sequence[str]
) -> Tokenizer:
    """One token per byte; a small model learns to spell, count and reverse letters by it."""
    return bpe(texts, framing, special_tokens, 256 + len(special_tokens))


def _wrap(
    backend: Tokenizer, special: Sequence[str], source: str, **named: Any
) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNK,
        additional_special_tokens=[t for t in special if t not in (PAD, UNK, *named.values())],
        clean_up_tokenization_spaces=False,
        **named,
    )
    tokenizer.chat_template = source
    return tokenizer


def _framing(template: ChatTemplate, tools: Sequence[ToolSpec]) -> list[str]:
    """Returns the template's own texts, in all shapes of conversation that it accepts."""
    specs = [{"type": "function", "function": tool.model_dump()} for tool in tools]
    text = {role: {"role": role, "content": SENTINEL} for role in ("system", "user", "tool")}
    call = {"type": "function", "function": {"name": SENTINEL, "arguments": {SENTINEL: SENTINEL}}}
    turn = {"role": "assistant", "content": SENTINEL}
    shapes: list[list[dict[str, Any]]] = [
        [text["user"], turn, text["user"]],
        [text["system"], text["user"], turn],
        [text["user"], {**turn, "reasoning_content": SENTINEL}],
        [text["user"], {**turn, "tool_calls": [call, call]}, text["tool"], text["tool"]],
    ]
    pieces: dict[str, None] = {}
    for shape in shapes:
        for listed in ([], specs):
            try:
                rendered = template.render(shape, listed, prompt=True)
            except ConfigError:
                continue  # e.g. gemma: no system message
            pieces |= dict.fromkeys(rendered.split(SENTINEL))
    markers = special_tokens(template.source)
    for marker in markers:
        pieces = dict.fromkeys(part for piece in pieces for part in piece.split(marker))
    return [piece for piece in pieces if piece]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
