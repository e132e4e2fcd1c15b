"""Parameters for a flow that has none: each weight by the first rule whose pattern matches its name.

An initialiser is a function of a random key and a shape, as files have it (`[out, in]` for linear weights).
"""

from __future__ import annotations

import fnmatch
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import F32
from rlx.errors import BindError, GraphError, nearest
from rlx.types import TensorType

Initialiser = Callable[[Any, Sequence[int]], Array]
Rules = tuple[tuple[str, Initialiser], ...]
STD = 0.02  # of what no rule speaks of, as nearly all published models have it


def _random() -> Any:
    from rlx.functional import random  # which brings all transformations along, and most flows are given their weights

    return random


def normal(std: float) -> Initialiser:
    """Normal numbers."""
    return lambda key, shape: np.asarray(_random().normal(key, shape)) * np.float32(std)


def truncated_normal(std: float, cutoff: float) -> Initialiser:
    """Normal numbers, drawn again where they are more than `cutoff` deviations from 0."""

    def make(key: Any, shape: Sequence[int]) -> Array:
        found = np.array(_random().normal(key, shape))
        again = 0
        while (beyond := np.abs(found) > cutoff).any():
            again += 1
            found[beyond] = np.asarray(_random().normal(_random().fold_in(key, again), shape))[beyond]
        return found * np.float32(std)

    return make


def uniform(low: float, high: float) -> Initialiser:
    """Numbers from `low` to `high`."""
    return lambda key, shape: np.asarray(_random().uniform(key, shape, minval=low, maxval=high))


def constant(value: float) -> Initialiser:
    """One number everywhere."""
    return lambda key, shape: np.full(shape, value, np.float32)


zeros, ones = constant(0.0), constant(1.0)


def xavier_uniform(key: Any, shape: Sequence[int]) -> Array:
    """Uniform by both fans (Glorot and Bengio, 2010)."""
    into, out = _fans(shape)
    bound = math.sqrt(6 / (into + out))
    return uniform(-bound, bound)(key, shape)


def lecun_normal(key: Any, shape: Sequence[int]) -> Array:
    """Normal by the number of inputs, cut off at two deviations; what is cut off is made up for, as Flax does it."""
    return truncated_normal(math.sqrt(1 / _fans(shape)[0]) / 0.87962566103423978, 2.0)(key, shape)


def _fans(shape: Sequence[int]) -> tuple[int, int]:
    """How many numbers go into one, and how many one goes into."""
    inner = math.prod(shape[2:])
    return shape[1] * inner, shape[0] * inner


def usual(std: float = STD) -> dict[str, Initialiser]:
    """What weights begin with whose stage declares nothing: biases 0, everything else normal."""
    return {"*bias": zeros, "*beta": zeros, "*": normal(std)}


def vectors_of_norms(std: float) -> Initialiser:
    """Vectors 1, everything else normal: for models whose vectors are all those of norms, besides their biases."""
    return lambda key, shape: (ones if len(shape) == 1 else normal(std))(key, shape)


def as_initialiser(like: Initialiser | float) -> Initialiser:
    """An initialiser, or the one number that a weight begins with."""
    if callable(like):
        return like
    if isinstance(like, bool) or not isinstance(like, Real):
        raise GraphError(f"init: {like!r} is neither a number nor a function of a key and a shape")
    return constant(float(like))


class WantedWeights:
    """Weights that are not there yet: what stages ask for, and the shape that they want it in."""

    def __init__(self, shapes: Mapping[str, Sequence[int]] | None = None) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(shape) for name, shape in (shapes or {}).items()}
        self.given = frozenset(self.shapes)
        self.asked: dict[str, tuple[int, ...]] = {}
        self.declared: dict[str, Initialiser] = {}  # what stages say that weights begin with

    def want(self, key: str, shape: Sequence[Any] | None, init: Initialiser | float | None = None) -> None:
        """A stage asks for a weight; it may know which shape that has, and what it begins with."""
        if init is not None:
            self.declared.setdefault(key, as_initialiser(init))
        if shape is not None and not all(isinstance(size, int) for size in shape):
            raise BindError(f"init: weight {key!r} has sizes that are known at run time only: {list(shape)}")
        if shape is not None:
            self.shapes.setdefault(key, tuple(shape))
        if key not in self.shapes:
            hint = f"init(key, shapes={{{key!r}: (rows, columns)}}), or a size for the stage, as linear(key, out=64)"
            raise BindError(f"init: no stage says which shape weight {key!r} has", hint=hint)
        self.asked[key] = self.shapes[key]

    def check(self) -> None:
        """Raise for a shape that was given for a weight that no stage asked for."""
        for key in sorted(self.given - set(self.asked)):
            raise BindError(f"init: shapes has {key!r}, and no stage asks for it", hint=nearest(key, self.asked))

    def has(self, key: str) -> bool:
        return key in self.shapes

    def type(self, key: str) -> TensorType:
        return TensorType(self.shapes[key], F32)

    def array(self, key: str) -> Array:
        raise BindError(f"init: weight {key!r} is not made yet")

    def keys(self) -> Iterable[str]:
        return self.shapes.keys()


def make(
    shapes: Mapping[str, tuple[int, ...]], key: Any, rules: Rules, declared: Mapping[str, Initialiser]
) -> dict[str, Array]:
    """Arrays for names and shapes: by the first rule that matches, else as declared, else as is usual.

    The numbers of one depend on the key and its name only.
    """
    if np.shape(key) != (2,) or np.asarray(key).dtype != np.uint32:
        raise GraphError(f"init: {key!r} is no random key", hint="rlx.random.key(0)")
    made: dict[str, Array] = {}
    for name, shape in shapes.items():
        own = _random().fold_in(key, np.uint32(zlib.crc32(name.encode())))
        says = ((name, declared[name]),) if name in declared else ()
        every = (*rules, *says, *usual().items())
        rule = next(rule for pattern, rule in every if pattern == name or fnmatch.fnmatchcase(name, pattern))
        found = rule(own, shape)
        if np.shape(found) != shape:
            raise GraphError(
                f"init: the initialiser of {name!r} gave shape {list(np.shape(found))}, wanted {list(shape)}"
            )
        made[name] = np.asarray(found, np.float32, order="C")
    return made
