"""`rlx bench MODEL`: measures the speed of a model, and how close it is to the limits of this machine.

Decoders are measured in prefill (`pp128`, `pp512`) and decode (`tg128`), named as in llama-bench, encoders in
embedding. The limits are measured in the same run: peak multiply-adds (f32 or int8, as each kernel does them) for
prefill, and the bandwidth of memory, or of caches if the weights fit into them, for decode.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from rlx import hub
from rlx.backends.base import backend_of
from rlx.backends.reports import Ceilings, Work
from rlx.cli import console
from rlx.cli.console import UsageError
from rlx.cli.inspect import phase_sizes
from rlx.cli.loading import DEVICE_HELP, load
from rlx.engine.embedding_model import EmbeddingModel
from rlx.engine.language_model import LanguageModel
from rlx.engine.vision_model import VisionModel
from rlx.fast_dataclass import dataclass
from rlx.hub.store import show_size
from rlx.inspect.profiler import LARGEST_CACHE
from rlx.ir.graph import Graph
from rlx.kv_layout import KvLayout
from rlx.lir.program import Program
from rlx.runtime.kv_spec import CACHE_HELP, CACHES
from rlx.types import evaluate

PROMPTS = (128, 512)
ANSWER = 128
TEXTS = ((1, 32), (1, 128), (32, 128))  # texts, tokens per text
START = 8  # tokens of the prompt before decode
SENTENCE = "it was not the one that had been there for them all to see from this old house with a garden by his side"
BUSY = "faster than the limits, which were measured while the machine was busy"
LIMITS = {
    "int8": "the int8 multiply-adds", "f32": "the f32 multiply-adds", "f64": "the f64 multiply-adds",
    "cache": "the bandwidth of the cache", "memory": "the bandwidth of memory",
}  # fmt: skip
MIN_S = 0.3  # minimum time of an embedding measurement


@dataclass(frozen=True)
class Row:
    """One line: a measurement and, if it has a limit, the share of it."""

    name: str
    value: float
    unit: str
    fraction: float | None = None  # at most 1
    limit: str = ""
    note: str = ""

    def compared(self, limits: Ceilings | None, work: Work, seconds: float) -> Row:
        """The row with the share of the limit that its work, which took these seconds, comes closest to."""
        if limits is None:
            return self
        share = limits.share(work, seconds)
        if share is None:
            return replace(self, note=", ".join(filter(None, (self.note, BUSY))))
        return replace(self, fraction=share.fraction, limit=LIMITS[share.limit])

    def cells(self) -> tuple[str, str, str, str]:
        share = "" if self.fraction is None else f"{self.fraction:.0%} of {self.limit}"
        number = show_size(int(self.value)) if self.unit == "bytes" else f"{self.value:.{_digits(self.value)}f}"
        return self.name, number, "" if self.unit == "bytes" else self.unit, ", ".join(filter(None, (share, self.note)))


def _digits(value: float) -> int:
    """Decimals for at least three significant digits.

    >>> [_digits(v) for v in (0.0123, 1.5, 42.0, 310.0)]
    [4, 2, 1, 0]
    """
    return min(4, max(0, 2 - math.floor(math.log10(value)))) if value > 0 else 0


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("bench", help="measure a model, and compare with the limits of the machine")
    command.add_argument("model", nargs="?", default=hub.DEFAULT, help=f"a model on this machine ({hub.DEFAULT})")
    command.add_argument("--device", default="cpu", help=DEVICE_HELP)
    command.add_argument("--threads", type=int, help="number of threads (default: all usable cores)")
    command.add_argument(
        "--repeat", type=int, default=3, help="number of measurements, of which the median is shown (3)"
    )
    command.add_argument("--cold", action="store_true", help="compile without the cache")
    command.add_argument("--cache", choices=CACHES, default="auto", help=CACHE_HELP)
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.repeat < 1:
        raise UsageError(f"bench: --repeat is {arguments.repeat}, expected a number from 1")
    files = hub.resolve(arguments.model, offline=True)
    begin = time.perf_counter()
    with console.status(f"loading {files.name}"):
        settings = {"threads": arguments.threads, "cache": arguments.cache, "device": arguments.device}
        model = load(arguments.model, offline=True, **settings)
    loading = time.perf_counter() - begin
    with model:
        compiled = model.compiled
        with console.status("compiling"):
            compiling = compile_seconds(model.built.module, compiled.device, cold=arguments.cold)
        with console.status("measuring the machine"):
            limits = backend_of(compiled.target).ceilings(compiled.target, compiled.threads)
        cache = "without" if arguments.cold else "with"
        rows = [
            Row("load", loading, "s", note="until ready to run, from the snapshot of an earlier load if there is one"),
            Row("compile", compiling, "s", note=f"its graph in a new process, {cache} the compile cache"),
        ]
        measure: Any = _decoder_rows if isinstance(model, LanguageModel) else _encoder_rows
        measure = _vision_rows if isinstance(model, VisionModel) else measure
        rows += measure(model, limits, arguments.repeat)
        memory = model.memory()
        rows.append(Row("memory", memory.total, "bytes", note=_parts(memory)))
        about = {"model": files.name, "target": compiled.target.name, "threads": compiled.threads}
    if arguments.json:
        machine = None if limits is None else asdict(limits)
        print(json.dumps(about | {"machine": machine, "rows": [asdict(r) for r in rows]}, indent=2))
        return 0
    print(f"{files.name} on {compiled.target.name}{_machine(limits, compiled.threads)}")
    console.table(("row", "value", "unit", "share of the limit"), [row.cells() for row in rows])
    return 0


def _machine(limits: Ceilings | None, threads: int) -> str:
    """The limits in words; nothing for devices whose limits are not measured."""
    if limits is None:
        return ""
    return (
        f", {threads} threads; machine: {limits.gflops:.0f} GFLOPS f32, {limits.gops['dot_u7']:.0f} GOPS int8, "
        f"{limits.memory_gb_per_second:.1f} GB/s from memory"
    )


# -- starting --------------------------------------------------------------------------------------------------------
def compile_seconds(graph: Graph, device: str, *, cold: bool) -> float:
    """Seconds to compile a graph for a device in a new process."""
    environment = (
        os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | ({"RLX_CACHE": "off"} if cold else {})
    )
    with tempfile.NamedTemporaryFile("w", suffix=".rlx", encoding="utf-8") as file:
        file.write(graph.text(full=True))
        file.flush()
        command = [sys.executable, "-c", _COMPILE, file.name, device]
        return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


_COMPILE = """
import sys, time
import rlx.hir.blocks
from rlx.ir.graph import Graph
from rlx.runtime.session import Session
with open(sys.argv[1], encoding="utf-8") as file:
    graph = Graph.parse(file.read())
begin = time.perf_counter()
Session(sys.argv[2]).compile(graph)
print(time.perf_counter() - begin)
"""


# -- decoders --------------------------------------------------------------------------------------------------------
def _decoder_rows(model: LanguageModel, limits: Ceilings | None, repeat: int) -> Iterator[Row]:
    random = np.random.default_rng(0)
    vocabulary = int(model.checkpoint.config.vocab)
    program = _program(model)

    def prompt(length: int) -> list[int]:
        return [int(t) for t in random.integers(0, vocabulary, length)]  # random, so that no prefix is reused

    for length in PROMPTS:
        name = f"pp{length}"
        if length >= model.context:
            console.note(f"{name}: left out, the context holds {model.context} tokens")
            continue
        seconds = _median(
            name, repeat, lambda n=length: model.generate(prompt(n), max_tokens=1).timings.prompt_seconds  # type: ignore[misc]
        )  # fmt: skip
        yield Row(name, length / seconds, "tok/s").compared(limits, prefill_work(program, 1, length), seconds)

    # Exclude stop tokens, which would end the answer early.
    no_stop = {t: -math.inf for t in model.tokenizer.stop_ids} if model.checkpoint.tokenizer else {}
    count = min(ANSWER, model.context - START - 1)

    def answer() -> float:
        done = model.generate(prompt(START), max_tokens=count, temperature=0.0, logit_bias=no_stop)
        assert len(done.tokens) == count
        return 1 / done.timings.answer_per_second

    seconds = _median(f"tg{count}", repeat, answer)
    moved = token_bytes(program, START + count // 2)
    work = Work({}, moved, moved if moved > LARGEST_CACHE else 0)
    row = Row(f"tg{count}", 1 / seconds, "tok/s", note=f"{show_size(moved)} per token")
    yield row.compared(limits, work, seconds)


def token_bytes(program: Program, past: int) -> int:
    """Bytes that one decode step must read: weights of matmuls, and the cached keys and values."""
    sizes = phase_sizes(1, 1, past, program.symbols)
    return sum(evaluate(x.bytes, sizes) for x in program.launches if x.kernel.kind in ("matmul", "attention"))


def prefill_work(program: Program, batch: int, seq: int, *, causal: bool = True) -> Work:
    """The multiply-adds of a run, and the weights that it reads; a causal mask reduces those of attention."""
    sizes, weights = phase_sizes(batch, seq, symbols=program.symbols), set(program.weights)
    positions = sizes.get("blocks", 0) * KvLayout().page
    work = Work({}, 0)
    for launch in program.launches:
        visible = (seq + 1) / 2 / positions if causal and launch.kernel.kind == "attention" else 1.0
        streamed = evaluate(launch.min_bytes(weights), sizes)
        work += Work({launch.kernel.arithmetic(): evaluate(launch.flops, sizes) * visible}, streamed, streamed)
    return work if work.memory_bytes > LARGEST_CACHE else replace(work, memory_bytes=0)


# -- encoders --------------------------------------------------------------------------------------------------------
def _encoder_rows(model: EmbeddingModel, limits: Ceilings | None, repeat: int) -> Iterator[Row]:
    program = _program(model)
    for count, length in TEXTS:
        texts = texts_of(model, count, length)
        name = f"embed {count}x{length}"
        seconds = _median(name, repeat, lambda texts=texts: _per_call(lambda: model.embed(texts)))  # type: ignore[misc]
        row = Row(
            name, count * length / seconds, "tok/s", note=f"{count / seconds:.0f} texts/s, {seconds * 1e3:.2f} ms"
        )
        yield row.compared(limits, prefill_work(program, count, length, causal=False), seconds)


def _vision_rows(model: VisionModel, limits: Ceilings | None, repeat: int) -> Iterator[Row]:
    side = model.checkpoint.config.image
    for count in (1, 8):
        inputs = model.inputs(np.ones((count, 3, side, side), np.float32))
        name = f"encode {count}"
        seconds = _median(name, repeat, lambda inputs=inputs: _per_call(lambda: model.compiled.run(inputs)))  # type: ignore[misc]
        yield Row(name, count / seconds, "images/s", note=f"{side}×{side}, {seconds * 1e3:.1f} ms")


def texts_of(model: EmbeddingModel, count: int, length: int) -> list[str]:
    """Different texts of `length` tokens each, including special ones. Equal texts would be computed only once."""
    texts, known = [], SENTENCE.split()
    for i in range(count):
        words = [known[(i + j * (1 + i // len(known))) % len(known)] for j in range(length)]
        while len(model.tokenizer.encode(" ".join(words))) > length:
            words.pop()
        texts.append(" ".join(words))
    return texts


def _per_call(work: Callable[[], Any]) -> float:
    calls, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < MIN_S or not calls:
        work()
        calls += 1
    return spent / calls


# -- measuring -------------------------------------------------------------------------------------------------------
def _median(name: str, repeat: int, seconds: Callable[[], float]) -> float:
    """The median of `repeat` runs, after a warm-up."""
    with console.status(f"measuring {name}"):
        seconds()
        return statistics.median(seconds() for _ in range(repeat))


def _program(model: LanguageModel | EmbeddingModel) -> Program:
    compiled = model.compiled
    return compiled.plan.main


def _parts(memory: Any) -> str:
    return ", ".join(f"{n} {show_size(getattr(memory, n))}" for n in ("weights", "cache", "arena", "mapped"))
