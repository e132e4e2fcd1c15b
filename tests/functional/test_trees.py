"""Trees: registered classes, static fields, unflatten, reduce and ravel."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import GraphError

X = np.arange(3.0)


class Interval:
    """A container of one's own: two arrays and a unit."""

    def __init__(self, low: Any, high: Any, unit: str = "m") -> None:
        self.low, self.high, self.unit = low, high, unit

    def tree_flatten(self) -> tuple[tuple[Any, Any], str]:
        return (self.low, self.high), self.unit

    @classmethod
    def tree_unflatten(cls, unit: str, children: Any) -> Interval:
        return cls(*children, unit)


rlx.tree.register(Interval)


@rlx.tree.register
class Box(Interval):
    pass


@dataclass
class Linear:
    w: Any
    name: str = field(default="linear", metadata={"static": True})


@dataclass
class Norm:
    scale: Any
    eps: float
    kind: str


rlx.tree.register_dataclass(Norm, ["scale", "eps"])


def test_a_registered_class_goes_through_every_transform() -> None:
    def width(interval: Interval) -> Any:
        assert interval.unit == "m"
        return np.sum((interval.high - interval.low) ** 2)

    interval = Interval(X, X + 2.0)
    gradient = rlx.grad(width)(interval)
    assert type(gradient) is Interval and gradient.unit == "m"
    np.testing.assert_array_equal(gradient.low, [-4.0] * 3)
    np.testing.assert_array_equal(rlx.vmap(width)(interval), [4.0] * 3)
    moved = rlx.jit(lambda i: rlx.tree.map(lambda v: v + 1.0, i))(Box(X, X))
    assert type(moved) is Box
    np.testing.assert_array_equal(moved.high, X + 1)
    final, _ = rlx.scan(lambda c, _: (Interval(c.low + 1.0, c.high, c.unit), None), interval, length=3)
    np.testing.assert_array_equal(final.low, X + 3)


def test_static_data_is_part_of_the_structure() -> None:
    jitted = rlx.jit(lambda i: i.low * (1.0 if i.unit == "m" else 1000.0))
    np.testing.assert_array_equal(jitted(Interval(X, X)), X)
    np.testing.assert_array_equal(jitted(Interval(X, X, "km")), X * 1000)
    np.testing.assert_array_equal(jitted(Interval(X, X)), X)
    assert len(jitted.history) == 2
    per_unit = rlx.grad(lambda i: np.sum(i.low) * (1.0 if i.unit == "m" else 1000.0))
    for unit, scale in (("m", 1.0), ("km", 1000.0), ("m", 1.0)):
        np.testing.assert_array_equal(per_unit(Interval(X, X, unit)).low, [scale] * 3)
    with pytest.raises(GraphError, match=r"tree.map: structures differ"):
        rlx.tree.map(operator.add, Interval(X, X), Interval(X, X, "km"))


def test_static_fields_of_dataclasses() -> None:
    layer = Linear(X, "first")
    (leaf,) = rlx.tree.leaves(layer)
    assert leaf is X
    gradient = rlx.grad(lambda p: np.sum(p.w**2) * len(p.name))(layer)
    assert gradient.name == "first"
    np.testing.assert_array_equal(gradient.w, 2 * X * 5)
    norm = rlx.jit(lambda n: rlx.tree.map(lambda v: v * 2.0, n) if n.kind == "rms" else n)(Norm(X, 0.5, "rms"))
    assert norm.kind == "rms" and norm.eps == 1.0
    np.testing.assert_array_equal(norm.scale, X * 2)


def test_unflatten_reduce_and_ravel() -> None:
    params = {"b": np.array(3, np.int32), "w": [np.ones((2, 2), np.float32), X]}
    leaves, structure = rlx.tree.flatten(params)
    again = rlx.tree.unflatten(structure, leaves)
    assert rlx.tree.structure(again) == structure and again["w"][1] is params["w"][1]  # type: ignore[index]
    assert rlx.tree.reduce(lambda n, x: n + x.size, params, 0) == 8
    flat, unravel = rlx.tree.ravel(params)
    np.testing.assert_array_equal(flat, [3, 1, 1, 1, 1, 0, 1, 2])
    rebuilt = unravel(flat * 2)
    assert rebuilt["b"].dtype == np.int32 and rebuilt["b"] == 6
    assert rebuilt["w"][0].dtype == np.float32 and rebuilt["w"][0].shape == (2, 2)
    np.testing.assert_array_equal(rebuilt["w"][1], X * 2)

    def loss(flat: Any) -> Any:
        p = unravel(flat)
        return np.sum(p["w"][0]) * 3.0 + np.sum(p["w"][1] ** 2)

    np.testing.assert_allclose(rlx.jit(rlx.grad(loss))(flat), [0, 3, 3, 3, 3, 0, 2, 4])
    empty, back = rlx.tree.ravel({})
    assert empty.shape == (0,) and back(empty) == {}


def test_mistakes_are_named() -> None:
    class Plain:
        pass

    with pytest.raises(GraphError, match="nothing says how to flatten Plain"):
        rlx.tree.register(Plain)
    with pytest.raises(GraphError, match="list is a tree already"):
        rlx.tree.register(list, tuple, tuple)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="Norm has no field 'scal'"):
        rlx.tree.register_dataclass(Norm, meta_fields=["scal"])
    with pytest.raises(GraphError, match="static data of Interval cannot be hashed"):
        rlx.tree.flatten(Interval(X, X, ["m"]))  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="2 leaves for a structure of 1"):
        rlx.tree.unflatten(rlx.tree.structure(X), [1, 2])
    with pytest.raises(GraphError, match="the tree has no leaves"):
        rlx.tree.reduce(operator.add, {})
    with pytest.raises(GraphError, match=r"the array is f64\[2\], the tree has 3 elements"):
        rlx.tree.ravel(X)[1](np.ones(2))
