"""Keywords of JAX that functions here do not take: an error says what to do instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from rlx.errors import GraphError

P = ParamSpec("P")
R = TypeVar("R")


def without(**hints: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that lacks these keywords; each has a hint."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name in hints:
                    raise GraphError(f"{function.__name__}: has no argument {name!r}", hint=hints[name])
            return function(*args, **kwargs)

        return call

    return decorate
