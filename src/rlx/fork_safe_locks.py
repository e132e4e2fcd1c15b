"""Locks that a forked child can use. All fork handling in rlx goes through this module.

A forked child has only the thread that called fork. A lock held by another thread would never be released there, so
there are two kinds. Most locks are reset in the child: the data they guard is valid after each bytecode, and objects
that a lost thread had checked out or half built are simply dropped. Where that is unsafe (LLVM in the middle of a
compile, parameters in the middle of an update), fork waits until the lock is free (`Waits`).
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

T = TypeVar("T")


class Waits(enum.IntEnum):
    """Locks that fork waits for, outermost first: a thread that holds one may only acquire later ones."""

    TRAIN_STEP = 0
    COMPILE = 1
    LIBRARY = 2
    LLVM = 3


class Lock:
    """A `threading.Lock`, or with `reentrant` an `RLock`, that is free in a forked child.

    One exception: a lock that the forking thread holds is still held in the child, by the same `with` statement.
    """

    __slots__ = ("__weakref__", "_depth", "_lock", "_owner", "_reentrant", "waits")

    def __init__(self, *, reentrant: bool = False, waits: Waits | None = None) -> None:
        self.waits = waits
        self._reentrant = reentrant
        self._reset()
        _locks[next(_numbers)] = self

    def _reset(self) -> None:
        self._lock: Any = threading.RLock() if self._reentrant else threading.Lock()
        self._owner = self._depth = 0

    def acquire(self, blocking: bool = True) -> bool:
        """Acquire the lock. Returns False if it is taken and `blocking` is False."""
        if not self._lock.acquire(blocking):
            return False
        self._owner = get_ident()
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds the lock."""
        return self._owner == get_ident()


class cached_property(functools.cached_property[T]):
    """`functools.cached_property` without a lock: Python 3.11 holds one while it runs, which no child could release."""

    def __init__(self, func: Callable[[Any], T]) -> None:
        super().__init__(func)
        self.lock = contextlib.nullcontext()  # Python 3.12 and later have none


_locks: weakref.WeakValueDictionary[int, Lock] = weakref.WeakValueDictionary()  # in order of creation
_numbers = itertools.count()
_waited: dict[int, list[Lock]] = {}  # locks acquired for a fork, by forking thread
_repairs: list[Callable[[], None]] = []


def alive() -> list[Lock]:
    """All locks of this process, in order of creation."""
    # Copied in one step, since another thread may add a lock at any time.
    return [lock for ref in _locks.valuerefs() if (lock := ref()) is not None]


def in_child(repair: Callable[[], None]) -> None:
    """Registers `repair` to run in every forked child, after locks were reset."""
    _repairs.append(repair)


def _before_fork() -> None:
    mine = _waited[get_ident()] = []
    waiting = [(lock.waits, i, lock) for i, lock in enumerate(alive()) if lock.waits is not None]
    for *_, lock in sorted(waiting):
        if not lock.is_mine:
            lock.acquire()
            mine.append(lock)


def _after_fork_in_parent() -> None:
    for lock in reversed(_waited.pop(get_ident(), [])):
        lock.release()


def _after_fork_in_child() -> None:
    for lock in alive():
        if not lock.is_mine:
            lock._reset()
    _after_fork_in_parent()
    _waited.clear()  # of other threads that were about to fork
    for repair in _repairs:
        repair()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
