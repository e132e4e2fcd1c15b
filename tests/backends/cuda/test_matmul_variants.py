"""Matmul kernels for GPUs: the same bits from every variant, run on the host; registers and shared memory of cubins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulator import TARGET, EmulatedGpu, missing

from rlx.arrays import Array
from rlx.backends.cuda.kernel_plan import KernelPlan, entry
from rlx.backends.cuda.matmul.common import CHUNKS, chunk_count, chunk_size, multiplied
from rlx.backends.cuda.matmul.generator import (
    Choice,
    MatmulGenerator,
    RowsChoice,
    plan_rows,
    plan_tiles,
    tile_choices,
)
from rlx.backends.cuda.matmul.tiles import TILES
from rlx.backends.cuda.matmul.warpgroups import GROUP_TILES, GroupTile
from rlx.backends.cuda.modules import source
from rlx.backends.cuda.nvrtc import compile_source
from rlx.backends.cuda.prelude import PRELUDE
from rlx.backends.cuda.targets import BY_NAME, SM_80, SM_86, SM_90, SM_100, CudaTarget
from rlx.dtypes import BF16, F16, F32, F64, DType
from rlx.lir.kernels import OUT_OF_RANGE, Epilogue, EpilogueOperand, MatmulKernel
from rlx.lir.loops import Let, Ref

emulated = pytest.mark.skipif(bool(missing()), reason=missing())
PlanOf = Callable[[MatmulKernel, Mapping[str, int], CudaTarget], KernelPlan | None]


def kernel_of(
    dtype: DType = F32, stored: DType | None = BF16, *, weights: int = 1, residual: bool = False, **more: Any
) -> MatmulKernel:
    """C = A B; of two weights, silu(A B) * (A B1); with a `residual`, plus x0."""
    sums = F32 if dtype.size == 2 else None
    acc = Ref("acc", sums or dtype)
    value = acc / ((-acc).exp() + 1.0) * Ref("acc1", acc.dtype) if weights == 2 else acc
    value = value + Ref("x0", acc.dtype) if residual else value
    operands = (EpilogueOperand("x0", acc.dtype, True),) * residual + (EpilogueOperand("y", acc.dtype, True, True),)
    epilogue = Epilogue("epilogue", (Let("v", value),), (Ref("v", acc.dtype),))
    return MatmulKernel(dtype, None, weights, epilogue, operands, sums=sums, stored=stored, **more)


@dataclass
class Product:
    """Operands of a kernel, and what they multiply to in f64."""

    kernel: MatmulKernel
    a: Array  # [batch, m, k]
    weights: list[Array]  # each [batch or groups, n, k]
    index: Array | None = None
    by_columns: bool = False  # weights are stored as [k, n]
    shift: int = 0  # elements by which weights miss their alignment
    x: Array = field(init=False)

    @classmethod
    def random(cls, kernel: MatmulKernel, m: int, n: int, k: int, *, matrices: int = 1, **more: Any) -> Product:
        rng = np.random.default_rng(m + n + k)
        batch = 1 if kernel.grouped else matrices
        a = rng.standard_normal((batch, m, k)).astype(kernel.dtype.numpy)
        kind = (kernel.stored or kernel.dtype).numpy
        weights = [(rng.standard_normal((matrices, n, k)) * k**-0.5).astype(kind) for _ in range(kernel.weights)]
        product = cls(kernel, a, weights, **more)
        product.x = rng.standard_normal((batch, m, n)).astype(kernel.accumulator.numpy)
        return product

    def first(self, rows: int) -> Product:
        """The same with fewer rows of A."""
        index = None if self.index is None else self.index[:rows]
        part = Product(self.kernel, self.a[:, :rows], self.weights, index, self.by_columns, self.shift)
        part.x = self.x[:, :rows]
        return part

    def words(self) -> dict[str, Any]:
        a = np.ascontiguousarray(self.a.swapaxes(1, 2) if self.kernel.transposed else self.a)
        (batch, m, k), n = self.a.shape, self.weights[0].shape[1]
        stored = [self._stored(w) for w in self.weights]
        words: dict[str, Any] = {
            "a": a, "b": stored[0], "b1": stored[-1], "m": m, "n": n, "k": k, "batch0": 1, "batch1": batch,
            "a_row": a.shape[2], "a_batch0": 0, "a_batch1": m * k if batch > 1 else 0,
            "b_k": n if self.by_columns else 1, "b_n": 1 if self.by_columns else k,
            "b_batch0": n * k if self.kernel.grouped else 0, "b_batch1": n * k if batch > 1 else 0,
            "index": self.index, "groups": len(self.weights[0]), "x0": np.ascontiguousarray(self.x),
            "y": np.full((batch, m, n), np.nan, self.kernel.accumulator.numpy),
        }  # fmt: skip
        for name in ("x0", "y"):
            words |= {f"{name}_row": n, f"{name}_batch0": 0, f"{name}_batch1": m * n}
        return words

    def _stored(self, weight: Array) -> Array:
        flat = (weight.swapaxes(1, 2) if self.by_columns else weight).ravel()
        memory = np.zeros(flat.size + 64, flat.dtype)
        start = -memory.ctypes.data % 64 // memory.itemsize + self.shift
        memory[start : start + flat.size] = flat
        return memory[start:]

    def sizes(self) -> dict[str, int]:
        return {name: 1 if isinstance(word, np.ndarray) else word for name, word in self.words().items()}

    def expected(self) -> Array:
        a = self.a.astype(multiplied(self.kernel).numpy).astype(np.float64)
        matrices = [
            w.astype(np.float64) if self.index is None else w.astype(np.float64)[self.index] for w in self.weights
        ]
        if self.index is None:
            sums = [a @ w.swapaxes(1, 2) for w in matrices]
        else:
            sums = [np.einsum("bik,ink->bin", a, w) for w in matrices]
        value = sums[0] / (1 + np.exp(-sums[0])) * sums[1] if len(sums) == 2 else sums[0]
        return value + self.x if len(self.kernel.epilogue_operands) == 2 else value

    def run(self, gpu: EmulatedGpu, plan_of: PlanOf) -> Array:
        """The result, which is checked."""
        words, plan = self.words(), plan_of(self.kernel, self.sizes(), SM_90)
        assert plan is not None and launch(gpu, self.kernel, plan, words) == 0
        bound = 1e-13 if self.kernel.accumulator is F64 else 4e-6
        np.testing.assert_allclose(words["y"], self.expected(), rtol=bound, atol=bound)
        result: Array = words["y"]
        return result


def rows_of(height: int) -> PlanOf:
    return lambda kernel, words, target: plan_rows(kernel, words, target, choice=RowsChoice(height, 2))


def tile_of(name: str, splits: int = 1) -> PlanOf:
    choice = Choice(TILES[name], splits, 0.0)
    return lambda kernel, words, target: plan_tiles(kernel, words, target, choice=choice)


def group_tile_of(name: str, splits: int = 1) -> PlanOf:
    """Of so few blocks that each takes several tiles."""
    choice = Choice(GROUP_TILES[name], splits, 0.0)
    return lambda kernel, words, target: plan_tiles(kernel, words, replace(target, processors=splits), choice=choice)


def planned(kernel: MatmulKernel, words: Mapping[str, int], target: CudaTarget) -> KernelPlan:
    return MatmulGenerator().plan(kernel, words, target)


def compiled(
    folder: Path, kernel: MatmulKernel, *uses: tuple[Product, PlanOf], target: CudaTarget = TARGET
) -> EmulatedGpu:
    """A GPU with all variants that these uses need."""
    gpu = EmulatedGpu(folder)
    plans = [plan for product, of in uses if (plan := of(kernel, product.sizes(), SM_90)) is not None]
    variants = dict.fromkeys(one.variant for plan in plans for one in plan.passes)
    text = PRELUDE + "".join(source(kernel, variant, target) for variant in variants)
    gpu.load(gpu.build(text, target.arch), {entry(kernel, variant): 0 for variant in variants})
    return gpu


def launch(gpu: EmulatedGpu, kernel: MatmulKernel, plan: KernelPlan, words: Mapping[str, Any]) -> int:
    """Runs the passes of a plan; returns the fault code."""
    scratch, fault = gpu.allocate(plan.scratch), np.zeros(2, np.int32)
    gpu.clear(scratch, plan.zeroed)
    values = [words[w].ctypes.data if isinstance(words[w], np.ndarray) else int(words[w]) for w in kernel.words]
    block = np.array([*values, scratch, fault.ctypes.data, 0], np.int64)
    for one in plan.passes:
        gpu.launch(gpu.function(entry(kernel, one.variant)), one.grid, one.threads, one.shared, block)
    counters = np.zeros(plan.zeroed, np.uint8)
    gpu.download(counters, scratch)
    assert not counters.any()
    return int(fault[1])


# -- numbers ---------------------------------------------------------------------------------------------------------
@emulated
def test_every_variant_gives_the_same_bits(tmp_path: Path) -> None:
    product = Product.random(kernel_of(), 37, 75, 1088)  # rows of whole eights: aligned loads
    tiles = [tile_of("64x64"), tile_of("128x32", 4), tile_of("64x16", 8)]
    uses = [(product, t) for t in tiles] + [(product.first(5), rows_of(h)) for h in (8, 16)]
    gpu = compiled(tmp_path, product.kernel, *uses)
    result = product.run(gpu, tiles[0])
    for tile in tiles[1:]:
        assert product.run(gpu, tile).tobytes() == result.tobytes()
    for height, rows in ((8, 1), (8, 5), (16, 1), (16, 5)):
        assert product.first(rows).run(gpu, rows_of(height)).tobytes() == result[:, :rows].tobytes()
    Product.random(product.kernel, 20, 30, 45).run(gpu, tiles[2])  # rows of A that are not aligned
    product.shift = 1  # without aligned loads
    assert product.run(gpu, tiles[0]).tobytes() == result.tobytes()
    assert product.first(5).run(gpu, rows_of(8)).tobytes() == result[:, :5].tobytes()


@emulated
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_order_within_a_step_is_the_same_where_it_matters(dtype: DType, tmp_path: Path) -> None:
    product = Product.random(kernel_of(dtype, BF16 if dtype is F32 else None), 20, 70, 300)
    tiles = [tile_of("64x32"), tile_of("128x128")]  # stages of 64 and 32 k
    uses = [*((product, tile) for tile in tiles), (product.first(3), rows_of(16))]
    gpu = compiled(tmp_path, product.kernel, *uses, target=SM_80)
    result = product.run(gpu, tiles[0])
    assert product.run(gpu, tiles[1]).tobytes() == result.tobytes()
    assert product.first(3).run(gpu, rows_of(16)).tobytes() == result[:, :3].tobytes()


@emulated
def test_sums_that_wait_in_shared_memory_are_the_same(tmp_path: Path) -> None:
    product = Product.random(kernel_of(BF16, None), 20, 30, 300)
    large, small = tile_of("256x128"), tile_of("64x32")
    gpu = compiled(tmp_path, product.kernel, (product, large), (product, small))
    assert product.run(gpu, large).tobytes() == product.run(gpu, small).tobytes()


@emulated
def test_groups_of_warps_give_the_same_bits(tmp_path: Path) -> None:
    product = Product.random(
        kernel_of(BF16, None, residual=True), 150, 203, 1088
    )  # whole tiles and edges, stages used again
    groups = [group_tile_of("128x128"), group_tile_of("64x128", 3), group_tile_of("192x128")]
    small = tile_of("64x32")
    gpu = compiled(tmp_path, product.kernel, *((product, one) for one in (small, *groups)))
    result = product.run(gpu, small)
    for order in (False, True):
        gpu.backwards = order
        for group in groups:
            assert product.run(gpu, group).tobytes() == result.tobytes()
    product.shift = 1  # without aligned copies
    assert product.run(gpu, groups[0]).tobytes() == result.tobytes()


@emulated
def test_groups_of_warps_take_gates_batches_and_scratch(tmp_path: Path) -> None:
    gate = Product.random(kernel_of(BF16, None, weights=2), 140, 72, 200)
    group, small = group_tile_of("128x192", 2), tile_of("64x32")
    gpu = compiled(tmp_path, gate.kernel, (gate, group), (gate, small))
    assert gate.run(gpu, group).tobytes() == gate.run(gpu, small).tobytes()
    batch = Product.random(kernel_of(F32, F16, transposed=True), 19, 24, 100, matrices=3, by_columns=True)
    gpu = compiled(tmp_path, batch.kernel, (batch, group_tile_of("128x64")), (batch, small))
    assert batch.run(gpu, group_tile_of("128x64")).tobytes() == batch.run(gpu, small).tobytes()


@emulated
def test_strides_and_batches(tmp_path: Path) -> None:
    kernel = kernel_of(F32, F16, transposed=True, residual=True)
    product = Product.random(kernel, 19, 24, 100, matrices=3, by_columns=True)
    gpu = compiled(tmp_path, kernel, (product, planned), (product.first(6), planned))
    result = product.run(gpu, planned)
    assert product.first(6).run(gpu, planned).tobytes() == result[:, :6].tobytes()


@emulated
def test_two_weights_make_a_gate(tmp_path: Path) -> None:
    product = Product.random(kernel_of(BF16, None, weights=2), 21, 40, 224)
    gpu = compiled(tmp_path, product.kernel, (product, tile_of("64x32", 2)), (product.first(3), planned))
    result = product.run(gpu, tile_of("64x32", 2))
    assert product.first(3).run(gpu, planned).tobytes() == result[:, :3].tobytes()


@emulated
def test_rows_select_matrices(tmp_path: Path) -> None:
    index = np.random.default_rng(0).integers(0, 4, 70).astype(np.int32)
    product = Product.random(kernel_of(BF16, None, grouped="rows"), 70, 40, 136, matrices=4, index=index)
    gpu = compiled(tmp_path, product.kernel, (product, planned), (product.first(9), planned))
    result = product.run(gpu, planned)
    assert product.first(9).run(gpu, planned).tobytes() == result[:, :9].tobytes()
    index[3] = 4
    for part in (product, product.first(9)):
        plan = planned(part.kernel, part.sizes(), SM_90)
        assert launch(gpu, part.kernel, plan, part.words()) == OUT_OF_RANGE


@emulated
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_wide_floats_are_multiplied_exactly(dtype: DType, tmp_path: Path) -> None:
    product = Product.random(kernel_of(dtype, None, residual=True), 70, 50, 1060)
    gpu = compiled(tmp_path, product.kernel, *((product.first(rows), planned) for rows in (70, 6, 1)))
    result = product.run(gpu, planned)
    for rows in (6, 1):
        assert product.first(rows).run(gpu, planned).tobytes() == result[:, :rows].tobytes()


def test_chunks_depend_on_k_alone() -> None:
    for k in (1, 100, 128, 1024, 1025, 3072, 12288, 100_000):
        assert chunk_size(k) % 128 == 0 and chunk_count(k) <= CHUNKS
        assert (chunk_count(k) - 1) * chunk_size(k) < k <= chunk_count(k) * chunk_size(k)


# -- plans -----------------------------------------------------------------------------------------------------------
def sizes_of(kernel: MatmulKernel, m: int, n: int, k: int) -> dict[str, int]:
    words = dict.fromkeys(kernel.words, 0) | dict.fromkeys(kernel.operands(), -1)
    return words | {"m": m, "n": n, "k": k, "batch0": 1, "batch1": 1, "a_row": k, "b_k": 1, "b_n": k}


def shown(m: int, n: int, k: int, target: CudaTarget = SM_90, **kernel: Any) -> list[str]:
    it = kernel_of(**kernel)
    return [
        f"{p.variant} {p.grid[0]}x{p.grid[1]} {p.threads}" for p in planned(it, sizes_of(it, m, n, k), target).passes
    ]


def test_plans_fill_the_gpu() -> None:
    assert shown(1, 4096, 1024) == ["rows16x8x512_eo 128x1 512"]  # all weights of a block at once
    assert shown(1, 1024, 3072) == ["rows8x12x256_eo 128x1 256"]
    assert shown(1, 3072, 1024, weights=2) == ["rows16x8x768_eo 128x1 768"]
    assert shown(1, 12288, 4096, weights=2) == ["rows16x16x512_e 132x1 512"]
    assert shown(8, 4096, 12288)[0].startswith("tile")  # no room for copies beside so long rows
    assert shown(4096, 4096, 4096, dtype=BF16, stored=None) == ["groups128x128_e 132x1 384"]
    assert shown(4096, 4096, 4096, SM_100, dtype=BF16, stored=None) == ["tile256x128_e 512x1 256"]
    assert shown(512, 4096, 1024)[0].startswith("narrowa_a ")
    assert shown(0, 4096, 1024) == []


@pytest.mark.parametrize("target", BY_NAME.values(), ids=lambda t: t.name)
def test_plans_keep_within_shared_memory_and_counters(target: CudaTarget) -> None:
    for kernel in (kernel_of(), kernel_of(weights=2), kernel_of(F32, None), kernel_of(F64, None)):
        for m, n, k in ((1, 100, 100_000), (8, 1024, 12288), (8, 64, 40_000), (33, 1024, 4096), (4096, 4096, 4096)):
            words = sizes_of(kernel, m, n, k)
            plan = planned(kernel, words, target)
            assert all(p.shared <= target.shared_bytes and 0 < p.threads <= 1024 for p in plan.passes)
            assert plan.zeroed <= plan.scratch or not plan.zeroed
            if kernel.stored:
                assert all(c.splits <= CHUNKS for c in tile_choices(kernel, words, target))


# -- cubins ----------------------------------------------------------------------------------------------------------
CUBINS = [
    (kernel_of(), "rows16x16x512_e"), (kernel_of(weights=2), "rows16x8x768_eo"), (kernel_of(), "tile128x128_ae"),
    (kernel_of(), "rows8x12x256_eo"),
    (kernel_of(BF16, None, weights=2), "tile128x32_s"), (kernel_of(F32, None), "fma64_k"),
]  # fmt: skip


def test_groups_of_warps_keep_their_registers() -> None:
    """No spills to speak of, and products that run in the background, which the compiler may give up."""
    generator = MatmulGenerator()
    kernels = (kernel_of(F32, BF16, residual=True), "ae"), (kernel_of(BF16, None, weights=2), "s")
    variants = [(kernel, f"groups{name}_{letters}") for kernel, letters in kernels for name in GROUP_TILES]
    text = "".join(generator.source(kernel, variant, SM_90) for kernel, variant in variants)
    cubin = compile_source(PRELUDE + text, SM_90.arch)
    assert "C75" not in cubin.log, cubin.log
    resources = cubin.resources()
    assert len(resources) == len(variants)
    for kernel, variant in variants:
        used, tile = resources[entry(kernel, variant)], GROUP_TILES[variant.split("_")[0].removeprefix("groups")]
        assert used.spilled <= 64, variant
        # Threads that copy give registers to those that multiply, which wait for them: for ever if there are too few.
        assert tile.copying_registers + tile.groups * tile.registers <= (tile.groups + 1) * used.registers, variant
        assert tile.blocks * tile.threads * used.registers <= 65_536, variant


@pytest.mark.parametrize("target", [SM_86, SM_90], ids=lambda t: t.name)
def test_kernels_keep_their_registers(target: CudaTarget) -> None:
    """No spills, and enough blocks per processor: the register file has 65,536 entries."""
    generator = MatmulGenerator()
    text = PRELUDE + "".join(generator.source(kernel, variant, target) for kernel, variant in CUBINS)
    resources = compile_source(text, target.arch).resources()
    assert len(resources) == len(CUBINS)
    for name, used in resources.items():
        assert used.spilled == 0, name
        assert used.registers <= (128 if "rows" in name else 255), name


@pytest.mark.parametrize("tile", GROUP_TILES.values(), ids=GROUP_TILES)
def test_groups_take_no_more_registers_than_their_block_has(tile: GroupTile) -> None:
    registers = (
        65_536 // (tile.threads * tile.blocks) // 8 * 8 * tile.threads
    )  # at the start, as the compiler allots them
    assert (
        128 * (tile.copying_registers + tile.groups * tile.registers) <= registers
    )  # more would be waited for for ever
