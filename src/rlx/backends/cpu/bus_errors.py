"""Bus errors: a signal handler in machine code that names the file whose map could not be read, and ends the process.

A file that is truncated while it is mapped raises SIGBUS in whatever thread reads it, mostly in a kernel. The handler
looks the address up in the table of maps (`formats.mapped.TABLE`), writes a message and exits; other faults go to the
handler that was there before. It calls nothing that POSIX does not allow in a handler. Only programs install it, never
a library: `import rlx` leaves signals alone.
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

HANDLER, BLOCK = "bus_error", "bus_block"  # the function of the object, and the constant that has the block's address

# The block that the handler reads, in bytes: functions of the C library, the handler that was there before (its
# address, whether it takes the details of a signal, and the record that installs it again), and what to do.
FUNCTIONS = ("write", "_exit", "sigaction", "raise")
WRITE, EXIT, SIGACTION, RAISE, OLD, OLD_IS_DETAILED, OLD_ACTION, CODE, MAPS = range(0, 72, 8)
BEFORE, BEFORE_LENGTH, AFTER, AFTER_LENGTH = range(72, 104, 8)
BLOCK_WORDS = 13

# siginfo_t of Linux on machines of 64 bits, and struct sigaction of its C libraries
SI_CODE, SI_ADDRESS = 8, 16
_SIGNAL_SET_BYTES = 128
_DETAILED, _ON_STACK = 0x4, 0x08000000  # SA_SIGINFO; SA_ONSTACK: on the alternative stack, where a thread has one


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
    from rlx.backends.cpu.bus_errors_code import emitted  # a handler that was compiled before needs no generator

    return emitted()


def install(code: int, before: str, after: str, *, compiling: bool = True) -> bool:
    """End the process with exit code `code` where a mapped file cannot be read; says on stderr: before, file, after.

    Returns False where there is no handler: on systems other than Linux, and, without `compiling`, where the machine
    code is not in the cache. Does nothing if it is installed already.
    """
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return False
    if not _installed:
        known = library(cpu_target(backend("cpu").target())).kept(HANDLER, handler_text, compiling=compiling)
        if known is not None:
            _install(known, code, before.encode(), after.encode())
    return bool(_installed)


_installed: list[Any] = []  # what the handler reads, so that it stays


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
    for kept in _installed:  # the end of the interpreter must not free it: a daemon thread may fault later
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    _call(libc.sigaction, new, None)


def _call(sigaction: Callable[..., int], new: _Action | None, old: _Action | None) -> None:
    given = (None if action is None else ctypes.byref(action) for action in (new, old))
    failed = sigaction(int(signal.SIGBUS), *given)
    assert not failed, "SIGBUS is a signal that may be handled"
