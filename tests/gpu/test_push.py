"""Messages written by a kernel: whole when their counter says so."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.driver import check, driver
from headrace.kernels.push import MOST_BYTES, can_push, push

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_bytes", [4, 8, 16, 20, 2048, 14336, 14340, 57344, MOST_BYTES])
def test_message_and_counter(num_bytes: int) -> None:
    source = torch.randint(-(2**31), 2**31 - 1, (num_bytes // 4,), dtype=torch.int32, device="cuda")
    target = torch.full((num_bytes // 4 + 4,), -7, dtype=torch.int32, device="cuda")
    counter = torch.zeros(4, dtype=torch.int32, device="cuda")
    for value in (1, 2):
        push(source, target.data_ptr(), counter.data_ptr(), value)
    assert torch.equal(target[:-4], source) and (target[-4:] == -7).all()
    assert counter.tolist() == [2, 0, 0, 0]


def test_a_stream_that_waits_for_the_counter_reads_the_message() -> None:
    api = driver()
    at_least = api.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ.value
    target = torch.zeros(3584, dtype=torch.int32, device="cuda")
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    reader = torch.cuda.Stream()
    copies = []
    torch.cuda.synchronize()
    for value in range(1, 50):
        with torch.cuda.stream(reader):
            check(api.cuStreamWaitValue32(reader.cuda_stream, counter.data_ptr(), value, at_least), "wait")
            copies.append(target.clone())
        push(torch.full_like(target, value), target.data_ptr(), counter.data_ptr(), value)
        torch.cuda.current_stream().wait_stream(reader)
    torch.cuda.synchronize()
    for value, copied in enumerate(copies, 1):
        assert (copied == value).all()


def test_what_is_no_message() -> None:
    assert not can_push(torch.empty(MOST_BYTES + 4, dtype=torch.int8, device="cuda"))
    assert not can_push(torch.empty(0, device="cuda"))
    assert not can_push(torch.empty(3, dtype=torch.int8, device="cuda"))
