"""Texts on which tokenizers differ when they differ."""

from __future__ import annotations

from hypothesis import strategies as st

TEXTS = (
    "",
    " ",
    "  leading and trailing  ",
    "Hello, world! It's 12:34:56; they'll've 1234567 reasons (or 3.14).",
    "I'M SHOUTING, YOU'RE NOT, HE'D'VE\n",
    "tabs\tand\r\nCRLF\r\n\r\n  \n\n\n   indented   runs      of spaces    ",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # comment\n\n\nclass A:\n\tpass\n",
    "camelCaseWords HTTPServer XMLHttpRequest iPhone15Pro snake_case_2 v1.2.3-rc4",
    "naïve café Zoë Ångström e\u0301 (combining) ﬁ ligature ½ ² Ⅷ ٣٤٥ १२३",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",
    "你好，世界！汉字 mixed with English你好abc123汉 カタカナひらがな 한국어 텍스트",
    "emoji 😀😀 👩‍👩‍👧‍👦 🇩🇪 👍🏽 ☃️ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𠜎",
    "zero\u200bwidth \u200d joiner \u2028 separator \u00a0 nbsp \u3000 ideographic space\ufeff",
    "control \x00\x01\x1b[31m \x7f \x85",
    "https://example.com/a?b=c&d=%20#frag user@example.com C:\\path\\to",
    '{"json": [1, 2.5e-10, null, true], "nested": {"k": "v\\n"}}',
    "a" * 300 + " " * 50 + "!" * 40 + "\n" * 30,
    "\ufffd replacement \ud7ff edge \ue000 private \U0010ffff last",
)

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
"""Any text without surrogates."""

_WORDS = ("the", " the", "THE", "ing", " ", "  ", "\n", "\r\n", "1", "23", "你好", "é", "e\u0301", "😀", "'s", ".")
wordy_text = st.lists(st.sampled_from(_WORDS), max_size=30).map("".join)
"""Texts in which merges apply."""

mixed_text = any_text | wordy_text
