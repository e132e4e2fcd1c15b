"""The thread pool: passes launch records to the driver, whose machine code does all forking, waiting and joining.

`shared(threads)` is the process's pool for a thread count; `Pool.run` is one call into the driver. Workers start with
the first run, end with the pool or the interpreter, and restart in a forked child.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rlx.backends.base import MAX_THREADS, backend
from rlx.backends.cpu import driver
from rlx.backends.cpu.cores import usable_cores
from rlx.backends.cpu.targets import cpu_target
from rlx.backends.cpu.toolchain import CodeLibrary, compile_text
from rlx.errors import CapabilityError
from rlx.fork_safe_locks import Lock, in_child
from rlx.host_memory import address

SPIN_SECONDS = 30e-6  # how long a thread spins before it sleeps; waking a sleeper takes about as long
LOOK_SECONDS = 0.3e-6  # how long it waits at a barrier before it looks for units that others have not started
SIGNAL_SECONDS = 0.1  # how long a loop runs before Python may handle signals
EXIT_SECONDS = 1.0  # how long interpreter exit waits for a worker at most

_Run = Callable[[int], int]
_WORD, _ADDRESS = ctypes.c_int64, ctypes.c_void_p
_SIGNATURES = {
    "call": ctypes.CFUNCTYPE(_WORD, _ADDRESS, _ADDRESS),
    "worker": ctypes.CFUNCTYPE(None, _ADDRESS, _WORD),
    "stop": ctypes.CFUNCTYPE(_WORD, _ADDRESS),
    "spin": ctypes.CFUNCTYPE(None, _WORD),
    "clock": ctypes.CFUNCTYPE(_WORD),
}

_guard = Lock()
_shared: dict[int, Pool] = {}
_alive: weakref.WeakSet[Pool] = weakref.WeakSet()


def default_threads() -> int:
    """`RLX_THREADS` if set, else one thread per usable core."""
    text = os.environ.get("RLX_THREADS")
    if not text:
        return usable_cores()
    count = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    if not 1 <= count <= MAX_THREADS:
        raise CapabilityError(f"RLX_THREADS: expected a whole number from 1 to {MAX_THREADS}, found {text!r}")
    return count


@functools.cache
def compiled_driver() -> Mapping[str, int]:
    """The driver's addresses, compiled for this machine."""
    target = cpu_target(backend("cpu").target())
    return CodeLibrary().load(compile_text(driver.driver_text(target), target), driver.SYMBOLS)


def thread_limit() -> int:
    """The maximum number of threads of a shared pool."""
    return usable_cores()


def shared(threads: int | None = None, addresses: Callable[[], Mapping[str, int]] = compiled_driver) -> Pool:
    """The process's pool with `threads` threads; `addresses` provides the driver if a pool must be created.

    More threads than cores would take turns, so their number is capped at the usable cores, with a warning.
    """
    count = default_threads() if threads is None else threads
    if count > (limit := thread_limit()):
        warnings.warn(
            f"{count} threads were asked for, but this process may use {limit} core{'s' * (limit > 1)}: using {limit}",
            RuntimeWarning,
            stacklevel=2,
        )
        count = limit
    with _guard:
        if count not in _shared:
            _shared[count] = Pool(count, addresses())
        return _shared[count]


class Pool:
    """`threads` threads, of which the caller of `run` is the first.

    A pool that `adapts` keeps runs on their callers for a while when its workers cannot get a core.
    """

    def __init__(self, threads: int, addresses: Mapping[str, int], *, adapts: bool = True) -> None:
        if threads < 1:
            raise CapabilityError(f"pool: expected at least one thread, asked for {threads}")
        self._why_single = _no_futex() or ("one thread was asked for" if threads == 1 else None)
        self.threads = 1 if self._why_single else threads
        self._functions = {name: make(addresses[name]) for name, make in _SIGNATURES.items()}
        self._adapts = adapts
        self._start_lock = Lock()
        # The driver's `call` with the address of a request; look it up each time, since a fork replaces it.
        self.execute: _Run = self._start_and_run
        self.repeat = addresses["repeat"]
        self._job: npt.NDArray[np.uint8] | None = None  # kept alive: workers and `job` hold its address
        self.job = np.zeros(1, np.int64)  # its address; 0 before the first run, also after a fork
        self._end: weakref.finalize[..., Pool] | None = None
        _alive.add(self)

    @property
    def why_single(self) -> str | None:
        """Why the pool has only one thread; None if it has more."""
        return self._why_single

    def run(
        self,
        records: npt.NDArray[np.int64],
        scratch: npt.NDArray[np.uint8],
        scratch_stride: int,
        trace: npt.NDArray[np.int64] | None = None,
        threads: int | None = None,
    ) -> int:
        """Executes launch records on `threads` threads; returns how many took part: fewer if the pool is busy.

        `scratch` has `scratch_stride` bytes per thread, `trace` is zeros of [records, threads, 2]. All arrays are
        contiguous and writable; `scratch` and the stride are multiples of 64 bytes.
        """
        count = self.threads if threads is None else threads
        base = address(scratch)
        assert records.dtype == np.int64 and records.shape[1] == driver.RECORD_WORDS
        assert (base | scratch_stride) % 64 == 0 and scratch.nbytes >= count * scratch_stride > 0
        assert trace is None or trace.nbytes >= len(records) * count * 16
        scratch[: count * scratch_stride].reshape(count, -1)[:, : driver.HEAD_BYTES] = 0
        stamps = 0 if trace is None else address(trace)
        request = np.zeros(driver.REQUEST_WORDS, np.int64)
        request[: driver.COPIED_WORDS] = address(records), len(records), base, scratch_stride, stamps, count
        return self.execute(address(request))

    def close(self) -> None:
        """Ends the workers unless a run is in progress. Later runs stay on the calling thread."""
        if self._end is not None:
            self._end()

    def _start_and_run(self, request: int) -> int:
        with self._start_lock:
            if self.execute == self._start_and_run:  # otherwise another thread was faster
                self._start()
        return self.execute(request)

    def _start(self) -> None:
        job = self._job = _zeros(driver.job_bytes(self.threads))
        workers: list[threading.Thread] = []
        words = job.view(np.int64)
        pause, tick = self._seconds()
        if self.threads <= usable_cores():  # otherwise spinning would keep other threads from working
            words[driver.SPIN // 8], words[driver.LOOK // 8] = SPIN_SECONDS / pause, LOOK_SECONDS / pause
        if self._adapts:
            words[driver.MILLISECOND // 8] = 1e-3 / tick
        signals = _signals()
        signals[driver.SIGNAL_TICKS // 8] = SIGNAL_SECONDS / tick
        words[driver.SIGNALS // 8] = address(signals)
        for tid in range(1, self.threads):
            # A Python thread inside a ctypes call holds no GIL and is as fast as a pthread. It can be joined, and
            # `threading` tracks it at exit and after a fork.
            worker = threading.Thread(
                target=_work, args=(self._functions["worker"], job, tid), name=f"rlx-{tid}", daemon=True
            )
            try:
                worker.start()
            except RuntimeError as error:  # the system's limit, or the interpreter is shutting down
                self._why_single = None if workers else f"no worker could be started: {error}"
                break
            workers.append(worker)
        words[driver.POOL_THREADS // 8] = 1 + len(workers)
        self._end = weakref.finalize(self, _stop, self._functions["stop"], job, workers)
        self.job[0] = address(job)
        self.execute = functools.partial(self._functions["call"], address(job))

    def _seconds(self) -> tuple[float, float]:
        """Seconds per pause (10 to 150 cycles) and per tick of the driver's clock."""
        sample, pauses, ticks = 1000, [], []
        for _ in range(5):
            begin, first = time.perf_counter(), self._functions["clock"]()
            self._functions["spin"](sample)
            last, end = self._functions["clock"](), time.perf_counter()
            pauses.append((end - begin) / sample)
            ticks.append((end - begin) / (last - first))
        return min(pauses), min(ticks)

    def _forget_workers(self) -> None:
        """In a forked child, where workers do not exist: the next run starts new ones, with a new job block."""
        if self._end is not None:
            self._end.detach()
        self._end = None
        self.job[0] = 0
        self.execute = self._start_and_run


def _work(worker: Callable[[int, int], None], job: npt.NDArray[np.uint8], tid: int) -> None:
    """Runs a worker. The Python frame keeps the job block alive, even during interpreter shutdown."""
    worker(address(job), tid)


def _stop(stop: Callable[[int], int], job: npt.NDArray[np.uint8], workers: Sequence[threading.Thread]) -> None:
    """Ends the workers, unless a thread that dies with the interpreter is inside `run`: then they die with it."""
    if stop(address(job)):
        for worker in workers:
            worker.join(EXIT_SECONDS)


def _zeros(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory aligned to a line of the job block."""
    block = np.zeros(nbytes + driver.LINE, np.uint8)
    start = -address(block) % driver.LINE
    return block[start : start + nbytes]


def interruption() -> BaseException | None:
    """The exception of a signal handler that has ended a run of this thread, such as KeyboardInterrupt, or None."""
    table = _signals()
    if not table[driver.RAISED // 8] or threading.current_thread() is not threading.main_thread():
        return None
    places = [int(table[place // 8]) for place in (driver.RAISED, driver.RAISED_VALUE, driver.RAISED_TRACE)]
    table[driver.RAISED // 8 :] = 0
    kind, value = (ctypes.cast(place, ctypes.py_object).value if place else None for place in places[:2])
    for place in filter(None, places):  # the driver's references
        ctypes.pythonapi.Py_DecRef(ctypes.c_void_p(place))
    if isinstance(value, BaseException):
        return value
    assert isinstance(kind, type) and issubclass(kind, BaseException)
    return kind() if value is None else kind(value)


@functools.cache
def _signals() -> npt.NDArray[np.int64]:
    """The table through which the driver lets Python handle signals."""
    table = np.zeros(driver.SIGNAL_WORDS, np.int64)
    for place, name in driver.SIGNAL_FUNCTIONS.items():
        table[place // 8] = ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0
    return table


def _no_futex() -> str | None:
    return None if sys.platform == "linux" else f"waiting threads need Linux futexes, and this is {sys.platform}"


@in_child
def _forget_all_workers() -> None:
    for pool in _alive:
        pool._forget_workers()
