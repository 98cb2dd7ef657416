"""The tokenizer inside a GGUF file: byte-level BPE or SentencePiece, rebuilt for the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from headrace.errors import CheckpointError, UserError
from headrace.text.tokenizer_json import BYTE_OF_CHAR, CHAR_OF_BYTE, LibraryTokenizer
from headrace.weights.gguf_file import read_gguf

_ARRAYS = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores", "token_type"))
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# None is GPT-2's own split. SmolLM was trained with digits cut off first, which differs for two or more spaces or line
# breaks before a digit; transformers reads its GGUF files with GPT-2's split, and the ids of transformers are promised.
_SPLITS = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
}


def read_tokenizer_gguf(path: Path) -> LibraryTokenizer:
    """Build the tokenizer that a GGUF file's metadata describe; UserError names what is missing or not supported."""
    metadata = read_gguf(path, _ARRAYS).metadata
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items() if "tokenizer.ggml." in key}
    kind, tokens = str(ggml.get("model")), ggml.get("tokens")
    if not tokens:
        raise UserError(f"{path}: no tokenizer; looked for tokenizer.ggml.tokens in the file's metadata")
    if not (isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens must be texts")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise UserError(f"{path}: tokenizer.ggml.model {kind!r} is not supported; gpt2 and llama are")
    types = ggml.get("token_type") or [1] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.token_type is not one number for each of {len(tokens)} tokens")
    try:
        backend = builders[kind](tokens, types, ggml)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:  # the library raises bare Exception, for a merge of unknown tokens for one
        raise CheckpointError(f"{path}: tokenizer.ggml.merges: {str(error).splitlines()[0]}") from None
    bos, eos = _token_id(tokens, ggml, "bos"), _token_id(tokens, ggml, "eos")
    # Files from before the flags: SentencePiece and Llama 3 put BOS first, the others do not.
    adds_bos = kind == "llama" or _SPLITS.get(str(ggml.get("pre", "default"))) == _LLAMA3_SPLIT
    _surround(
        backend,
        bos=tokens[bos] if bos is not None and ggml.get("add_bos_token", adds_bos) else None,
        eos=tokens[eos] if eos is not None and ggml.get("add_eos_token", False) else None,
    )
    ends = (_token_id(tokens, ggml, name) for name in ("eos", "eot", "eom"))
    return LibraryTokenizer(backend, bos_id=bos, eos_ids=[i for i in ends if i is not None], origin=path)


def _surround(backend: Backend, *, bos: str | None, eos: str | None) -> None:
    """Make `add_special` put these tokens, and nothing else, before and after a text."""
    parts = [*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])]
    tokens = [(text, backend.token_to_id(text)) for text in (bos, eos) if text]
    backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=tokens)


def _token_id(tokens: Sequence[str], ggml: Mapping[str, Any], name: str) -> int | None:
    """Id of a named special token, if the file names one that exists."""
    index = ggml.get(f"{name}_token_id")
    return index if isinstance(index, int) and 0 <= index < len(tokens) else None


def gguf_special_texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... of metadata read with `tokenizer.ggml.tokens`."""
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    tokens = ggml.get("tokens") or []
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _token_id(tokens, ggml, key) for name, key in names.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None}


def _byte_level(tokens: list[str], types: list[int], ggml: Mapping[str, Any]) -> Backend:
    pre = str(ggml.get("pre", "default"))
    if pre not in _SPLITS:
        raise UserError(f"tokenizer.ggml.pre {pre!r} is not supported; {', '.join(_SPLITS)} are")
    if not ggml.get("merges"):
        raise UserError("no tokenizer.ggml.merges in the file's metadata")
    whole = (_CONTROL, _USER_DEFINED)
    vocab = {t if kind in whole else _as_bytes(t): i for i, (t, kind) in enumerate(zip(tokens, types, strict=True))}
    merges = [_pair(merge) for merge in ggml["merges"]]
    split = _SPLITS[pre]
    # Llama 3 takes a piece that is a token whole, even where no merges lead to it.
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=split == _LLAMA3_SPLIT))
    if split is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if split == _QWEN2_SPLIT:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    _add_special(backend, tokens, types, special=(_CONTROL,), plain=(_USER_DEFINED,))
    return backend


def _as_bytes(token: str) -> str:
    """The token in the byte alphabet; some converters wrote a few tokens as plain text."""
    if all(char in BYTE_OF_CHAR for char in token):
        return token
    return "".join(CHAR_OF_BYTE[byte] for byte in token.encode("utf-8"))


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(tokens: list[str], types: list[int], ggml: Mapping[str, Any]) -> Backend:
    scores = ggml.get("scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise UserError(f"tokenizer.ggml.scores is not one number for each of {len(tokens)} tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    prefix = bool(ggml.get("add_space_prefix", True))
    unknown_id = _token_id(tokens, ggml, "unknown")
    unknown = None if unknown_id is None else tokens[unknown_id]
    merges = _merges_of_scores(vocab, scores)
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if prefix else "never", split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    _add_special(backend, tokens, types, special=(_CONTROL, _UNKNOWN), plain=(_USER_DEFINED,))
    return backend


def _merges_of_scores(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that lead to each token, best score first: SentencePiece's BPE stores no merges of its own."""
    found = []
    for token, i in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[i], -len(left), -len(right), i, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_special(
    backend: Backend, tokens: list[str], types: list[int], *, special: tuple[int, ...], plain: tuple[int, ...]
) -> None:
    """Make tokens that stand for themselves match whole in a text; the special ones are not shown."""
    for kinds, hidden in ((special, True), (plain, False)):
        found = [t for t, kind in zip(tokens, types, strict=True) if kind in kinds and t and "\u2581" not in t]
        backend.add_tokens([AddedToken(text, normalized=False, special=hidden) for text in found])
