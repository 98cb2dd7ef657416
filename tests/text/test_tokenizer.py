from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from headrace.errors import UserError
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.metaspace import write_metaspace
from tests.text.sources import folder_source, gguf_source
from tests.text.texts import TEXTS, mixed_text
from tests.tiny_tokenizer import ENDOFTEXT, IM_END, IM_START, write_tiny_tokenizer

KINDS = ["embedded", "tiny", "tiktoken", "metaspace", "sentencepiece"]


def rewrite(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(content | changes), "utf-8")


# --- what holds for every kind --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tiny", "tiktoken"])
@hypothesis_settings(max_examples=60, deadline=None)
@given(text=mixed_text)
def test_vocabularies_of_all_bytes_give_the_text_back(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize("kind", KINDS)
@given(ids=st.lists(st.integers(-(2**70), 2**70) | st.integers(-5, 400), max_size=8))
def test_ids_without_a_token_are_worth_no_text(tokenizers: dict[str, Tokenizer], kind: str, ids: list[int]) -> None:
    tokenizer = tokenizers[kind]
    known = [i for i in ids if 0 <= i < tokenizer.vocab_size]
    assert tokenizer.decode(ids, skip_special=False) == tokenizer.decode(known, skip_special=False)
    for token in set(ids) - set(known):
        assert tokenizer.token_bytes(token) == b""
        assert tokenizer.token_text(token) == ""
        assert not tokenizer.is_special(token)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d\ude00 pair"])
def test_surrogates_that_json_may_carry_do_not_fail(tokenizer: Tokenizer, text: str) -> None:
    repaired = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert tokenizer.encode(text, add_special=False) == tokenizer.encode(repaired, add_special=False)


def test_every_token_has_bytes_and_the_last_id_a_token(tokenizer: Tokenizer) -> None:
    assert all(tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size))


def test_a_part_of_a_character_has_exact_bytes(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in ("tiny", "tiktoken"):
        assert tokenizers[kind].token_bytes(0xF0) == b"\xf0"
        assert tokenizers[kind].token_text(0xF0) == "\ufffd"
    pieces = tokenizers["sentencepiece"].encode("😀", add_special=False)
    assert b"".join(map(tokenizers["sentencepiece"].token_bytes, pieces)) == " 😀".encode()


# --- tokenizer.json -------------------------------------------------------------------------------------------------


def test_a_tiny_tokenizer_is_one_token_a_byte(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, 300)
    tokenizer = load_tokenizer(folder_source(tmp_path))
    assert tokenizer.encode("hé", add_special=True) == list("hé".encode())
    assert tokenizer.encode("<|im_start|>a<|im_end|>", add_special=False) == [IM_START, ord("a"), IM_END]
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (300, ENDOFTEXT, (IM_END,))
    assert tokenizer.decode([IM_START, ord("a"), 299], skip_special=True) == "a w299"
    assert [i for i in range(300) if tokenizer.is_special(i)] == [ENDOFTEXT, IM_START, IM_END]


@pytest.mark.parametrize("config", [{"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("processed", [True, False])
def test_what_goes_around_a_prompt_is_what_transformers_puts_there(
    tmp_path: Path, config: dict[str, Any], processed: bool
) -> None:
    write_tiny_tokenizer(tmp_path)
    own = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [IM_START], "tokens": ["<|im_start|>"]}},
    }
    if processed:
        rewrite(tmp_path / "tokenizer.json", post_processor=own)
    rewrite(tmp_path / "tokenizer_config.json", **config)
    ours, theirs = load_tokenizer(folder_source(tmp_path)), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for special in (True, False):
        assert ours.encode("hi", add_special=special) == theirs.encode("hi", add_special_tokens=special)


def test_tokens_that_only_the_config_knows_are_added_as_transformers_adds_them(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tool, pad = {"content": "<tool>", "special": False} | flags, {"content": "<pad>", "special": True} | flags
    rewrite(tmp_path / "tokenizer_config.json", added_tokens_decoder={"273": tool, "272": pad}, unk_token="<unk>")
    ours, theirs = load_tokenizer(folder_source(tmp_path)), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "a<tool>b<pad>c<unk>d<|im_end|>"
    ids = ours.encode(text, add_special=False)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids, skip_special=True) == theirs.decode(ids, skip_special_tokens=True) == "a<tool>bcd"
    assert ours.vocab_size == 275


def test_a_tokenizer_json_that_truncates_or_pads_does_not_shorten_a_prompt(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(folder_source(tmp_path)).encode("longer", add_special=True) == list(b"longer")


def test_end_tokens_are_the_tokenizers_and_then_the_generation_configs(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    rewrite(tmp_path / "generation_config.json", eos_token_id=[ENDOFTEXT, IM_END])
    assert load_tokenizer(folder_source(tmp_path)).eos_ids == (IM_END, ENDOFTEXT)
    rewrite(tmp_path / "generation_config.json", eos_token_id=ENDOFTEXT)
    assert load_tokenizer(folder_source(tmp_path)).eos_ids == (IM_END, ENDOFTEXT)


def test_special_tokens_map_is_read_where_the_config_is_silent(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}", "utf-8")
    rewrite(tmp_path / "special_tokens_map.json", eos_token={"content": "<|im_end|>"}, bos_token="<|im_start|>")
    tokenizer = load_tokenizer(folder_source(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (IM_START, (IM_END,))


@pytest.mark.parametrize("text", TEXTS)
def test_metaspace_pieces_decode_as_the_library_decodes_them(tmp_path: Path, text: str) -> None:
    write_metaspace(tmp_path)
    ours, theirs = load_tokenizer(folder_source(tmp_path)), Backend.from_file(str(tmp_path / "tokenizer.json"))
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, add_special=False) == ids
    assert ours.encode(text, add_special=True) == [1, *ids]
    assert ours.decode(ids, skip_special=True) == theirs.decode(ids)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_missing_tokenizer_names_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer; looked for tokenizer\.json and tiktoken\.model$"):
        load_tokenizer(folder_source(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UserError, match=r"tokenizer\.model alone is not enough"):
        load_tokenizer(folder_source(tmp_path))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "Unheard"}}', "\x00"])
def test_a_broken_tokenizer_json_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, "utf-8")
    with pytest.raises(UserError, match=r"tokenizer\.json: \S") as raised:
        load_tokenizer(folder_source(tmp_path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("{", r"tokenizer_config\.json: cannot be read as JSON"),
        ("[]", r"tokenizer_config\.json: holds no JSON object"),
        ('{"added_tokens_decoder": {"x": {"content": "a"}}}', r"added_tokens_decoder\['x'\] needs a token id"),
        ('{"added_tokens_decoder": {"7": {}}}', r"added_tokens_decoder\['7'\] needs a token id"),
        ('{"added_tokens_decoder": [1]}', r"added_tokens_decoder\[''\] needs a token id"),
    ],
)
def test_a_broken_config_is_named(tmp_path: Path, config: str, problem: str) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(config, "utf-8")
    with pytest.raises(UserError, match=problem):
        load_tokenizer(folder_source(tmp_path))


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (None, "None"),
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "Replace"),
        (
            decoders.Sequence(
                [decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]
            ),
            r"Replace\+ByteFallback\+Fuse\+Strip",
        ),
    ],
)
def test_a_decoder_that_cannot_be_streamed_exactly_is_refused(tmp_path: Path, decoder: Any, name: str) -> None:
    write_tiny_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=f"decoder {name}.* is not supported"):
        load_tokenizer(folder_source(tmp_path))


def test_an_unreadable_gguf_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.gguf"):
        load_tokenizer(gguf_source(tmp_path / "none.gguf"))
