"""Attention kernels for GPUs, run on the host (`emulator.hpp`): values against NumPy, equal bits of all variants.

Products of matrices are emulated, so bits are those of the emulation; that variants agree shows that they add the same
terms in the same order.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulator import EmulatedGpu, missing

from rlx.backends.cuda import modules
from rlx.backends.cuda.attention import generator
from rlx.backends.cuda.attention.generator import AttentionGenerator
from rlx.backends.cuda.attention.gradient import AttentionGradGenerator
from rlx.backends.cuda.kernel_plan import KernelPlan, Pass, entry
from rlx.backends.cuda.nvrtc import compile_source
from rlx.backends.cuda.prelude import PRELUDE
from rlx.backends.cuda.targets import BY_NAME, SM_80, SM_90, SM_120, CudaTarget
from rlx.dtypes import BF16, F16, F32, F64, DType
from rlx.dtypes import BY_NAME as DTYPES
from rlx.lir.kernels import BEYOND_CAPACITY, OUTSIDE_POOL, AttentionGradKernel, AttentionKernel
from rlx.ops.attention import _attention_grad
from rlx.ops.kv_cache import packed_rows
from rlx.ops.quant import unpack_blocks

Array = np.ndarray[Any, Any]
Q8 = DTYPES["q8_0"]
GENERATOR, SMALL = AttentionGenerator(), replace(SM_90, processors=3)
NEEDS_COMPILER = pytest.mark.skipif(bool(missing()), reason=missing())


def a_kernel(
    dtype: DType,
    dim: int,
    group: int = 1,
    mask: str = "causal",
    window: int = 0,
    cache: DType | None = None,
    **more: Any,
) -> AttentionKernel:
    paged = {"page": 64, "cache_dtype": cache, "key_axes": "sd"} if cache else {}
    values = {"value_dim": dim, "softcap": 0.0, "mask_dtype": None, "scale": 1 / math.sqrt(dim)} | paged | more
    return AttentionKernel(dtype=dtype, head_dim=dim, group=group, mask=mask, window=window, **values)


# -- running ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> EmulatedGpu:
    return EmulatedGpu(tmp_path_factory.mktemp("attention"))


def run(
    kernel: AttentionKernel | AttentionGradKernel, plan: KernelPlan, known: dict[str, Any], gpu: EmulatedGpu,
    *, backwards: bool,
) -> int:  # fmt: skip
    """Runs the passes of a plan; returns the fault code. Scratch memory is NaN where nothing is to be read."""
    scratch, fault = np.full(plan.scratch // 8 + 8, np.nan), np.zeros(2, np.int32)
    scratch.view(np.uint8)[: plan.zeroed] = 0
    values = [known.get(word, 0) for word in kernel.words]
    words = np.array(
        [v.ctypes.data if isinstance(v, np.ndarray) else v for v in (*values, scratch, fault, 0)], np.int64
    )
    gpu.backwards = backwards
    for one in plan.passes:
        name = entry(kernel, one.variant)
        if gpu.function(name) is None:
            gpu.load(gpu.build(PRELUDE + modules.source(kernel, one.variant, SM_90), SM_90.arch), {name: one.shared})
        gpu.launch(gpu.function(name), one.grid, one.threads, one.shared, words)
    assert not scratch.view(np.uint8)[: plan.zeroed].any(), "counts are zero again"
    return int(fault[1])


def strides(name: str, array: Array, axes: str, unit: int = 0) -> dict[str, int]:
    steps = (step // (unit or array.itemsize) for step in array.strides)
    return dict(zip((f"{name}_{axis}" for axis in axes.split()), steps, strict=False))


def plan_of(kernel: AttentionKernel, words: dict[str, int], variant: str, workers: int) -> KernelPlan:
    """A plan with this variant, and this many workers per tile."""
    rows, units = words["q_len"] * kernel.group, words["batch"] * words["kv_heads"]
    if variant.startswith(("rows_", "groups_")):
        kind, height = variant.split("_")
        warps = int(height) // 16
        grid = units * -(-rows // (16 * warps)) * generator.slices(kernel), 1, 1
        shared = generator.rows_shared(kernel, warps, SM_90, groups=kind == "groups")
        return KernelPlan((Pass(variant, grid, warps * 32, shared),))
    slices = generator.slices(kernel) if variant == "scalar" else 1
    shared = generator.scalar_shared(kernel) if variant == "scalar" else generator.splits_shared(kernel, SM_90)
    target = replace(SM_90, processors=workers * units * -(-rows // 16) * slices, shared_bytes=0)
    return generator.spread(kernel, variant, words, target, slices, shared)


def variants(kernel: AttentionKernel, queries: int) -> list[tuple[str, int]]:
    """Variants and numbers of workers that give the same bits."""
    if not generator.on_tensor_cores(kernel):
        return [("scalar", 1), ("scalar", 3)]
    groups = [("groups_64", 1), ("groups_128", 1)] if generator.in_groups(kernel, SM_90) else []
    token = [("token", 1), ("token", 3), ("token_each", 3)] if queries == 1 else []
    return [("splits_early", 1), ("splits_early", 3), ("rows_64", 1), *groups, *token]


# -- caches -----------------------------------------------------------------------------------------------------------
class Cached:
    """Queries at positions [batch, seq] over pages in random order; slots that nobody sees are NaN or infinite."""

    def __init__(
        self, kernel: AttentionKernel, positions: Any, kv_heads: int = 1, blocks: int = 0, rows: Any = None
    ) -> None:
        rng = np.random.default_rng(0)
        self.kernel, self.positions, self.kv_heads = kernel, np.array(positions, np.int32), kv_heads
        self.rows = np.arange(len(self.positions), dtype=np.int32) if rows is None else np.array(rows, np.int32)
        sequences, longest = int(self.rows.max()) + 1, int(self.positions.max()) + 1
        storage, blocks = kernel.cache_dtype or kernel.dtype, blocks or -(-max(longest, 1) // kernel.page)
        heads = kv_heads * kernel.group
        self.q = rng.standard_normal((*self.positions.shape, heads, kernel.head_dim)).astype(kernel.dtype.numpy)
        self.table = rng.permutation(sequences * blocks).astype(np.int32).reshape(sequences, blocks)
        self.pools, self.numbers = [], []
        for dim in (kernel.head_dim, kernel.value_dim):
            numbers = rng.standard_normal((sequences, max(longest, 1), kv_heads, dim))
            packed = packed_rows(numbers.astype(np.float32)) if storage is Q8 else numbers.astype(storage.numpy)
            shape = (sequences * blocks, kv_heads, kernel.page, packed.shape[3])
            pool = np.zeros(shape, packed.dtype)
            if storage is not Q8:
                pool[:] = np.resize(np.array([np.nan, np.inf, -np.inf], packed.dtype), shape)
            for b in range(sequences):
                newest = int(self.positions[self.rows == b].max())
                for p in range(max(newest + 1 - blocks * kernel.page, 0), newest + 1):
                    slot = p % (blocks * kernel.page)
                    pool[self.table[b, slot // kernel.page], :, slot % kernel.page] = packed[b, p]
            self.pools.append(pool)
            self.numbers.append(unpack_blocks(packed).astype(float) if storage is Q8 else packed.astype(float))

    def words(self) -> dict[str, Any]:
        batch, seq = self.positions.shape
        unit = 2 if self.kernel.cache_dtype is Q8 else 0
        words: dict[str, Any] = {
            "batch": batch, "q_len": seq, "capacity": self.table.shape[1] * self.kernel.page, "kv_heads": self.kv_heads,
            "pages": len(self.pools[0]), "table_rows": len(self.table), "positions_batch": seq,
            "table_row": self.table.shape[1], "q": self.q, "k": self.pools[0], "v": self.pools[1],
            "positions": self.positions, "table": self.table, "rows": self.rows,
        }  # fmt: skip
        words |= strides("q", self.q, "batch seq head")
        return (
            words
            | strides("k", self.pools[0], "page head seq", unit)
            | strides("v", self.pools[1], "page head seq", unit)
        )

    def run(self, variant: str, workers: int, gpu: EmulatedGpu, *, fault: int = 0) -> Array:
        out = np.full((*self.q.shape[:3], self.kernel.value_dim), 7, self.kernel.dtype.numpy)
        words = self.words() | {"out": out} | strides("out", out, "batch seq head")
        plan = plan_of(self.kernel, words, variant, workers) if variant else GENERATOR.plan(self.kernel, words, SMALL)
        assert run(self.kernel, plan, words, gpu, backwards=workers > 1) == fault
        return out

    def expected(self) -> Array:
        keys, values = self.numbers
        result = np.zeros((*self.q.shape[:3], self.kernel.value_dim))
        for b, i, h in np.ndindex(*self.q.shape[:3]):
            end, head = int(self.positions[b, i]) + 1, h // self.kernel.group
            begin = max(end - self.kernel.window, 0) if self.kernel.mask == "sliding" else 0
            if end:
                scores = self.kernel.scale * keys[self.rows[b], begin:end, head] @ self.q[b, i, h].astype(float)
                weights = np.exp(scores - scores.max())
                result[b, i, h] = weights / weights.sum() @ values[self.rows[b], begin:end, head]
        return result


POSITIONS = {
    "one token": ((63,), (290,), (-1,)),
    "any order": ((50, 2, -1, 2, 130, 64, 63, -1, 0, 129, 20), tuple(range(10, -1, -1))),
}
KERNELS = {
    "bf16": a_kernel(F32, 32, 4, cache=BF16),
    "f16, a window, odd sizes": a_kernel(F16, 20, 3, "sliding", 70, cache=F16, value_dim=33),
    "pages of 16": a_kernel(F32, 16, cache=BF16, page=16),
    "two panels": a_kernel(F32, 80, 2, "sliding", 70, cache=BF16, value_dim=128),
    "f32": a_kernel(F32, 16, 2, cache=F32),
    "q8_0": a_kernel(F32, 32, 2, cache=Q8, value_dim=64),
    "f64": a_kernel(F64, 8, cache=F64, value_dim=200),
}
TOLERANCE = {BF16: 3e-2, F16: 4e-3, F32: 2e-6, Q8: 2e-6, F64: 1e-14}


@NEEDS_COMPILER
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_variants_over_a_cache_agree_with_numpy_and_with_each_other(kernel: AttentionKernel, gpu: EmulatedGpu) -> None:
    for positions in POSITIONS.values():
        case = Cached(kernel, positions, kv_heads=2)
        results = [case.run(variant, workers, gpu) for variant, workers in variants(kernel, len(positions[0]))]
        tolerance = TOLERANCE[kernel.cache_dtype or kernel.dtype]
        np.testing.assert_allclose(results[0].astype(float), case.expected(), rtol=0, atol=tolerance)
        assert len({result.tobytes() for result in results}) == 1


@NEEDS_COMPILER
def test_a_row_of_many_splits_has_the_bits_of_splits_in_order(gpu: EmulatedGpu) -> None:
    for name in ("bf16", "f32"):
        case = Cached(KERNELS[name], ((4500,), (300,)))
        kinds = [(variant, 40 if workers > 1 else 1) for variant, workers in variants(KERNELS[name], 1)]
        assert len({case.run(variant, workers, gpu).tobytes() for variant, workers in kinds}) == 1


@NEEDS_COMPILER
def test_a_ring_wraps_around(gpu: EmulatedGpu) -> None:
    kernel = a_kernel(F32, 64, 2, "sliding", 100, cache=BF16, ring=True)
    case = Cached(kernel, (tuple(range(400, 420)), tuple(range(150, 170))), blocks=2)
    results = [case.run(variant, workers, gpu) for variant, workers in variants(kernel, 20)[1:]]
    np.testing.assert_allclose(results[0].astype(float), case.expected(), rtol=0, atol=TOLERANCE[BF16])
    assert len({result.tobytes() for result in results}) == 1


@NEEDS_COMPILER
def test_ragged_tokens_of_a_sequence_share_its_keys(gpu: EmulatedGpu) -> None:
    """Sequences with several tokens in a tile are tiled, the others are not; bits are those of tokens by themselves."""
    kernel = a_kernel(F32, 64, 4, cache=BF16, ragged=True)
    rows = [3] * 20 + [0] + [2] * 2 + [1] * 30 + [0] + [3] * 5 + [2] + [1] * 12 + [0] * 3
    begin = {0: 130, 1: 0, 2: 70, 3: 100}
    positions = np.array([begin[row] + rows[:i].count(row) for i, row in enumerate(rows)])
    positions[[5, 30]] = -1
    case = Cached(kernel, positions[:, None], kv_heads=2, rows=rows)
    plan = GENERATOR.plan(kernel, case.words(), SMALL)
    assert [one.variant for one in plan.passes] == ["groups_64", "rest_64"]
    tiled, alone = case.run("", 1, gpu), case.run("splits", 1, gpu)
    np.testing.assert_allclose(tiled, case.expected(), rtol=0, atol=TOLERANCE[BF16])
    assert tiled.tobytes() == alone.tobytes()


@NEEDS_COMPILER
def test_faults_of_positions_and_pages(gpu: EmulatedGpu) -> None:
    case = Cached(KERNELS["bf16"], ((70,),))
    case.positions[0, 0] = 128
    case.run("splits_early", 1, gpu, fault=BEYOND_CAPACITY)
    case.positions[0, 0] = 70
    case.table[0, 1] = 2
    case.run("splits_early", 1, gpu, fault=OUTSIDE_POOL)
    case.positions[0, 0] = 63  # the page is not needed
    case.run("splits_early", 1, gpu)


# -- gradient ---------------------------------------------------------------------------------------------------------
@NEEDS_COMPILER
def test_the_gradient_agrees_with_numpy(gpu: EmulatedGpu) -> None:
    kernel, batch, queries, keys, kv_heads = a_kernel(F32, 20, 2, value_dim=33, softcap=3.0), 2, 20, 90, 2
    rng, heads = np.random.default_rng(0), 2 * kv_heads
    shapes = {
        "q": (queries, heads, 20),
        "k": (keys, kv_heads, 20),
        "v": (keys, kv_heads, 33),
        "dy": (queries, heads, 33),
    }
    known: dict[str, Any] = {n: rng.standard_normal((batch, *s)).astype(np.float32) for n, s in shapes.items()}
    known |= {
        n: rng.standard_normal((batch, heads, queries)).astype(np.float32) + c for n, c in (("lse", 8), ("delta", 0))
    }
    how = {"mask_kind": "causal", "scale": kernel.scale, "softcap": kernel.softcap}
    expected = _attention_grad(*(known[n].astype(float) for n in ("q", "k", "v", "dy", "lse", "delta")), None, **how)
    for name in "qkv":
        known[f"d{name}"] = np.full_like(known[name], np.nan)
    for name in ("q", "k", "v", "dy", "dq", "dk", "dv"):
        known |= strides(name, known[name], "batch seq head")
    for name in ("lse", "delta"):
        known |= strides(name, known[name], "batch head")
    known |= {"batch": batch, "q_len": queries, "k_len": keys, "kv_heads": kv_heads}
    grad = AttentionGradKernel(kernel)
    assert not run(grad, AttentionGradGenerator().plan(grad, known, SM_90), known, gpu, backwards=True)
    for name, value in zip("qkv", expected, strict=True):
        np.testing.assert_allclose(known[f"d{name}"], value, rtol=1e-5, atol=1e-5)


# -- plans and machine code -------------------------------------------------------------------------------------------
def sizes(batch: int, queries: int, capacity: int) -> dict[str, int]:
    return {"batch": batch, "q_len": queries, "capacity": capacity, "kv_heads": 8} | dict.fromkeys(
        ("positions", "table", "rows"), -1
    )


def test_few_rows_are_spread_over_the_gpu_and_many_are_tiled() -> None:
    kernel, writer = replace(a_kernel(F32, 128, 4, cache=BF16), appends=True), AttentionGenerator()
    decode = writer.plan(kernel, sizes(1, 1, 4352), SM_90)
    assert [(p.variant, p.grid, p.threads, p.shared) for p in decode.passes] == [("token_each", (8, 34, 1), 128, 78336)]
    assert decode.zeroed == 256 and decode.scratch == 256 + 8 * 34 * 4 * 8 + 8 * 34 * 4 * 128 * 4
    assert writer.plan(kernel, sizes(32, 1, 1024), SM_90) == KernelPlan((Pass("token", (256, 1, 1), 128, 78336),))
    for target, name in ((SM_90, "groups_64"), (SM_80, "rows_64")):
        assert [p.variant for p in writer.plan(kernel, sizes(1, 512, 4352), target).passes] == [name]
        assert [p.variant for p in writer.plan(kernel, sizes(1, 4096, 4352), target).passes] == [name]
    assert writer.plan(kernel, sizes(0, 1, 64), SM_90) == KernelPlan(())


@pytest.mark.parametrize("target", BY_NAME.values(), ids=BY_NAME)
def test_tiles_fit_into_the_shared_memory_of_a_block(target: CudaTarget) -> None:
    for dim in (16, 64, 80, 96, 128, 192, 256):
        kernel = a_kernel(F32, dim, 4, cache=BF16)
        for batch, queries in ((1, 1), (64, 1), (1, 64), (4, 4096)):
            for one in AttentionGenerator().plan(kernel, sizes(batch, queries, 8192), target).passes:
                declared = generator.STATIC_SHARED[one.variant.removesuffix("_64")]
                assert one.shared + declared <= target.shared_bytes, (dim, one)


def assert_compiles(kernel: AttentionKernel, variant: str, target: CudaTarget) -> None:
    source = f"namespace one {{\n{AttentionGenerator().source(kernel, variant, target)}\n}}"
    cubin = compile_source(PRELUDE + source, target.arch)
    assert "C75" not in cubin.log, "products of groups run in the background"
    taken = cubin.resources()[entry(kernel, variant)]
    assert taken.spilled <= 96 and taken.registers <= 255  # bytes of the local frame, arrays included
    assert taken.shared <= generator.STATIC_SHARED["scalar"]


@pytest.mark.parametrize(
    ("variant", "target"),
    [("splits_early", SM_90), ("token", SM_90), ("groups_64", SM_90), ("rows_128", SM_80), ("scalar", SM_120)],
)
def test_kernels_compile_within_budgets(variant: str, target: CudaTarget) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    kernel = a_kernel(F32, 128, 4, cache=F32 if variant == "scalar" else BF16)
    assert_compiles(kernel, variant, target)


@pytest.mark.targets
@pytest.mark.parametrize("target", BY_NAME.values(), ids=BY_NAME)
def test_kernels_of_common_sizes_compile_within_budgets(target: CudaTarget) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    for dim in (64, 80, 96, 128, 256):
        kernel = a_kernel(F32, dim, 4, cache=BF16)
        groups = ["groups_64"] if generator.in_groups(kernel, target) else []
        for variant in ("splits", "rows_64", "rows_128", *groups):
            assert_compiles(kernel, variant, target)
    for dtype in (F32, F64):
        assert_compiles(a_kernel(dtype, 64, 4, cache=dtype), "scalar", target)
