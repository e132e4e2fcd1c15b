"""LLVM through the C functions of llvmlite's library: IR text in, objects and assembly out.

llvmlite's Python classes are not used: importing them takes longer than compiling the driver, and they let one thread
at a time into LLVM, which itself supports several threads, each with a context and a machine of its own. Short
functions keep the GIL, since a thread that releases it may wait 5 ms to get it back; code generation releases it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import mmap
import os
from collections.abc import Callable
from ctypes import POINTER, byref, c_bool, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

from rlx.errors import CapabilityError, RlxError
from rlx.free_memory import fits, lacking, show

_OUT = POINTER(c_char_p)  # output parameter for a text, such as an error message
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "InitializeNativeTarget": (None, []),
    "InitializeNativeAsmPrinter": (None, []),
    "InitializeNativeAsmParser": (None, []),
    "InitializeAllTargetInfos": (None, []),
    "InitializeAllTargets": (None, []),
    "InitializeAllTargetMCs": (None, []),
    "InitializeAllAsmPrinters": (None, []),
    "GetVersionInfo": (c_uint, []),
    "GetDefaultTargetTriple": (None, [_OUT]),
    "GetTargetFromTriple": (c_void_p, [c_char_p, _OUT]),
    "CreateTargetMachine": (
        c_void_p, [c_void_p, c_char_p, c_char_p, c_char_p, c_int, c_char_p, c_char_p, c_int, c_int, c_char_p]
    ),
    "CreateTargetMachineData": (c_void_p, [c_void_p]),
    "CopyStringRepOfTargetData": (None, [c_void_p, _OUT]),
    "DisposeTargetData": (None, [c_void_p]),
    "ContextCreate": (c_void_p, []),
    "ContextDispose": (None, [c_void_p]),
    "ParseAssembly": (c_void_p, [c_void_p, c_char_p, _OUT]),
    "SetTarget": (None, [c_void_p, c_char_p]),
    "SetDataLayout": (None, [c_void_p, c_char_p]),
    "VerifyModule": (c_bool, [c_void_p, _OUT]),
    "DisposeModule": (None, [c_void_p]),
    "TargetMachineEmitToMemory": (c_void_p, [c_void_p, c_void_p, c_int, _OUT]),
    "GetBufferStart": (c_void_p, [c_void_p]),
    "GetBufferSize": (c_size_t, [c_void_p]),
    "DisposeMemoryBuffer": (None, [c_void_p]),
    "DisposeString": (None, [c_char_p]),
}  # fmt: skip
_LONG = {"TargetMachineEmitToMemory"}  # releases the GIL


class Refused(Exception):
    """LLVM's error message for a module."""


@functools.cache
def library() -> Path:
    """Path of the library that contains LLVM."""
    spec = importlib.util.find_spec("llvmlite")
    folder = Path(spec.origin).parent / "binding" if spec is not None and spec.origin else None
    files = sorted(folder.glob("*llvmlite*")) if folder is not None else []
    if files:
        return files[0]
    from llvmlite.binding import ffi  # packaged differently

    return Path(ffi.lib._name)


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    path, functions = str(library()), {}
    try:
        quick, long = ctypes.PyDLL(path), ctypes.CDLL(path)
    except OSError as error:
        raise _not_loaded(path, str(error)) from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(long if name in _LONG else quick, f"LLVMPY_{name}")
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    for name in ("InitializeNativeTarget", "InitializeNativeAsmPrinter", "InitializeNativeAsmParser"):
        functions[name]()  # inline assembly needs the parser
    return functions


def _not_loaded(path: str, why: str) -> RlxError:
    size = Path(path).stat().st_size
    if not fits(size) or any(word in why for word in ("map", "allocate")):  # wording of dynamic linkers
        hint = "is there a limit on memory (ulimit -v)? Compiling needs about 1 GiB of addresses"
        return lacking(f"LLVM: {path} needs {show(size)} of memory to be loaded", hint, [why])
    return CapabilityError(f"LLVM: {path} cannot be loaded", hint="install llvmlite again", notes=[why])


def load() -> None:
    """Loads LLVM for code that uses it through llvmlite."""
    _functions()


def release() -> None:
    """Releases the pages of LLVM's code (50 MB) on Linux; a later compilation reads them from the file again."""
    maps = Path("/proc/self/maps")
    if not _functions.cache_info().currsize or not maps.exists():
        return
    libc, path = ctypes.CDLL(None), os.path.realpath(library())
    for line in maps.read_text(errors="replace").splitlines():
        if line.endswith(f" {path}") and " r-xp " in line:  # unmodified code pages
            start, end = (int(place, 16) for place in line.split()[0].split("-"))
            libc.madvise(c_void_p(start), c_size_t(end - start), mmap.MADV_DONTNEED)


def _call(name: str, *arguments: Any) -> tuple[Any, str]:
    """The result of a function and the text it returns."""
    functions, text = _functions(), c_char_p()
    result = functions[name](*arguments, byref(text))
    told = (text.value or b"").decode(errors="replace")
    functions["DisposeString"](text)
    return result, told


def version() -> tuple[int, ...]:
    """LLVM's version."""
    number: int = _functions()["GetVersionInfo"]()
    return number >> 16 & 255, number >> 8 & 255, number & 255


def default_triple() -> str:
    """LLVM's triple of this machine."""
    return _call("GetDefaultTargetTriple")[1]


@functools.cache
def init_all_targets() -> None:
    """Enables code generation for other architectures."""
    for name in ("TargetInfos", "Targets", "TargetMCs", "AsmPrinters"):
        _functions()[f"InitializeAll{name}"]()


class Machine:
    """A code generator, for one thread at a time. Lives as long as the process.

    Small code model and PIC: a constant is one RIP-relative operand, not a movabs and a load.
    """

    def __init__(self, triple: str, cpu: str, features: str) -> None:
        functions = _functions()
        target, problem = _call("GetTargetFromTriple", triple.encode())
        if not target:
            raise Refused(problem)
        self._triple = triple.encode()
        asked = self._triple, cpu.encode(), features.encode()
        self._machine = functions["CreateTargetMachine"](target, *asked, 3, b"pic", b"small", 0, 1, b"")
        data = functions["CreateTargetMachineData"](self._machine)
        self._layout = _call("CopyStringRepOfTargetData", data)[1].encode()
        functions["DisposeTargetData"](data)

    def code(self, ir: str, *, assembly: bool = False) -> bytes:
        """The object or assembly of a module; raises `Refused` if LLVM rejects it."""
        functions = _functions()
        context = functions["ContextCreate"]()
        module = None
        try:
            module, problem = _call("ParseAssembly", context, ir.encode())
            if problem or not module:
                raise Refused(f"LLVM IR parsing error\n{problem}")
            functions["SetTarget"](module, self._triple)
            functions["SetDataLayout"](module, self._layout)
            is_broken, problem = _call("VerifyModule", module)
            if is_broken:
                raise Refused(problem)
            buffer, problem = _call("TargetMachineEmitToMemory", self._machine, module, int(not assembly))
            if not buffer:
                raise Refused(problem)
            code = ctypes.string_at(functions["GetBufferStart"](buffer), functions["GetBufferSize"](buffer))
            functions["DisposeMemoryBuffer"](buffer)
            return code
        finally:
            if module:
                functions["DisposeModule"](module)
            functions["ContextDispose"](context)
