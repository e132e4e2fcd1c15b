"""Dot products of four bytes in each 32-bit lane, with the instructions that the target has."""

from __future__ import annotations

from rlx.backends.cpu.builder import Builder, Value, const, lanes_of, vector
from rlx.backends.cpu.targets import CpuTarget

_MULTIPLY_BYTES = {16: "ssse3.pmadd.ub.sw.128", 32: "avx2.pmadd.ub.sw", 64: "avx512.pmaddubs.w.512"}
_MULTIPLY_WORDS = {16: "sse2.pmadd.wd", 32: "avx2.pmadd.wd", 64: "avx512.pmaddw.d.512"}


def dot(b: Builder, total: Value, x: Value, y: Value, target: CpuTarget, *, small: bool) -> Value:
    """total + the four products of the bytes of x, unsigned (below 128 if `small`), and of y, signed, in each i32."""
    lanes = lanes_of(total.type)
    size = 4 * lanes
    if target.arch != "x86_64" or size != target.vector_bytes:
        return _dot_by_shifts(b, total, x, y)
    as_bytes = vector(size, "i8")
    if target.has_dot:
        sides = (b.convert("bitcast", v, as_bytes) for v in (x, y))
        return b.call(total.type, f"llvm.x86.avx512.vpdpbusd.{8 * size}", total, *sides)
    as_words = vector(2 * lanes, "i16")
    if small and size > 16:  # two products fit into 16 bits
        sides = (b.convert("bitcast", v, as_bytes) for v in (x, y))
        pairs = b.call(as_words, f"llvm.x86.{_MULTIPLY_BYTES[size]}", *sides)
        return b.op("add", total, _add_pairs(b, pairs, const(as_words, 1), total.type))
    x, y = b.convert("bitcast", x, as_words), b.convert("bitcast", y, as_words)
    eight = const(as_words, 8)
    even = b.op("and", x, const(as_words, 255)), b.op("ashr", b.op("shl", y, eight), eight)
    odd = b.op("lshr", x, eight), b.op("ashr", y, eight)
    for left, right in (even, odd):
        total = b.op("add", total, _add_pairs(b, left, right, total.type))
    return total


def _add_pairs(b: Builder, x: Value, y: Value, result: str) -> Value:
    """The sums of the products of two neighbours."""
    return b.call(result, f"llvm.x86.{_MULTIPLY_WORDS[2 * lanes_of(x.type)]}", x, y)


def _dot_by_shifts(b: Builder, total: Value, x: Value, y: Value) -> Value:
    for byte in range(4):
        left = b.op("and", b.op("lshr", x, const(x.type, 8 * byte)), const(x.type, 255))
        right = b.op("ashr", b.op("shl", y, const(y.type, 24 - 8 * byte)), const(y.type, 24))
        total = b.op("add", total, b.op("mul", left, right))
    return total
