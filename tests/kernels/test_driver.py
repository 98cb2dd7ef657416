"""What stands around CUDA C++ kernels where there is no driver, no compiler or no home."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.errors import Fault, UserError
from headrace.kernels import nvrtc
from headrace.kernels.driver import check, driver


def test_answers() -> None:
    assert check((0, 7), "ask") == 7
    assert check((0,), "tell") is None
    with pytest.raises(Fault, match="ask: 3"):
        check((3, None), "ask")


def test_no_bindings_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, None)
    driver.cache_clear()
    with pytest.raises(UserError, match="pip install cuda-bindings"):
        driver()


def test_images_are_kept_where_there_is_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[str] = []

    def compile_source(text: bytes, name: str, options: list[str]) -> bytes:
        made.append(name)
        return b"image"

    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    monkeypatch.setattr(nvrtc, "_version", lambda: "13.0")
    source = tmp_path / "kernel.cu"
    source.write_text("nothing")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):
        assert nvrtc._image(source, (), "90") == b"image"
    assert made == ["kernel.cu"]

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    for _ in range(2):
        assert nvrtc._image(source, (), "90") == b"image"
    assert len(made) == 3
