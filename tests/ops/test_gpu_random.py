"""Random numbers on a GPU: the CPU's bits and uniform numbers; normal ones within three units in the last place."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import ORACLES

import rlx

pytestmark = pytest.mark.gpu
SHAPES = [(), (1,), (0, 3), (7, 19), (100_003,)]


def numbers(op: str, device: str, shape: tuple[int, ...], key: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    g = rlx.Graph("random")
    g.set_outputs([g.apply(op, g.input("key", (2,), "u32"), shape=shape)])
    return np.asarray(rlx.compile(g, device).run({"key": key})[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", ["random_bits", "random_uniform", "random_normal"])
def test_numbers_are_those_of_the_cpu(op: str, shape: tuple[int, ...]) -> None:
    for seed in range(3):
        key = np.array([seed, 0x299F31D0 + seed], np.uint32)
        on_cpu, on_gpu = (numbers(op, device, shape, key) for device in ("cpu", "cuda"))
        assert (on_gpu.dtype, on_gpu.shape) == (on_cpu.dtype, on_cpu.shape)
        if op == "random_normal":
            # log and cos of the CPU alone are up to 3 units away from those that are rounded once
            np.testing.assert_array_max_ulp(on_gpu, on_cpu, maxulp=3)
        else:
            np.testing.assert_array_equal(on_gpu, on_cpu)
            np.testing.assert_array_equal(on_gpu, ORACLES[op](key, shape=shape).astype(on_cpu.dtype))
