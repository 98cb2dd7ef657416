from __future__ import annotations

import base64
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import settings as hypothesis_settings

from headrace.errors import UserError
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from headrace.text.tokenizer_tiktoken import _LONGEST_RUN
from tests.text.sources import folder_source
from tests.text.texts import TEXTS, mixed_text
from tests.tiny_tokenizer import K2_SHOWN, K2_SPECIALS, write_tiny_tiktoken

# K2's pattern spelled out, for an engine that is not tiktoken's: version 1 of `regex` knows set intersections.
SPLIT = regex.compile(
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+",
    regex.V1,
)


def merge_by_hand(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes((byte,)) for byte in piece]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def encode_by_hand(text: str, ranks: dict[bytes, int]) -> list[int]:
    pieces = SPLIT.findall(text)
    assert "".join(pieces) == text
    return [i for piece in pieces for i in merge_by_hand(piece.encode(), ranks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("k2")
    write_tiny_tiktoken(path, 320)
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[bytes, int]:
    lines = (line.split() for line in (folder / "tiktoken.model").read_text("utf-8").splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_split_and_merged_as_k2_says(
    tokenizers: dict[str, Tokenizer], ranks: dict[bytes, int], text: str
) -> None:
    ids = tokenizers["tiktoken"].encode(text, add_special=True)
    assert ids == encode_by_hand(text, ranks)
    assert tokenizers["tiktoken"].decode(ids, skip_special=True) == text


@hypothesis_settings(max_examples=200, deadline=None)
@given(text=mixed_text)
def test_any_text_is_split_and_merged_as_k2_says(
    tokenizers: dict[str, Tokenizer], ranks: dict[bytes, int], text: str
) -> None:
    assert tokenizers["tiktoken"].encode(text, add_special=False) == encode_by_hand(text, ranks)


def test_han_runs_digits_and_contractions(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["tiktoken"]
    pieces = [tokenizer.token_text(i) for i in tokenizer.encode("hello你好12345 a's", add_special=False)]
    assert pieces == ["hello", "你好", "123", "4", "5", " a", "'s"]


def test_special_tokens_follow_the_vocabulary(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["tiktoken"]
    first = 320 - len(K2_SPECIALS)
    assert tokenizer.encode("".join(K2_SPECIALS), add_special=True) == list(range(first, 320))
    assert (tokenizer.vocab_size, tokenizer.bos_id) == (320, first)
    assert tokenizer.eos_ids == (first + 1, first + 2)  # the document's end and the turn's
    hidden = [text for i, text in enumerate(K2_SPECIALS) if tokenizer.is_special(first + i)]
    assert hidden == [text for text in K2_SPECIALS if text not in K2_SHOWN]


def test_tool_calls_are_shown_and_turn_marks_are_not(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["tiktoken"]
    text = "<|im_assistant|>assistant<|im_middle|><|tool_call_begin|>functions.f:0<|tool_call_end|><|im_end|>"
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.decode(ids, skip_special=True) == "assistant<|tool_call_begin|>functions.f:0<|tool_call_end|>"


def change_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    change(config)
    path.write_text(json.dumps(config), "utf-8")


def test_a_special_token_that_begins_another_does_not_hide_it(tmp_path: Path) -> None:
    write_tiny_tiktoken(tmp_path)
    change_config(tmp_path, lambda c: c["added_tokens_decoder"].update({"272": {"content": "<|im_end|>x"}}))
    assert load_tokenizer(folder_source(tmp_path)).encode("<|im_end|>x<|im_end|>", add_special=False) == [272, 258]


def test_bos_is_added_only_where_the_config_says_so(tmp_path: Path) -> None:
    write_tiny_tiktoken(tmp_path)
    assert load_tokenizer(folder_source(tmp_path)).encode("a", add_special=True) == [97]
    change_config(tmp_path, lambda c: c.update(add_bos_token=True))
    tokenizer = load_tokenizer(folder_source(tmp_path))
    assert tokenizer.encode("a", add_special=True) == [256, 97]
    assert tokenizer.encode("a", add_special=False) == [97]


@pytest.mark.parametrize("char", ["x", " ", "你"])
def test_a_very_long_run_is_cut_and_nothing_is_lost(tokenizers: dict[str, Tokenizer], char: str) -> None:
    tokenizer = tokenizers["tiktoken"]
    text = "the " + char * (2 * _LONGEST_RUN + 7) + "\nthe"
    assert tokenizer.decode(tokenizer.encode(text, add_special=False), skip_special=False) == text


def test_runs_are_cut_at_their_own_multiples_only() -> None:
    from headrace.text.tokenizer_tiktoken import _cut_runs

    assert list(_cut_runs("ab abcdefgh   ij", 3)) == ["ab abc", "def", "gh   ij"]
    assert list(_cut_runs("abc", 3)) == ["abc"]
    assert list(_cut_runs("abcd    e", 4)) == ["abcd    e"]


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("", r"the ranks are not"),
        ("YQ== 0\nYg== 0\n", r"the ranks are not 0 to 1, each once"),
        ("YQ== 0\nYg== 2\n", r"the ranks are not 0 to 1, each once"),
        ("YQ== 0\nYg==\n", r"line 2 is not a token in base64 and its rank"),
        ("YQ== 0\n!! 1\n", r"line 2 is not a token in base64 and its rank"),
        ("YQ== zero\n", r"line 1 is not a token in base64 and its rank"),
        ("YQ== 0\n", r"no token for the byte 0x00"),
    ],
)
def test_a_broken_vocabulary_is_named(tmp_path: Path, lines: str, problem: str) -> None:
    write_tiny_tiktoken(tmp_path)
    (tmp_path / "tiktoken.model").write_text(lines, "utf-8")
    with pytest.raises(UserError, match=rf"tiktoken\.model: {problem}"):
        load_tokenizer(folder_source(tmp_path))


def test_a_special_token_inside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    write_tiny_tiktoken(tmp_path)
    change_config(tmp_path, lambda c: c["added_tokens_decoder"].update({"255": {"content": "<x>"}}))
    with pytest.raises(UserError, match=r"added_tokens_decoder\[255\] is an id of tiktoken\.model's 256"):
        load_tokenizer(folder_source(tmp_path))


def test_another_models_tiktoken_vocabulary_is_refused(tmp_path: Path) -> None:
    write_tiny_tiktoken(tmp_path)
    change_config(tmp_path, lambda c: c.update(tokenizer_class="OtherTokenizer"))
    with pytest.raises(UserError, match=r"tokenizer_class 'OtherTokenizer' is not supported with tiktoken\.model"):
        load_tokenizer(folder_source(tmp_path))
