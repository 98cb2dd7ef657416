"""Any layout, split, chunk, page size, load and memory gives what `transformers` gives, through the real server."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from headrace.text.tokenizer import load_tokenizer
from headrace.weights.source import resolve
from tests.parity import matrix
from tests.parity.matrix import Case
from tests.parity.reference import check, prompts
from tests.parity.server import complete, metric, names_of, served
from tests.tiny import TINY, VOCAB, load_reference, write_tiny

MAX_TOKENS = {9: 12, 40: 6}
"""By load."""
TIGHT_TOKENS = 40
"""With tight pages: more than the room for growth that an admission leaves."""
LONGEST = 90


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@cache
def model(root: Path, family: str) -> tuple[Path, Any, dict[str, int]]:
    """A family's checkpoint, its reference, and its tokens' names."""
    folder = write_tiny(root / family, family, seed=7, spelling="v5" if TINY.index(family) % 2 else "v4")
    tokenizer = load_tokenizer(resolve(str(folder), say=lambda _: None))
    return folder, load_reference(folder, root / f"{family}-plain"), names_of(tokenizer, VOCAB)


def run(case: Case, root: Path, tmp_path: Path) -> None:
    folder, reference, names = model(root, case.family)
    tight = case.pressure == "tight"
    longest = LONGEST if case.chunk > 1 and not tight else 30
    max_tokens = TIGHT_TOKENS if tight else MAX_TOKENS[case.load]
    if case.chunk == 1 and case.load == 40:
        longest, max_tokens = 6, 4  # a step a token: what is shown is shown by fewer
    alone = [max(prompts(1, 3, longest=longest), key=len)]
    asked = prompts(case.load, case.load, longest=longest)
    max_len = longest + max_tokens
    # Tight: two are let in and grow until one must go; the longest alone always fits.
    room = max_len + 30 if tight else 64 * max_len
    flags = ["--max-len", str(max_len), "--kv-memory", str(room * kv_bytes(case)), "--dtype", "float32"]
    flags += ["--run-ahead", str(case.run_ahead)]
    with served(str(folder), *case.flags, *flags, "--device", "cpu", stderr=tmp_path / "log") as server:
        got = [w for together in (alone, asked) for w in complete(server, together, max_tokens, names, seed=3)]
        for i, written in enumerate(got):
            assert len(written.tokens) == max_tokens
            check(reference, written, f"{case.name}, request {i}")
        # The engine tells its status when it falls silent.
        assert any(metric(server, "headrace:num_requests_running") == 0 for _ in range(500))
        assert (metric(server, "headrace:num_preemptions_total") > 0) == tight
        if case.load > 1 and case.page_size < longest // 3:
            assert metric(server, "headrace:prefix_cache_hits_total") > 0


def kv_bytes(case: Case) -> int:
    """Bytes of a token on the rank that holds most of them."""
    layers = max(map(int, split.split(","))) if (split := _flag(case, "--split")) else -(-case.num_layers // case.pp)
    mla = case.family.startswith(("deepseek", "kimi"))
    head_dim = 32 if case.family.startswith("qwen") else 16
    values = 40 if mla else 2 * 2 * head_dim // (1 if case.ranks == "tp1" else 2)
    return layers * values * 4


def _flag(case: Case, name: str) -> str | None:
    return case.flags[case.flags.index(name) + 1] if name in case.flags else None


def test_no_pair_is_left_out() -> None:
    every = set().union(*map(matrix.pairs_of, matrix.combinations()))
    assert every == set().union(*map(matrix.pairs_of, matrix.pairwise())), "choose anew: python -m tests.parity.choose"
    for factor in ("pp", "ranks", "split", "chunk", "page_size", "pressure", "load"):
        met = {(getattr(case, factor), case.run_ahead) for case in matrix.pairwise()}
        assert len(met) == 3 * len({value for value, _ in met}), f"{factor}: another start of run_ahead's choice"


ALWAYS = [*matrix.pairwise()[1::2], matrix.pairwise()[4]]
"""For each check-in: every family and every value of the others is among them."""
EVERY_PAIR = [
    pytest.param(case, id=case.name, marks=[] if case in ALWAYS else [pytest.mark.parity]) for case in matrix.pairwise()
]


def test_every_value_is_met_without_being_asked() -> None:
    for factor in ("family", "pp", "ranks", "split", "chunk", "page_size", "pressure", "load", "run_ahead"):
        every = {getattr(case, factor) for case in matrix.pairwise()}
        assert {getattr(case, factor) for case in ALWAYS} == every, factor


@pytest.mark.parametrize("case", EVERY_PAIR)
def test_every_pair(case: Case, root: Path, tmp_path: Path) -> None:
    run(case, root, tmp_path)


@pytest.mark.parity
@pytest.mark.parametrize("case", matrix.whole(), ids=lambda case: case.name)
def test_every_layout(case: Case, root: Path, tmp_path: Path) -> None:
    run(case, root, tmp_path)
