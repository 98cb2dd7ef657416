"""Tokenizers small enough for a random checkpoint of a few hundred tokens, written as real checkpoints bring them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

ENDOFTEXT, IM_START, IM_END = 256, 257, 258
TINY_SPECIALS = {"<|endoftext|>": ENDOFTEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END}

K2_SPECIALS = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<think>",
    "</think>",
    "[UNK]",
    "[PAD]",
)
"""K2's special tokens, in the order in which they follow a tiny vocabulary."""
K2_SHOWN = (*K2_SPECIALS[7:14],)
"""Those that are parsed whole but not hidden: an answer's tool calls and thinking are read from its text."""

K2_TEMPLATE = """\
{%- macro show(content) -%}
  {%- if content is string -%}{{ content }}
  {%- else -%}{%- for part in content -%}{{ part['text'] }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
  {%- if loop.first and messages[0]['role'] != 'system' -%}
    <|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>
  {%- endif -%}
  {%- set role = 'system' if message['role'] == 'tool' else message['role'] -%}
  <|im_{{ role }}|>{{ message.get('name') or message['role'] }}<|im_middle|>
  {%- if message['role'] == 'assistant' and message.get('tool_calls') -%}
    {{ show(message.get('content') or '') }}<|tool_calls_section_begin|>
    {%- for call in message['tool_calls'] -%}
      <|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
      {%- if call['function']['arguments'] is string -%}{{ call['function']['arguments'] }}
      {%- else -%}{{ call['function']['arguments'] | tojson }}{%- endif -%}
      <|tool_call_end|>
    {%- endfor -%}
    <|tool_calls_section_end|>
  {%- elif message['role'] == 'tool' -%}
    ## Return of {{ message['tool_call_id'] }}
{{ show(message['content']) }}
  {%- elif message['content'] is not none -%}
    {{ show(message['content']) }}
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|>
{%- endif -%}
"""


def byte_alphabet() -> dict[int, str]:
    """The character that byte-level vocabularies write for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def write_tiny_tokenizer(folder: Path, vocab_size: int = 272, *, chat_template: str | None = CHATML) -> None:
    """Write tokenizer.json and tokenizer_config.json: one token a byte, so a text of n bytes is n tokens.

    Ids 0 to 255 are the bytes, 256 to 258 `<|endoftext|>`, `<|im_start|>`, `<|im_end|>` (the end of an answer), and the
    rest up to `vocab_size` words that no text is encoded to, so that whatever a random model says has a text.
    """
    assert vocab_size >= 256 + len(TINY_SPECIALS)
    alphabet = byte_alphabet()
    vocab = {alphabet[byte]: byte for byte in range(256)} | TINY_SPECIALS
    vocab |= {f"{alphabet[0x20]}w{i}": i for i in range(len(vocab), vocab_size)}
    added = [
        {"id": i, "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for text, i in TINY_SPECIALS.items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocab, "merges": []},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


def write_tiny_tiktoken(folder: Path, vocab_size: int = 272, *, chat_template: str | None = K2_TEMPLATE) -> None:
    """Write tiktoken.model, tokenizer_config.json and chat_template.jinja as Kimi-K2 ships them.

    The last 16 ids are `K2_SPECIALS`; what lies between them and the 256 bytes are merges.
    """
    num_ranks = vocab_size - len(K2_SPECIALS)
    assert num_ranks >= 256
    words = [*_MERGES, *(f" w{i}" for i in range(num_ranks))][: num_ranks - 256]
    tokens = [bytes((byte,)) for byte in range(256)] + [word.encode() for word in words]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    added = {
        str(num_ranks + i): {"content": text, "special": text not in K2_SHOWN}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, text in enumerate(K2_SPECIALS)
    }
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiktoken.model").write_text("".join(lines), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, "utf-8")


_MERGES = (
    *("th", "he", "in", "er", "an", "re", " t", " a", " the", "ing", "ll", "lo", "hel", "hello", " w", "or", " wor"),
    *(
        "ld",
        " world",
        "12",
        "34",
        "123",
        "  ",
        "    ",
        "\n\n",
        "def",
        "'s",
        "é",
        "你",
        "好",
        "你好",
        "世",
        "界",
        "世界",
    ),
    *("😀", "の", "ing ", "ed", "on", "at", "en", "es", "st", "ou", "The", "IN", "And", "00", "000"),
)
"""Tokens of several bytes for the tiktoken vocabulary, most frequent first."""
