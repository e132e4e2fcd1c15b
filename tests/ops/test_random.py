"""Random numbers: the published vectors of Philox 4x32-10, and bits that depend on key and index alone."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]
from oracles import ORACLES
from targets import supported

import rlx
from rlx.errors import ShapeError
from rlx.ops.random import philox

WHERE = ["reference", *(t.name for t in supported())]
KEY = np.array([0xA4093822, 0x299F31D0], np.uint32)

# The known answers that come with the Random123 library: counter, key, result.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]  # fmt: skip


def numbers(op: str, where: str, shape: tuple[int, ...], **options: int) -> np.ndarray:  # type: ignore[type-arg]
    g = rlx.Graph("random")
    g.set_outputs([g.apply(op, g.input("key", (2,), "u32"), shape=shape)])
    f = rlx.compile(g, "reference") if where == "reference" else rlx.compile(g, target=where, **options)
    return f.run({"key": KEY})[0]


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_the_published_vectors_come_out(counter: list[int], key: list[int], wanted: list[int]) -> None:
    actual = philox([np.uint64(c) for c in counter], [np.uint64(k) for k in key])
    assert [int(word) for word in actual] == wanted


@pytest.mark.parametrize("where", WHERE)
def test_bits_are_those_of_the_paper_on_every_device(where: str) -> None:
    for shape in ((), (1,), (0, 3), (7, 19), (1003,)):
        actual = numbers("random_bits", where, shape)
        np.testing.assert_array_equal(actual, ORACLES["random_bits"](KEY, shape=shape).astype(np.uint32))
        actual = numbers("random_uniform", where, shape)
        np.testing.assert_array_equal(actual, ORACLES["random_uniform"](KEY, shape=shape).astype(np.float32))


def test_bits_depend_on_key_and_index_alone() -> None:
    """Not on the shape, the length, or the number of threads."""
    long = numbers("random_bits", WHERE[1], (20_000,), threads=2)
    np.testing.assert_array_equal(numbers("random_bits", WHERE[1], (20_000,), threads=1), long)
    np.testing.assert_array_equal(numbers("random_bits", WHERE[1], (50, 30)).reshape(-1), long[:1500])


def test_uniform_numbers_fill_the_interval() -> None:
    x = numbers("random_uniform", WHERE[1], (100_000,)).astype(np.float64)
    assert 0 <= x.min() < 1e-3 and 1 - 1e-3 < x.max() < 1
    assert abs(x.mean() - 1 / 2) < 4 / np.sqrt(12 * x.size)  # four standard deviations
    counts = np.histogram(x, 100, (0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 160  # chi-square with 99 degrees of freedom: 1 in 10,000


@pytest.mark.parametrize("where", WHERE)
def test_normal_numbers_are_those_of_box_and_muller_on_every_device(where: str) -> None:
    """Two uniform numbers each, in float64; only the last places of log, sqrt and cos are the device's own."""
    for shape in ((), (1,), (0, 3), (7, 19), (1003,)):
        actual = numbers("random_normal", where, shape)
        assert actual.dtype == np.float32 and actual.shape == shape
        np.testing.assert_allclose(actual, ORACLES["random_normal"](KEY, shape=shape), rtol=0, atol=2e-6)


def test_normal_numbers_depend_on_key_and_index_alone_and_are_normal() -> None:
    x = numbers("random_normal", WHERE[1], (200_000,), threads=2)
    np.testing.assert_array_equal(numbers("random_normal", WHERE[1], (50, 30)).reshape(-1), x[:1500])
    assert np.isfinite(x).all() and np.abs(x).max() < np.sqrt(2 * 24 * np.log(2)) + 1e-5
    assert scipy.stats.kstest(x, "norm").pvalue > 1e-3
    assert scipy.stats.normaltest(x).pvalue > 1e-3  # skewness and kurtosis together
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 4 / np.sqrt(x.size)


@pytest.mark.parametrize("op", ["random_bits", "random_uniform", "random_normal"])
@pytest.mark.parametrize("shape", [(-1,), (1.5,), (True,)])
def test_shapes_are_sizes(op: str, shape: tuple[object, ...]) -> None:
    g = rlx.Graph("random")
    with pytest.raises(ShapeError):
        g.apply(op, g.input("key", (2,), "u32"), shape=shape)
