from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headrace.text.detokenizer import Delta, Detokenizer
from headrace.text.tokenizer import Tokenizer
from tests.text.texts import mixed_text

KINDS = ["embedded", "tiny", "tiktoken", "metaspace", "sentencepiece"]


def push_in_parts(detokenizer: Detokenizer, ids: Sequence[int], sizes: random.Random) -> list[Delta]:
    deltas, at = [], 0
    while at < len(ids):
        size = sizes.choice((1, 1, 1, 2, 5))
        deltas.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*deltas, detokenizer.finish()]


def joined(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@st.composite
def token_lists(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Ids of real texts, any other ids, and ids that no vocabulary has."""
    size = tokenizer.vocab_size
    any_ids = st.lists(st.integers(-2, size + 3) | st.integers(0, min(size, 300) - 1), max_size=12)
    real_ids = mixed_text.map(lambda text: tokenizer.encode(text, add_special=True))
    return [i for part in draw(st.lists(any_ids | real_ids, max_size=4)) for i in part]


def cut_by_hand(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """What a reader sees who stops at the first character that completes a stop string."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("kind", KINDS)
@hypothesis_settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_deltas_join_to_what_decode_gives(tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizers[kind]
    ids, skip = data.draw(token_lists(tokenizer)), data.draw(st.booleans())
    detokenizer = Detokenizer(tokenizer, skip_special=skip)
    deltas = push_in_parts(detokenizer, ids, data.draw(st.randoms()))
    assert joined(deltas) == tokenizer.decode(ids, skip_special=skip)
    assert sum(delta.num_tokens for delta in deltas) == len(ids)
    assert not any(delta.stopped for delta in deltas)


@pytest.mark.parametrize("kind", KINDS)
@hypothesis_settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_text_ends_before_the_stop_that_is_complete_first(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    ids = data.draw(token_lists(tokenizer))
    text = tokenizer.decode(ids, skip_special=True)
    places = st.integers(0, max(0, len(text) - 1))
    from_text = st.tuples(places, st.integers(1, 9)).map(lambda cut: text[cut[0] : cut[0] + cut[1]])
    stops = tuple(data.draw(st.lists((from_text | st.text(min_size=1, max_size=4)).filter(bool), max_size=4)))
    expected, reason = cut_by_hand(text, stops)

    deltas = push_in_parts(Detokenizer(tokenizer, stop=stops), ids, data.draw(st.randoms()))
    assert joined(deltas) == expected
    assert (deltas[-1].stopped, deltas[-1].stop_reason) == (reason is not None, reason)

    with_stop = push_in_parts(Detokenizer(tokenizer, stop=stops, include_stop=True), ids, data.draw(st.randoms()))
    assert joined(with_stop) == expected + (reason or "")


@given(
    text=st.text("ab", max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=4),
    sizes=st.randoms(),
)
def test_stops_that_overlap_themselves_and_each_other(
    tokenizers: dict[str, Tokenizer], text: str, stops: list[str], sizes: random.Random
) -> None:
    tokenizer = tokenizers["tiny"]
    deltas = push_in_parts(Detokenizer(tokenizer, stop=tuple(stops)), list(text.encode()), sizes)
    assert (joined(deltas), deltas[-1].stop_reason) == cut_by_hand(text, stops)


@pytest.mark.parametrize("text", ["😀", "é", "你好", "👩‍👩‍👧", "e\u0301"])
def test_no_character_is_split(tokenizers: dict[str, Tokenizer], text: str) -> None:
    detokenizer = Detokenizer(tokenizers["tiny"])
    shown = [detokenizer.push([byte]).text for byte in text.encode()]
    assert [piece for piece in shown if piece] == list(text)
    assert detokenizer.finish().text == ""


def test_bytes_that_never_became_a_character_are_shown_at_the_end(tokenizers: dict[str, Tokenizer]) -> None:
    detokenizer = Detokenizer(tokenizers["tiny"])
    assert detokenizer.push(list("a😀".encode()[:-1])).text == "a"
    assert detokenizer.finish().text == "\ufffd"
    assert detokenizer.finish().text == ""


def test_a_stop_string_over_several_tokens_never_leaks(tokenizers: dict[str, Tokenizer]) -> None:
    detokenizer = Detokenizer(tokenizers["tiny"], stop=("STOP", "\n\n"))
    shown = [detokenizer.push([byte]).text for byte in b"a ST b\nSTO"]
    assert shown == ["a", " ", "", "", "ST ", "b", "", "\n", "", ""]
    delta = detokenizer.push(b"P and more")
    assert (delta.text, delta.stopped, delta.stop_reason, delta.num_tokens) == ("", True, "STOP", 1)


def test_what_was_held_for_a_stop_that_did_not_come_is_shown_at_the_end(tokenizers: dict[str, Tokenizer]) -> None:
    detokenizer = Detokenizer(tokenizers["tiny"], stop=("STOP",))
    assert detokenizer.push(b"a STO").text == "a "
    assert detokenizer.finish() == Delta("STO")


def test_a_stop_string_completed_by_the_end_of_the_text(tokenizers: dict[str, Tokenizer]) -> None:
    detokenizer = Detokenizer(tokenizers["tiny"], stop=("b\ufffd",))
    assert detokenizer.push(b"ab\xf0").text == "a"
    assert detokenizer.finish() == Delta("", stopped=True, stop_reason="b\ufffd")


def test_nothing_is_read_after_the_stop(tokenizers: dict[str, Tokenizer]) -> None:
    detokenizer = Detokenizer(tokenizers["tiny"], stop=(".",))
    assert detokenizer.push(b"One. Two.").text == "One"
    assert detokenizer.push(b" Three") == Delta("", stopped=True, stop_reason=".")
    assert detokenizer.finish() == Delta("", stopped=True, stop_reason=".")


def test_offsets_say_how_many_characters_lie_before_each_token(tokenizers: dict[str, Tokenizer]) -> None:
    detokenizer = Detokenizer(tokenizers["tiny"], stop=("!!",))
    assert detokenizer.push("né".encode()).offsets == (0, 1, 1)
    assert detokenizer.push(b"e!x").offsets == (2, 3, 4)
    assert detokenizer.push(b"!!?") == Delta("", stopped=True, stop_reason="!!", num_tokens=2, offsets=(5, 6))


def test_special_tokens_are_hidden_unless_asked_for(tokenizers: dict[str, Tokenizer]) -> None:
    ids = tokenizers["tiny"].encode("a<|im_end|>b", add_special=False)
    assert Detokenizer(tokenizers["tiny"]).push(ids).text == "ab"
    assert Detokenizer(tokenizers["tiny"], skip_special=False).push(ids).text == "a<|im_end|>b"


def test_a_run_of_byte_pieces_is_held_until_it_ends(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sentencepiece"]
    bytes_of_smile = tokenizer.encode("😀", add_special=False)[1:]
    letter = tokenizer.encode("a", add_special=False)
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token]).text for token in bytes_of_smile] == [""] * 4
    assert detokenizer.push(letter).text == "😀 a"


def test_an_empty_stop_string_is_refused(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(ValueError, match="stop: an empty text"):
        Detokenizer(tokenizers["tiny"], stop=("a", ""))


def test_the_work_for_a_token_does_not_grow_with_the_text(tokenizers: dict[str, Tokenizer]) -> None:
    """A stop string that is almost there all the time: every character is looked at a bounded number of times."""
    looks = 0

    class Counted(str):
        __slots__ = ()

        def __getitem__(self, key: object) -> str:
            nonlocal looks
            looks += 1
            return str.__getitem__(self, key)  # type: ignore[index]  # passed through

    detokenizer = Detokenizer(tokenizers["tiny"], stop=("a" * 500 + "b",))
    (matcher,) = detokenizer._matchers
    matcher.text = Counted(matcher.text)
    num_tokens = 3000
    for _ in range(num_tokens):
        detokenizer.push(b"a")
    assert looks < 8 * num_tokens
    assert len(detokenizer._held) == 500
