"""Log-probabilities in the two shapes that OpenAI has: parallel lists for completions, objects for chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.api.generation import Entry
from headrace.api.shapes import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from headrace.step import TokenLogprobs
from headrace.text.detokenizer import Detokenizer
from headrace.text.tokenizer import Tokenizer

_FLOOR = -9999.0
"""JSON has no -inf; clients know this number for it."""


def completion_logprobs(tokenizer: Tokenizer, entries: Sequence[Entry], start: int) -> CompletionLogprobs:
    """Entries of generated tokens; `start` characters of the choice's text lie before the generated text."""
    return CompletionLogprobs(
        tokens=[_key(tokenizer, entry.token) for entry, _ in entries],
        token_logprobs=[max(entry.logprob, _FLOOR) for entry, _ in entries],
        top_logprobs=[_top(tokenizer, entry) for entry, _ in entries],
        text_offset=[start + offset for _, offset in entries],
    )


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], entries: Iterable[TokenLogprobs], text_len: int
) -> CompletionLogprobs:
    """Entries of an echoed prompt of `text_len` characters: the first token has none, nothing lies before it."""
    offsets = Detokenizer(tokenizer, skip_special=False).push(prompt).offsets
    found = list(entries)
    return CompletionLogprobs(
        tokens=[_key(tokenizer, token) for token in prompt],
        token_logprobs=[None, *(max(entry.logprob, _FLOOR) for entry in found)],
        top_logprobs=[None, *(_top(tokenizer, entry) for entry in found)],
        text_offset=[min(offset, text_len) for offset in offsets],
    )


def joined(first: CompletionLogprobs | None, second: CompletionLogprobs | None) -> CompletionLogprobs | None:
    """The entries of both, in order."""
    if first is None or second is None:
        return first or second
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[Entry]) -> ChatLogprobs:
    """Entries of generated tokens."""
    content = []
    for entry, _ in entries:
        top = [
            TopLogprob(tokenizer.token_text(token), max(logprob, _FLOOR), list(tokenizer.token_bytes(token)))
            for token, logprob in zip(entry.top_tokens, entry.top_logprobs, strict=True)
        ]
        text, raw = tokenizer.token_text(entry.token), tokenizer.token_bytes(entry.token)
        content.append(ChatLogprob(text, max(entry.logprob, _FLOOR), list(raw), top))
    return ChatLogprobs(content)


def _top(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, float]:
    top = {
        _key(tokenizer, token): max(logprob, _FLOOR)
        for token, logprob in zip(entry.top_tokens, entry.top_logprobs, strict=True)
    }
    top.setdefault(_key(tokenizer, entry.token), max(entry.logprob, _FLOOR))
    return top


def _key(tokenizer: Tokenizer, token: int) -> str:
    """A token as a name: parts of characters, which would all read U+FFFD, as OpenAI spells them."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
