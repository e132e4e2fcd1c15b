"""The driver under thousands of interleavings: random programs, in runs that follow each other or come at once.

Whatever the order in which threads go on: each unit runs once and after what its launch waits for, faults are seen, no
thread touches memory of a run that is over, nobody sleeps for ever, and workers get all their cores back.
"""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from collections.abc import Callable

import pytest
from interleaved import Life, Machine, translated
from targets import BASELINE

from rlx.backends.cpu import driver as d

HOME, STRIDE, KERNEL, FAULT = 64, 256, 1, 7
ENSURE, CHECK, FETCH, RELEASE = range(2, 6)  # functions of CPython
ENDLESS = 1 << 62
TRIALS, BATCHES = 40, 4  # of each batch, with seeds of its own
PATIENCE = 1_000_000  # steps of a trial; it takes about 5000


@functools.cache
def functions() -> dict[str, Callable[..., Life]]:
    text = d.driver_text(BASELINE)
    return translated(
        text, {*re.findall(r"^define internal .*?@(\w+)", text, re.M), "execute", "call", "worker", "stop"}
    )


class Program:
    """Random records in the memory of a machine, and what they must do. Launches are known by the word they are given.

    `phase` counts the barriers before a launch; `ends` has the places of predicates, and the launches that clear them.
    """

    def __init__(self, machine: Machine, seed: random.Random, threads: int, first: int) -> None:
        self.machine, self.random, self.threads = machine, seed, threads
        self.low, self.number, self.count = machine.used, first, 0
        self.units, self.phase, self.ends = dict[int, int](), dict[int, int](), dict[int, int]()
        self.begun, self.done = Counter[tuple[int, int]](), Counter[int]()
        self.rows: list[list[int]] = []
        self.failed = self.over = False
        parts = (self.launches, self.launches, self.tests, self.branch, self.loop, self.nested)
        for _ in range(seed.randint(1, 4)):
            seed.choice(parts)()
        able = [number for number in self.phase if self.units[number]]
        self.fault = seed.choice(able) if able and seed.random() < 0.3 else None
        self.scratch = machine.reserve(STRIDE * threads)
        records = machine.reserve(32 * len(self.rows))
        trace = machine.reserve(16 * threads * len(self.rows)) if seed.random() < 0.3 else 0
        machine.write(records, *(word for row in self.rows for word in row))
        shortest = seed.choice((0, 1))  # 1: a run like this one was small
        self.request = self.words(records, len(self.rows), self.scratch, STRIDE, trace, threads, shortest, 0, 0)
        self.high = machine.used

    # -- parts --------------------------------------------------------------------------------------------------------
    def words(self, *words: int) -> int:
        place = self.machine.reserve(8 * len(words))
        self.machine.write(place, *words)
        return place

    def sometimes(self) -> int:
        return self.random.choice((0, d.BARRIER_AFTER))

    def launch(self, flags: int, place: int | None = None, steps: int = 1, least: int = 0) -> int:
        """A row for a launch, or for one in each step of a loop, which finds its word at `place`."""
        number, units = self.number, max(least, self.random.choice((0, 1, 1, 2, 3, 5)))
        self.number += steps
        self.units |= dict.fromkeys(range(number, self.number), units)
        private = d.LAUNCH if place is None else d.LAUNCH | d.PRIVATE
        self.rows.append([KERNEL, self.words(number) if place is None else place, units, private | flags])
        return number

    def meet(self, number: int, flags: int) -> None:
        """A launch comes now; with a barrier, what follows is in the next phase."""
        self.phase[number] = self.count
        self.count += bool(flags & d.BARRIER_AFTER)

    def launches(self) -> None:
        for _ in range(self.random.randint(1, 2)):
            flags = self.sometimes()
            self.meet(self.launch(flags), flags)

    def test(self) -> tuple[int, int]:
        """A test that holds; its record, and the place of its predicate."""
        place = self.words(1)
        self.rows.append([len(self.rows) + 1, self.words(place), 0, d.TEST])
        return len(self.rows) - 1, place

    def tests(self) -> None:
        self.launches()
        for _ in range(self.random.randint(1, 3)):
            self.test()

    def branch(self) -> None:
        at, place = self.test()
        first = self.launch(0)
        jump = len(self.rows)
        self.rows.append([0, 0, 0, d.JUMP])
        self.rows[at][0] = len(self.rows)
        taken = self.launch(0)
        self.rows[jump][0] = len(self.rows)
        if self.random.random() < 0.5:
            taken = first
        else:
            self.machine.write(place, 0)
        flags = self.sometimes()
        self.rows.append([at, 0, 0, d.LEAVE | flags])
        self.meet(taken, flags)

    def loop(self, outer: int | None = None) -> None:
        """A loop of one or two launches. In an outer loop, whose word moves with its steps, it has one of one step."""
        steps, solo = self.random.randint(1, 4), self.random.choice((0, d.SOLO))
        if outer is None and solo:  # who is alone waits for nobody: a loop of one thread stands between barriers
            self.meet(self.launch(d.BARRIER_AFTER), d.BARRIER_AFTER)
        count, home = (self.random.randint(1, 2), HOME) if outer is None else (1, HOME + 64)
        enter, block = len(self.rows), self.words(*[0] * d.LOOP_WORDS)
        self.rows.append([0, block, 0, d.ENTER | solo])
        waits = outer is None and self.random.random() < 0.5
        test = self.test() if waits else None
        launches = []
        for i in range(count):
            flags = d.BARRIER_AFTER if test and i == count - 1 else self.sometimes()
            least = int(test is not None and i == count - 1)
            if outer is None:
                launches.append((self.launch(flags, home + 8 + 8 * i, steps, least), flags))
            else:
                self.rows.append([KERNEL, home + 8, self.units[outer], d.LAUNCH | d.PRIVATE | flags])
        if test:
            self.ends[launches[-1][0] + steps - 1] = test[1]
            self.rows[test[0]][0] = len(self.rows) + 1
        self.rows.append([0, block, 0, d.NEXT | d.BARRIER_AFTER])
        leave = len(self.rows)
        meets = d.BARRIER_AFTER if solo or outer is not None else self.sometimes()
        self.rows.append([enter, 0, 0, d.LEAVE | solo | meets])
        source = HOME + 8 if outer is not None else self.words(*(number for number, _ in launches))
        moves = self.words(*(word for i in range(len(launches)) for word in (8 + 8 * i, 1)))
        times = 1 if outer is not None else ENDLESS if test else steps
        private, moved = int(outer is not None), len(launches)
        self.machine.write(block, times, source, private, home, count, moves, moved, 0, enter + 1, leave, leave)
        for step in range(steps):
            for number, flags in launches:
                self.meet(number + step, flags)
            if launches and step < steps - 1:
                self.count += 1
        self.count += bool(launches and meets)

    def nested(self) -> None:
        """A loop in a loop; a fault in the inner one ends an outer one that has no other end."""
        steps = self.random.randint(1, 3)
        self.meet(self.launch(d.BARRIER_AFTER), d.BARRIER_AFTER)
        enter, block = len(self.rows), self.words(*[0] * d.LOOP_WORDS)
        self.rows.append([0, block, 0, d.ENTER])
        number, self.number = self.number, self.number + steps
        self.units |= dict.fromkeys(range(number, self.number), self.random.randint(0, 3))
        self.loop(outer=number)
        self.rows.append([0, block, 0, d.NEXT | d.BARRIER_AFTER])
        leave = len(self.rows)
        self.rows.append([enter, 0, 0, d.LEAVE | d.BARRIER_AFTER])
        source, moves = self.words(number), self.words(8, 1)
        self.machine.write(block, steps, source, 0, HOME, 1, moves, 1, 0, enter + 1, leave, leave)
        for step in range(steps):
            self.meet(number + step, d.BARRIER_AFTER)

    # -- what happens -------------------------------------------------------------------------------------------------
    def kernel(self, thread: int, number: int, low: int, high: int, scratch: int) -> Life:
        assert not self.over, "a kernel runs after the end"
        if not self.failed:
            assert number in self.phase, "a launch that the program does not come to"
            before = [n for n, phase in self.phase.items() if phase < self.phase[number]]
            assert all(self.done[n] == self.units[n] for n in before), (
                "a launch begins before what it waits for is done"
            )
        for unit in range(low, high):
            assert not self.begun[number, unit], "a unit runs twice"
            self.begun[number, unit] += 1
        for _ in range(self.random.choice((0, 1, 5, 40))):
            yield
        if number == self.fault and low == 0:
            self.machine.store(thread, scratch + d.STATUS, 8, FAULT)
            self.failed = True
        self.done[number] += high - low
        if number in self.ends and self.done[number] == self.units[number]:
            self.machine.store(thread, self.ends[number], 1, 0)
        yield

    def end(self) -> None:
        self.over = True
        status = [self.machine.load(-1, self.scratch + STRIDE * t + d.STATUS, 8) for t in range(self.threads)]
        assert any(status) == self.failed, "a fault was lost"
        assert self.failed or all(self.done[n] == self.units[n] for n in self.phase), "units were left out"
        self.machine.gone.append((self.low, self.high))


class Trial:
    """A pool on a machine, and a random order of its threads' steps."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        self.threads, self.cores = self.random.randint(2, 4), pick((2, 4))
        self.machine = machine = Machine(functions(), self.cores)
        self.job = machine.reserve(d.job_bytes(self.threads))
        settings = {d.POOL_THREADS: self.threads, d.SPIN: pick((0, 0, 1, 3)), d.LOOK: pick((0, 1))}
        # Ticks: with 10, runs may stay on their callers; with many, all runs are small and claim whole slices.
        settings[d.MILLISECOND] = pick((0, 0, 10, 1 << 40))
        for place, value in settings.items():
            machine.write(self.job + place, value)
        machine.core = lambda: self.random.randrange(self.cores)
        machine.kernels[KERNEL] = self.kernel
        if self.random.random() < 0.5:
            self.add_signals()
        self.programs: list[Program] = []
        self.calls = dict[int, Program]()
        self.workers = [machine.start("worker", self.job, tid) for tid in range(1, self.threads)]
        self.burst, self.stalls, self.stalled = pick((1, 2, 5, 30, 200)), pick((0, 0.02, 0.1)), dict[int, int]()
        self.steps = 0

    def add_signals(self) -> None:
        """Let Python look for signals at every second step of a loop; sometimes a handler raises."""
        table = self.machine.reserve(8 * d.SIGNAL_WORDS)
        self.machine.write(table, self.random.choice((0, 100)), ENSURE, CHECK, FETCH, RELEASE)
        self.machine.write(self.job + d.SIGNALS, table)
        chance = self.random.choice((0, 0.1, 0.5))

        def check(machine: Machine, thread: int) -> Life:
            program = self.calls[thread]
            assert not program.over, "signals are looked for after the end"
            yield
            raised = self.random.random() < chance
            program.failed |= raised
            return -int(raised)

        def other(machine: Machine, thread: int, *arguments: int) -> Life:
            yield
            return 0

        self.machine.kernels |= {ENSURE: other, CHECK: check, FETCH: other, RELEASE: other}

    def kernel(self, machine: Machine, thread: int, arguments: int, low: int, high: int, scratch: int) -> Life:
        number = machine.load(thread, arguments, 8)
        program = next(p for p in reversed(self.programs) if number in p.units)
        return program.kernel(thread, number, low, high, scratch)

    def go_on(self) -> bool:
        """Let some thread make some steps, and maybe stand still after that; False where all of them sleep."""
        machine = self.machine
        able = machine.runnable()
        if not able:
            return False
        now = machine.ticks
        thread = self.random.choice([t for t in able if self.stalled.get(t, 0) <= now] or able)
        if self.random.random() < self.stalls:
            self.stalled[thread] = now + self.random.randint(100, 5000)
        for _ in range(1 + int(self.random.expovariate(1 / self.burst))):
            if machine.threads[thread] is None or thread in machine.asleep:
                break
            machine.step(thread)
            self.steps += 1
        assert self.steps < PATIENCE, "there is no end"
        return True

    def run(self, callers: int) -> None:
        calls = self.calls
        for _ in range(callers):
            first = self.programs[-1].number if self.programs else 0
            threads = self.random.randint(1, self.threads) if self.random.random() < 0.3 else self.threads
            self.programs.append(program := Program(self.machine, self.random, threads, first))
            calls[self.machine.start("call", self.job, program.request)] = program
        while calls:
            assert self.go_on(), f"all threads sleep: {self.machine.asleep}"
            for call in [call for call in calls if self.machine.threads[call] is None]:
                calls.pop(call).end()

    def check_rest(self) -> None:
        """Workers that have nothing to do sleep on their seats, and may use all of their cores."""
        while self.go_on():
            pass
        for tid, worker in enumerate(self.workers, start=1):
            seat = self.job + d.SEATS + tid * d.SEAT_BYTES
            assert self.machine.asleep.get(worker) == seat, "a wake-up was lost"
            assert self.machine.masks[worker] == (1 << self.cores) - 1, "a worker has lost a core"

    def stop(self) -> None:
        call = self.machine.start("stop", self.job)
        while self.go_on():
            pass
        assert self.machine.results[call] == 1 and not any(self.machine.threads), "a worker stays"


@pytest.mark.parametrize("batch", range(BATCHES))
def test_threads_agree_in_whatever_order_they_go_on(batch: int) -> None:
    for seed in range(batch * TRIALS, (batch + 1) * TRIALS):
        trial = Trial(seed)
        try:
            for _ in range(4):
                trial.run(callers=1 + (trial.random.random() < 0.2))
                for _ in range(trial.random.choice((0, 0, 10, 1000))):  # a pause, in which workers may fall asleep
                    trial.go_on()
            trial.check_rest()
            trial.stop()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
