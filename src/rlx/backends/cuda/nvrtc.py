"""Compiling CUDA C with NVRTC: source and architecture in, a cubin out. Needs no GPU; results are cached on disk."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.backends import cache_folder
from rlx.backends.cuda.cubin import Resources, resources
from rlx.backends.cuda.wheels import require_wheels
from rlx.errors import LowerError
from rlx.fast_dataclass import dataclass

OPTIONS = ("--fmad=false", "--std=c++17", "--ptxas-options=-v")  # products and sums fuse only where the code says fma
_KIND = "cubins"  # folder of the cache


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of a translation unit, and the log of the compiler."""

    code: bytes
    log: str

    def resources(self) -> Mapping[str, Resources]:
        """What each kernel takes, by name."""
        return resources(self.code)


@functools.cache
def version() -> str:
    """The version of NVRTC."""
    library = require_wheels().nvrtc
    _, major, minor = library.nvrtcVersion()
    return f"{major}.{minor}"


def compile_source(source: str, arch: str, *, options: Sequence[str] = ()) -> Cubin:
    """Compiles a translation unit for an architecture such as `sm_90a`, unless the cache has it."""
    flags = (f"--gpu-architecture={arch}", *OPTIONS, *options)
    key = hashlib.blake2b("\0".join((version(), *flags, source)).encode(), digest_size=16).hexdigest()
    store = cache_folder.current()
    stored = store.read(_KIND, key)
    if stored is not None:
        log, _, code = stored.partition(b"\0")
        return Cubin(code, log.decode())
    cubin = _compile(source, flags, "CUBIN")
    store.write(_KIND, key, cubin.log.encode() + b"\0" + cubin.code)
    global _compiled
    _compiled += 1
    return cubin


_compiled = 0


def units_compiled() -> int:
    """Number of translation units this process has compiled."""
    return _compiled


def compile_ptx(source: str, arch: str) -> str:
    """PTX of a translation unit for a virtual architecture such as `compute_90a`."""
    flags = (f"--gpu-architecture={arch}", *(option for option in OPTIONS if "ptxas" not in option))
    return _compile(source, flags, "PTX").code.decode().rstrip("\0")


def _compile(source: str, flags: Sequence[str], form: str) -> Cubin:
    """Compiles to a form that NVRTC has a getter for: CUBIN or PTX."""
    library = require_wheels().nvrtc
    error, program = library.nvrtcCreateProgram(source.encode(), b"rlx.cu", 0, [], [])
    _check(library, error)
    try:
        (error,) = library.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        log = _bytes(library, program, library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog)
        text = log.decode(errors="replace").rstrip("\0 \n")
        if error != library.nvrtcResult.NVRTC_SUCCESS:
            raise LowerError(f"cuda: generated code does not compile: {_first_error(text)}", notes=[text[:4000]])
        size, read = getattr(library, f"nvrtcGet{form}Size"), getattr(library, f"nvrtcGet{form}")
        return Cubin(_bytes(library, program, size, read), text)
    finally:
        library.nvrtcDestroyProgram(program)


def _first_error(log: str) -> str:
    return next((line for line in log.splitlines() if "error" in line), "no reason given")


def _bytes(library: Any, program: Any, size_of: Any, read: Any) -> bytes:
    error, size = size_of(program)
    _check(library, error)
    buffer: bytes = b" " * (size + 1)  # NVRTC writes into it: Python shares all strings of one byte
    (error,) = read(program, buffer)
    _check(library, error)
    return buffer[:size]


def _check(library: Any, error: Any) -> None:
    if error != library.nvrtcResult.NVRTC_SUCCESS:
        raise LowerError(f"cuda: NVRTC reports {library.nvrtcGetErrorString(error)[1].decode()}")
