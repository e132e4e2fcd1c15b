"""Every identity holds bit for bit, on random numbers and on special ones, for each of its types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlx import Graph
from rlx.dtypes import dtype
from rlx.ir.evaluate import run
from rlx.ir.rewrite import IDENTITIES, Identity
from rlx.mir.canonicalize import canonicalize
from rlx.mir.dce import dce

Array = np.ndarray[Any, Any]
CASES = [pytest.param(i, d, id=f"{i.name}-{d}") for i in IDENTITIES for d in i.dtypes]


def numbers(name: str, count: int, seed: int) -> Array:
    """Ordinary and special numbers of a type, in random order."""
    rng, kind = np.random.default_rng(seed), dtype(name)
    if kind.is_bool:
        return rng.random(count) < 0.5
    if kind.is_integer:
        limits = np.iinfo(kind.numpy)
        special = np.array([0, 1, -1, limits.min, limits.max], kind.numpy)
        return np.concatenate([special, rng.integers(limits.min, limits.max, count - 5, dtype=kind.numpy)])
    info = np.finfo(kind.numpy)
    special = np.array(
        [
            0.0,
            -0.0,
            1.0,
            -1.0,
            np.inf,
            -np.inf,
            np.nan,
            info.max,
            -info.max,
            info.tiny,
            -info.tiny,
            info.smallest_subnormal,
        ]
    )
    bits = rng.integers(0, 2 ** (8 * kind.size), count // 2, dtype=np.uint64)
    anything = bits.astype(f"u{kind.size}").view(kind.numpy)
    ordinary = (rng.standard_normal(count - len(special) - len(anything)) * 3).astype(kind.numpy)
    return rng.permutation(np.concatenate([special.astype(kind.numpy), anything, ordinary]))


def sides(identity: Identity, name: str, shape: tuple[int, ...]) -> tuple[Graph, Graph]:
    """The two sides as graphs of inputs p0, p1, ..."""
    graphs = []
    for side in (0, 1):
        g = Graph(identity.name)
        places = [g.input(f"p{i}", shape, name) for i in range(len(identity.places))]
        graphs.append(g.set_outputs([identity.build(*places)[side]]))
    return graphs[0], graphs[1]


def as_bits(a: Array) -> Array:
    """Bits, with all NaN the same: no IEEE operation promises the sign or the payload of one."""
    if a.dtype.kind == "f":
        a = np.where(np.isnan(a), np.array(np.nan, a.dtype), a)
    return a.view(f"u{a.dtype.itemsize}")


@pytest.mark.parametrize(("identity", "name"), CASES)
def test_both_sides_have_the_same_bits(identity: Identity, name: str) -> None:
    count = 4096
    left, right = sides(identity, name, (count,))
    arrays = {f"p{i}": numbers(name, count, seed=i) for i in range(len(identity.places))}
    (a,), (b,) = run(left, arrays, {}), run(right, arrays, {})
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(as_bits(a), as_bits(b))


@pytest.mark.parametrize(("identity", "name"), CASES)
def test_the_engine_replaces_the_left_side_by_the_right(identity: Identity, name: str) -> None:
    left, right = sides(identity, name, ("n", 3))  # type: ignore[arg-type]
    assert dce(canonicalize(left)) == dce(right)


def test_there_are_identities() -> None:
    assert len(IDENTITIES) >= 13
    assert len({i.name for i in IDENTITIES}) == len(IDENTITIES)
