"""Errors of torch and the system as one line."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from headrace.errors import Fault, UserError
from headrace.worker.faults import in_words, words_of


def test_memory_that_is_not_there_is_told_with_what_was_asked_and_what_is_free() -> None:
    with (
        pytest.raises(Fault, match=r"out of memory: 4.00 EiB were asked for, \d+ of \d+ bytes are free on this"),
        in_words(),
    ):
        np.empty(1 << 62, dtype=np.uint8)
    with pytest.raises(Fault, match=r"out of memory: \d+ bytes were asked for, \d+ of \d+ bytes are free"), in_words():
        torch.empty(1 << 56, dtype=torch.uint8)


def test_a_gpu_says_which_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5, 80))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of")
    assert words_of(error) == "out of memory on the GPU: 2.50 GiB were asked for, 5 of 80 bytes are free there"


def test_a_devices_error_is_its_first_line() -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported")
    assert words_of(error) == "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("x"), UserError("x"), Fault("x")])
def test_all_else_passes(error: Exception) -> None:
    with pytest.raises(type(error), match=re.escape("x")), in_words():
        raise error
