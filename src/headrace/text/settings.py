"""What the JSON files of a checkpoint's folder say about its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no such file. UserError if it is broken."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no JSON object")
    return content


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, over the older `special_tokens_map.json`."""
    return read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")


def special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens (`bos_token`, `eos_token`, ...) that have a text."""
    texts = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and not key.startswith("add_") and isinstance(text, str):
            texts[key] = text
    return texts


def added_tokens(settings: Mapping[str, Any], origin: Path) -> dict[int, Mapping[str, Any]]:
    """`added_tokens_decoder` by ascending id: each entry has a text `content` and flags. UserError if it is broken."""
    tokens: dict[int, Mapping[str, Any]] = {}
    entries = settings.get("added_tokens_decoder") or {}
    for key, entry in entries.items() if isinstance(entries, Mapping) else [("", entries)]:
        usable = isinstance(entry, Mapping) and isinstance(entry.get("content"), str) and entry["content"]
        if not (usable and key.isdecimal() and int(key) < 2**31):
            raise UserError(f"{origin}: added_tokens_decoder[{key!r}] needs a token id and a content")
        tokens[int(key)] = entry
    return dict(sorted(tokens.items()))


def generation_eos_ids(folder: Path) -> list[int]:
    """`eos_token_id` of `generation_config.json`, which also names the tokens that end a chat turn."""
    ids = read_json(folder / "generation_config.json").get("eos_token_id")
    return [i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)]
