"""Trained tokenizers: lossless texts, reproducible files."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config

from ludus.core.errors import ConfigError
from ludus.core.types import Message, Spec, ToolSpec
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.template import BREAK, load_template
from ludus.models.chat.tokenizers import load_tokenizer, train_tokenizer

TEXTS = [
    "Goal: go to the red ball\nYou see a red ball 2 steps forward and 13 steps left.",
    "You carry: nothing.  (It's a grey_key!)\n\n\tAvailable: turn left, pick up",
    "craft 4 oak planks using 1 oak log",
    "turn left",
]
TOOL = ToolSpec(name="turn", description="Turns you.")


@pytest.fixture(scope="module")
def words():  # type: ignore[no-untyped-def]
    return train_tokenizer(Spec(name="words"), TEXTS)


def test_words_round_trip_training_texts(words) -> None:  # type: ignore[no-untyped-def]
    for text in TEXTS:
        ids = words.encode(text, add_special_tokens=False)
        assert words.decode(ids) == text
        assert words.unk_token_id not in ids
    assert len(words.encode("turn left")) == 2


@given(
    st.lists(st.sampled_from([" red", " ball", ".", "\n", " 2", " ", "turn", ":", "(", " left"]))
)
def test_words_round_trip_known_pieces(pieces: list[str]) -> None:
    text = "".join(pieces)
    tokenizer = MIXTURE
    ids = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.unk_token_id not in ids:  # "turn" + "turn" is a word of its own
        assert tokenizer.decode(ids) == text


MIXTURE = train_tokenizer(Spec(name="words"), TEXTS)


def test_unknown_words_become_unk(words) -> None:  # type: ignore[no-untyped-def]
    assert words.decode(words.encode("turn sideways")) == "turn<unk>"


def test_words_arguments() -> None:
    texts = ["a a a b b c"]
    rare = train_tokenizer(Spec(name="words", args={"min_count": 2}), texts)
    assert " c" not in rare.get_vocab()
    assert " b" in rare.get_vocab()
    small = train_tokenizer(Spec(name="words", args={"vocab_size": len(rare)}), texts)
    assert len(small) == len(rare)
    with pytest.raises(ConfigError, match=r"model\.tokenizer\.args\.vocab_size"):
        train_tokenizer(Spec(name="words", args={"vocab_size": 16}), texts, "qwen3", [TOOL])
    with pytest.raises(ConfigError, match=r"did you mean model\.tokenizer\.args\.vocab_size"):
        train_tokenizer(Spec(name="words", args={"vocabsize": 16}), texts)
    with pytest.raises(ConfigError, match="no texts"):
        train_tokenizer(Spec(name="words"), [])


BPE = train_tokenizer(Spec(name="bpe", args={"vocab_size": 320}), TEXTS)


@given(st.text(st.characters(exclude_characters=BREAK, exclude_categories=["Cs"])))
def test_bpe_round_trips_any_text(text: str) -> None:
    encoder = Renderer(BPE)._encoder
    ids = encoder.encode(encoder.defuse(text))
    assert BPE.decode(ids) == text


def test_bpe_keeps_its_size() -> None:
    assert len(BPE) == 320
    with pytest.raises(ConfigError, match=r"model\.tokenizer\.args\.vocab_size .*288"):
        train_tokenizer(Spec(name="bpe", args={"vocab_size": 100}), TEXTS)


def test_bytes_are_single_tokens() -> None:
    tokenizer = train_tokenizer(Spec(name="bytes"), TEXTS)
    encoder = Renderer(tokenizer)._encoder
    for text in ("turn left", "turn left turn left", "für 12", "\n\t{}"):
        ids = encoder.encode(encoder.defuse(text))
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["words", "bytes", "bpe"])
@pytest.mark.parametrize("template", ["plain", "qwen3"])
def test_trained_tokenizers_support_the_template(name: str, template: str) -> None:
    tokenizer = train_tokenizer(Spec(name=name), TEXTS, template, [TOOL])
    end = {"plain": "<|end|>", "qwen3": "<|im_end|>"}[template]
    assert tokenizer.eos_token == end
    assert tokenizer.pad_token_id == 0
    renderer = Renderer(tokenizer, tools=[TOOL])
    assert tokenizer.unk_token_id not in renderer.open([Message(role="user", content="turn left")])
    specs = [{"type": "function", "function": TOOL.model_dump()}]
    messages = [{"role": "user", "content": "turn left"}]
    ids = tokenizer.apply_chat_template(messages, tools=specs, return_dict=False)
    assert tokenizer.unk_token_id not in ids


SCRIPT = """
import sys
from ludus.core.types import Spec
from ludus.models.chat.tokenizers import train_tokenizer
for name in ("words", "bpe"):
    train_tokenizer(Spec(name=name), eval(sys.argv[2])).save_pretrained(f"{sys.argv[1]}/{name}")
"""


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@pytest.mark.slow
def test_the_same_texts_give_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    texts = [f"{a} {b} of {a}{b}" for a in "abcdefghij" for b in "klmnop"] + TEXTS
    for name in ("words", "bpe"):
        train_tokenizer(Spec(name=name), texts).save_pretrained(tmp_path / "here" / name)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "there"), repr(texts)]
    subprocess.run(command, check=True, env=None)
    assert hashes(tmp_path / "here") == hashes(tmp_path / "there")


@pytest.mark.parametrize("name", ["words", "bpe"])
def test_saved_and_loaded_beside_a_model_configuration(name: str, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(Spec(name=name), TEXTS)
    tokenizer.save_pretrained(tmp_path)
    Qwen3Config().save_pretrained(tmp_path)  # its model type may not choose another tokenizer
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.chat_template == tokenizer.chat_template
    assert (loaded.eos_token, loaded.pad_token, loaded.unk_token) == ("<|end|>", "<pad>", "<unk>")
    assert loaded.get_vocab() == tokenizer.get_vocab()
    for text in [*TEXTS, "<|user|>turn left<|assistant|>", " the  red\n "]:
        assert loaded.encode(text) == tokenizer.encode(text)
        assert loaded.decode(loaded.encode(text)) == tokenizer.decode(tokenizer.encode(text))


def test_a_run_s_folder_is_no_model(tmp_path: Path) -> None:
    run = tmp_path / "mine-1"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("name: mine")
    with pytest.raises(ConfigError, match=r"is a run of ludus: .*ludus checkpoint export mine-1"):
        load_tokenizer(str(run))


def test_load_errors(tmp_path: Path) -> None:
    (tmp_path / "qwen3-small").mkdir()
    with pytest.raises(ConfigError, match=r"no folder .*did you mean .*qwen3-small"):
        load_tokenizer(str(tmp_path / "qwen3-smal"))
    with pytest.raises(ConfigError, match=r"model\.tokenizer: cannot load from the folder"):
        load_tokenizer(str(tmp_path / "qwen3-small"))
    with pytest.raises(ConfigError, match="hub did not provide it"):
        load_tokenizer("nobody/no-such-model")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (b"{% for m in messages %}\n{{ m.content }}{% endfr %}", "line 2: Encountered unknown tag"),
        (b"\n\n{{ messages", "line 3: unexpected end of template"),
        (b"{{ messages | nothing }}", "line 1: No filter named 'nothing'"),
        (b"\xff", "cannot be read: 'utf-8' codec"),
    ],
)
def test_a_broken_template_of_a_folder_is_named(tmp_path: Path, template: bytes, said: str) -> None:
    """Also where the recipe names another template: an export would carry the broken one."""
    train_tokenizer(Spec(name="words"), TEXTS).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(template)
    with pytest.raises(ConfigError, match=rf"chat_template\.jinja,? {said}"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match=rf"chat_template\.jinja,? {said}"):
        load_template(str(tmp_path / "chat_template.jinja"))


def test_a_broken_template_in_the_tokenizers_configuration_is_named(tmp_path: Path) -> None:
    train_tokenizer(Spec(name="words"), TEXTS).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": "{% if %}"}))
    with pytest.raises(ConfigError, match=f"the chat template of {tmp_path}, line 1: Expected"):
        load_tokenizer(str(tmp_path))


def test_what_gives_no_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^model.tokenizer: 'builtins:print' gives None: name a"):
        train_tokenizer(Spec(name="builtins:print"), TEXTS)
