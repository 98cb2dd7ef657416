"""Kimi-K2's tokenizer: a tiktoken vocabulary with its own split pattern, built without the checkpoint's Python."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import tiktoken

from headrace.errors import UserError
from headrace.text import settings as checkpoint
from headrace.text.stream import ByteStream, TextStream
from headrace.text.unicode import well_formed

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_FIRST}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_FIRST}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How K2 splits a text before merging: Han runs first, at most three digits, contractions with their word."""

_END_OF_TURN = "<|im_end|>"
_LONGEST_RUN = 25_000
"""Longest run of spaces or of other characters that is merged as one: tiktoken's time and stack grow faster than it."""
_RUNS = re.compile(r"\s+|\S+")


class TiktokenTokenizer:
    """Byte tokens below, special tokens above them. Safe to use from several threads."""

    def __init__(
        self,
        ranks: dict[bytes, int],
        specials: Mapping[str, int],
        *,
        hidden: Collection[int],
        bos_id: int | None,
        eos_ids: Sequence[int],
        add_bos: bool = False,
    ) -> None:
        """`specials` are parsed whole wherever they stand in a text; those in `hidden` are not shown."""
        self._encoding = tiktoken.Encoding("k2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
        self._specials = dict(specials)
        # Longest first: a special token may begin another.
        longest_first = sorted(self._specials, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._bytes = {rank: token for token, rank in ranks.items()}
        self._bytes |= {token: text.encode("utf-8") for text, token in self._specials.items()}
        self._hidden = frozenset(hidden)
        self._prefix = [bos_id] if add_bos and bos_id is not None else []
        self.vocab_size = max(self._bytes) + 1
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """See `Tokenizer.encode`."""
        text = well_formed(text)
        ids = list(self._prefix) if add_special else []
        done = 0
        for match in self._special_pattern.finditer(text):
            ids += self._encode_plain(text[done : match.start()])
            ids.append(self._specials[match[0]])
            done = match.end()
        return ids + self._encode_plain(text[done:])

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        ids: list[int] = []
        for part in _cut_runs(text, _LONGEST_RUN):
            ids += self._encoding.encode_ordinary(part)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """See `Tokenizer.decode`."""
        shown = (i for i in ids if not (skip_special and i in self._hidden))
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        """One token to show to people."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token adds to a text."""
        return self._bytes.get(token, b"")

    def is_special(self, token: int) -> bool:
        """Whether `skip_special` drops the token."""
        return token in self._hidden

    def stream(self) -> TextStream:
        """A stream that makes `decode`'s text token by token."""
        return ByteStream(self.token_bytes)


def _cut_runs(text: str, longest: int) -> Iterator[str]:
    """The text in parts, cut so that no run of spaces or of other characters is longer than `longest`."""
    done = 0
    if len(text) > longest:
        for run in _RUNS.finditer(text):
            for cut in range(run.start() + longest, run.end(), longest):
                yield text[done:cut]
                done = cut
    yield text[done:]


def read_tokenizer_tiktoken(folder: Path) -> TiktokenTokenizer:
    """`tiktoken.model`, with the special tokens of `tokenizer_config.json`."""
    path, config_path = folder / "tiktoken.model", folder / "tokenizer_config.json"
    settings = checkpoint.tokenizer_settings(folder)
    kind = settings.get("tokenizer_class", "TikTokenTokenizer")
    if kind != "TikTokenTokenizer":
        raise UserError(f"{config_path}: tokenizer_class {kind!r} is not supported with tiktoken.model; Kimi-K2's is")
    ranks = _read_ranks(path)
    added = checkpoint.added_tokens(settings, config_path)
    taken = [token for token in added if token < len(ranks)]
    if taken:
        raise UserError(f"{config_path}: added_tokens_decoder[{taken[0]}] is an id of tiktoken.model's {len(ranks)}")
    specials = {entry["content"]: token for token, entry in added.items()}
    texts = checkpoint.special_texts(settings)
    # The tokenizer's own end is that of a document; a chat turn ends with its own token.
    ends = [specials.get(texts.get("eos_token", "")), specials.get(_END_OF_TURN)]
    return TiktokenTokenizer(
        ranks,
        specials,
        hidden=[token for token, entry in added.items() if entry.get("special", True)],
        bos_id=specials.get(texts.get("bos_token", "")),
        eos_ids=[token for token in (*ends, *checkpoint.generation_eos_ids(folder)) if token is not None],
        add_bos=bool(settings.get("add_bos_token")),
    )


def _read_ranks(path: Path) -> dict[bytes, int]:
    """The lines `base64 rank` of a tiktoken vocabulary; the ranks must be 0, 1, 2, ... in some order."""
    ranks: dict[bytes, int] = {}
    # Not tiktoken's own reader: it keeps copies in a shared temporary folder and trusts what it finds there.
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(f"{path}: line {number} is not a token in base64 and its rank") from None
    if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(f"{path}: the ranks are not 0 to {len(ranks) - 1}, each once")
    missing = [byte for byte in range(256) if bytes((byte,)) not in ranks]
    if missing:
        raise UserError(f"{path}: no token for the byte {missing[0]:#04x}")
    return ranks
