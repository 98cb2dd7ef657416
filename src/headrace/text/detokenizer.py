"""One request's tokens to text as they come: never half a character, never any part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.text.stream import TextStream
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """What one push added."""

    text: str
    """Text that may be shown now."""
    stopped: bool = False
    """A stop string was found; the text ends before it (or after it, if asked) and the request is over."""
    stop_reason: str | None = None
    """The stop string that was found."""
    num_tokens: int = 0
    """Tokens of this push that were read: all, or up to and including the one that completed the stop string."""
    offsets: tuple[int, ...] = ()
    """For each token read, how many characters of the whole output lie before it. A token that begins inside a
    character counts the whole ones before it; one inside a stop string may lie past the end of the text shown."""


class Detokenizer:
    """Joined, the deltas' texts are `tokenizer.decode` of all tokens, cut at the stop string that is complete first.

    Where several stop strings become complete with the same character, the longest one counts. So the text never
    depends on how characters are spread over tokens, or tokens over pushes. The cost of a token does not grow with the
    length of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        skip_special: bool = True,
        include_stop: bool = False,
    ) -> None:
        if not all(stop):
            raise ValueError("stop: an empty text cannot be a stop string")
        self._is_hidden = tokenizer.is_special if skip_special else _never
        self._stream: TextStream = tokenizer.stream()
        self._matchers = [_Matcher(text) for text in dict.fromkeys(stop)]
        self._include_stop = include_stop
        self._held = ""
        self._num_chars = 0
        self._stop_reason: str | None = None
        self._over = False

    def push(self, tokens: Sequence[int]) -> Delta:
        """Read tokens; once a stop string was found, nothing more is read."""
        shown: list[str] = []
        offsets: list[int] = []
        for token in tokens:
            if self._over:
                break
            offsets.append(self._num_chars)
            if not self._is_hidden(token):
                shown.append(self._read(self._stream.push(token)))
        return Delta("".join(shown), self._stop_reason is not None, self._stop_reason, len(offsets), tuple(offsets))

    def finish(self) -> Delta:
        """The text still held, at the end of the request; calling it again gives nothing."""
        if self._over:
            return Delta("", self._stop_reason is not None, self._stop_reason)
        text = self._read(self._stream.finish())
        if not self._over:
            text, self._held, self._over = text + self._held, "", True
        return Delta(text, self._stop_reason is not None, self._stop_reason)

    def _read(self, piece: str) -> str:
        """Take new text, give what can be shown of it and of what was held."""
        if not piece:
            return ""
        self._num_chars += len(piece)
        if not self._matchers:
            return piece
        text = self._held + piece
        # A match ends in the new piece, since all that could begin one is held; `end` counts in the piece.
        matches = [(end, -len(m.text), m.text) for m in self._matchers if (end := m.read(piece)) is not None]
        if matches:
            end, _, found = min(matches)
            self._stop_reason, self._held, self._over = found, "", True
            return text[: len(text) - len(piece) + end - (0 if self._include_stop else len(found))]
        hold = max(m.matched for m in self._matchers)
        shown = len(text) - hold
        self._held = text[shown:]
        return text[:shown]


class _Matcher:
    """Looks for one text in a stream of characters: Knuth, Morris and Pratt's automaton, grown as far as it is used."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """Length of the longest end of what was read that begins the text."""
        self._fallback = [0, 0]

    def read(self, piece: str) -> int | None:
        """Index in the piece just after the first complete match, or None."""
        text, at = self.text, 0
        while at < len(piece):
            if not self.matched:
                at = piece.find(text[0], at)
                if at < 0:
                    return None
                self.matched = 1
            elif piece[at] == text[self.matched]:
                self.matched += 1
            else:
                self.matched = self._fallback_of(self.matched)
                continue
            at += 1
            if self.matched == len(text):
                return at
        return None

    def _fallback_of(self, length: int) -> int:
        """Length of the longest proper end of `text[:length]` that begins the text."""
        text, fallback = self.text, self._fallback
        while len(fallback) <= length:
            char, shorter = text[len(fallback) - 1], fallback[-1]
            while shorter and text[shorter] != char:
                shorter = fallback[shorter]
            fallback.append(shorter + (text[shorter] == char))
        return fallback[length]


def _never(token: int) -> bool:
    return False
