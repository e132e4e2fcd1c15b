"""A library's process: sets a case up when told to, times it when told to, until the driver hangs up.

Run by the interpreter that has the library, which need not have rlx or llvmlite: nothing but the standard library and
NumPy is imported here. Messages are tuples: ("setup", case) is answered by ("ready", ...) or ("failed", why), ("run",)
by ("time", seconds) or ("failed", why).
"""

from __future__ import annotations

import ctypes
import importlib
import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

SLICE_SECONDS = 0.02  # a timed stretch is at least this long; its mean is one round's number


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to compute. `bytes` is what must at least be touched: each operand and result once."""

    name: str
    dims: dict[str, int]
    flops: float
    bytes: float
    subject: str = ""  # what it is computed on, such as a file
    narrow: float = 1.0  # how many times the f32 rate arithmetic may reach: 4 where numbers may be rounded to 8 bits


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a factory gives: `call` is timed, `output` (if any) gives its result for the check."""

    call: Callable[[], object]
    output: Callable[[], np.ndarray] | None = None
    work: float | None = None  # FLOPs or bytes of a call, where these are not the case's
    note: str = ""
    seconds: Callable[[], float] | None = None  # in place of timing `call`: for long work that has its own clock


def serve(connection: Connection, factory: str, threads: int) -> None:
    die_with_parent()
    module, function = factory.split(":")
    prepared: Prepared | None = None
    inner = 1
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        try:
            if message[0] == "setup":
                prepared = None  # frees the last case before the next is made
                prepared = getattr(importlib.import_module(module), function)(message[1], threads)
                inner = calls_of_a_slice(prepared)
                output = prepared.output() if prepared.output else None
                connection.send(("ready", prepared.work, prepared.note, output))
            else:
                assert prepared is not None
                taken = prepared.seconds() if prepared.seconds else time_calls(prepared.call, inner)
                connection.send(("time", taken))
        except Exception as error:  # whatever a library raises is a line in the result, not the end of the run
            connection.send(("failed", f"{type(error).__name__}: {error}".splitlines()[0][:300]))


def calls_of_a_slice(prepared: Prepared) -> int:
    """How many calls last SLICE_SECONDS; makes some, so that the first timed one is not the first of all."""
    prepared.call()
    if prepared.seconds:
        return 1
    seconds = min(timed(prepared.call) for _ in range(3))
    return max(1, math.ceil(SLICE_SECONDS / max(seconds, 1e-7)))


def time_calls(call: Callable[[], object], inner: int) -> float:
    """Mean seconds of `inner` calls, after enough of them to refill the caches and wake the pool."""
    for _ in range(inner // 4 + 1):
        call()
    start = time.perf_counter()
    for _ in range(inner):
        call()
    return (time.perf_counter() - start) / inner


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def die_with_parent() -> None:
    """A stopped process would outlive a killed driver for ever; Linux can be asked to end it (prctl(2))."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[3])), sys.argv[1], int(sys.argv[2]))
