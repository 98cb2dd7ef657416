"""What torch and the system say when they fail, in one line with the figures that matter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from headrace.errors import Fault, UserError

_ASKED = re.compile(r"(?:[Tt]ried|Unable) to allocate ([\d.]+ \w+)")


@contextmanager
def in_words() -> Iterator[None]:
    """Turn memory that is not there and a device's error into a Fault of one line; all else passes."""
    try:
        yield
    except (UserError, Fault):
        raise
    except (RuntimeError, MemoryError) as error:
        words = words_of(error)
        if words is None:
            raise
        raise Fault(words) from error


def words_of(error: RuntimeError | MemoryError) -> str | None:
    """The line; None for an error of another kind."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory on the GPU: {_asked(text)}, {_free_there()}"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        memory = psutil.virtual_memory()
        return f"out of memory: {_asked(text)}, {memory.available} of {memory.total} bytes are free on this machine"
    if "CUDA error" in text:
        # What follows is advice for a debugger.
        return text[text.index("CUDA error") :].splitlines()[0]
    return None


def _asked(text: str) -> str:
    match = _ASKED.search(text)
    return f"{match[1]} were asked for" if match else "more was asked for than there is"


def _free_there() -> str:
    free, total = torch.cuda.mem_get_info()
    return f"{free} of {total} bytes are free there"
