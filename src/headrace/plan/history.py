"""What starts of `headrace serve` were predicted to take, and took: a JSON line each, in the user's state folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

MOST = 200
"""Starts that are kept."""


class Figures(msgspec.Struct, frozen=True):
    """Of a start, predicted or measured; what is not known is left out."""

    weight_bytes: list[float]
    """By stage, of each rank."""
    kv_tokens: list[int] = []
    """By stage, what it alone could hold."""
    prompt_s: float = 0.0
    """The warm-up's prompt, from being planned to its token."""
    decode_s: float = 0.0
    """A decode step after it, from token to token, in the mean."""


class Start(msgspec.Struct, frozen=True):
    """One start."""

    time: str
    model: str
    layout: str
    split: list[int]
    device: str
    prompt_tokens: int
    predicted: Figures
    measured: Figures


def history_path() -> Path:
    """$XDG_STATE_HOME, else ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "headrace" / "plan-history.jsonl"


def keep(start: Start, path: Path | None = None) -> None:
    """Append a start; the oldest go. Raises OSError where it cannot be written."""
    path = path or history_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_bytes().splitlines()[1 - MOST :] if path.is_file() else []
    # Another service may write at the same time: never half a file.
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_bytes(b"\n".join([*lines, msgspec.json.encode(start), b""]))
    new.replace(path)


def read_history(path: Path | None = None) -> list[Start]:
    """All that is kept, oldest first; lines of another version are left out."""
    path = path or history_path()
    if not path.is_file():
        return []
    found = []
    for line in path.read_bytes().splitlines():
        try:
            found.append(msgspec.json.decode(line, type=Start))
        except msgspec.MsgspecError:
            continue
    return found


def errors(start: Start) -> dict[str, float]:
    """Predicted by measured less 1, of the worst stage: weights, kv_tokens, prompt_s, decode_s where both are known."""
    predicted, measured = start.predicted, start.measured
    found = {}
    for name in ("weight_bytes", "kv_tokens"):
        pairs = zip(getattr(predicted, name), getattr(measured, name), strict=False)
        each = [ours / theirs - 1 for ours, theirs in pairs if theirs]
        if each:
            found[name] = max(each, key=abs)
    for name in ("prompt_s", "decode_s"):
        ours, theirs = getattr(predicted, name), getattr(measured, name)
        if ours and theirs:
            found[name] = ours / theirs - 1
    return found


def history_text(starts: Sequence[Start]) -> str:
    """For people: a line a start, then the mean of the errors' sizes."""
    return "\n".join(_lines(starts))


def _lines(starts: Sequence[Start]) -> Iterator[str]:
    if not starts:
        yield f"no start of headrace serve is on record ({history_path()})"
        return
    names = {"weight_bytes": "weights", "kv_tokens": "KV tokens", "prompt_s": "prompt", "decode_s": "decode"}
    width = max(len(start.model) for start in starts)
    yield "predicted less measured, as a share of measured; of memory the worst stage"
    yield f"{'start':16}  {'model':{width}}  {'layout':8}  {'on':4}" + "".join(f"{name:>11}" for name in names.values())
    all_errors = [errors(start) for start in starts]
    for start, found in zip(starts, all_errors, strict=True):
        cells = "".join(f"{found[name]:>+11.1%}" if name in found else f"{'-':>11}" for name in names)
        yield f"{start.time[:16]}  {start.model:{width}}  {start.layout:8}  {start.device:4}{cells}"
    cells = ""
    for name in names:
        sizes = [abs(found[name]) for found in all_errors if name in found]
        cells += f"{sum(sizes) / len(sizes):>11.1%}" if sizes else f"{'-':>11}"
    yield f"{'mean size':16}  {'':{width}}  {'':8}  {'':4}{cells}"
