"""A byte-level tokenizer over a vocabulary of any size, so that a random checkpoint can be served and measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import UserError

_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def write_random_tokenizer(folder: Path, config: Mapping[str, Any]) -> None:
    """Write tokenizer.json and tokenizer_config.json: a token a byte, the config's special ids, and filler words.

    No text is encoded to a filler, but every id decodes to a text. Raises UserError if the vocabulary is too small.
    """
    vocab_size = config["vocab_size"]
    specials = _special_ids(config, vocab_size)
    free = [i for i in range(vocab_size) if i not in specials.values()]
    if len(free) < 256:
        raise UserError(f"vocab_size {vocab_size}: a byte-level tokenizer needs at least {256 + len(specials)}")
    letters = _byte_letters()
    vocab = specials | dict(zip(letters, free, strict=False))
    vocab |= {f"{letters[0x20]}w{i}": i for i in free[256:]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": text, "special": True, **flags} for text, i in specials.items()],
        "pre_tokenizer": _BYTE_LEVEL,
        "decoder": _BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": dict(sorted(vocab.items(), key=lambda entry: entry[1])), "merges": []},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>" if "<|bos|>" in specials else None,
        "eos_token": "<|im_end|>",
        "add_bos_token": False,
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def _special_ids(config: Mapping[str, Any], vocab_size: int) -> dict[str, int]:
    """`<|im_end|>` is the config's (first) end id; those that the config does not name are the vocabulary's last."""
    ends = config.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends
    named = {"<|im_end|>": end, "<|bos|>": config.get("bos_token_id"), "<|pad|>": config.get("pad_token_id")}
    specials: dict[str, int] = {}
    for text, i in named.items():
        if isinstance(i, int) and 0 <= i < vocab_size and i not in specials.values():
            specials[text] = i
    for text in ("<|im_end|>", "<|im_start|>"):
        if text not in specials:
            specials[text] = max(i for i in range(vocab_size) if i not in specials.values())
    return specials


def _byte_letters() -> list[str]:
    """The character that byte-level vocabularies write for each byte: itself if it prints, else one past 255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, spare = [], 256
    for byte in range(256):
        letters.append(chr(byte if byte in printable else spare))
        spare += byte not in printable
    return letters
