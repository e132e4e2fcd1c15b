"""The tool chain: text to objects to addresses, and what it refuses."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from limits import LONGEST_S
from targets import AVX2, AVX512, BASELINE, BY_NAME, NEON, host, supported

from rlx.backends.cpu import driver, llvm, toolchain
from rlx.backends.cpu.builder import Builder, Module, Value, const, vector
from rlx.errors import FormatError, LowerError
from rlx.target import Target

SIGNATURE = (("ptr", "args"), ("i64", "lo"), ("i64", "hi"), ("ptr", "scratch"))
FOREIGN = NEON if host().arch == "x86_64" else BASELINE


def constant_text(symbol: str, value: int) -> str:
    """A function that gives `value`."""
    module = Module()
    module.define(symbol, [], lambda b: const("i64", value), result="i64")
    return module.text()


def value_at(address: int) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int64)(address)())


def calling(name: str) -> str:
    """A function that needs another one."""
    module = Module()
    module.define("f", [("double", "x")], lambda b, x: b.call("double", name, x), result="double")
    return module.text()


@pytest.mark.parametrize("target", supported(), ids=lambda t: t.name)
def test_a_symbol_with_dots_loads_and_runs(target: Target) -> None:
    obj = toolchain.compile_text(constant_text("uk.f32.6x4", 42), target)
    assert toolchain.undefined_symbols(obj) == []
    library = toolchain.CodeLibrary()
    assert value_at(library.load(obj, ["uk.f32.6x4"])["uk.f32.6x4"]) == 42


def code_in_memory() -> int:
    """Kilobytes of LLVM's code."""
    kilobytes, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            inside = " r-xp " in line and line.endswith(str(os.path.realpath(llvm.library())))
        elif inside and line.startswith("Rss:"):
            kilobytes += int(line.split()[1])
    return kilobytes


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not say what is in memory")
def test_what_only_compiling_needed_is_put_away_and_comes_back() -> None:
    obj = toolchain.compile_text(constant_text("f", 1), host())
    before = code_in_memory()
    toolchain.trim_compiler_memory()
    assert code_in_memory() < before / 4 and before > 4096
    assert toolchain.compile_text(constant_text("f", 1), host()) == obj


def test_constants_of_a_loaded_object_are_found() -> None:
    lanes = host().lanes(4)
    module = Module()

    def emit(b: Builder, args: Value, *_: Value) -> None:
        ramp = Value(vector(lanes, "float"), "<" + ", ".join(f"float {i}.0" for i in range(lanes)) + ">")
        b.store(b.op("fadd", b.load(ramp.type, args), ramp), args)

    module.define("ramp", SIGNATURE, emit)
    library = toolchain.CodeLibrary()
    address = library.load(toolchain.compile_text(module.text(), host()), ["ramp"])["ramp"]
    data = np.full(lanes, 0.5, np.float32)
    words = [ctypes.c_void_p(data.ctypes.data), ctypes.c_int64(0), ctypes.c_int64(1), ctypes.c_void_p(0)]
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)(address)(*words)
    assert np.array_equal(data, np.arange(lanes) + np.float32(0.5))


def test_equal_names_in_two_objects_do_not_meet() -> None:
    library = toolchain.CodeLibrary()
    one, two = (library.load(toolchain.compile_text(constant_text("f", value), host()), ["f"])["f"] for value in (1, 2))
    assert (value_at(one), value_at(two)) == (1, 2)


def test_an_object_serves_another_process(tmp_path: Path) -> None:
    path = tmp_path / "object"
    path.write_bytes(toolchain.compile_text(constant_text("f", 7), host()))
    program = (
        "import ctypes, sys; from rlx.backends.cpu.toolchain import CodeLibrary; library = CodeLibrary();"
        "address = library.load(open(sys.argv[1], 'rb').read(), ['f'])['f'];"
        "print(ctypes.CFUNCTYPE(ctypes.c_int64)(address)())"
    )
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LONGEST_S)
    assert (done.stdout, done.returncode) == ("7\n", 0), done.stderr


def test_text_that_does_not_parse_is_a_lower_error_with_the_line() -> None:
    with pytest.raises(LowerError, match=r"toolchain: LLVM refuses the module") as caught:
        toolchain.compile_text("define void @f() {\n  %x = add i64 1, float 2.0\n  ret void\n}\n", host())
    assert "add i64 1, float 2.0" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= toolchain.MESSAGE_LINES


def test_text_that_does_not_verify_is_a_lower_error() -> None:
    unreachable_value = (
        "define i64 @f(i1 %c) {\n  br i1 %c, label %a, label %b\na:\n  %x = add i64 1, 2\n  br label %b\nb:\n"
        "  ret i64 %x\n}\n"
    )
    with pytest.raises(LowerError, match="does not dominate"):
        toolchain.assembly(unreachable_value, host())


def test_a_call_of_libm_is_seen_and_refused() -> None:
    obj = toolchain.compile_text(calling("llvm.sin.f64"), host())
    assert toolchain.undefined_symbols(obj) == ["sin"]
    with pytest.raises(LowerError, match=r"the object calls sin\b"):
        toolchain.CodeLibrary().load(obj, ["f"])


def test_an_unknown_function_is_seen_and_refused() -> None:
    obj = toolchain.compile_text(calling("nowhere"), host())
    assert toolchain.undefined_symbols(obj) == ["nowhere"]
    with pytest.raises(LowerError, match="nowhere"):
        toolchain.CodeLibrary().load(obj, ["f"])


def test_memcpy_is_allowed_and_found() -> None:
    text = (
        "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)\ndefine void @f(ptr %to, ptr %from, i64 %n) {\n"
        "  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %n, i1 false)\n  ret void\n}\n"
    )
    obj = toolchain.compile_text(text, host())
    assert toolchain.undefined_symbols(obj) == ["memcpy"]
    library = toolchain.CodeLibrary()
    copy = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(library.load(obj, ["f"])["f"])
    source, target = np.arange(1000), np.zeros(1000, np.int64)
    copy(target.ctypes.data, source.ctypes.data, source.nbytes)
    assert np.array_equal(source, target)


def test_a_symbol_that_the_object_lacks_is_named() -> None:
    with pytest.raises(LowerError, match=r"does not define g$"):
        toolchain.CodeLibrary().load(toolchain.compile_text(constant_text("f", 1), host()), ["f", "g"])


def test_broken_objects_are_format_errors() -> None:
    obj = toolchain.compile_text(constant_text("f", 1), host())
    for broken in (b"", b"not an object at all", obj[:70], obj[: len(obj) // 2], obj[:64] + bytes(len(obj) - 64)):
        with pytest.raises((FormatError, LowerError)):
            toolchain.CodeLibrary().load(broken, ["f"])


def test_a_library_survives_a_refused_object() -> None:
    library = toolchain.CodeLibrary()
    with pytest.raises(LowerError):
        library.load(toolchain.compile_text(calling("nowhere"), host()), ["f"])
    assert value_at(library.load(toolchain.compile_text(constant_text("f", 3), host()), ["f"])["f"]) == 3


def test_many_threads_may_compile_and_load() -> None:
    library, addresses = toolchain.CodeLibrary(), dict[int, int]()

    def work(start: int) -> None:
        for value in range(start, start + 10):
            obj = toolchain.compile_text(constant_text("f", value), host())
            addresses[value] = value_at(library.load(obj, ["f"])["f"])

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert addresses == {value: value for i in range(4) for value in range(100 * i, 100 * i + 10)}


def test_modules_compiled_in_the_background_come_in_order() -> None:
    compilation = toolchain.Compilation(host())
    for value in range(12):
        compilation.add(constant_text("f", value))
    library = toolchain.CodeLibrary()
    assert [value_at(library.load(obj, ["f"])["f"]) for obj in compilation.objects()] == list(range(12))
    assert compilation.objects() == [toolchain.compile_text(constant_text("f", value), host()) for value in range(12)]


def test_what_is_wrong_with_a_module_compiled_in_the_background_is_told() -> None:
    compilation = toolchain.Compilation(host())
    for text in (constant_text("f", 1), "define void @f() {\n  %x = add i64 1, float 2.0\n  ret void\n}\n"):
        compilation.add(text)
    with pytest.raises(LowerError, match=r"add i64 1, float 2\.0"):
        compilation.objects()


def test_without_threads_modules_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    compilation = toolchain.Compilation(host())
    compilation.add(constant_text("f", 1))
    assert compilation.objects() == [toolchain.compile_text(constant_text("f", 1), host())]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_during_a_compile_can_compile() -> None:
    over = threading.Event()

    def compile_on() -> None:
        while not over.is_set():
            toolchain.compile_text(driver.driver_text(host()), host())

    busy = threading.Thread(target=compile_on)
    busy.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                obj = toolchain.compile_text(constant_text("f", 5), host())
                os._exit(0 if value_at(toolchain.CodeLibrary().load(obj, ["f"])["f"]) == 5 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        over.set()
        busy.join()


def test_importing_the_backend_does_not_import_llvmlite() -> None:
    program = (
        "import sys, rlx.backends.cpu.toolchain, rlx.backends.cpu.pool;"
        "sys.exit(any(name.startswith('llvmlite') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=LONGEST_S).returncode == 0


def test_the_identity_tells_targets_apart_and_names_the_library_that_is_used() -> None:
    identities = {toolchain.cpu_identity(target) for target in BY_NAME.values()}
    assert len(identities) == len(BY_NAME)
    toolchain.llvm_version()
    maps = Path("/proc/self/maps").read_text() if sys.platform == "linux" else ""
    loaded = {line.split()[-1] for line in maps.splitlines() if line.endswith(".so") and "llvmlite" in line}
    assert all(path in identity for path in loaded for identity in identities)
    assert int(toolchain.llvm_version().split(".")[0]) >= 20


@pytest.mark.skipif(host().arch != "x86_64", reason="x86 registers")
@pytest.mark.parametrize("target, register", [(AVX512, "%zmm"), (AVX2, "%ymm"), (BASELINE, "%xmm")])
def test_vectors_use_the_widest_registers_of_the_target(target: Target, register: str) -> None:
    module = Module()

    def emit(b: Builder, args: Value, *_: Value) -> None:
        x = b.load(vector(target.lanes(4), "float"), args)
        b.store(b.op("fmul", x, x), args)

    module.define("square", SIGNATURE, emit)
    assert register in toolchain.assembly(module.text(), target)


def test_another_architecture_can_be_compiled_but_not_assembled_inline() -> None:
    assert "f:" in toolchain.assembly(constant_text("f", 1), FOREIGN)
    assert toolchain.undefined_symbols(toolchain.compile_text(constant_text("f", 1), FOREIGN)) == []
    with pytest.raises(LowerError, match="inline assembly"):
        toolchain.assembly(driver.driver_text(FOREIGN), FOREIGN)


@pytest.mark.parametrize("target", supported(), ids=lambda t: t.name)
def test_the_driver_needs_no_other_code(target: Target) -> None:
    assert toolchain.undefined_symbols(toolchain.compile_text(driver.driver_text(target), target)) == []


def test_the_driver_of_arm_passes_the_system_call_its_registers() -> None:
    # LLVM has an assembler for the host only; an empty instruction still shows what the registers hold.
    listing = toolchain.assembly(driver.driver_text(NEON).replace('"svc #0"', '""'), NEON)
    for expected in ("mov\tw8, #98", "mov\tw1, #128", "mov\tw1, #129", "mov\tx3, xzr", "isb", "CNTVCT_EL0"):
        assert expected in listing
