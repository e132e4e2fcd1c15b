"""What `latency.py` asks of a library: one call at a time, in a loop or after pauses, beside processes that spin.

Runs in the library's own process. A case's dims say what happens between calls; its subject is a folder with the files
of MiniLM, or the file of a language model.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import embed_engines
import llm_engines
import minilm_files
import numpy as np
from worker import Case, Prepared

TEXT = "The quick brown fox jumps over the lazy dog near the river bank today."
TOKENS = 16
MATRIX = (384, 1536)
SETTLE_SECONDS = 0.3  # for the system to find a core for a process that begins to spin
Call = Callable[[], float]  # seconds of one call
_calls: dict[str, Call] = {}  # what the cases of a process share


def prepare(make: Callable[[str, int], Call], case: Case, threads: int) -> Prepared:
    if not _calls:
        _calls[case.subject] = make(case.subject, threads)
    call, pause, calls = _calls[case.subject], case.dims["pause_ms"] / 1e3, case.dims["calls"]

    def pattern() -> float:
        """The median of some calls."""
        with spinning(case.dims["spinners"]):
            for _ in range(3):
                call()
            times = []
            for _ in range(calls):
                if pause:  # sleeping for no time at all gives the core away too
                    time.sleep(pause)
                times.append(call())
            return statistics.median(times)

    return Prepared(call, seconds=pattern)


@contextlib.contextmanager
def spinning(count: int) -> Iterator[None]:
    """Processes that keep a core busy each. They are waited for, so the harness counts their time as ours."""
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        if count:
            time.sleep(SETTLE_SECONDS)
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def timed(call: Callable[[], object]) -> Call:
    def once() -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return once


# ---------------------------------------------------------------------------------------------------------------------
# One sentence to a vector.


def rlx_embed(folder: str, threads: int) -> Call:
    embed = embed_engines.rlx_embed(Path(folder), threads, precision="f32")
    return timed(lambda: embed([TEXT]))


def onnxruntime_embed(folder: str, threads: int) -> Call:
    embed = embed_engines.onnxruntime_embed(Path(folder), threads, file=minilm_files.onnx_file)
    return timed(lambda: embed([TEXT]))


# ---------------------------------------------------------------------------------------------------------------------
# Some tokens after a prompt, which is not counted.


def write(engine: str, path: str, threads: int) -> Call:
    engine_of_model = llm_engines.ENGINES[engine](path, threads)
    prompt = engine_of_model.prompt()
    return lambda: engine_of_model.write(prompt, TOKENS)


# ---------------------------------------------------------------------------------------------------------------------
# A vector by a matrix.


def operands() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape, dtype=np.float32) for shape in ((1, MATRIX[0]), MATRIX))
    return x, w


def rlx_matvec(_: str, threads: int) -> Call:
    import rlx

    x, w = operands()
    graph = rlx.Graph("matvec")
    graph.set_outputs([graph.input("x", ("rows", MATRIX[0])) @ graph.param("w", MATRIX)])
    compiled = rlx.compile(graph, threads=threads)
    compiled.set_param("w", w)
    inputs = {"x": x}
    return timed(lambda: compiled.run(inputs))


def numpy_matvec(_: str, threads: int) -> Call:
    x, w = operands()
    out = np.empty((1, MATRIX[1]), np.float32)
    return timed(lambda: np.matmul(x, w, out=out))


# ---------------------------------------------------------------------------------------------------------------------
# The libraries, as the harness asks for them.


MAKERS: dict[str, Callable[[str, int], Call]] = {
    "embed_rlx": rlx_embed,
    "embed_onnxruntime": onnxruntime_embed,
    "write_rlx": lambda path, threads: write("rlx", path, threads),
    "write_llama_cpp": lambda path, threads: write("llama.cpp", path, threads),
    "matvec_rlx": rlx_matvec,
    "matvec_numpy": numpy_matvec,
}


def pinned(make: Callable[[str, int], Call]) -> Callable[[str, int], Call]:
    """The caller and the workers of the pool on different cores, by hand: what placement can give at best."""

    def prepare(subject: str, threads: int) -> Call:
        call = make(subject, threads)
        call()  # which starts the workers
        first, *others = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {first})
        workers = [t.native_id for t in threading.enumerate() if t.name.startswith("rlx-") and t.native_id]
        for worker, core in zip(workers, others, strict=False):
            os.sched_setaffinity(worker, {core})
        return call

    return prepare


def __getattr__(name: str) -> Callable[[Case, int], Prepared]:
    """`embed_rlx`, `embed_rlx_alone` (one thread), `embed_rlx_pinned`, ...: factories of the harness."""
    kind, _, how = name.partition("_rlx_") if "_rlx_" in name else (name, "", "")
    maker = MAKERS.get(f"{kind}_rlx" if how else kind)
    if maker is None:
        raise AttributeError(name)
    make = pinned(maker) if how == "pinned" else maker
    return lambda case, threads: prepare(make, case, 1 if how == "alone" else threads)
