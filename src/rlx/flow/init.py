"""Random weights for a flow: each weight is initialised by the first rule whose pattern matches its name.

An initialiser is a function of a random key and a shape in file layout (`[out, in]` for linear weights).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import F32
from rlx.errors import BindError, GraphError, nearest
from rlx.flow.patterns import matches_name
from rlx.types import TensorType, dim

__all__ = ["constant", "lecun_normal", "normal", "ones", "truncated_normal", "uniform", "usual", "vectors_of_norms",
           "xavier_uniform", "zeros"]  # fmt: skip

Initialiser = Callable[[Any, Sequence[int]], Array]
Rules = tuple[tuple[str, Initialiser], ...]
UNKNOWN = "unknown"  # begins the names of sizes that no stage has told
STD = 0.02  # the default, as in nearly all published models


def _random() -> Any:
    from rlx.functional import random  # lazy: imports all transforms

    return random


def normal(std: float) -> Initialiser:
    """Initialise from a normal distribution with mean 0."""
    return lambda key, shape: np.asarray(_random().normal(key, shape)) * np.float32(std)


def truncated_normal(std: float, cutoff: float) -> Initialiser:
    """Initialise from a normal distribution; values beyond `cutoff` standard deviations are redrawn."""

    def make(key: Any, shape: Sequence[int]) -> Array:
        values = np.array(_random().normal(key, shape))
        attempt = 0
        while (beyond := np.abs(values) > cutoff).any():
            attempt += 1
            values[beyond] = np.asarray(_random().normal(_random().fold_in(key, attempt), shape))[beyond]
        return values * np.float32(std)

    return make


def uniform(low: float, high: float) -> Initialiser:
    """Initialise uniformly from `low` to `high`."""
    return lambda key, shape: np.asarray(_random().uniform(key, shape, minval=low, maxval=high))


def constant(value: float) -> Initialiser:
    """Initialise with one number."""
    return lambda key, shape: np.full(shape, value, np.float32)


zeros, ones = constant(0.0), constant(1.0)


def xavier_uniform(key: Any, shape: Sequence[int]) -> Array:
    """Initialise uniformly, scaled by fan-in and fan-out (Glorot and Bengio, 2010)."""
    into, out = _fans(shape)
    bound = math.sqrt(6 / (into + out))
    return uniform(-bound, bound)(key, shape)


def lecun_normal(key: Any, shape: Sequence[int]) -> Array:
    """Initialise from a normal scaled by fan-in, truncated at two deviations and corrected for that, as in Flax."""
    return truncated_normal(math.sqrt(1 / _fans(shape)[0]) / 0.87962566103423978, 2.0)(key, shape)


def _fans(shape: Sequence[int]) -> tuple[int, int]:
    """Return fan-in and fan-out."""
    inner = math.prod(shape[2:])
    return shape[1] * inner, shape[0] * inner


def usual(std: float = STD) -> dict[str, Initialiser]:
    """Return the default rules: biases 0, everything else normal."""
    return {"*bias": zeros, "*beta": zeros, "*": normal(std)}


def vectors_of_norms(std: float) -> Initialiser:
    """Initialise vectors with 1 and the rest from a normal: for models whose only vectors are norms and biases."""
    return lambda key, shape: (ones if len(shape) == 1 else normal(std))(key, shape)


def as_initialiser(like: Initialiser | float) -> Initialiser:
    """Convert a number to a constant initialiser; initialisers pass through."""
    if callable(like):
        return like
    if isinstance(like, bool) or not isinstance(like, Real):
        raise GraphError(f"init: {like!r} is neither a number nor a function of a key and a shape")
    return constant(float(like))


class WantedWeights:
    """A weight source that records which weights stages ask for, and in which shapes."""

    def __init__(self, shapes: Mapping[str, Sequence[int]] | None = None) -> None:
        self.shapes: dict[str, tuple[Any, ...]] = {name: tuple(shape) for name, shape in (shapes or {}).items()}
        self.user_shapes = frozenset(self.shapes)
        self.asked: dict[str, tuple[Any, ...]] = {}
        self.declared: dict[str, Initialiser] = {}  # initialisers that stages declare
        self.unknown: dict[str, tuple[Any, ...]] = {}  # weights of unknown shape, with the sizes that are known

    def want(self, key: str, shape: Sequence[Any] | None, init: Initialiser | float | None = None) -> None:
        """Record that a stage asks for a weight, with its shape and its initialiser if the stage knows them.

        None stands for an unknown size. A weight of unknown shape gets a symbolic one, so that the build goes on to
        the next: `check_shapes` names them all.
        """
        if init is not None:
            self.declared.setdefault(key, as_initialiser(init))
        if key in self.shapes:
            self.asked[key] = self.shapes[key]
            return
        sizes = () if shape is None else tuple(shape)
        if shape is None or not all(isinstance(size, int) for size in sizes):
            if sizes and None not in sizes and not any(str(size).startswith(UNKNOWN) for size in sizes):
                raise BindError(f"init: weight {key!r} has symbolic sizes: {list(sizes)}")
            self.unknown[key] = sizes
            sizes = tuple(dim(f"{UNKNOWN}{len(self.unknown)}") if size is None else size for size in sizes)
        self.shapes[key] = self.asked[key] = sizes

    def check_shapes(self) -> None:
        """Raise if the shape of a weight is not known; the error names all such weights."""
        if not self.unknown:
            return
        # sizes that are symbols follow from those of other weights
        asked = {key: sizes for key, sizes in self.unknown.items() if not sizes or None in sizes}
        shown = {key: [size if isinstance(size, int) else "?" for size in sizes] for key, sizes in asked.items()}
        listed = ", ".join(
            f"{key!r}" + (f" [{', '.join(map(str, sizes))}]" if sizes else "") for key, sizes in shown.items()
        )
        subject = f"shape weight {listed} has" if len(shown) == 1 else f"shapes {len(shown)} weights have: {listed}"
        first, sizes = next(iter(shown.items()))
        example = f"({', '.join('64' if size == '?' else str(size) for size in sizes)})" if sizes else "(64,)"
        raise BindError(
            f"init: no stage says which {subject}",
            hint=f"init(key, shapes={{{first!r}: {example}}}), or tell the stage: embed(key, shape=(1000, 64)),"
            " linear(key, out=64), swiglu(...) and gelu_ffn(..., intermediate_size=64), load_param(key, shape=(64,))",
        )

    def check(self) -> None:
        """Raise if the user passed a shape for a weight that no stage asked for."""
        for key in sorted(self.user_shapes - set(self.asked)):
            raise BindError(f"init: shapes has {key!r}, but no stage asks for it", hint=nearest(key, self.asked))

    def has(self, key: str) -> bool:
        return key in self.shapes

    def type(self, key: str) -> TensorType:
        return TensorType(self.shapes[key], F32)

    def array(self, key: str) -> Array:
        raise BindError(f"init: weight {key!r} is not initialised yet")

    def keys(self) -> Iterable[str]:
        return self.shapes.keys()


def make(
    shapes: Mapping[str, tuple[int, ...]], key: Any, rules: Rules, declared: Mapping[str, Initialiser]
) -> dict[str, Array]:
    """Initialise arrays: by the first matching rule, else as the stage declares, else by the default rules.

    The values of a weight depend only on the key and its name.
    """
    if np.shape(key) != (2,) or np.asarray(key).dtype != np.uint32:
        raise GraphError(f"init: {key!r} is not a random key", hint="rlx.random.key(0)")
    arrays: dict[str, Array] = {}
    for name, shape in shapes.items():
        own_key = _random().fold_in(key, np.uint32(zlib.crc32(name.encode())))
        own_rule = ((name, declared[name]),) if name in declared else ()
        every = (*rules, *own_rule, *usual().items())
        rule = next(rule for pattern, rule in every if pattern == name or matches_name(name, pattern))
        array = rule(own_key, shape)
        if np.shape(array) != shape:
            raise GraphError(
                f"init: the initialiser of {name!r} returned shape {list(np.shape(array))}, expected {list(shape)}"
            )
        arrays[name] = np.asarray(array, np.float32, order="C")
    return arrays


def __dir__() -> list[str]:
    return __all__
