"""What `llm.py` asks of a library: load a model, read a prompt, write tokens. Runs in the library's own process.

Run as a script it is a fresh process that loads a model and prints a line when the first token is there, and another
with the most memory it had until then (`first`), or the latter after it read a long prompt and wrote some tokens
(`memory`). Imports are where they are needed: what a process imports is part of its start and of its memory.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from worker import Case, Prepared

CONTEXT = 1024
PROMPT = 32  # tokens before what is written
TEXT = (
    "The river rises in the hills to the north of the old town and runs for about forty miles through farms, woods "
    "and small villages before it reaches the sea. For centuries the people who lived along"
)


class Engine(Protocol):
    about: str  # what its code was compiled for

    def __init__(self, path: str, threads: int) -> None: ...

    def prompt(self) -> list[int]:
        """The first tokens of TEXT."""

    def read(self, tokens: list[int]) -> int:
        """The token after a prompt of which nothing is known."""

    def write(self, tokens: list[int], count: int) -> float:
        """Seconds for `count` tokens after the first one that follows a prompt, each the likeliest."""

    def close(self) -> None: ...


class Rlx:
    def __init__(self, path: str, threads: int) -> None:
        import rlx

        self.model: Any = rlx.load(path, threads=threads, context=CONTEXT)
        self.about = self.model.target

    def prompt(self) -> list[int]:
        tokens: list[int] = self.model.tokenizer.encode(TEXT)[:PROMPT]
        return tokens

    def read(self, tokens: list[int]) -> int:
        done = self.model.generate(tokens, max_tokens=1)
        if done.usage.cached_tokens:
            raise RuntimeError(f"{done.usage.cached_tokens} tokens of the prompt were known")
        return int(done.tokens[0])

    def write(self, tokens: list[int], count: int) -> float:
        """A text that ends is begun again; reading the prompt is not counted."""
        written, seconds = 0, 0.0
        while written < count:
            done = self.model.generate(tokens, max_tokens=count - written + 1)
            if len(done.tokens) < 2:
                raise RuntimeError("the text ended with its first token")
            written += len(done.tokens) - 1  # the first one is part of the reading
            seconds += float(done.timings.answer_seconds)
        return seconds

    def close(self) -> None:
        self.model.close()


class LlamaCpp:
    """At its defaults, but with the shortest way from logits to a token that its Python interface has."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp
        import numpy as np

        self.api, self.np = llama_cpp, np
        self.about = llama_cpp.llama_print_system_info().decode()
        self.llm = llama_cpp.Llama(
            path, n_ctx=CONTEXT, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def prompt(self) -> list[int]:
        tokens: list[int] = self.llm.tokenize(TEXT.encode(), add_bos=True)[:PROMPT]
        return tokens

    def read(self, tokens: list[int]) -> int:
        self.llm.reset()
        return self._next(tokens)

    def write(self, tokens: list[int], count: int) -> float:
        token = self.read(tokens)
        begin = time.perf_counter()
        for _ in range(count):
            token = self._next([token])
        return time.perf_counter() - begin

    def _next(self, tokens: list[int]) -> int:
        self.llm.eval(tokens)
        logits = self.api.llama_get_logits_ith(self.llm.ctx, -1)
        return int(self.np.ctypeslib.as_array(logits, (self.llm.n_vocab(),)).argmax())

    def close(self) -> None:
        self.llm.close()


ENGINES: dict[str, type[Engine]] = {"rlx": Rlx, "llama.cpp": LlamaCpp}
_loaded: list[Engine] = []  # the one that cases share


def rlx(case: Case, threads: int) -> Prepared:
    return prepare("rlx", case, threads)


def llama_cpp(case: Case, threads: int) -> Prepared:
    return prepare("llama.cpp", case, threads)


def prepare(name: str, case: Case, threads: int) -> Prepared:
    from worker import Prepared

    ((kind, count),) = case.dims.items()

    def load() -> float:
        close()
        begin = time.perf_counter()
        _loaded.append(ENGINES[name](case.subject, threads))
        return time.perf_counter() - begin

    def first() -> float:
        begin = time.perf_counter()
        child = subprocess.Popen(command(name, case.subject, threads, "first"), stdout=subprocess.PIPE)
        assert child.stdout is not None
        line = child.stdout.readline()
        seconds = time.perf_counter() - begin
        child.kill()
        child.communicate()
        if not line:
            raise RuntimeError("the process ended before its first token")
        return seconds

    def read() -> float:
        (engine,) = _loaded
        tokens = random.choices(range(1000, 20_000), k=count)  # other ones each time: a known prompt need not be read
        begin = time.perf_counter()
        engine.read(tokens)
        return time.perf_counter() - begin

    def write() -> float:
        (engine,) = _loaded
        return engine.write(engine.prompt(), count) / count

    if kind == "first":
        close()  # so that two copies need not fit into the memory
    elif not _loaded:
        load()
    seconds = {"load": load, "first": first, "read": read, "write": write}[kind]
    return Prepared(seconds, seconds=seconds, note=_loaded[0].about if _loaded else "")


def close() -> None:
    while _loaded:
        _loaded.pop().close()


def command(name: str, path: str, threads: int, what: str) -> list[str]:
    return [sys.executable, __file__, name, path, str(threads), what]


def main(name: str, path: str, threads: str, what: str) -> None:
    answers = os.fdopen(os.dup(1), "w")  # libraries print too
    os.dup2(2, 1)
    engine = ENGINES[name](path, int(threads))
    if what == "first":
        print(engine.read(engine.prompt()), file=answers, flush=True)
    else:
        engine.read(list(range(1000, 1512)))
        engine.write(engine.prompt(), 32)
    with open("/proc/self/status") as status:  # not getrusage, which counts what the process was before exec
        print(next(line.split()[1] for line in status if line.startswith("VmHWM")), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
