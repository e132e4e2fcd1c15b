"""Locks across a fork: free in the child, whoever held them, and what they guard is whole."""

from __future__ import annotations

import ast
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from forked import in_child

import rlx
from rlx import fork_safe_locks
from rlx.fork_safe_locks import Lock, Waits, cached_property

ROOT = Path(rlx.__file__).parent
# A child never meets these events: they belong to a call, or to a compilation that children drop.
EVENTS = {"engine/weights.py", "backends/cpu/toolchain.py", "batch/on_ray.py"}  # the last is of a process of Ray's
MAKERS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier", "Event"}
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")


@contextmanager
def held(*taken: Lock) -> Iterator[None]:
    """Another thread holds some locks."""
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in taken:
            lock.acquire()
        begun.set()
        over.wait()
        for lock in taken:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_lock_that_another_thread_holds_is_free_in_a_child(reentrant: bool) -> None:
    lock = Lock(reentrant=reentrant)
    with held(lock):
        assert in_child(lambda: lock.acquire(blocking=False)) == 0
        assert not lock.acquire(blocking=False)
    assert lock.acquire(blocking=False)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("waits", [None, Waits.COMPILE])
def test_a_lock_of_the_forking_thread_is_held_in_the_child_too(reentrant: bool, waits: Waits | None) -> None:
    lock = Lock(reentrant=reentrant, waits=waits)

    def work() -> bool:
        mine = lock.is_mine and lock.acquire(blocking=False) == reentrant
        if reentrant:
            lock.release()
        lock.release()
        return mine and not lock.is_mine and lock.acquire(blocking=False)

    with lock:
        assert in_child(work) == 0
    assert not lock.is_mine


def test_fork_waits_for_what_must_be_whole() -> None:
    lock, state, forker = Lock(waits=Waits.TRAIN_STEP), [0, 0], threading.get_ident()
    begun = threading.Event()

    def update() -> None:
        with lock:
            state[0] = 1
            begun.set()
            while forker not in fork_safe_locks._waited:  # until the other thread is about to fork
                pass
            state[1] = 1

    thread = threading.Thread(target=update)
    thread.start()
    begun.wait()
    assert in_child(lambda: state == [1, 1] and not lock.is_mine and lock.acquire(blocking=False)) == 0
    thread.join()
    assert lock.acquire(blocking=False) and not fork_safe_locks._waited


def test_fork_takes_locks_from_the_outermost_in() -> None:
    order: list[Waits] = []

    class Noted(Lock):
        def acquire(self, blocking: bool = True) -> bool:
            assert self.waits is not None
            order.append(self.waits)
            return super().acquire(blocking)

    noted = [Noted(waits=waits) for waits in reversed(Waits)]
    assert in_child(lambda: order == list(Waits)) == 0
    assert not any(lock.is_mine for lock in noted)


def test_a_child_is_repaired_after_its_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_safe_locks, "_repairs", list(fork_safe_locks._repairs))
    lock, actual = Lock(), list[bool]()
    fork_safe_locks.in_child(lambda: actual.append(lock.acquire(blocking=False)))
    with held(lock):
        assert in_child(lambda: actual == [True]) == 0
    assert actual == []


def test_a_property_that_another_thread_computes_is_computed_in_a_child() -> None:
    begun, over = threading.Event(), threading.Event()

    class Slow:
        @cached_property
        def value(self) -> int:
            if threading.current_thread() is not threading.main_thread():
                begun.set()
                over.wait()
            return 7

    slow = Slow()
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    begun.wait()
    assert in_child(lambda: slow.value == 7) == 0
    over.set()
    thread.join()
    assert vars(slow) == {"value": 7} and isinstance(vars(Slow)["value"], functools.cached_property)


def test_all_locks_of_the_package_are_of_this_kind() -> None:
    banned = {("threading", name) for name in MAKERS} | {("functools", "cached_property"), ("os", "register_at_fork")}
    actual = []
    for path in sorted(ROOT.rglob("*.py")):
        name, text = str(path.relative_to(ROOT)), path.read_text()
        # A server is started, not forked: its process has one event loop and one engine thread.
        if name.startswith("server/") or not any(word in text for _, word in banned):
            continue
        for node in ast.walk(ast.parse(text)):
            used = set[tuple[str | None, str]]()
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used = {(node.value.id, node.attr)}
            elif isinstance(node, ast.ImportFrom):
                used = {(node.module, alias.name) for alias in node.names}
            allowed = {("threading", "Event")} if name in EVENTS else set()
            actual += [(name, *each) for each in used & banned - allowed if name != "fork_safe_locks.py"]
    assert not actual, "rlx.fork_safe_locks has those that a forked child can use"
