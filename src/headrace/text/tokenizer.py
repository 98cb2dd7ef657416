"""What a tokenizer is, and which of the three kinds a checkpoint brings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from headrace.errors import UserError
from headrace.text.stream import TextStream


class Source(Protocol):
    """Where a checkpoint lies: what this package needs to know of a `ModelSource`."""

    @property
    def kind(self) -> str:
        """`folder` or `gguf`."""
        ...

    @property
    def path(self) -> Path:
        """The folder, or the GGUF file."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back. No method fails on an id that has no token: it is worth no text."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that has a token; ids below it may have none."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The token that begins a document."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, the tokenizer's own first."""
        ...

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Ids of a text. The texts of special tokens in it become those tokens, wherever they come from.

        `add_special` puts what the tokenizer wants around a bare prompt (BOS, usually); a rendered chat has it already.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of ids, with U+FFFD where bytes are no character."""
        ...

    def token_text(self, token: int) -> str:
        """One token to show to people, with U+FFFD for a part of a character."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token adds to a text."""
        ...

    def is_special(self, token: int) -> bool:
        """Whether `skip_special` drops the token."""
        ...

    def stream(self) -> TextStream:
        """A stream whose text is `decode(ids, skip_special=False)`, made token by token."""
        ...


def load_tokenizer(source: Source) -> Tokenizer:
    """Read a checkpoint's tokenizer; UserError says what is missing, broken or not supported."""
    # Imported here: a process needs one of the three libraries, never all.
    path = Path(source.path)
    if source.kind == "gguf":
        from headrace.text.tokenizer_gguf import read_tokenizer_gguf

        return read_tokenizer_gguf(path)
    if (path / "tokenizer.json").is_file():
        from headrace.text.tokenizer_json import read_tokenizer_json

        return read_tokenizer_json(path)
    if (path / "tiktoken.model").is_file():
        from headrace.text.tokenizer_tiktoken import read_tokenizer_tiktoken

        return read_tokenizer_tiktoken(path)
    found = [name for name in ("tokenizer.model", "vocab.json", "spiece.model") if (path / name).is_file()]
    hint = f" ({found[0]} alone is not enough: save it as tokenizer.json with transformers)" if found else ""
    raise UserError(f"{path}: no tokenizer; looked for tokenizer.json and tiktoken.model{hint}")
