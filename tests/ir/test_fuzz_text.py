"""Thousands of mutated graph texts: each parses and verifies or is an RlxError, and what parses prints the same again.

The texts are those of layers, loops, branches and fused kernels, with symbolic sizes, constants and odd names.
"""

from __future__ import annotations

import functools
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import layers
import numpy as np
import pytest
from loop_graphs import odd_graph
from targets import AVX512

import rlx
from rlx import Graph
from rlx.dtypes import ALL
from rlx.errors import RlxError
from rlx.ir import registry
from rlx.mir.pipeline import optimise


# -- texts -----------------------------------------------------------------------------------------------------------
def sizes_graph() -> Graph:
    """Sizes of all kinds, as shapes and as attributes."""
    n, m = rlx.dim("n", max=64), rlx.dim("m")
    g = Graph("sizes", level="hir")
    x = g.input("x", (n, 4))
    y = x.reshape(n * 2, 2)[n // 2 :].pad(low=(m, 0), high=(0, 1), value=-0.5)
    z = g.input("z", ("min(n, m // 3)", "(n + 3) // 4 * m"))
    w = g.concatenate(x, g.input("v", ("m*m", 4)), axis=0).softmax(axis=-1)
    return g.set_outputs([y, z.transpose(axes=(1, 0)), w.sum(axis=(0, 1), keepdims=True), *w.topk(k=2)])


def constants_graph() -> Graph:
    g = Graph('all "kinds" {', level="mir")
    values = [g.constant(np.arange(6).reshape(2, 3).astype(d.numpy)) for d in ALL if not d.is_bool]
    flags = g.constant(np.array([True, False]))
    long = g.constant(np.linspace(0, 1, 70, dtype=np.float32))
    g.param("a, b: (c)  # d", (3,), "f16")
    return g.set_outputs([*values, flags, long, g.constant([np.inf, -0.0, np.nan], "f32")])


def loop_graph() -> Graph:
    more, body = Graph("more"), Graph("body")
    i = more.input("i", (), "i32")
    more.input("c", ("n", 3))
    more.set_outputs([i < 5])
    i, c = body.input("i", (), "i32"), body.input("c", ("n", 3))
    body.set_outputs([i + 1, c.cumsum(axis=0).tanh()])
    g = Graph("loop")
    return g.set_outputs([*g.while_loop((g.constant(0, "i32"), g.input("x", ("n", 3))), more, body, max_steps=7)])


def fused_graph() -> Graph:
    g = Graph("fused")
    x, w = g.input("x", ("n", 4)), g.param("w", (4, 2))
    h = (x @ w).tanh() * 2.0
    return optimise(g.set_outputs([h.rms_norm(eps=1e-5), h.argmax(axis=1)]), AVX512).main


@functools.cache
def texts() -> list[str]:
    graphs = [
        sizes_graph(), constants_graph(), loop_graph(), fused_graph(), odd_graph(),
        layers.bert_graph(layers.TINY_BERT), layers.llama_graph(layers.TINY_LLAMA, past=True),
    ]  # fmt: skip
    return [g.text(full=True) for g in graphs]


# -- mutations -------------------------------------------------------------------------------------------------------
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|%[0-9]+(?:\.[0-9]+)?|-?[0-9]+(?:\.[0-9]+)?|\w+|[^\w\s]|\s+')
SIGNS = [*'"\\%=:;,()[]{}#\n -.\x00é@', "//"]
WORDS = [
    "none", "true", "return", "graph", "f32[2]", "%0", "%0.1", "graph @g mir {", "1e999", "nan", "n", "m + 1", "(",
    "()", "(1,)", "min(n, m)", "n // 2", "(a + b)*(c + d)", "max(n=3)", "name", "body", "0", "-1", "9" * 40,
]  # fmt: skip
DTYPES = [d.name for d in ALL]


def a_token(rng: random.Random, text: str, pattern: str = r"\S+") -> re.Match[str] | None:
    fitting = [m for m in TOKEN.finditer(text) if re.fullmatch(pattern, m[0])]
    return rng.choice(fitting) if fitting else None


def with_other(text: str, match: re.Match[str] | None, other: str) -> str:
    return text if match is None else text[: match.start()] + other + text[match.end() :]


def any_characters(rng: random.Random, text: str) -> str:
    at, size = rng.randrange(len(text) + 1), rng.choice((0, 1, 1, 3, 20))
    return text[:at] + rng.choice((*SIGNS, *WORDS, "")) + text[at + size :]


def another_token(rng: random.Random, text: str) -> str:
    other = a_token(rng, text)
    return with_other(text, a_token(rng, text), rng.choice((other[0] if other else "", rng.choice(WORDS))))


def another_number(rng: random.Random, text: str) -> str:
    numbers = ("0", "1", "2", "3", "4", "-1", "7", "64", "2147483648", "0.5", "n")
    return with_other(text, a_token(rng, text, r"-?[0-9.]+"), rng.choice(numbers))


def another_value(rng: random.Random, text: str) -> str:
    return with_other(text, a_token(rng, text, r"%[0-9.]+"), f"%{rng.randrange(12)}")


def another_op(rng: random.Random, text: str) -> str:
    return with_other(text, a_token(rng, text, "|".join(registry.OPS)), rng.choice(list(registry.OPS)))


def another_type(rng: random.Random, text: str) -> str:
    return with_other(text, a_token(rng, text, "|".join(DTYPES)), rng.choice(DTYPES))


def other_names(rng: random.Random, text: str) -> str:
    """Another name for a size everywhere, which changes no meaning unless the name is taken."""
    symbol = a_token(rng, text, "n|m|batch|seq|time|past_seq")
    new = rng.choice(("n", "m", "q", "graph", "in", "β", "min", "f32", "batch", "a*b", "(a + 1)", "a // 2"))
    return re.sub(rf"\b{symbol[0]}\b", new, text) if symbol else text


def other_layout(rng: random.Random, text: str) -> str:
    """White space and comments, which mean nothing."""
    gap = a_token(rng, text, r"[(){}\[\],:;=+]")
    before, after = rng.choice((("\n", ""), ("", "  "), ("\t", "\n"), ("", " # ) } ]\n")))
    return with_other(text, gap, before + gap[0] + after) if gap else text


def lines_moved(rng: random.Random, text: str) -> str:
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    match rng.randrange(3):
        case 0:
            lines.insert(rng.randrange(len(lines)), lines[at])
        case 1:
            del lines[at]
        case _:
            lines.insert(rng.randrange(len(lines)), lines.pop(at))
    return "\n".join(lines)


def another_text_inside(rng: random.Random, text: str) -> str:
    other = rng.choice(texts())
    start, size = rng.randrange(len(other)), rng.choice((10, 50, 300))
    at = rng.randrange(len(text) + 1)
    return text[:at] + (other if rng.random() < 0.2 else other[start : start + size]) + text[at:]


def nested(rng: random.Random, text: str) -> str:
    """A token in brackets, in many of them, or many times over: nothing of it may take long."""
    token = a_token(rng, text)
    count = rng.choice((1, 1, 2, 40, 300))
    open_, close = rng.choice((("(", ")"), ("[", "]"), ("(", ",)"), ("min(n, ", ")"), ("(n + ", ")"), ("-", "")))
    if token and rng.random() < 0.5:
        factor = rng.choice((" + {}{}", "*({}{} + 1)", " // ({} + {})")).format(token[0], "_x")
        return with_other(text, token, token[0] + factor * count)
    return with_other(text, token, open_ * count + (token[0] if token else "") + close * count)


MUTATIONS: list[Callable[[random.Random, str], str]] = [
    any_characters, another_token, another_number, another_value, another_op, another_type, other_names, other_layout,
    other_layout, lines_moved, another_text_inside, nested,
]  # fmt: skip


@pytest.fixture
def little_memory() -> Iterator[None]:
    """At most a gigabyte more than now: a text that asks for more gets a MemoryError, not the machine."""
    resource = pytest.importorskip("resource")
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def check(text: str) -> str:
    """Parse one text, and say what became of it."""
    begin = time.process_time()
    try:
        graph = Graph.parse(text).verify()
    except RlxError as error:
        cause: BaseException | None = error
        while cause is not None:
            assert not isinstance(cause, MemoryError), error
            cause = cause.__cause__
        assert len(str(error)) <= 500, f"a message of {len(str(error))} characters"
        return "refused"
    finally:
        spent = time.process_time() - begin
        assert spent < 5, f"{spent:.1f} s"
    printed = graph.text(full=True)
    again = Graph.parse(printed)
    assert again == graph
    assert again.text(full=True) == printed
    return "parsed"


@pytest.mark.fuzz
@pytest.mark.usefixtures("little_memory")
def test_a_mutated_text_parses_or_is_refused(fuzz_seeds: range) -> None:
    outcomes: Counter[str] = Counter()
    begin = time.process_time()
    for seed in fuzz_seeds:
        rng = random.Random(f"text {seed}")
        text = rng.choice(texts())
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            text = rng.choice(MUTATIONS)(rng, text)
        try:
            outcomes[check(text)] += 1
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    print(f"graph texts: {dict(outcomes)}, {time.process_time() - begin:.1f} s")
    for outcome in ("parsed", "refused"):  # else the mutations are too weak or too wild
        assert outcomes[outcome] >= len(fuzz_seeds) // 10, outcomes
