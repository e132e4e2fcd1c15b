"""Loops and branches in programs: their text, their barriers, what lives how long, and that no two launches race."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from graphs import examples
from hypothesis import given
from hypothesis import strategies as st
from loop_graphs import loop_graphs, odd_graph
from targets import AVX512

import rlx
from rlx.lir.memory import Plan, lifetimes, plan
from rlx.lir.program import ARENA, Branch, Launch, Loop, Program
from rlx.lir.schedule import schedule
from rlx.lir.views import View, offset_steps
from rlx.mir.pipeline import optimise
from rlx.types import evaluate


def program(g: rlx.Graph) -> Program:
    return schedule(optimise(g, AVX512).main, AVX512)


# -- text -------------------------------------------------------------------------------------------------------------
GOLDEN = """\
  launch copy.*(c) -> c4  split chunks(((5*batch + 4095) // (4096)))  barrier
  loop t0 in time, p0:  barrier
    launch matmul.*(c4+5*batch*p0, @0) -> t3  epilogue tanh(acc)  barrier
    loop t1 in 5, p1:  barrier between  barrier
      launch add.*(t3+5*batch*p1, xs+5*batch*t0 + t1<5, 0>) -> t3-5*batch*p1 + 5*batch  split rows(batch)
      launch copy.*(t3+5*batch*p1<5>) -> t5.1+batch*t1  split chunks(((batch + 4095) // (4096)))
    launch sum.*(t3+5*batch) -> t6  split rows(1)  barrier
    launch greater.*(t6) -> t7  split chunks(1)  barrier
    if t7:  barrier
      launch softmax.*(t3+5*batch) -> c4-5*batch*p0 + 5*batch  split rows(batch)
    else:
      launch mul.*(t3+5*batch) -> c4-5*batch*p0 + 5*batch  split chunks(((5*batch + 4095) // (4096)))
    launch sum.*(t5.1) -> output1+batch*t0  split rows(((batch + 255) // (256)))
  launch copy.*(c4+5*batch*time - 10*batch*((time) // (2))) -> output0  split chunks(((5*batch + 4095) // (4096)))"""


def test_loops_and_branches_read_well() -> None:
    text = program(odd_graph()).text(kernels=False)
    launches = re.sub(r"\b([a-z_]+)\.[0-9a-f]{8}\b", r"\1.*", text[text.index("  launch ") :])
    assert launches == GOLDEN, launches


def test_a_while_loop_reads_well() -> None:
    g, more, step = (rlx.Graph(n) for n in ("g", "more", "step"))
    more.set_outputs([more.input("i", (), "i32") < 9])
    step.set_outputs([step.input("i", (), "i32") + 1])
    text = program(g.set_outputs([g.while_loop(g.input("i", (), "i32"), more, step)])).text(kernels=False)
    assert re.findall(r"^ +(while.*|test.*|then:)$", text, re.M) == [
        "while t0, p0:  barrier between",
        "test t1",
        "then:",
    ]


def test_symbols_of_loops_are_not_those_of_the_user() -> None:
    body = rlx.Graph("body")
    body.set_outputs([body.input("c", ("t0", "p1")) * 2.0])
    g = rlx.Graph("g")
    inner = g.scan(g.input("x", ("t0", "p1")), body, 3)
    p = program(g.set_outputs([g.scan(inner, body, 4)]))
    assert p.loop_symbols() == ("t1", "p0", "t2", "p2")


def test_a_carry_that_never_changes_has_no_memory_and_an_empty_loop_is_none() -> None:
    body = rlx.Graph("body")
    c, d = body.input("c", (3,)), body.input("d", (3,))
    body.set_outputs([c, d])
    g = rlx.Graph("g")
    finals, _ = g.scan_general([g.input("c", (3,)), g.input("d", (3,))], body, 1000)
    p = program(g.set_outputs([*finals]))
    assert not p.controls and not [b for b in p.buffers.values() if b.kind == ARENA]


def test_what_is_carried_and_kept_is_stored_twice_by_one_launch() -> None:
    body = rlx.Graph("body")
    c, w, x = body.input("c", (1, 8)), body.input("w", (8, 8)), body.input("x", (1, 8))
    h = (c @ w + x).tanh()
    g = rlx.Graph("rnn")
    c, w, xs = g.input("c", (1, 8)), g.param("w", (8, 8)), g.input("xs", (9, 1, 8))
    finals, ys = g.scan_general([c], body.set_outputs([h, h]), 9, broadcasts=[w], xs=[xs])
    p = program(g.set_outputs([*finals, *ys]))
    (loop,) = p.controls
    assert loop.end - loop.first == 1, "a recurrent layer is one launch a step"
    assert [v.buffer for v in p.launches[loop.first].views(written=True)] == ["c4", "output1"]


# -- barriers ---------------------------------------------------------------------------------------------------------
def loops_of(p: Program) -> list[Loop]:
    return [c for c in p.controls if isinstance(c, Loop)]


def test_a_map_needs_no_barrier_between_its_steps() -> None:
    """No step needs another: threads may be in different ones."""
    body = rlx.Graph("body")
    body.set_outputs([body.input("x", (40, 3)).softmax(axis=1)])
    g = rlx.Graph("g")
    _, ys = g.scan_general([], body, 5, xs=[g.input("xs", (5, 40, 3))])
    (loop,) = loops_of(program(g.set_outputs([*ys])))
    assert loop.end - loop.first == 1


def test_reading_a_carry_and_writing_the_next_need_no_barrier() -> None:
    body = rlx.Graph("body")
    c = body.input("c", (40, 3))
    body.set_outputs([c * 2.0, c.softmax(axis=1)])
    g = rlx.Graph("g")
    finals, ys = g.scan_general([g.input("c", (40, 3))], body, 5)
    p = program(g.set_outputs([*finals, *ys]))
    (loop,) = loops_of(p)
    assert loop.between and [x.barrier for x in p.launches[loop.first : loop.end]] == [False, False]


# -- races ------------------------------------------------------------------------------------------------------------
GUARDED = ("concatenate", "pad")  # kernels that ask before they load: their views reach beyond what they read


@dataclass(frozen=True)
class Access:
    """Bytes [low, high) of the arena, or of a buffer of the caller, that a launch touches."""

    memory: str
    low: int
    high: int
    written: bool
    launch: int
    step: tuple[int, ...]

    def races(self, other: Access) -> bool:
        apart = self.high <= other.low or other.high <= self.low
        same = (self.launch, self.step) == (other.launch, other.step)
        return self.memory == other.memory and not apart and not same and (self.written or other.written)


class Runner:
    """Walks a program as threads do, with branches decided by `choices`, and collects what is touched in each phase."""

    def __init__(self, p: Program, sizes: Mapping[str, int], choices: Iterator[bool]) -> None:
        self.p, self.sizes, self.choices = p, dict(sizes), choices
        self.steps = list(p.steps())
        lives = lifetimes(p)
        self.plan: Plan = plan(lives, {x.name: evaluate(p.buffers[x.name].type.bytes, sizes) for x in lives})
        self.phases: list[list[Access]] = [[]]
        self.symbols: dict[str, int] = dict.fromkeys(p.loop_symbols(), 0)

    def place(self, kind: str, number: int) -> int:
        return next(i for i, s in enumerate(self.steps) if (s.kind, s.number) == (kind, number))

    def barrier(self) -> None:
        self.phases.append([])

    def run(self) -> list[list[Access]]:
        at = 0
        while at < len(self.steps):
            step = self.steps[at]
            at += 1
            if step.kind == "launch":
                self.launch(step.number)
                continue
            control = self.p.controls[step.number]
            if isinstance(control, Branch):
                if step.kind == "test":
                    self.touch(control.predicate, False, -1 - step.number)
                    at = at if next(self.choices) else self.place("jump", step.number) + 1
                elif step.kind == "jump":
                    at = self.place("leave", step.number)
                elif control.barrier:
                    self.barrier()
                continue
            steps = 2 if control.length is None else evaluate(control.length, self.sizes)
            after = self.place("next", step.number) + 1
            match step.kind:
                case "enter":
                    self.symbols |= {control.symbol: 0, control.parity: 0}
                    at = at if steps else after
                case "test":
                    assert control.predicate is not None
                    self.touch(control.predicate, False, -1 - step.number)
                    at = at if next(self.choices) else after
                case "next":
                    done = self.symbols[control.symbol] + 1
                    self.symbols |= {control.symbol: done, control.parity: done % 2}
                    if control.between and (done < steps or control.last < control.end):
                        self.barrier()
                    at = self.place("enter", step.number) + 1 if done < steps else after
                case "leave":
                    if control.barrier:
                        self.barrier()
        return self.phases

    def launch(self, number: int) -> None:
        launch = self.p.launches[number]
        written = launch.kernel.operands()
        guarded = launch.kernel.symbol.startswith(GUARDED)
        for name, word in zip(launch.kernel.words, launch.words, strict=True):
            if isinstance(word, View) and (written[name] or not guarded):
                self.touch(word, written[name], number)
        if launch.barrier:
            self.barrier()

    def touch(self, view: View, written: bool, launch: int) -> None:
        known = self.sizes | self.symbols
        shape, strides = ([evaluate(d, known) for d in sizes] for sizes in (view.shape, view.strides))
        if 0 in shape:
            return
        low = evaluate(view.offset, known)
        high = low + sum((d - 1) * s for d, s in zip(shape, strides, strict=True)) + 1
        inside = self.p.buffers[view.buffer].kind == ARENA
        base = self.plan.offsets[view.buffer] if inside else 0
        size = view.dtype.size
        extent = evaluate(self.p.buffers[view.buffer].type.bytes, self.sizes)
        assert low >= 0 and high * size <= extent, f"launch {launch} leaves {view}"
        step = tuple(self.symbols.values())
        memory = "arena" if inside else view.buffer
        self.phases[-1].append(Access(memory, base + low * size, base + high * size, written, launch, step))


def check_races(p: Program, sizes: Mapping[str, int], choices: Iterator[bool]) -> None:
    for phase in Runner(p, sizes, choices).run():
        for a, b in itertools.combinations(phase, 2):
            assert not a.races(b), f"{a} and {b} in\n{p.text(kernels=False)}"


@given(loop_graphs(), st.integers(0, 3))
@examples(80)
def test_no_two_launches_race(g: rlx.Graph, seed: int) -> None:
    """Neither in a buffer nor in memory that buffers share; in every step of every loop."""
    done = optimise(g, AVX512)
    for part in (done.main, done.bind):
        choices = itertools.cycle([True, True, False] if seed < 2 else [False, True])
        check_races(schedule(part, AVX512), {}, itertools.islice(choices, seed, None))


@pytest.mark.parametrize("time", [0, 1, 2, 3])
@pytest.mark.parametrize("batch", [1, 5])
def test_no_two_launches_race_at_any_size(time: int, batch: int) -> None:
    for first in (True, False):
        check_races(program(odd_graph()), {"time": time, "batch": batch}, itertools.cycle([first, not first]))


# -- offsets ----------------------------------------------------------------------------------------------------------
def test_how_offsets_move() -> None:
    n, t, p = rlx.dim("n"), rlx.dim("t0"), rlx.dim("p0")
    offset: Any = 3 + 4 * n + 5 * n * t - (2 * n + 1) * p + (n + 2) * t
    assert offset_steps(offset, ["t0", "p0"]) == {"t0": 6 * n + 2, "p0": -2 * n - 1}
    assert offset_steps(offset, ["u0"]) == {} and offset_steps(7, ["t0"]) == {}
    view = View("b", rlx.dtype("f32"), (n, 3), (3, 1), offset).bound({"n": 2}, ["t0", "p0"])
    assert (view.shape, view.strides, str(view.offset)) == ((2, 3), (3, 1), "-5*p0 + 14*t0 + 11")


def test_launches_run_as_often_as_their_loops() -> None:
    p = program(odd_graph())
    sizes = {"time": 4, "batch": 2}
    assert p.all_steps(sizes) == {0: 4, 1: 20}
    assert p.runs(p.all_steps(sizes)) == [1, 4, 20, 20, 4, 4, 4, 4, 4, 1]
    names = [x.kernel.symbol.split(".")[0] for x in p.launches]
    assert names[2] == "add" and isinstance(p.launches[2], Launch)
