"""GGUF files that hold a vocabulary and no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write_gguf(path: Path, **fields: Any) -> Path:
    """Write a file with these `tokenizer.ggml` fields (and `chat_template`); the types follow gguf's writer."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, value in fields.items():
        key = f"tokenizer.{name}" if name == "chat_template" else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def sentencepiece_fields(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: bytes, letters and a few longer pieces with falling scores."""
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "é", "你"]
    words = ("he", "ll", "\u2581t", "th", "in", "\u2581the", "hell", "hello", "\u2581hello", "ing", "\u2581\u2581")
    pieces: list[tuple[str, float, int]] = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    pieces += [(word, -float(i), NORMAL) for i, word in enumerate(words)]
    pieces += [(letter, -100.0 - i, NORMAL) for i, letter in enumerate(letters)]
    pieces += [("<|user|>", 0.0, CONTROL), ("<think>", 0.0, USER_DEFINED)]
    fields = {
        "model": "llama",
        "tokens": [piece for piece, _, _ in pieces],
        "scores": [score for _, score, _ in pieces],
        "token_type": [kind for _, _, kind in pieces],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return fields | changes


def byte_level_fields(alphabet: Sequence[str], **changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary: the bytes, a few merges, a control token and one that is shown."""
    merges = ["t h", "h e", "i n", "th e", "Ġ the", "in g", "1 2", "12 3", "Ċ Ċ", "Ġ Ġ", "e Ì", "eÌ ģ", "l l", "E R"]
    joined = [merge.replace(" ", "") for merge in merges]
    tokens = [*alphabet, *joined, "Ġwhole", "<|end of text|>", "<think>"]
    fields = {
        "model": "gpt2",
        "tokens": tokens,
        "merges": merges,
        "token_type": [NORMAL] * (len(tokens) - 2) + [CONTROL, USER_DEFINED],
        "bos_token_id": len(tokens) - 2,
        "eos_token_id": len(tokens) - 2,
    }
    return fields | changes
