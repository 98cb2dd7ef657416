"""Turn token ids into text one at a time, so that the pieces join to exactly what decoding all of them gives."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

REPLACEMENT = "\ufffd"

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextStream(Protocol):
    """The text of one growing sequence of tokens."""

    def push(self, token: int) -> str:
        """The text that became certain with this token: whole characters only, often none."""
        ...

    def finish(self) -> str:
        """The rest, with U+FFFD for what never became a character."""
        ...


def byte_of_piece(piece: str) -> int | None:
    """The byte that a byte-fallback piece such as `<0xE2>` stands for, or None for any other piece."""
    match = _BYTE_PIECE.fullmatch(piece)
    return int(match[1], 16) if match else None


class ByteStream:
    """For vocabularies whose tokens are byte strings: an incremental UTF-8 decoder."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """See `TextStream.push`."""
        return self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        """See `TextStream.finish`."""
        return self._decoder.decode(b"", True)


@dataclass(frozen=True, kw_only=True)
class PieceStyle:
    """How a SentencePiece-like vocabulary spells text."""

    space: str = "\u2581"
    """What stands for a space inside a piece."""
    byte_fallback: bool = False
    """Whether pieces such as `<0xE2>` are bytes."""
    strip: int = 0
    """Most spaces dropped at the start of the text."""
    bare_first: bool = False
    """The first piece loses its space marks (what a Metaspace decoder does)."""


class PieceStream:
    """For vocabularies of text pieces, where single bytes are a fallback.

    A run of byte pieces is text if the whole run is UTF-8, else every byte is U+FFFD; so a run is held until it ends.
    """

    def __init__(self, piece_of: Callable[[int], str | None], style: PieceStyle) -> None:
        self._piece_of = piece_of
        self._style = style
        self._run = bytearray()
        self._strip = style.strip
        self._first = True

    def push(self, token: int) -> str:
        """See `TextStream.push`."""
        piece = self._piece_of(token)
        if piece is None:
            return ""
        if self._style.byte_fallback and (byte := byte_of_piece(piece)) is not None:
            self._run.append(byte)
            return ""
        mark = "" if self._first and self._style.bare_first else " "
        self._first = False
        return self._stripped(self._end_run() + piece.replace(self._style.space, mark))

    def finish(self) -> str:
        """See `TextStream.finish`."""
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text
