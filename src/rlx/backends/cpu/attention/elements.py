"""Moving elements between memory and registers: widened on the way in, rounded on the way out.

Partial vectors are moved lane by lane, not under a mask: LLVM joins neighbouring lanes by itself, also where the target
has no masks, and LLVM 22 turns a masked store of one narrowed lane into a store of its wide original.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cpu.attention.plan import SCALAR, Plan
from rlx.backends.cpu.builder import Builder, Value, const, i64, lanes_of, vector
from rlx.backends.cpu.math.conversions import bfloat_to_float, float_to_bfloat, float_to_half, half_to_float
from rlx.dtypes import BF16, F16, F64, DType
from rlx.host_memory import LINE
from rlx.lir.forms.quant_blocks import UNIT


def stored_type(dtype: DType) -> str:
    """The LLVM type in which an element is moved."""
    return f"i{8 * dtype.size}" if dtype.size < 4 else SCALAR[dtype]


def load(b: Builder, plan: Plan, dtype: DType, pointer: Value, live: int) -> Value:
    """`live` stored elements as a vector of the compute type, zeros in the other lanes, which are not read."""
    return widen(b, plan, load_stored(b, dtype, pointer, plan.lanes, live), dtype)


def load_stored(b: Builder, dtype: DType, pointer: Value, lanes: int, live: int) -> Value:
    type_ = vector(lanes, stored_type(dtype))
    if live >= lanes:
        return b.load(type_, pointer, align=dtype.size)
    loaded = const(type_, 0)
    for lane in range(live):
        element = b.load(stored_type(dtype), b.offset(pointer, lane * dtype.size), align=dtype.size)
        loaded = b.insert(loaded, element, lane)
    return loaded


def widen(b: Builder, plan: Plan, stored: Value, dtype: DType) -> Value:
    """A stored vector in the compute type of the kernel."""
    if dtype is F16:
        stored = half_to_float(b, stored, plan.target)
    elif dtype is BF16:
        stored = bfloat_to_float(b, stored, plan.target)
    if plan.target.native(dtype) is plan.compute:
        return stored
    return b.convert("fpext" if plan.compute is F64 else "fptrunc", stored, vector(lanes_of(stored.type), plan.scalar))


def load_packed(b: Builder, plan: Plan, row: Value, column: Value) -> Value:
    """The numbers of a packed row from `column` on: a vector of them lies within a block."""
    block = b.offset(row, b.mul(b.sdiv(column, plan.stored.block), plan.stored.size))
    scale = b.splat(load_scales(b, plan, [block], 1), plan.lanes)
    numbers = b.offset(b.offset(block, UNIT), b.srem(column, plan.stored.block))
    return unpack(b, plan, b.load(vector(plan.lanes, "i8"), numbers, align=1), scale)


def load_scales(b: Builder, plan: Plan, blocks: Sequence[Value], lanes: int) -> Value:
    """The scales of some blocks, widened; of one, a number."""
    if lanes == 1:
        return b.extract(load_scales(b, plan, [blocks[0]] * 2, 2), 0)
    halves = const(vector(lanes, "i16"), 0)
    for lane, block in enumerate(blocks):
        halves = b.insert(halves, b.load("i16", block, align=UNIT), lane)
    return half_to_float(b, halves, plan.target)


def unpack(b: Builder, plan: Plan, numbers: Value, scales: Value) -> Value:
    """Bytes times scales."""
    lanes = lanes_of(numbers.type)
    wide = b.convert("sext", numbers, vector(lanes, "i32"))
    return b.op("fmul", b.convert("sitofp", wide, vector(lanes, plan.scalar)), scales)


def store(b: Builder, plan: Plan, value: Value, pointer: Value, live: int) -> None:
    """The first `live` lanes, rounded to the stored type."""
    dtype = plan.kernel.dtype
    if dtype is F16:
        value = float_to_half(b, value, plan.target)
    elif dtype is BF16:
        value = float_to_bfloat(b, value, plan.target)
    if live >= plan.lanes:
        b.store(value, pointer, align=dtype.size)
        return
    for lane in range(live):
        b.store(b.extract(value, lane), b.offset(pointer, lane * dtype.size), align=dtype.size)


def sweep(b: Builder, extent: int, step: int, body: Callable[[Value, int], None], unroll: int = 4) -> None:
    """`body(start, live)` for each `step` elements of a constant extent; the last ones may be fewer."""
    whole = extent // step
    while whole % unroll:
        unroll //= 2

    def several(start: Value) -> None:
        for n in range(unroll):
            body(b.add(start, n * step), step)

    if whole == unroll:
        several(i64(0))
    elif whole:
        b.loop(0, whole * step, unroll * step, several)
    if extent % step:
        body(i64(whole * step), extent % step)


def fetch(b: Builder, place: Value, size: int, *, locality: int = 3) -> None:
    """Have the lines of so many bytes come."""
    for at in range(0, size, LINE):
        b.prefetch(b.offset(place, at), locality=locality)


def clear(b: Builder, place: Value, size: Value) -> None:
    b.call("void", "llvm.memset.p0.i64", place, Value("i8", "0"), size, Value("i1", "false"))
