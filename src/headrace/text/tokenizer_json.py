"""Tokenizers that the `tokenizers` library runs, and reading one from a `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from headrace.errors import UserError
from headrace.text import settings as checkpoint
from headrace.text.stream import ByteStream, PieceStream, PieceStyle, TextStream, byte_of_piece
from headrace.text.unicode import well_formed


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level vocabularies write for each byte (GPT-2's table), to the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF_CHAR = _byte_alphabet()
CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}


class LibraryTokenizer:
    """A `tokenizers` object with a byte-level or a SentencePiece-like decoder. Safe to use from several threads."""

    def __init__(self, backend: Backend, *, bos_id: int | None, eos_ids: Sequence[int], origin: Path) -> None:
        # A tokenizer.json may ask for truncation; a server must never shorten a prompt in silence.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special = {token for token, entry in added.items() if entry.special}
        self._style = _piece_style(backend, origin)
        self._token_bytes = lru_cache(maxsize=65536)(self._bytes_of)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=False), *(i + 1 for i in added), 0)
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """See `Tokenizer.encode`."""
        # A batch of one: unlike `encode`, it lets other threads run meanwhile.
        (encoding,) = self._backend.encode_batch([well_formed(text)], add_special_tokens=add_special)
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """See `Tokenizer.decode`."""
        known = [i for i in ids if 0 <= i < self.vocab_size]
        return str(self._backend.decode(known, skip_special_tokens=skip_special))

    def token_text(self, token: int) -> str:
        """One token to show to people."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token adds to a text."""
        return self._token_bytes(token)

    def is_special(self, token: int) -> bool:
        """Whether `skip_special` drops the token."""
        return token in self._special

    def stream(self) -> TextStream:
        """A stream that makes `decode`'s text token by token."""
        return ByteStream(self.token_bytes) if self._style is None else PieceStream(self._piece_of, self._style)

    def _piece_of(self, token: int) -> str | None:
        return self._backend.id_to_token(token) if 0 <= token < self.vocab_size else None

    def _bytes_of(self, token: int) -> bytes:
        piece = self._piece_of(token)
        if piece is None:
            return b""
        if self._style is None:
            try:
                return bytes(map(BYTE_OF_CHAR.__getitem__, piece))
            except KeyError:  # an added token, written as it is
                return piece.encode("utf-8")
        if self._style.byte_fallback and (byte := byte_of_piece(piece)) is not None:
            return bytes((byte,))
        return piece.replace(self._style.space, " ").encode("utf-8")


def _piece_style(backend: Backend, origin: Path) -> PieceStyle | None:
    """How the pieces spell text; None: as bytes. UserError if the decoder is of another kind."""
    state: dict[str, Any] = {"type": None}
    if backend.decoder is not None:
        state = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    match steps:
        case [{"type": "ByteLevel"}]:
            return None
        case [{"type": "Metaspace", "replacement": str(mark), "prepend_scheme": str(scheme)}]:
            return PieceStyle(space=mark, bare_first=scheme != "never")
        case [{"type": "Replace", "pattern": {"String": str(mark)}, "content": " "}, *rest]:
            kinds = [step["type"] for step in rest]
            if kinds == ["ByteFallback", "Fuse"]:
                return PieceStyle(space=mark, byte_fallback=True)
            if kinds == ["ByteFallback", "Fuse", "Strip"] and (rest[2]["content"], rest[2]["stop"]) == (" ", 0):
                return PieceStyle(space=mark, byte_fallback=True, strip=rest[2]["start"])
    names = "+".join(str(step["type"]) for step in steps)
    raise UserError(
        f"{origin}: a tokenizer with the decoder {names} is not supported; "
        "ByteLevel, Metaspace and Replace+ByteFallback+Fuse(+Strip) are"
    )


def read_tokenizer_json(folder: Path) -> LibraryTokenizer:
    """`tokenizer.json` and what `tokenizer_config.json` and `generation_config.json` add to it.

    What goes around a prompt is tokenizer.json's to say: `add_bos_token` of the config is not read, as in transformers.
    """
    path = folder / "tokenizer.json"
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path}: {str(error).splitlines()[0]}") from None
    settings = checkpoint.tokenizer_settings(folder)
    texts = checkpoint.special_texts(settings)
    _add_missing(backend, settings, texts, folder / "tokenizer_config.json")
    bos, eos = texts.get("bos_token"), texts.get("eos_token")
    eos_ids = [backend.token_to_id(eos)] if eos else []
    return LibraryTokenizer(
        backend,
        bos_id=backend.token_to_id(bos) if bos else None,
        eos_ids=[i for i in (*eos_ids, *checkpoint.generation_eos_ids(folder)) if i is not None],
        origin=path,
    )


def _add_missing(backend: Backend, settings: Mapping[str, Any], texts: Mapping[str, str], origin: Path) -> None:
    """Add the tokens that only the config knows, and mark the named ones special, as transformers does."""
    known = {entry.content: entry.special for entry in backend.get_added_tokens_decoder().values()}
    missing = []
    for entry in checkpoint.added_tokens(settings, origin).values():
        if entry["content"] not in known:
            flags = {k: bool(entry.get(k, False)) for k in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            missing.append(AddedToken(entry["content"], **flags))
            known[entry["content"]] = flags["special"]
    missing += [AddedToken(t, special=True, normalized=False) for t in dict.fromkeys(texts.values()) if t not in known]
    if missing:
        backend.add_tokens(missing)
