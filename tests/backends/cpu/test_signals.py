"""Signals during a run: a handler that raises, as for Ctrl-C, ends an endless loop; others do not disturb it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rlx

SOON = 0.05  # seconds


class StopHere(Exception):
    """What the handler raises."""


@pytest.fixture
def alarm() -> Iterator[Callable[[Callable[..., object]], None]]:
    """Call a handler soon, and every now and then after that."""
    before = signal.getsignal(signal.SIGALRM)

    def start(handler: Callable[..., object]) -> None:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, SOON, SOON)

    yield start
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def stop(*_: object) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    raise StopHere("stopped")


def step(carry: tuple[Any, Any]) -> tuple[Any, Any]:
    return carry[0] * 0.5 + 1.0, carry[1] @ carry[1]


def endless(x: Any, m: Any) -> Any:
    return rlx.while_loop(lambda c: c[0] >= 0.0, step, (x, m))


def bounded(x: Any, m: Any) -> Any:
    return rlx.while_loop(lambda c: c[0] >= 0.0, step, (x, m), max_steps=10**9)[0]


def nested(x: Any, m: Any) -> Any:
    return rlx.scan(lambda c, _: (endless(*c), None), (x, m), None, length=3)[0]


def long_scan(x: Any, m: Any) -> Any:
    return rlx.scan(lambda c, _: (step(c), None), (x, m), None, length=10**9)[0]


@pytest.mark.parametrize("size", [2, 200])  # of a matrix: small loops have one thread, large ones share it
@pytest.mark.parametrize("function", [endless, bounded, nested, long_scan])
def test_an_exception_of_a_handler_ends_a_loop(
    function: Callable[..., Any], size: int, alarm: Callable[[Callable[..., object]], None]
) -> None:
    program = rlx.jit(function)
    arguments = np.float32(1), np.eye(size, dtype=np.float32)
    program.program(*arguments)  # compiled: the exception is for the run
    for _ in range(3):  # the third call is a fast one
        alarm(stop)
        with pytest.raises(StopHere, match="stopped"):
            program(*arguments)
    count, product = rlx.jit(lambda n, m: rlx.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, c[1] @ m), (n, m)))(
        0, 0.5 * np.eye(size, dtype=np.float32)
    )
    assert count == 9 and np.array_equal(product, 0.5**10 * np.eye(size, dtype=np.float32))


def test_control_c_ends_a_loop(alarm: Callable[[Callable[..., object]], None]) -> None:
    program, arguments = rlx.jit(endless), (np.float32(1), np.eye(2, dtype=np.float32))
    program.program(*arguments)

    def press(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.raise_signal(signal.SIGINT)

    alarm(press)
    with pytest.raises(KeyboardInterrupt):
        program(*arguments)


def test_a_handler_that_returns_does_not_disturb_a_run(alarm: Callable[[Callable[..., object]], None]) -> None:
    calls: list[int] = []
    alarm(lambda *_: calls.append(1))
    program = rlx.jit(lambda x: rlx.while_loop(lambda n: n < x, lambda n: n + 1, 0))
    limit = 1000
    while len(calls) < 3:  # of whatever speed the machine is, some come during a loop
        assert program(np.int32(limit)) == limit
        limit = min(2 * limit, 1 << 24)
