"""Loads and stores of vectors: contiguous, gathered and scattered, under a mask."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.builder import Builder, Value, const, intrinsic_suffix, lanes_of, vector


def load(b: Builder, type_: str, pointer: Value, align: int, mask: Value | None) -> Value:
    """A contiguous vector; lanes that `mask` leaves out are 0."""
    if mask is None:
        return b.load(type_, pointer, align=align)
    name = f"llvm.masked.load.{intrinsic_suffix(type_)}.p0"
    b.module.declare(name, type_, ["ptr", mask.type, type_])
    zero = f"{type_} zeroinitializer"
    return b.assign(type_, f"call {type_} @{name}(ptr align {align} {pointer.text}, {mask}, {zero})")


def gather(b: Builder, type_: str, pointers: Value, align: int, mask: Value | None) -> Value:
    """An element from each pointer; lanes that `mask` leaves out are 0."""
    count = lanes_of(type_)
    live = mask or const(vector(count, "i1"), True)
    name = f"llvm.masked.gather.{intrinsic_suffix(type_)}.v{count}p0"
    b.module.declare(name, type_, [pointers.type, live.type, type_])
    places = f"{pointers.type} align {align} {pointers.text}"
    return b.assign(type_, f"call {type_} @{name}({places}, {live}, {type_} zeroinitializer)")


def store(b: Builder, value: Value, pointer: Value, align: int, mask: Value | None) -> None:
    """Stores a contiguous vector, but for lanes that `mask` leaves out."""
    if mask is None:
        b.store(value, pointer, align=align)
    else:
        _masked_store(b, f"llvm.masked.store.{intrinsic_suffix(value.type)}.p0", value, pointer, align, mask)


def scatter(b: Builder, value: Value, pointers: Value, align: int, mask: Value | None) -> None:
    """Stores an element to each pointer, but for lanes that `mask` leaves out."""
    count = lanes_of(value.type)
    name = f"llvm.masked.scatter.{intrinsic_suffix(value.type)}.v{count}p0"
    _masked_store(b, name, value, pointers, align, mask or const(vector(count, "i1"), True))


def _masked_store(b: Builder, intrinsic: str, value: Value, to: Value, align: int, mask: Value) -> None:
    b.module.declare(intrinsic, "void", [value.type, to.type, mask.type])
    b.line(f"call void @{intrinsic}({value}, {to.type} align {align} {to.text}, {mask})")


def shuffled(b: Builder, table: Sequence[int], at: Value) -> Value:
    """Looks up to 16 numbers up in registers, at 8 or 16 indices: several times as fast as a load per lane."""
    type_ = vector(lanes_of(at.type), "i32")
    at = at if at.type == type_ else b.convert("trunc", at, type_)
    values = [*table, *[0] * (16 - len(table))]

    def register(part: list[int]) -> Value:
        return Value(type_, f"<{', '.join(f'i32 {v}' for v in part)}>")

    if lanes_of(type_) == 16:
        return b.call(type_, "llvm.x86.avx512.permvar.si.512", register(values), at)
    low, high = (b.call(type_, "llvm.x86.avx2.permd", register(part), at) for part in (values[:8], values[8:]))
    return b.select(b.icmp("sgt", at, const(type_, 7)), high, low)
