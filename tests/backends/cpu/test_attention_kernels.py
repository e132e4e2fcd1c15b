"""Attention kernels on every target that runs here: values against NumPy and torch, bits, masks and bounds."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import targets
from guarded import guarded, guarded_copy
from targets import AVX512, BASELINE

from rlx.backends.cpu import attention, toolchain
from rlx.backends.cpu.builder import Module
from rlx.backends.cpu.routine import Routine
from rlx.dtypes import BF16, BOOL, F16, F32, F64, I8, I32, U8, DType
from rlx.errors import LowerError
from rlx.lir.kernels import AttentionKernel
from rlx.target import Target

Array = npt.NDArray[Any]

TARGETS = targets.widths()
EVERY_TARGET = pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
EVERY_DTYPE = pytest.mark.parametrize("dtype", (F32, F64, F16, BF16), ids=str)
EVERY_MASK = pytest.mark.parametrize("mask", attention.MASKS)

LENGTHS = (  # of queries and keys: nothing to see, around a vector, around a block, several blocks and units
    (3, 0), (1, 1), (15, 15), (16, 17), (17, 16), (7, 33), (63, 63), (1, 64), (64, 65), (5, 130), (130, 130), (100, 7),
)  # fmt: skip
TOLERANCE = {F32: (2e-6, 3e-6), F64: (1e-14, 1e-14), F16: (2**-11, 1e-5), BF16: (2**-8, 1e-5)}  # relative, absolute


# -- compiling and calling --------------------------------------------------------------------------------------------
_LIBRARY = toolchain.CodeLibrary()
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
_addresses: dict[tuple[str, str], int] = {}


def object_of(routines: Sequence[Routine], target: Target) -> bytes:
    module = Module()
    for routine in routines:
        routine.emit(module)
    return toolchain.compile_text(module.text(), target)


def addresses_of(routines: Sequence[Routine], target: Target) -> list[int]:
    """Where routines are loaded; those that an earlier kernel has brought along are not compiled again."""
    missing = [r for r in routines if (target.name, r.symbol) not in _addresses]
    if missing:
        loaded = _LIBRARY.load(object_of(missing, target), [r.symbol for r in missing])
        _addresses.update({(target.name, symbol): address for symbol, address in loaded.items()})
    return [_addresses[target.name, r.symbol] for r in routines]


def a_kernel(
    dtype: DType = F32, head_dim: int = 16, value_dim: int | None = None, group: int = 1, mask: str = "none",
    window: int = 0, scale: float | None = None, softcap: float = 0.0, mask_dtype: DType | None = None,
) -> AttentionKernel:  # fmt: skip
    if mask_dtype is None:
        mask_dtype = {"custom": BOOL, "bias": F32}.get(mask)
    if mask == "sliding" and not window:
        window = 37
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    return AttentionKernel(dtype, head_dim, value_dim or head_dim, group, mask, window, scale, softcap, mask_dtype)


@dataclass(frozen=True)
class Operands:
    """q, k, v [batch, seq, heads, dim] in any layout whose last axis is contiguous, and the mask where there is one."""

    q: Array
    k: Array
    v: Array
    mask: Array | None = None

    def with_keys(self, count: int) -> Operands:
        """The same queries over the first keys only."""
        mask = None if self.mask is None else np.ascontiguousarray(self.mask[..., :count])
        return Operands(self.q, self.k[:, :count], self.v[:, :count], mask)

    def chunk(self, begin: int, end: int) -> Operands:
        """The query rows begin .. end over the keys that exist once they are there."""
        past = self.k.shape[1] - self.q.shape[1]
        mask = self.mask if self.mask is None or self.mask.ndim == 2 else self.mask[:, :, begin:end]
        return replace(self, q=self.q[:, begin:end], mask=mask).with_keys(past + end)


class Compiled:
    """An attention kernel ready to be called on arrays."""

    def __init__(self, kernel: AttentionKernel, target: Target) -> None:
        self.kernel, self.target = kernel, target
        entry = attention.entry(kernel, target)
        self.function = _FUNCTION(addresses_of([entry.routine], target)[0])
        self.parts = np.array(addresses_of(entry.tables["parts"], target), np.int64)

    def words(self, operands: Operands, out: Array) -> Array:
        q, k, v, mask = operands.q, operands.k, operands.v, operands.mask
        values = {
            "parts": self.parts.ctypes.data, "q": q.ctypes.data, "k": k.ctypes.data, "v": v.ctypes.data,
            "out": out.ctypes.data, "mask": 0 if mask is None else mask.ctypes.data, "batch": q.shape[0],
            "q_len": q.shape[1], "k_len": k.shape[1], "kv_heads": k.shape[2],
            "mask_batch": 0, "mask_head": 0, "mask_query": 0,
        }  # fmt: skip
        for name, array in (("q", q), ("k", k), ("v", v), ("out", out)):
            for axis, stride in zip(("batch", "seq", "head"), array.strides, strict=False):
                values[f"{name}_{axis}"] = stride // array.itemsize
        if mask is not None:
            axes = ("mask_batch",) if mask.ndim == 2 else ("mask_batch", "mask_head", "mask_query")
            for axis, stride, size in zip(axes, mask.strides, mask.shape, strict=False):
                values[axis] = stride // mask.itemsize if size > 1 else 0
        return np.array([values[word] for word in attention.Plan(self.kernel, self.target).words], np.int64)

    def units(self, operands: Operands) -> int:
        batch, q_len, kv_heads = operands.q.shape[0], operands.q.shape[1], operands.k.shape[2]
        return int(batch * kv_heads * -(-q_len // attention.Plan(self.kernel, self.target).unit_positions))

    def scratch(self) -> Array:
        """Just as much as was asked for, before a page without access, and full of NaN."""
        size = attention.scratch_bytes(self.kernel, self.target)
        memory = guarded(size, at_end=True)
        memory[:] = 0xFF
        return memory

    def __call__(
        self, operands: Operands, out: Array | None = None, calls: Sequence[tuple[int, int]] | None = None
    ) -> Array:
        """The result; `calls` are the units of each call, all in one unless said."""
        if out is None:
            out = np.full((*operands.q.shape[:3], self.kernel.value_dim), 7, self.kernel.dtype.numpy)
        words = self.words(operands, out)
        for low, high in [(0, self.units(operands))] if calls is None else calls:
            scratch = self.scratch()
            scratch[:64] = 0
            self.function(words.ctypes.data, low, high, scratch.ctypes.data)
            assert not scratch[:64].any(), "the header of scratch is the driver's"
        return out


@functools.cache
def compiled(kernel: AttentionKernel, target: Target) -> Compiled:
    return Compiled(kernel, target)


# -- data and reference -----------------------------------------------------------------------------------------------
def random(kernel: AttentionKernel, q_len: int, k_len: int, *, batch: int = 1, kv_heads: int = 1) -> Operands:
    rng = np.random.default_rng([q_len, k_len, kernel.head_dim])
    heads = kv_heads * kernel.group

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(kernel.dtype.numpy)

    mask: Array | None = None
    if kernel.mask_dtype is not None and kernel.mask == "custom":
        mask = (rng.random((batch, k_len)) < 0.7).astype(kernel.mask_dtype.numpy)
    elif kernel.mask_dtype is not None:
        mask = rng.standard_normal((batch, heads, q_len, k_len)).astype(kernel.mask_dtype.numpy)
        mask[rng.random(mask.shape) < 0.2] = -np.inf
    return Operands(
        normal(batch, q_len, heads, kernel.head_dim), normal(batch, k_len, kv_heads, kernel.head_dim),
        normal(batch, k_len, kv_heads, kernel.value_dim), mask,
    )  # fmt: skip


def visible(kernel: AttentionKernel, operands: Operands) -> npt.NDArray[np.bool_]:
    """Which keys each row sees: [batch, heads, q_len, k_len]."""
    (batch, q_len, heads, _), k_len = operands.q.shape, operands.k.shape[1]
    position, key = np.arange(k_len - q_len, k_len)[:, None], np.arange(k_len)
    seen = np.ones((batch, heads, q_len, k_len), np.bool_)
    if kernel.mask in ("causal", "sliding"):
        seen &= key <= position
    if kernel.mask == "sliding":
        seen &= key > position - kernel.window
    if operands.mask is not None and kernel.mask == "custom":
        seen &= (operands.mask.astype(np.float64) >= 0.5)[:, None, None]
    if operands.mask is not None and kernel.mask == "bias":
        seen &= operands.mask != -np.inf
    return seen


def reference(kernel: AttentionKernel, operands: Operands) -> Array:
    """Softmax attention in f64, written down as it is defined."""
    q, k, v = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (operands.q, operands.k, operands.v))
    k, v = (np.repeat(x, kernel.group, axis=1) for x in (k, v))
    scores = kernel.scale * (q @ k.swapaxes(-1, -2))
    if kernel.softcap:
        scores = kernel.softcap * np.tanh(scores / kernel.softcap)
    seen = visible(kernel, operands)
    if operands.mask is not None and kernel.mask == "bias":
        scores = scores + np.where(seen, operands.mask.astype(np.float64), 0.0)
    scores = np.where(seen, scores, -np.inf)
    peak = scores.max(axis=-1, keepdims=True, initial=np.finfo(np.float64).min)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    shares = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.ascontiguousarray((shares @ v).transpose(0, 2, 1, 3))


@functools.cache
def example(kernel: AttentionKernel, q_len: int, k_len: int) -> tuple[Operands, Array]:
    """Operands and what is expected of them, the same for every target."""
    operands = random(kernel, q_len, k_len, batch=2, kv_heads=1 if kernel.group > 4 else 2)
    return operands, reference(kernel, operands)


def assert_close(actual: Array, expected: Array, dtype: DType) -> None:
    relative, absolute = TOLERANCE[dtype]
    np.testing.assert_allclose(actual.astype(np.float64), expected, rtol=relative, atol=absolute)


def assert_same_bits(actual: Array, expected: Array) -> None:
    assert np.ascontiguousarray(actual).tobytes() == np.ascontiguousarray(expected).tobytes()


# -- values -----------------------------------------------------------------------------------------------------------
KERNELS = (
    a_kernel(),
    a_kernel(head_dim=1, mask="sliding", window=1),
    a_kernel(head_dim=20, value_dim=33, group=3, mask="causal"),
    a_kernel(head_dim=32, group=2, mask="sliding", window=70),
    a_kernel(head_dim=64, group=4, mask="custom"),
    a_kernel(head_dim=80, mask="bias"),
    a_kernel(head_dim=96, group=8, mask="causal", softcap=5.0),
    a_kernel(head_dim=128, value_dim=64, mask="custom", mask_dtype=F32, softcap=2.0),
    a_kernel(head_dim=256, group=2, mask="sliding", window=64),
    a_kernel(head_dim=5, value_dim=18, group=128, mask="causal"),
    a_kernel(head_dim=2, value_dim=3, mask="bias", softcap=3.0, mask_dtype=BF16),
    a_kernel(scale=-0.7, mask="causal"),
    a_kernel(scale=0.0),
    a_kernel(F64, 20, 33, 2, "causal"),
    a_kernel(F64, 64, mask="sliding"),
    a_kernel(F64, 3, mask="custom", mask_dtype=I32, softcap=4.0),
    a_kernel(F64, 16, group=3, mask="bias", mask_dtype=F16),
    a_kernel(F16, 64, mask="causal"),
    a_kernel(F16, 1, group=2),
    a_kernel(F16, 18, 17, mask="custom", mask_dtype=F16),
    a_kernel(F16, 6, mask="bias", mask_dtype=F16),
    a_kernel(BF16, 32, group=3, mask="sliding", window=20),
    a_kernel(BF16, 20, 33, mask="causal", softcap=30.0),
    a_kernel(BF16, 1, mask="bias", mask_dtype=F64),
)


def name_of(kernel: AttentionKernel) -> str:
    cap = "-cap" if kernel.softcap else ""
    return f"{kernel.dtype}-{kernel.head_dim}x{kernel.value_dim}-g{kernel.group}-{kernel.mask}{cap}-{kernel.scale:.2g}"


@EVERY_TARGET
@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
def test_values_are_those_of_the_definition(kernel: AttentionKernel, target: Target) -> None:
    run = compiled(kernel, target)
    for q_len, k_len in LENGTHS:
        operands, expected = example(kernel, q_len, k_len)
        assert_close(run(operands), expected, kernel.dtype)


@pytest.mark.parametrize("dtype", (BOOL, I8, I32, U8, F16, BF16, F32, F64), ids=str)
def test_a_custom_mask_keeps_what_is_true_or_at_least_one_half(dtype: DType) -> None:
    kernel = a_kernel(head_dim=8, mask="custom", mask_dtype=dtype)
    operands = random(kernel, 2, 70)
    values: list[float] = (
        [0.5, 0.4990234375, -1.0, np.inf, -np.inf, np.nan, 1.0, -0.0] if dtype.is_float else [0, 1, 2, 100]
    )
    if dtype.kind == "int":
        values += [-1, -128]
    if dtype.is_bool:
        values = [False, True]
    operands = replace(operands, mask=np.resize(np.array(values, dtype.numpy), (1, 70)))
    assert_close(compiled(kernel, TARGETS[0])(operands), reference(kernel, operands), F32)


@EVERY_TARGET
@EVERY_DTYPE
def test_layouts_are_strides(dtype: DType, target: Target) -> None:
    """Heads before positions, rows far apart, the result inside something larger: NaN lies between."""
    kernel = a_kernel(dtype, 18, 32, group=2, mask="causal")
    plain = random(kernel, 20, 70, batch=2, kv_heads=3)

    def heads_first(array: Array) -> Array:
        wide = np.full((*np.array(array.shape)[[0, 2, 1]], array.shape[3] + 5), np.nan, array.dtype)
        view = wide[..., : array.shape[3]].transpose(0, 2, 1, 3)
        view[...] = array
        return view

    expected = compiled(kernel, target)(plain)
    out = heads_first(np.zeros_like(expected))
    operands = Operands(*(heads_first(x) for x in (plain.q, plain.k, plain.v)))
    assert_same_bits(compiled(kernel, target)(operands, out=out), expected)
    assert out.base is not None
    assert np.isnan(out.base[..., 32:].astype(np.float64)).all()


@EVERY_TARGET
def test_one_bias_may_serve_all_heads_and_rows(target: Target) -> None:
    kernel = a_kernel(F32, 18, 32, group=2, mask="bias")
    operands = random(kernel, 9, 70, batch=2, kv_heads=2)
    assert operands.mask is not None
    shared = np.ascontiguousarray(operands.mask[:, :1, :1])
    full = np.broadcast_to(shared, operands.mask.shape)
    output = compiled(kernel, target)(replace(operands, mask=shared))
    assert_same_bits(output, compiled(kernel, target)(replace(operands, mask=np.ascontiguousarray(full))))


# -- torch ------------------------------------------------------------------------------------------------------------
@pytest.mark.parity
@EVERY_TARGET
@pytest.mark.parametrize("kernel", [k for k in KERNELS if not k.softcap], ids=name_of)
def test_torch_agrees(kernel: AttentionKernel, target: Target) -> None:
    torch = pytest.importorskip("torch")
    run = compiled(kernel, target)
    for q_len, k_len in ((1, 1), (17, 17), (64, 65), (130, 130)):
        operands = random(kernel, q_len, k_len, batch=2)
        q, k, v = (torch.from_numpy(x.astype(np.float64)).transpose(1, 2) for x in (operands.q, operands.k, operands.v))
        seen = torch.from_numpy(visible(kernel, operands))
        rule: Any = seen
        if operands.mask is not None and kernel.mask == "bias":
            rule = torch.from_numpy(operands.mask.astype(np.float64))
        result = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=rule, scale=kernel.scale, enable_gqa=kernel.group > 1
        )
        result = torch.where(seen.any(-1, keepdim=True), result, torch.zeros_like(result))
        assert_close(run(operands), result.transpose(1, 2).numpy(), kernel.dtype)


# -- bits -------------------------------------------------------------------------------------------------------------
BIT_KERNELS = (
    a_kernel(head_dim=64, mask="causal"),
    a_kernel(head_dim=20, value_dim=33, group=3, mask="causal"),
    a_kernel(head_dim=32, mask="sliding", window=70),
    a_kernel(BF16, 32, group=3, mask="sliding", window=20),
    a_kernel(F64, 16, mask="causal", softcap=3.0),
    a_kernel(mask="bias"),
)


@EVERY_TARGET
@pytest.mark.parametrize("kernel", BIT_KERNELS, ids=name_of)
def test_chunks_of_a_prompt_have_the_bits_of_the_whole(kernel: AttentionKernel, target: Target) -> None:
    run, length = compiled(kernel, target), 150
    prompt = random(kernel, length, length, kv_heads=2)
    if prompt.mask is not None:  # a chunk has no keys after its last row, so no row may see any
        prompt.mask[..., np.triu(np.ones((length, length), np.bool_), 1)] = -np.inf
    full_output = run(prompt)
    for size in (1, 7, 64):
        chunks = [run(prompt.chunk(i, min(i + size, length))) for i in range(0, length, size)]
        assert_same_bits(np.concatenate(chunks, axis=1), full_output)


@EVERY_TARGET
@EVERY_MASK
@pytest.mark.parametrize(("group", "q_len"), ((5, 45), (1, 210)))  # more rows than go over the keys together
def test_bits_depend_on_neither_units_nor_neighbours(mask: str, group: int, q_len: int, target: Target) -> None:
    kernel = a_kernel(head_dim=20, value_dim=16, group=group, mask=mask)
    run = compiled(kernel, target)
    operands = random(kernel, q_len, 80, batch=3, kv_heads=2)
    full_output, units = run(operands), run.units(operands)
    assert_same_bits(run(operands, calls=[(i, i + 1) for i in reversed(range(units))]), full_output)
    assert_same_bits(run(operands, calls=[(0, 5), (5, units)]), full_output)
    for i in range(3):
        alone = [None if x is None else x[i : i + 1] for x in (operands.q, operands.k, operands.v, operands.mask)]
        assert_same_bits(run(Operands(*alone)), full_output[i : i + 1])  # type: ignore[arg-type]


@EVERY_TARGET
@pytest.mark.parametrize("mask", ("custom", "bias"))
def test_masking_the_last_keys_is_as_good_as_not_having_them(mask: str, target: Target) -> None:
    kernel = a_kernel(F32, 18, 32, group=2, mask=mask)
    operands = random(kernel, 20, 150)
    assert operands.mask is not None
    for count in (1, 16, 40, 64, 100, 129):
        operands.mask[..., count:] = 0 if mask == "custom" else -np.inf
        run = compiled(kernel, target)
        assert_same_bits(run(operands), run(operands.with_keys(count)))


@EVERY_TARGET
def test_zeros_have_no_sign(target: Target) -> None:
    """A negative sum that underflows is -0, and would become 0 by one more key of weight 0."""
    kernel = a_kernel(F32, 18, 32, group=2, mask="bias")
    operands = random(kernel, 4, 70)
    assert operands.mask is not None
    operands.q[:], operands.mask[..., 0], operands.mask[..., 1:40], operands.mask[..., 40:] = 0, 0, -2, -np.inf
    operands.v[:, 0], operands.v[:, 1:40], operands.v[:, 40:] = 0, -np.finfo(np.float32).smallest_subnormal, 1
    for case in (operands, operands.with_keys(40)):
        output = compiled(kernel, target)(case)
        assert_same_bits(output, np.zeros_like(output))


@EVERY_TARGET
def test_equal_queries_of_different_heads_have_equal_bits(target: Target) -> None:
    """Whatever place in a tile a row has, and whatever height the tile."""
    kernel = a_kernel(head_dim=24, group=13)
    operands = random(kernel, 1, 100)
    operands.q[:] = operands.q[:, :, :1]
    output = compiled(kernel, target)(operands)
    assert_same_bits(output, np.broadcast_to(output[:, :, :1], output.shape))


# -- what a row must not see ------------------------------------------------------------------------------------------
def spoil(array: Array, keys: Sequence[int] | npt.NDArray[Any]) -> None:
    array[:, keys] = np.resize(np.array([np.inf, np.nan, -np.inf], array.dtype), array[:, keys].shape)


@EVERY_TARGET
@EVERY_DTYPE
@pytest.mark.parametrize("mask", ("causal", "sliding"))
def test_rows_do_not_notice_inf_and_nan_outside_their_range(mask: str, dtype: DType, target: Target) -> None:
    kernel = a_kernel(dtype, 18, 32, group=2, mask=mask)
    run, length = compiled(kernel, target), 140
    clean = random(kernel, length, length)
    expected = run(clean)
    for first, last in ((0, 1), (70, 71), (63, 65), (10, 128)):
        dirty = replace(clean, k=clean.k.copy(), v=clean.v.copy())
        for array in (dirty.k, dirty.v):
            spoil(array, np.arange(first, last))
        output = run(dirty)
        assert_same_bits(output[:, :first], expected[:, :first])
        if mask == "sliding":
            after = last + kernel.window - 1
            assert_same_bits(output[:, after:], expected[:, after:])
        assert np.isnan(output[:, first : last + 10].astype(np.float64)).all()


@EVERY_TARGET
@EVERY_DTYPE
def test_keys_that_a_custom_mask_drops_may_hold_anything(dtype: DType, target: Target) -> None:
    kernel = a_kernel(dtype, 18, 32, group=2, mask="custom")
    operands = random(kernel, 9, 140)
    assert operands.mask is not None
    expected = compiled(kernel, target)(operands)
    for array in (operands.k, operands.v):
        spoil(array, np.flatnonzero(operands.mask[0] == 0))
    assert_same_bits(compiled(kernel, target)(operands), expected)


@EVERY_TARGET
@EVERY_DTYPE
def test_keys_that_a_bias_hides_from_a_row_may_hold_anything(dtype: DType, target: Target) -> None:
    kernel = a_kernel(dtype, 18, 32, group=2, mask="bias")
    operands = random(kernel, 13, 140)
    assert operands.mask is not None
    operands.mask[:, :, :5, 3] = operands.mask[:, :, 4:9, 100] = -np.inf
    expected = compiled(kernel, target)(operands)
    for array in (operands.k, operands.v):
        spoil(array, [3, 100])
    hidden = (operands.mask[0][..., [3, 100]] == -np.inf).all(axis=-1).T  # [q_len, heads]
    output = compiled(kernel, target)(operands)
    assert hidden.any()
    assert_same_bits(output[0][hidden], expected[0][hidden])
    assert np.isnan(output[0][~hidden].astype(np.float64)).all()


@EVERY_TARGET
@EVERY_MASK
def test_what_lies_beyond_the_lengths_is_not_used(mask: str, target: Target) -> None:
    kernel = a_kernel(head_dim=20, value_dim=16, group=5, mask=mask)
    for k_len in (1, 17, 64, 70):
        plain = random(kernel, 5, k_len)
        expected = compiled(kernel, target)(plain)

        def longer(array: Array, k_len: int = k_len) -> Array:
            cache = np.full((1, 200, *array.shape[2:]), np.nan, array.dtype)
            cache[:, :k_len] = array
            return cache[:, :k_len]

        operands = replace(plain, k=longer(plain.k), v=longer(plain.v))
        assert_same_bits(compiled(kernel, target)(operands), expected)


@EVERY_TARGET
@EVERY_DTYPE
def test_nan_that_is_seen_comes_out(dtype: DType, target: Target) -> None:
    kernel = a_kernel(dtype, 16)
    run = compiled(kernel, target)
    for key in (0, 31, 63, 64, 99):
        operands = random(kernel, 8, 100)
        operands.k[0, key, 0, 3] = np.nan
        assert np.isnan(run(operands).astype(np.float64)).all()
        operands = random(kernel, 8, 100)
        operands.v[0, key, 0, 3] = np.nan
        is_nan = np.isnan(run(operands).astype(np.float64))
        assert is_nan[..., 3].all()
        assert is_nan.sum() == 8
    operands = random(kernel, 8, 100)
    operands.q[0, 5] = np.nan
    is_nan = np.isnan(run(operands).astype(np.float64))
    assert is_nan[0, 5].all()
    assert is_nan.sum() == 16


@EVERY_TARGET
@EVERY_DTYPE
def test_a_row_that_sees_no_key_is_zero(dtype: DType, target: Target) -> None:
    kernels = {mask: a_kernel(dtype, 18, 32, group=2, mask=mask) for mask in attention.MASKS if mask != "none"}
    for kernel in (a_kernel(dtype, 16), *kernels.values()):
        output = compiled(kernel, target)(random(kernel, 3, 0))
        assert_same_bits(output, np.zeros_like(output))
    for mask in ("causal", "sliding"):
        output = compiled(kernels[mask], target)(random(kernels[mask], 100, 7))
        assert not output[:, :93].any()  # these rows come before the first key
        assert output[:, 93:].all()
    for mask, nothing in (("custom", 0), ("bias", -np.inf)):
        operands = random(kernels[mask], 5, 70)
        assert operands.mask is not None
        operands.mask[...] = nothing
        operands.q[:] = np.inf
        output = compiled(kernels[mask], target)(operands)
        assert_same_bits(output, np.zeros_like(output))


# -- extreme scores ---------------------------------------------------------------------------------------------------
@EVERY_TARGET
@pytest.mark.parametrize("mask", ("none", "custom"))
def test_scores_near_the_lowest_number_are_scores(mask: str, target: Target) -> None:
    kernel = a_kernel(head_dim=1, value_dim=16, mask=mask, scale=1.0)
    for score in (-1e25, -1e38, float(np.finfo(np.float32).min)):
        operands = random(kernel, 3, 90)
        operands.q[:] = 1
        operands.k[:] = score
        # That far out, all keys are as heavy as each other.
        near = reference(kernel, replace(operands, k=np.zeros_like(operands.k)))
        assert_close(compiled(kernel, target)(operands), near, F32)
        operands.k[:, 80] = 0  # and next to nothing beside a key that is near
        if operands.mask is None or operands.mask[0, 80]:
            assert_close(compiled(kernel, target)(operands)[0, 0, 0], operands.v[0, 80, 0], F32)


@EVERY_TARGET
def test_a_bias_of_the_lowest_number_is_no_mask(target: Target) -> None:
    """Models that mask with the lowest number expect an average where every key has it."""
    kernel = a_kernel(F32, 18, 32, mask="bias", group=2)
    operands = random(kernel, 4, 90)
    assert operands.mask is not None
    operands.mask[...] = np.finfo(np.float32).min
    output = compiled(kernel, target)(operands)
    average = operands.v.astype(np.float64).mean(axis=1, keepdims=True)
    assert_close(output, np.broadcast_to(average, output.shape), F32)
    operands.mask[..., 17] = operands.mask[..., 80] = 0
    assert_close(compiled(kernel, target)(operands), reference(kernel, operands), F32)


@EVERY_TARGET
@EVERY_DTYPE
def test_a_reference_may_move_often_and_far(dtype: DType, target: Target) -> None:
    kernel = a_kernel(dtype, 16, mask="causal", scale=1.0)
    for slope in (0.0, 0.02, 0.1, 0.5, 3.0, -0.5):
        operands = random(kernel, 200, 200)
        operands.q[..., 0], operands.q[..., 1:] = 1, 0
        operands.k[..., 0] = (np.arange(200) * slope).astype(dtype.numpy)[:, None]
        assert_close(compiled(kernel, target)(operands), reference(kernel, operands), dtype)


# -- bounds -----------------------------------------------------------------------------------------------------------
@EVERY_TARGET
@pytest.mark.parametrize("at_end", (True, False), ids=("end", "start"))
@pytest.mark.parametrize(
    "kernel",
    (
        a_kernel(head_dim=20, value_dim=33, group=2, mask="causal"),
        a_kernel(head_dim=64, mask="sliding"),
        a_kernel(head_dim=1, mask="custom"),
        a_kernel(head_dim=7, value_dim=64, mask="bias"),
        a_kernel(F64, 5, 3, mask="bias", mask_dtype=F64),
        a_kernel(F16, 18, 17, mask="bias", mask_dtype=F16),
        a_kernel(BF16, 64, 33, mask="custom", mask_dtype=BF16),
    ),
    ids=name_of,
)
def test_nothing_outside_a_buffer_is_touched(kernel: AttentionKernel, at_end: bool, target: Target) -> None:
    run = compiled(kernel, target)
    for q_len, k_len in ((1, 1), (3, 17), (20, 65), (2, 127)):
        plain = random(kernel, q_len, k_len)
        expected = run(plain)
        q, k, v = (guarded_copy(x, at_end=at_end) for x in (plain.q, plain.k, plain.v))
        mask = None if plain.mask is None else guarded_copy(plain.mask, at_end=at_end)
        out = guarded_copy(np.zeros_like(expected), at_end=at_end)
        assert_same_bits(run(Operands(q, k, v, mask), out=out), expected)


@EVERY_TARGET
@EVERY_DTYPE
@pytest.mark.parametrize("mask", ("sliding", "bias"))
def test_objects_call_nothing(mask: str, dtype: DType, target: Target) -> None:
    entry = attention.entry(a_kernel(dtype, 20, 33, 2, mask, softcap=2.0), target)
    assert set(toolchain.undefined_symbols(object_of([entry.routine], target))) <= {"memset"}


# -- the plan ---------------------------------------------------------------------------------------------------------
def test_the_columns_of_v_are_cut_evenly() -> None:
    def cut(value_dim: int, target: Target) -> list[tuple[int, int, int]]:
        return [(s.first, s.count, s.vectors) for s in attention.Plan(a_kernel(value_dim=value_dim), target).strips]

    assert cut(64, AVX512) == [(0, 1, 4)]
    assert cut(80, AVX512) == [(0, 1, 3), (3, 1, 2)]
    assert cut(96, AVX512) == [(0, 2, 3)]
    assert cut(256, AVX512) == [(0, 4, 4)]
    assert cut(20, BASELINE) == [(0, 2, 2), (4, 1, 1)]


def test_micro_kernels_are_shared_between_kernels() -> None:
    first, second = (
        {r.symbol for r in attention.entry(k, AVX512).tables["parts"]}
        for k in (a_kernel(head_dim=64, mask="causal"), a_kernel(BF16, 96, 64, 4, "bias"))
    )
    assert first == second


@pytest.mark.parametrize(
    ("kernel", "message"),
    (
        (a_kernel(I32), "no kernel for i32"),
        (a_kernel(mask="diagonal"), "mask 'diagonal' is not one of none, causal"),
        (replace(a_kernel(mask="bias"), mask_dtype=None), "a bias mask needs its element type"),
        (a_kernel(mask="bias", mask_dtype=BOOL), "a bias is of a float type, not bool"),
    ),
)
def test_kernels_that_cannot_be_are_refused(kernel: AttentionKernel, message: str) -> None:
    with pytest.raises(LowerError, match=message):
        attention.entry(kernel, AVX512)
