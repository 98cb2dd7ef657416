from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from headrace.errors import CheckpointError, UserError
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from headrace.weights.source import ModelSource
from tests.text.gguf_vocabulary import byte_level_fields, sentencepiece_fields, write_gguf
from tests.text.sources import gguf_source
from tests.text.texts import TEXTS, mixed_text
from tests.tiny_tokenizer import byte_alphabet

CHAT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <repo_name>  <|im_end|>\n<|im_start|>assistant\n"
SPECIALS = (CHAT, "<|im_start|><|im_end|>", " <|endoftext|> ", "<|im_start", "a<file_sep>b<|im_end|>", "< |im_end|>")


def byte_level(path: Path, **changes: Any) -> Tokenizer:
    alphabet = [byte_alphabet()[byte] for byte in range(256)]
    return load_tokenizer(gguf_source(write_gguf(path / "vocabulary.gguf", **byte_level_fields(alphabet, **changes))))


def sentencepiece(path: Path, **changes: Any) -> Tokenizer:
    return load_tokenizer(gguf_source(write_gguf(path / "vocabulary.gguf", **sentencepiece_fields(**changes))))


# --- the embedded default is what transformers reads from the same file ---------------------------------------------


@pytest.mark.parametrize("text", [*TEXTS, *SPECIALS])
def test_the_embedded_default_is_transformers_embedded(
    tokenizers: dict[str, Tokenizer], transformers_embedded: Any, text: str
) -> None:
    ours = tokenizers["embedded"]
    for special in (True, False):
        ids = ours.encode(text, add_special=special)
        assert ids == transformers_embedded.encode(text, add_special_tokens=special)
        assert ours.decode(ids, skip_special=special) == transformers_embedded.decode(ids, skip_special_tokens=special)


@hypothesis_settings(max_examples=200, deadline=None)
@given(text=mixed_text)
def test_the_embedded_default_is_transformers_embedded_on_any_text(
    tokenizers: dict[str, Tokenizer], transformers_embedded: Any, text: str
) -> None:
    assert tokenizers["embedded"].encode(text, add_special=True) == transformers_embedded.encode(text)


def test_the_embedded_defaults_special_tokens_are_transformers(
    tokenizers: dict[str, Tokenizer], transformers_embedded: Any
) -> None:
    ours, theirs = tokenizers["embedded"], transformers_embedded
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (len(theirs), theirs.bos_token_id, (theirs.eos_token_id,))
    special = {i for i in range(ours.vocab_size) if ours.is_special(i)}
    assert special == {i for i, entry in theirs.added_tokens_decoder.items() if entry.special}


# --- other vocabularies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [True, None])
def test_a_sentencepiece_vocabulary_is_transformers_embedded(tmp_path: Path, prefix: bool | None) -> None:
    changes = {} if prefix is None else {"add_space_prefix": prefix}
    ours = sentencepiece(tmp_path, **changes)
    theirs, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(tmp_path / "vocabulary.gguf"))[:2])
    texts = (*TEXTS, "<|user|>hello the<think> thing</s>the", "hello hello", "<s>hello", "the<0x41>")
    for text in texts:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False) == ids, text
        assert ours.encode(text, add_special=True) == [1, *ids]
        assert ours.decode(ids, skip_special=True) == theirs.decode(ids)


def test_a_sentencepiece_vocabulary_without_a_space_before_the_text(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, add_space_prefix=False, add_bos_token=False)
    ids = tokenizer.encode("hello the", add_special=True)
    assert [tokenizer.token_bytes(i) for i in ids] == [b"hello", b" the"]
    assert tokenizer.decode(tokenizer.encode(" hello", add_special=False), skip_special=True) == " hello"


def test_llama_3_text_is_split_and_begun_as_llama_3_does(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, pre="llama-bpe")
    bos = tokenizer.bos_id
    assert bos is not None
    pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode(" the whole123456", add_special=True)]
    assert pieces == [b"<|end of text|>", b" the", b" whole", b"123", b"4", b"5", b"6"]
    assert tokenizer.encode("a", add_special=False) == [ord("a")]


def test_qwen_text_is_normalised_and_split_by_single_digits(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, pre="qwen2")
    assert tokenizer.encode("e\u0301", add_special=True) == list("é".encode())
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("123", add_special=True)] == [b"1", b"2", b"3"]


def test_gpt_2_is_the_default(tmp_path: Path) -> None:
    named, unnamed = byte_level(tmp_path, pre="gpt-2"), byte_level(tmp_path)
    ids = named.encode("the 123\n\n ER's", add_special=True)
    assert ids == unnamed.encode("the 123\n\n ER's", add_special=True)
    assert [named.token_bytes(i) for i in ids] == [b"the", b" ", b"123", b"\n\n", b" ", b"ER", b"'", b"s"]


def test_control_tokens_are_hidden_and_user_defined_ones_shown(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    ids = tokenizer.encode("a<|end of text|>b<think>", add_special=False)
    assert len(ids) == 4
    assert tokenizer.decode(ids, skip_special=True) == "ab<think>"
    assert tokenizer.decode(ids, skip_special=False) == "a<|end of text|>b<think>"


def test_a_turns_end_is_an_end_token_too(tmp_path: Path) -> None:
    assert byte_level(tmp_path, eos_token_id=5, eot_token_id=7, eom_token_id=10**6).eos_ids == (5, 7)


def test_special_ids_that_name_no_token_are_as_none(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, bos_token_id="1", eos_token_id=2**32 - 1, add_bos_token=True, add_eos_token=True)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (None, ())
    assert tokenizer.encode("a", add_special=True) == [ord("a")]


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "bert"}, r"tokenizer\.ggml\.model 'bert' is not supported; gpt2 and llama are"),
        ({"pre": "tekken"}, r"tokenizer\.ggml\.pre 'tekken' is not supported; default, gpt-2, smollm, llama-bpe"),
        ({"token_type": [1]}, r"tokenizer\.ggml\.token_type is not one number for each of 273 tokens"),
        ({"token_type": 5}, r"tokenizer\.ggml\.token_type is not one number for each"),
        ({"model": ["gpt2"]}, r"tokenizer\.ggml\.model \"\['gpt2'\]\" is not supported"),
        ({"merges": ["the unheard"]}, r"tokenizer\.ggml\.merges: .*unheard"),
        ({"merges": ["the"]}, r"tokenizer\.ggml\.merges: "),
        ({"merges": 1}, r"tokenizer\.ggml\.merges"),
        ({"tokens": "x"}, r"tokenizer\.ggml\.tokens must be texts"),
        ({"pre": 1}, r"tokenizer\.ggml\.pre '1' is not supported"),
    ],
)
def test_what_cannot_be_rebuilt_is_named(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem) as raised:
        byte_level(tmp_path, **changes)
    assert str(tmp_path / "vocabulary.gguf") in str(raised.value)


@pytest.mark.parametrize("missing", ["tokens", "merges"])
def test_a_missing_field_is_named(tmp_path: Path, missing: str) -> None:
    fields = byte_level_fields([byte_alphabet()[byte] for byte in range(256)])
    del fields[missing]
    with pytest.raises(UserError, match=rf"no .*tokenizer\.ggml\.{missing}"):
        load_tokenizer(gguf_source(write_gguf(tmp_path / "vocabulary.gguf", **fields)))


def test_scores_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.ggml\.scores is not one number for each of \d+ tokens"):
        sentencepiece(tmp_path, scores=[0.0, 1.0])


def test_a_file_cut_short_is_one_line(tmp_path: Path, embedded_source: ModelSource) -> None:
    path = tmp_path / "cut.gguf"
    with embedded_source.path.open("rb") as file:
        path.write_bytes(file.read(200_000))
    with pytest.raises(CheckpointError, match=r"cut\.gguf: .*cut short"):
        load_tokenizer(gguf_source(path))
