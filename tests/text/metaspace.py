"""A tokenizer.json whose pieces mark spaces and whose decoder is Metaspace."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors


def write_metaspace(folder: Path) -> None:
    """Letters and a few merges; other characters are <unk>."""
    letters = ["<unk>", "<s>", "</s>", "\u2581", *"abcdefghijklmnopqrstuvwxyzéü你好😀.\u0301"]
    merges = [("h", "e"), ("t", "he"), ("\u2581", "the"), ("l", "l"), ("i", "n"), ("\u2581", "\u2581")]
    vocab = {piece: i for i, piece in enumerate([*letters, *map("".join, merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
