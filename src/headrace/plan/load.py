"""What the rows of one plan ask of a stage, as the few sums that its price depends on."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.step import Int32Array


@dataclass(frozen=True, slots=True)
class Load:
    """One microbatch. Decode rows are those of one position; the others are chunks of prompts."""

    tokens: int
    """Positions to compute."""
    sampled: int
    """Rows whose last position samples a token."""
    decodes: int
    """Decode rows."""
    context: int
    """Positions that decode rows attend to, together."""
    chunk_context: int = 0
    """Positions that chunks read from the cache, together: each chunk's own and all before it."""
    chunk_pairs: int = 0
    """Pairs of a chunk's position and one that it attends to."""

    @classmethod
    def of_rows(cls, rows: Int32Array) -> Load:
        """Of a plan's rows [R, 4]: slot, start, count, samples."""
        starts, counts = rows[:, 1], rows[:, 2]
        num_rows, tokens, sampled = len(rows), int(counts.sum()), int(rows[:, 3].sum())
        if tokens == num_rows:
            return cls(tokens, sampled, num_rows, int(starts.sum()) + num_rows)
        chunks = counts > 1
        begins, lengths = starts[chunks].astype("i8"), counts[chunks].astype("i8")
        chunk_tokens = int(lengths.sum())
        num_decodes = tokens - chunk_tokens
        before = int(begins.sum())
        return cls(
            tokens=tokens,
            sampled=sampled,
            decodes=num_decodes,
            context=int(starts.sum()) - before + num_decodes,
            chunk_context=before + chunk_tokens,
            chunk_pairs=int((lengths * begins + lengths * (lengths + 1) // 2).sum()),
        )

    @classmethod
    def decode(cls, num_rows: int, length: int) -> Load:
        """So many decode rows, each attending to `length` positions."""
        return cls(num_rows, num_rows, num_rows, num_rows * length)

    @classmethod
    def prompt(cls, start: int, count: int, *, samples: bool) -> Load:
        """Positions start..start+count-1 of one prompt, at least two."""
        return cls(count, int(samples), 0, 0, start + count, count * start + count * (count + 1) // 2)
