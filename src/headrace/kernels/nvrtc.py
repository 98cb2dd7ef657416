"""CUDA C++ kernels compiled at first use with NVRTC for the device at hand, and kept on disk.

The compiler and the driver's interface come with PyTorch's CUDA builds (`cuda.bindings`, libnvrtc), so nothing more is
needed to run from a wheel. Sources include nothing: NVRTC brings no headers.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from headrace.errors import Fault
from headrace.kernels.device import limits
from headrace.kernels.driver import check, driver, nvrtc

DEFAULT_SMEM = 48 << 10
"""Dynamic shared memory that a block may have without asking."""


@dataclass(frozen=True)
class Address:
    """Memory that is no tensor here: another process's."""

    value: int


Argument = torch.Tensor | Address | int | float | None


class Kernel:
    """One compiled `extern "C"` function on one device."""

    def __init__(self, function: Any, name: str) -> None:
        self._function, self._name, self._driver = function, name, driver()
        self._smem = DEFAULT_SMEM
        self._early = self._driver.CUlaunchAttribute()
        self._early.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        self._early.value.programmaticStreamSerializationAllowed = 1

    def __call__(
        self,
        grid: tuple[int, int, int],
        block: int,
        args: Sequence[Argument],
        smem: int = 0,
        *,
        early: bool = False,
    ) -> None:
        """Launch on torch's current stream.

        Tensors pass their address, None a null pointer, int int32 (its lowest 32 bits), float float32.

        early: start while the kernel before it in the stream still runs (programmatic dependent launch), for kernels
        that wait for it themselves, `griddepcontrol.wait`, before they read or write anything that it may touch.
        """
        if not (grid[0] and grid[1] and grid[2]):
            return
        if smem > self._smem:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(self._driver.cuFuncSetAttribute(self._function, attribute, smem), self._name)
            self._smem = smem
        values: list[int | float] = []
        kinds: list[type[Any]] = []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                values.append(arg.data_ptr())
                kinds.append(ctypes.c_void_p)
            elif arg is None or isinstance(arg, Address):
                values.append(0 if arg is None else arg.value)
                kinds.append(ctypes.c_void_p)
            elif isinstance(arg, int):
                values.append(arg)
                kinds.append(ctypes.c_int)
            else:
                values.append(arg)
                kinds.append(ctypes.c_float)
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes, config.hStream = smem, torch.cuda.current_stream().cuda_stream
        if early:
            config.attrs, config.numAttrs = [self._early], 1
        check(self._driver.cuLaunchKernelEx(config, self._function, (tuple(values), tuple(kinds)), 0), self._name)


@cache
def kernel(source: Path, name: str, defines: tuple[tuple[str, int], ...], device_index: int) -> Kernel:
    """The function `name` of a source file with these macros, for one device; compiled, or taken from the cache.

    Raises Fault with the compiler's words, UserError where there is no compiler.
    """
    with torch.cuda.device(device_index):
        torch.cuda.current_stream()  # the context must be there before a module is loaded into it
        torch.zeros(1, device="cuda")
        major, minor = limits(device_index).capability
        image = _image(source, defines, f"{major}{minor}")
        module = check(driver().cuModuleLoadData(image), f"load {source.name}")
        function = check(driver().cuModuleGetFunction(module, name.encode()), name)
    return Kernel(function, name)


def defined(**values: int) -> tuple[tuple[str, int], ...]:
    """Macros in a form that can be a key."""
    return tuple(sorted(values.items()))


def _image(source: Path, defines: tuple[tuple[str, int], ...], capability: str) -> bytes:
    text = source.read_bytes()
    # Hopper's own instructions need the architecture's "a" form; newer parts take the plain one.
    arch = "sm_90a" if capability == "90" else f"sm_{capability}"
    options = [f"--gpu-architecture={arch}", "--std=c++17", "-default-device", "--use_fast_math"]
    options += [f"-D{name}={value}" for name, value in defines]
    key = hashlib.sha256(b"\0".join([text, *(o.encode() for o in options), _version().encode()])).hexdigest()
    folder = _folder()
    if folder is None:
        return compile_source(text, source.name, options)
    path = folder / f"{source.stem}-{key[:32]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    image = compile_source(text, source.name, options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Several ranks may compile the same: each writes its own file and renames it.
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as out:
            out.write(image)
        Path(out.name).replace(path)
    except OSError:
        pass  # a cache that cannot be written costs time, nothing else
    return image


def compile_source(text: bytes, name: str, options: Sequence[str]) -> bytes:
    """A cubin. Raises Fault with the compiler's words."""
    compiler = nvrtc()
    program = check(compiler.nvrtcCreateProgram(text, name.encode(), 0, [], []), name)
    encoded = [option.encode() for option in options]
    status = compiler.nvrtcCompileProgram(program, len(encoded), encoded)[0]
    if int(status):
        size = check(compiler.nvrtcGetProgramLogSize(program), name)
        words = b" " * size
        compiler.nvrtcGetProgramLog(program, words)
        raise Fault(f"{name} does not compile: {words.decode(errors='replace').strip()}")
    size = check(compiler.nvrtcGetCUBINSize(program), name)
    image = b" " * size
    check(compiler.nvrtcGetCUBIN(program, image), name)
    compiler.nvrtcDestroyProgram(program)
    return image


@cache
def _version() -> str:
    major, minor = nvrtc().nvrtcVersion()[1:]
    return f"{major}.{minor}"


def _folder() -> Path | None:
    """Where images are kept; None where a user has no home."""
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:
            return None
    return Path(base) / "headrace" / "kernels"
