"""Four codes in a word against the decoder of each type, on blocks whose bytes are all random."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlx.backends.cpu.forms.panels import ARGUMENTS, over_panel, panel_params
from rlx.backends.cpu.forms.quantised_dots import code_words, codes_kernel, codes_of, unpacked_words
from rlx.backends.cpu.packing.quantised_weights import Interleaved
from rlx.backends.toy import interpreter
from rlx.dtypes import I32, I64, DType, dtype
from rlx.formats.gguf_quants import dequantise
from rlx.lir.loops import Const, Index, LoopKernel, Param, Store
from rlx.ops.quantised_activations import INT8_DOT_TYPES

Array = np.ndarray[Any, Any]
WIDTH, LANES = 8, 4
HIGH = {"q4_0": 4, "q4_1": 4, "q4_k": 32, "q5_k": 8, "q6_k": 16}  # words of a block whose upper bits are codes
EVERY_TYPE = pytest.mark.parametrize("storage", [dtype(name) for name in INT8_DOT_TYPES], ids=str)


def random_rows(storage: DType) -> Array:
    """Rows of one panel."""
    rng = np.random.default_rng(5)
    return rng.integers(0, 256, (WIDTH, 32 * storage.size), np.uint8).view(storage.numpy)


def written(kernel: LoopKernel, rows: Array, words: int) -> Array:
    """The words that a kernel writes for each column and block of a panel: [columns, blocks, words]."""
    storage = dtype(rows.dtype)
    panel = Interleaved(storage, WIDTH, LANES, True).pack(rows).reshape(-1)
    out = np.zeros((rows.shape[1], words, WIDTH), np.int32)
    views = [panel.view(np.int32), panel.view(np.float16 if storage.unit == 2 else np.uint8), panel.view(np.int32)]
    arrays = [*views, out.reshape(-1), out.reshape(-1).view(np.float32)][: len(kernel.params)]
    interpreter.run(kernel, 1, [(array, 0) for array in arrays], [rows.shape[1], 0], [])
    return np.ascontiguousarray(out.transpose(2, 0, 1))


@EVERY_TYPE
def test_unpacked_integers_and_floats_give_the_bits_of_values(storage: DType) -> None:
    rows, codes = random_rows(storage), codes_of(storage)
    words = written(codes_kernel(storage, WIDTH, LANES), rows, unpacked_words(storage))
    runs = storage.block // codes.step
    ends = np.cumsum([storage.block // 4, runs if codes.scaled else 0, codes.minima])
    four_codes, scales, four_minima, floats = (np.ascontiguousarray(x) for x in np.split(words, ends, axis=-1))
    unit, *other = np.split(floats.view(np.float32), codes.floats, axis=-1)
    values = (four_codes.view(np.uint8).astype(np.float32) - codes.offset).reshape(*rows.shape, runs, codes.step)
    with np.errstate(all="ignore"):
        values *= (unit * scales.astype(np.float32) if codes.scaled else unit)[..., None]
        if codes.minima:
            values -= (other[0] * four_minima.view(np.uint8).astype(np.float32))[..., None]
        elif other:
            values += other[0][..., None]
    expected = dequantise(rows.view(np.uint8), storage, rows.size * storage.block)
    np.testing.assert_array_equal(values.reshape(-1), expected)


@pytest.mark.parametrize("storage", [dtype(name) for name in HIGH], ids=str)
def test_raised_codes_are_codes_times_a_power_of_two(storage: DType) -> None:
    weights = code_words(storage, WIDTH, LANES)
    fours = [four for four in map(weights.codes, range(storage.block // 4)) if four.is_high]
    count = len(fours)
    for i, word in enumerate([*(four.word() for four in fours), *(four.raised() for four in fours)]):
        place = ((Index("u"), 2 * count * WIDTH), (Const(i, I64), WIDTH), (Index("v"), LANES), (Index("c"), 1))
        weights.block.stmts.append(Store(3, place, word))
    params = (*panel_params(storage), Param("x_words", I32), Param("codes", I32, True))
    kernel = LoopKernel("raised", params, ARGUMENTS, over_panel(WIDTH, LANES, tuple(weights.block.stmts)))
    plain, raised = np.split(written(kernel, random_rows(storage), 2 * count).view(np.uint8), 2, axis=-1)
    room = np.repeat([four.room for four in fours], 4)
    assert count == HIGH[storage.name]
    np.testing.assert_array_equal(raised, plain.astype(np.int32) << room)
