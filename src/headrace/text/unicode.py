"""Make any Python string encodable as UTF-8."""

from __future__ import annotations


def well_formed(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates (which JSON may carry) replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
