"""The byte-level tokenizer of a random checkpoint covers the config's vocabulary and special ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from headrace.errors import UserError
from headrace.weights.random_tokenizer import write_random_tokenizer


def written(folder: Path, **config: object) -> Tokenizer:
    write_random_tokenizer(folder, config)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("bos", "eos", "pad"), [(256, 258, None), (997, 998, 999), (0, [1, 2], 1), (None, None, None), (5, 5, 5)]
)
def test_text_is_its_bytes_and_every_id_is_text(tmp_path: Path, bos: object, eos: object, pad: object) -> None:
    tokenizer = written(tmp_path, vocab_size=1000, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)
    assert tokenizer.get_vocab_size() == 1000
    assert sorted(tokenizer.get_vocab().values()) == list(range(1000))
    text = "Grüße, 世界 🙂\n\t w1"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    end = eos[0] if isinstance(eos, list) else eos
    assert end is None or tokenizer.token_to_id("<|im_end|>") == end
    assert tokenizer.encode("<|im_start|>a<|im_end|>").ids[2] == tokenizer.token_to_id("<|im_end|>")


def test_vocabulary_without_room_for_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vocab_size 257"):
        written(tmp_path, vocab_size=257, bos_token_id=0, eos_token_id=1)
