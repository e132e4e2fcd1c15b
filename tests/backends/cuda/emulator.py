"""A GPU on the host: generated CUDA C compiled by g++, threads of a block as fibers (`emulator.hpp`).

`emulated_gpu` stands in for `Gpu`: `rlx.compile(graph, "cuda")` then runs every launch here. A missing barrier shows as
a result that depends on the order in which threads run (`backwards`), a barrier that not all threads reach as an error,
an access out of bounds as a crash (`guarded`).
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import mmap
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from rlx.backends.cuda import backend, launch_plan, memory, modules
from rlx.backends.cuda.attention import instructions as attention_instructions
from rlx.backends.cuda.gpu import Gpu
from rlx.backends.cuda.kernel_plan import KernelPlan, Pass, entry
from rlx.backends.cuda.launch_plan import PlannedLaunch
from rlx.backends.cuda.loops.emitter import Variant
from rlx.backends.cuda.matmul.instructions import WARPGROUPS, instructions, multiply_group, multiply_registers
from rlx.backends.cuda.matmul.warpgroups import GROUP_TILES
from rlx.backends.cuda.prelude import PRELUDE
from rlx.backends.cuda.scalars import SCALARS
from rlx.backends.cuda.targets import SM_90
from rlx.dtypes import BF16, F16, F32
from rlx.lir.loops import LoopKernel

Array = np.ndarray[Any, Any]
HEADER = "".join((Path(__file__).parent / name).read_text() for name in ("emulator.hpp", "emulated_tensor_cores.hpp"))
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-w", "-ffp-contract=off", "-fno-strict-aliasing")
_ENTRY = re.compile(
    r'extern "C" __global__ void __launch_bounds__\([\w, ]+\) (\w+)\(const (?:__grid_constant__ )?(\w+) \w+\)'
)
_MEETS = re.compile(r"__sync|team_barrier|reduce_|__shfl|mma|wait_for_phase")
_DYNAMIC = "extern __shared__ __align__(128) u8 shared[];"
_MMA = """INLINE void mma(float (&s)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  mma_of<T, IN_ORDER_OF_STEPS>(s, a0, a1, a2, a3, b0, b1);
}
INLINE u32 pair(float a, float b) { return pair_of<T>(a, b); }
"""
_MULTIPLY = """template <int N> INLINE void multiply(float (&sums)[N], u64 a, u64 b, int keep) {
  multiply_group<T>(sums, a, b, keep);
}
"""
_MULTIPLY_REGISTERS = """template <int N>
INLINE void {name}(float (&sums)[N][4], const u32 (&a)[4], u64 b, int keep) {{
  multiply_four_warps<Stored, {columns}>(sums, a, b, keep);
}}
"""
_OF_REGISTERS = ("multiply_rows", False), ("multiply_columns", True)
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def missing() -> str:
    """Why there can be no emulator here; empty if there can."""
    return "" if shutil.which("g++") else "needs g++"


TARGET = SM_90
_HEADER = threading.Lock()


def _compile(*arguments: str) -> None:
    done = subprocess.run(["g++", *FLAGS, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]


@dataclass
class _Function:
    run: Any  # of its library
    address: int
    meets: bool  # whether threads wait for each other


@dataclass
class EmulatedGpu(Gpu):
    """Memory and launches on the host, in order."""

    folder: Path
    backwards: bool = False  # the order of threads and blocks
    guarded: bool = False  # memory ends at a page that nobody may touch
    index: int = 0
    name: str = "emulated"
    launches: int = 0
    downloads: int = 0
    waits: int = 0  # of the host
    functions: dict[str, _Function] = field(default_factory=dict)
    blocks: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.__dict__["target"] = TARGET

    # -- memory --
    def allocate(self, size: int, owner: str = "an array") -> int:
        if not self.guarded:
            block = np.full(size + 256, 0xFF, np.uint8)  # NaN until written
            address = -(-block.ctypes.data // 256) * 256
            self.blocks[address] = block
            return int(address)
        page = mmap.PAGESIZE
        body = -(-max(size, 1) // page) * page
        block = np.frombuffer(mmap.mmap(-1, body + page), np.uint8)
        block[:body] = 0xFF
        _LIBC.mprotect(block.ctypes.data + body, page, 0)
        address = block.ctypes.data + (body - size) // 8 * 8
        self.blocks[address] = block
        return int(address)

    def free(self, address: int) -> None:
        self.blocks.pop(address, None)

    def free_bytes(self) -> int:
        return 1 << 34

    @property
    def total_bytes(self) -> int:
        return 1 << 34

    def trim(self) -> None:
        return

    def start_upload(self, address: int, source: int, size: int) -> None:
        ctypes.memmove(address, source, size)

    def start_download(self, target: int, address: int, size: int) -> None:
        self.downloads += 1
        ctypes.memmove(target, address, size)

    def pin(self, size: int) -> Array:
        return np.zeros(size, np.uint8)

    def copy(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    def clear(self, address: int, size: int) -> None:
        ctypes.memset(address, 0, size)

    # -- kernels --
    def function(self, name: str) -> _Function | None:
        return self.functions.get(name)

    def build(self, source: str, arch: str) -> bytes:
        """Compiles a translation unit to a shared library; the result is its path.

        Only on Hopper are steps of tensor cores exact, so that the order of their products does not matter.
        """
        ordered = "false" if arch == TARGET.arch else "true"
        kernels = source.removeprefix(PRELUDE).replace(_DYNAMIC, "u8* shared = shared_memory;")
        for text in (instructions(F32), attention_instructions.SCALAR, attention_instructions.TENSOR, WARPGROUPS):
            kernels = kernels.replace(text, "")
        mma = _MMA.replace("IN_ORDER_OF_STEPS", ordered)
        for kind in (BF16, F16):
            kernels = kernels.replace(instructions(kind).removeprefix(instructions(F32)), mma)
            for columns in {tile.columns for tile in GROUP_TILES.values()}:
                kernels = kernels.replace(multiply_group(kind, columns), _MULTIPLY)
            for columns, (name, transposed) in itertools.product(range(16, 129, 16), _OF_REGISTERS):
                text = multiply_registers(kind, columns, name=name, transposed=transposed)
                kernels = kernels.replace(text, _MULTIPLY_REGISTERS.format(name=name, columns=str(transposed).lower()))
        thunks = [
            f'extern "C" void call_{name}(const void* w) {{ {inside}{name}(*(const {inside}{words}*)w); }}'
            for name, words in _ENTRY.findall(kernels)
            for inside in (f"ns_{name}::{name}_::" if f"namespace {name}_ {{" in kernels else f"ns_{name}::",)
        ]
        header = self.precompiled_header()
        text = "\n".join([f'#include "{header.name}"', kernels, *thunks, ""])
        key = hashlib.blake2b(f"{header.name}{text}".encode(), digest_size=12).hexdigest()
        library = self.folder / f"{key}.so"
        if not library.exists():
            written = library.with_suffix(".cpp")
            written.write_text(text)
            _compile("-shared", str(written), "-o", str(library))
        return str(library).encode()

    def precompiled_header(self) -> Path:
        text = HEADER + SCALARS
        header = self.folder / f"{hashlib.blake2b(f'{FLAGS}{text}'.encode(), digest_size=6).hexdigest()}.hpp"
        with _HEADER:  # translation units are built at the same time
            if not header.exists():
                header.write_text(text)
                _compile("-x", "c++-header", str(header), "-o", f"{header}.gch")
        return header

    def load(self, cubin: bytes, names: dict[str, int]) -> None:
        library = ctypes.CDLL(cubin.decode())
        library.rlx_run.restype = ctypes.c_char_p
        numbers = (ctypes.c_uint, ctypes.c_uint64, ctypes.c_bool, ctypes.c_bool)
        library.rlx_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, *numbers)
        source = Path(cubin.decode()).with_suffix(".cpp").read_text()
        bodies = {piece.split(" ", 1)[0]: piece for piece in source.split("namespace ns_")[1:]}
        for name in names:
            address = ctypes.cast(getattr(library, f"call_{name}"), ctypes.c_void_p).value
            assert address is not None
            self.functions[name] = _Function(library.rlx_run, address, bool(_MEETS.search(bodies[name])))

    def allow_shared(self, name: str, shared: int) -> None:
        return

    def launch(self, function: Any, grid: tuple[int, int, int], threads: int, shared: int, words: Array) -> None:
        assert threads <= 1024 and shared <= TARGET.shared_bytes
        self.launches += 1
        words, sizes = np.ascontiguousarray(words), np.array(grid, np.uint32)
        problem = function.run(
            function.address, words.ctypes.data, sizes.ctypes.data, threads, shared, function.meets, self.backwards
        )
        assert problem is None, problem.decode()

    def activate(self) -> None:
        return

    # -- graphs --
    @contextmanager
    def capture(self) -> Iterator[list[Any]]:
        """Records launches, with the words that they have now."""
        recorded: list[Any] = []
        with mock.patch.object(self, "launch", lambda *args: recorded.append((*args[:-1], args[-1].copy()))):
            graphs: list[Any] = []
            yield graphs
            graphs.append(recorded)

    def replay(self, graph: Any) -> None:
        for args in graph:
            self.launch(*args)

    def destroy(self, graph: Any) -> None:
        return

    # -- time --
    def mark(self, event: Any = None) -> Any:
        return "over"

    def is_over(self, event: Any) -> bool:
        return True

    def wait(self, event: Any) -> None:
        self.waits += 1

    def synchronize(self) -> None:
        self.waits += 1


@dataclass(frozen=True)
class Changes:
    """What an emulated run does differently from the plan: threads per unit, packs, 64-bit indices, shared memory."""

    lanes: int = 0
    pack: int = 0
    wide: bool = False
    aliased: bool = False
    warps: int = -1  # mask of the loops that warps may split

    def __call__(self, planned: PlannedLaunch) -> PlannedLaunch:
        kernel = planned.kernel
        if not isinstance(kernel, LoopKernel) or len(planned.plan.passes) != 1:
            return planned
        (one,) = planned.plan.passes
        variant = Variant.parse(one.variant)
        variant = replace(
            variant,
            lanes=variant.lanes and (self.lanes or variant.lanes),
            pack=min(self.pack or variant.pack, variant.pack),
            narrow=variant.narrow and not self.wide,
            distinct=variant.distinct and not self.aliased,
            warps=0 if self.aliased or 0 < self.lanes <= 32 else variant.warps & self.warps,
        )
        grid = one.grid
        if variant.lanes and self.lanes:
            extent = kernel.root.extent
            units = extent if isinstance(extent, int) else int(planned.words[kernel.words.index(extent.name)])
            grid = (-(-units * variant.lanes // variant.threads), 1, 1)
        return replace(planned, plan=KernelPlan((Pass(str(variant), grid, variant.threads),)))


_folder = tempfile.TemporaryDirectory(prefix="rlx-emulator-")


@contextmanager
def emulated_gpu(
    changes: Changes | None = None, *, backwards: bool = False, guarded: bool = False, folder: str = ""
) -> Iterator[EmulatedGpu]:
    """Device `cuda` is emulated inside."""
    gpu = EmulatedGpu(Path(folder or _folder.name), backwards, guarded)
    plan = launch_plan._planned  # each launch by itself, before small ones are joined

    def changed(*args: Any) -> PlannedLaunch:
        return (changes or Changes())(plan(*args))

    with (
        mock.patch.object(backend, "gpu", lambda index=0: gpu),
        mock.patch.object(backend, "gpu_count", lambda: 1),
        mock.patch.object(memory, "gpu", lambda index=0: gpu),
        mock.patch.object(launch_plan, "_planned", changed),
    ):
        yield gpu


def launch(kernel: LoopKernel, arrays: list[Array], sizes: dict[str, int], variant: Variant, gpu: EmulatedGpu) -> int:
    """Runs a variant of a kernel on arrays; returns the fault that it reports, 0 without one."""
    name = entry(kernel, str(variant))
    if gpu.function(name) is None:
        gpu.load(gpu.build(PRELUDE + modules.source(kernel, str(variant), TARGET), TARGET.arch), {name: 0})
    fault = np.zeros(2, np.int32)
    words = [a.ctypes.data for a in arrays] + [sizes[n] for n in kernel.args] + [0, fault.ctypes.data, 3]
    extent = kernel.root.extent
    units = extent if isinstance(extent, int) else sizes[extent.name]
    blocks = -(-units * max(variant.lanes, 1) // variant.threads)
    gpu.launch(gpu.function(name), (max(blocks, 1), 1, 1), variant.threads, 0, np.array(words, np.int64))
    assert fault[1] == 0 or fault[0] == 3
    return int(fault[1])
