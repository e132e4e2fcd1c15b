"""The loader of objects: what it puts into memory runs, no page is both written and executed, and it never guesses."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from targets import NEON, host, supported

from rlx.backends.cpu import driver, elf, toolchain
from rlx.backends.cpu.builder import Builder, Module, Value, const, vector
from rlx.errors import CapabilityError, FormatError
from rlx.target import Target

pytestmark = pytest.mark.skipif(not elf.can_load(), reason="x86-64 Linux only")
CALL_MEMSET = """
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
define void @clear(ptr %to, i64 %n) {
  call void @llvm.memset.p0.i64(ptr %to, i8 7, i64 %n, i1 false)
  ret void
}
"""


def ramp_text(lanes: int) -> str:
    """A function that adds a vector of constants, another that gives a number, and a third that calls it."""
    module = Module()

    def emit(b: Builder, args: Value) -> None:
        ramp = Value(vector(lanes, "float"), "<" + ", ".join(f"float {i}.5" for i in range(lanes)) + ">")
        b.store(b.op("fadd", b.load(ramp.type, args), ramp), args)

    module.define("ramp", [("ptr", "args")], emit)
    module.define("seven", [], lambda b: const("i64", 7), result="i64")
    module.define("calls", [], lambda b: b.call("i64", "seven"), result="i64")
    return module.text()


@pytest.fixture(scope="module")
def ramp() -> bytes:
    return toolchain.compile_text(ramp_text(host().lanes(4)), host())


def mapping_of(address: int) -> str:
    """The rights of the memory at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_ = line.split()
        first, end = (int(part, 16) for part in span.split("-"))
        if first <= address < end:
            return rights
    raise AssertionError("not mapped")


@pytest.mark.parametrize("target", supported(), ids=lambda t: t.name)
def test_code_finds_its_constants_and_its_neighbours(target: Target) -> None:
    lanes = target.lanes(4)
    addresses = elf.load(toolchain.compile_text(ramp_text(lanes), target), ["ramp", "calls"])
    data = np.full(lanes, 0.25, np.float32)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(addresses["ramp"])(data.ctypes.data)
    assert np.array_equal(data, np.arange(lanes) + np.float32(0.75))
    assert ctypes.CFUNCTYPE(ctypes.c_int64)(addresses["calls"])() == 7


def test_the_c_library_is_reached() -> None:
    obj = toolchain.compile_text(CALL_MEMSET, host())
    assert toolchain.undefined_symbols(obj) == ["memset"]
    data = np.zeros(1000, np.uint8)
    clear = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(elf.load(obj, ["clear"])["clear"])
    clear(data.ctypes.data + 1, 998)
    assert data[0] == data[-1] == 0 and (data[1:-1] == 7).all()


def test_no_page_is_writable_and_executable(ramp: bytes) -> None:
    before = Path("/proc/self/maps").read_text().count("rwx")  # other libraries may have such
    addresses = elf.load(ramp, ["ramp"])
    assert mapping_of(addresses["ramp"]) == "r-xp"
    assert Path("/proc/self/maps").read_text().count("rwx") == before


def test_equal_names_in_two_objects_do_not_meet(ramp: bytes) -> None:
    assert elf.load(ramp, ["seven"]) != elf.load(ramp, ["seven"])


def test_the_driver_loads() -> None:
    addresses = elf.load(toolchain.compile_text(driver.driver_text(host()), host()), driver.SYMBOLS)
    assert list(addresses) == list(driver.SYMBOLS)


# -- what is refused --
def test_a_name_that_is_not_there_is_named(ramp: bytes) -> None:
    with pytest.raises(FormatError, match=r"does not define nowhere$"):
        elf.load(ramp, ["ramp", "nowhere"])


def test_a_function_of_another_library_is_refused() -> None:
    module = Module()
    module.define("f", [("double", "x")], lambda b, x: b.call("double", "llvm.sin.f64", x), result="double")
    with pytest.raises(FormatError, match="it calls sin"):
        elf.load(toolchain.compile_text(module.text(), host()), ["f"])


def test_variables_are_refused() -> None:
    text = "@x = global i64 1\ndefine i64 @f() {\n  %v = load i64, ptr @x\n  ret i64 %v\n}\n"
    with pytest.raises(FormatError, match="variables"):
        elf.load(toolchain.compile_text(text, host()), ["f"])


def test_code_for_another_machine_is_refused() -> None:
    module = Module()
    module.define("f", [], lambda b: const("i64", 1), result="i64")
    with pytest.raises(CapabilityError, match="expected code for machine 62"):
        elf.load(toolchain.compile_text(module.text(), NEON), ["f"])


def test_an_unknown_relocation_is_refused(ramp: bytes) -> None:
    obj = elf.Object.read(ramp)
    (table,) = (s for s in obj.sections if s.kind == 4)
    changed = bytearray(ramp)
    struct.pack_into("<I", changed, table.offset + 8, 42)
    with pytest.raises(FormatError, match="relocation kind 42"):
        elf.load(bytes(changed), ["ramp"])


def test_a_relocation_to_no_symbol_is_refused(ramp: bytes) -> None:
    obj = elf.Object.read(ramp)
    (table,) = (s for s in obj.sections if s.kind == 4)
    changed = bytearray(ramp)
    struct.pack_into("<I", changed, table.offset + 12, 0)
    with pytest.raises(FormatError, match="is undefined"):
        elf.load(bytes(changed), ["ramp"])


@pytest.mark.parametrize(
    "damage", [lambda d: b"", lambda d: d[:70], lambda d: d[: len(d) // 2], lambda d: d[:64] + bytes(len(d) - 64)]
)
def test_what_is_cut_or_emptied_is_refused(ramp: bytes, damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(FormatError):
        elf.load(damage(ramp), ["ramp"])


@settings(max_examples=300)
@given(st.data())
def test_damaged_objects_load_or_are_refused_in_words(ramp: bytes, data: st.DataObject) -> None:
    changed = bytearray(ramp)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(ramp) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FormatError, CapabilityError):
        elf.load(bytes(changed), ["ramp"])
