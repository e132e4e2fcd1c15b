"""Bus errors: a signal handler in machine code that names the mapped file that could not be read, and exits.

Truncating a mapped file raises SIGBUS in whichever thread reads it, usually inside a kernel. The handler looks the
address up in the table of maps (`formats.mapped.TABLE`), writes a message and exits; other faults go to the previous
handler. It is async-signal-safe: it calls only what POSIX allows in a handler. Only programs install it, never the
library: `import rlx` leaves signals alone.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.backends.base import backend
from rlx.backends.cpu import elf
from rlx.backends.cpu.kernel_library import library
from rlx.backends.cpu.targets import cpu_target
from rlx.backends.cpu.toolchain import CodeLibrary
from rlx.formats.mapped_file import TABLE

HANDLER, BLOCK = "bus_error", "bus_block"  # the handler's symbol, and the constant that holds the block's address

# The block that the handler reads, as byte offsets: C library functions, the previous handler (its address, whether it
# takes siginfo, and the record that reinstalls it), the exit code, the map table and the texts.
FUNCTIONS = ("write", "_exit", "sigaction", "raise")
WRITE, EXIT, SIGACTION, RAISE, OLD, OLD_IS_DETAILED, OLD_ACTION, CODE, MAPS = range(0, 72, 8)
BEFORE, BEFORE_LENGTH, AFTER, AFTER_LENGTH = range(72, 104, 8)
BLOCK_WORDS = 13

# Offsets in Linux's 64-bit siginfo_t, and the signal set size in struct sigaction of its C libraries
SI_CODE, SI_ADDRESS = 8, 16
_SIGNAL_SET_BYTES = 128
_DETAILED, _ON_STACK = 0x4, 0x08000000  # SA_SIGINFO; SA_ONSTACK: on the alternate stack, if the thread has one


class _Action(ctypes.Structure):
    """struct sigaction"""

    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * _SIGNAL_SET_BYTES),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


def handler_text() -> str:
    """The handler's LLVM IR."""
    from rlx.backends.cpu.bus_errors_code import handler_ir  # a cached handler needs no generator

    return handler_ir()


def install(code: int, before: str, after: str, *, compiling: bool = True) -> bool:
    """Exits with status `code` when a mapped file cannot be read, writing `before`, the file and `after` to stderr.

    Returns False if no handler was installed: outside Linux, and, without `compiling`, if the machine code is not
    cached. Does nothing if it is installed already.
    """
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return False
    if not _installed:
        known = library(cpu_target(backend("cpu").target())).cached_object(HANDLER, handler_text, compiling=compiling)
        if known is not None:
            _install(known, code, before.encode(), after.encode())
    return bool(_installed)


_installed: list[Any] = []  # keeps alive what the handler reads


def _install(machine_code: bytes, code: int, before: bytes, after: bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    old, new = _Action(), _Action(flags=_DETAILED | _ON_STACK)
    texts = [np.frombuffer(text, np.uint8) for text in (before, after)]
    block = np.zeros(BLOCK_WORDS, np.int64)
    linked = elf.with_word(machine_code, BLOCK, int(block.ctypes.data))
    new.handler = CodeLibrary().load(linked, [HANDLER])[HANDLER]
    _call(libc.sigaction, None, old)
    block[:] = [
        *(ctypes.cast(getattr(libc, name), ctypes.c_void_p).value or 0 for name in FUNCTIONS),
        old.handler or 0, old.flags & _DETAILED, ctypes.addressof(old), code, TABLE.ctypes.data,
        *(word for text in texts for word in (text.ctypes.data, text.size)),
    ]  # fmt: skip
    _installed.extend((old, texts, block, TABLE))
    for item in _installed:  # must outlive the interpreter: a daemon thread may fault during shutdown
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))
    _call(libc.sigaction, new, None)


def _call(sigaction: Callable[..., int], new: _Action | None, old: _Action | None) -> None:
    pointers = (None if action is None else ctypes.byref(action) for action in (new, old))
    failed = sigaction(int(signal.SIGBUS), *pointers)
    assert not failed, "SIGBUS is a signal that may be handled"
