"""Plans launches of matmul kernels and writes their CUDA C.

Names of variants: `rows16_e` and `tile128x64_as` run on tensor cores, `fmarows1_k` and `fma128_n` do not, `narrowa_as`
prepares an operand. Letters say: a, b, the operand is in scratch memory; w, A is read in f32; s, blocks split k; e,
weights are read early, before earlier launches have ended; k, n, the axis along which weights are contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlx.backends.cuda.kernel_plan import KernelPlan, Pass, entry
from rlx.backends.cuda.matmul import rows, simt, tiles
from rlx.backends.cuda.matmul.common import CHUNKS, chunk_count, chunk_size, on_tensor_cores
from rlx.backends.cuda.matmul.tiles import TILES, Tile
from rlx.backends.cuda.targets import CudaTarget
from rlx.dtypes import F32
from rlx.errors import LowerError
from rlx.lir.kernels import Kernel, MatmulKernel, weight_name

FEW_ROWS = 8  # rows of A up to which the `rows` variants run
MANY_TURNS = 3  # tiles per block from which on blocks end at about the same time
FEW_GROUPED = 64  # the same for grouped rows, each of which is a product of its own
NARROW_THREADS = 256
# Seconds, bytes and products on which the choice of tiles rests; only ratios matter.
LINE_RATE = 40e9  # bytes per second that a processor takes from the L2 cache
TILE_RATE = {  # products per second
    "256x128": 1.7e12, "128x128": 1.5e12, "128x64": 1.4e12, "64x128": 1.4e12, "64x64": 1.2e12,
}  # fmt: skip
SMALL_TILE_RATE = 0.7e12
SPLIT_RATE = 2.5e12  # bytes per second of partial sums, written and read
START = 2e-6  # of a block: filling the stages, the epilogue


@dataclass(frozen=True, slots=True)
class Choice:
    """A tile and the number of blocks that share its chunks of k."""

    tile: Tile
    splits: int
    seconds: float


class MatmulGenerator:
    """Writes CUDA C for matmul kernels."""

    def plan(self, kernel: Kernel, words: Mapping[str, int], target: CudaTarget) -> KernelPlan:
        kernel = _matmul(kernel)
        if 0 in (words["m"], words["n"], words["batch0"], words["batch1"]):
            return KernelPlan(())
        if not on_tensor_cores(kernel):
            return _plan_fma(kernel, words, target)
        return plan_rows(kernel, words, target) or plan_tiles(kernel, words, target)

    def source(self, kernel: Kernel, variant: str, target: CudaTarget) -> str:
        text = _source(_matmul(kernel), variant, target)
        return f"namespace {entry(kernel, variant)}_ {{\n{text}\n}}\n"  # variants of one unit define the same names


def _source(kernel: MatmulKernel, variant: str, target: CudaTarget) -> str:
    name, _, letters = variant.partition("_")
    a, b, wide, split, early = (letter in letters for letter in "abwse")
    if name.startswith("rows"):
        return rows.source(kernel, variant, rows=int(name.removeprefix("rows")), early=early)
    if name.startswith("tile"):
        tile = TILES[name.removeprefix("tile")]
        return tiles.tile_source(
            kernel, variant, tile,
            shared_bytes=target.shared_bytes, a=a, b=b, wide=wide, split=split, early=early,
        )  # fmt: skip
    if name.startswith("narrow"):
        return tiles.narrow_source(kernel, variant, of_b=name == "narrowb", a=a, b=b, split=split)
    k_first = letters == "k"
    if name.startswith("fmarows"):
        return simt.rows_source(kernel, variant, tokens=int(name.removeprefix("fmarows")), k_first=k_first)
    return simt.tile_source(kernel, variant, size=int(name.removeprefix("fma")), k_first=k_first)


def source_with_prologue(
    kernel: MatmulKernel, variant: str, target: CudaTarget, name: str, struct: str, compute: str
) -> str:
    """CUDA C of a `rows` variant that computes its only row of A itself (`prologues.py`)."""
    height, _, letters = variant.removeprefix("rows").partition("_")
    prologue = rows.Prologue(name, struct, compute)
    return rows.source(kernel, variant, rows=int(height), early="e" in letters, prologue=prologue)


def _matmul(kernel: Kernel) -> MatmulKernel:
    assert isinstance(kernel, MatmulKernel)
    if kernel.layout is not None or kernel.weights > 2 or not kernel.dtype.is_float:
        raise LowerError(
            f"cuda: no matmul kernel for {kernel.text()}", hint="weights are floats, at most two, not packed"
        )
    return kernel


def _are_early(kernel: MatmulKernel, words: Mapping[str, int]) -> bool:
    """Whether weights may be read before earlier launches have ended."""
    return not kernel.grouped and all(words[weight_name(i)] < 0 for i in range(kernel.weights))


# -- tensor cores -----------------------------------------------------------------------------------------------------
def plan_rows(
    kernel: MatmulKernel, words: Mapping[str, int], target: CudaTarget, *, height: int = 0, teams: int = 0,
    resident: int = 0,
) -> KernelPlan | None:  # fmt: skip
    """The variant for few rows of A; None if they are too many.

    The rest is chosen unless given: rows of the weights per warp, teams of warps per block, blocks per processor.
    """
    m, n, k, batch = words["m"], words["n"], words["k"], words["batch0"] * words["batch1"]
    grouped = kernel.grouped == "rows"
    if kernel.grouped == "depth" or m > (FEW_GROUPED if grouped else FEW_ROWS):
        return None
    tokens, chunks = 1 if grouped else m, chunk_count(k)
    pairs = m * batch if grouped else batch
    height = height or _height(n * kernel.weights, kernel.weights, k, pairs, target)
    columns = height // kernel.weights
    if not teams:
        teams = _teams(chunks, -(-n // columns) * pairs, target)
        if tokens > 4 and n * pairs >= 2 * teams * columns * target.processors:
            teams *= 2  # that share the rows of A
    shared = rows.shared_bytes(k, tokens, height, teams, chunks)
    if shared > target.shared_bytes:
        return None
    count = -(-n // (columns * teams))
    resident = resident or min(2 if teams * chunks <= CHUNKS else 1, max(1, target.shared_bytes // max(shared, 1)))
    blocks = min(count, max(1, -(-target.processors * resident // pairs)))
    variant = f"rows{height}_{'e' if _are_early(kernel, words) else ''}"
    grid = (blocks * batch, m if grouped else 1, 1)
    return KernelPlan((Pass(variant, grid, 32 * chunks * teams, shared),))


def _teams(chunks: int, tiles: int, target: CudaTarget) -> int:
    """Teams of warps in a block, each with a tile of its own: as many as fill a block, if all processors get one."""
    return max(1, min(CHUNKS // chunks, tiles // target.processors))


def _height(rows_of_weights: int, weights: int, k: int, pairs: int, target: CudaTarget) -> int:
    """Rows of the weights per warp: those with which the busiest block has the least to do."""
    chunks, steps = chunk_count(k), chunk_size(k) // 32
    slots = 2 * target.processors * max(1, CHUNKS // chunks)

    def turns(height: int) -> int:
        return -(-rows_of_weights * pairs // (height * slots))

    heights = (16, 32) if weights == 2 else (8, 16, 32)
    if turns(16) > MANY_TURNS:
        return 32 if steps <= rows.LOADS // 4 else 16  # as many loads in flight as there are registers for
    return min(reversed(heights), key=lambda height: turns(height) * height)


def plan_tiles(
    kernel: MatmulKernel, words: Mapping[str, int], target: CudaTarget, *, choice: Choice | None = None
) -> KernelPlan:
    """Tiles, after passes that prepare operands which are not 16-bit rows along k."""
    choice = choice or choose_tile(kernel, words, target)
    tile, splits = choice.tile, choice.splits
    wide = kernel.dtype is F32 and not kernel.transposed and tile.takes_wide
    a = (kernel.dtype.size != 2 or kernel.transposed) and not wide
    b = words["b_k"] != 1 and words["k"] > 1
    split = splits > 1
    count = _tiles(kernel, words, tile)
    letters = "a" * a + "b" * b + "w" * wide + "s" * split
    early = "e" if _are_early(kernel, words) and not b else ""
    passes = []
    for operand in "a" * a + "b" * b:
        rows_of = words["m"] if operand == "a" else words["n"] * kernel.weights
        eights = tiles.matrices_in_scratch(kernel, words, operand) * rows_of * -(-words["k"] // 8)
        blocks = min(-(-eights // NARROW_THREADS), 16 * target.processors)
        passes.append(Pass(f"narrow{operand}_{letters}", (blocks, 1, 1), NARROW_THREADS))
    variant = f"tile{tile.name}_{letters}{early}"
    passes.append(Pass(variant, (count, splits, 1), tile.threads, tile.shared(target.shared_bytes, wide=wide)))
    scratch = tiles.scratch_bytes(kernel, words, tile, count, a=a, b=b, split=split)
    return KernelPlan(tuple(passes), scratch, tiles.COUNTERS if split else 0)


def _tiles(kernel: MatmulKernel, words: Mapping[str, int], tile: Tile) -> int:
    across = -(-words["n"] // (tile.columns // kernel.weights))
    return -(-words["m"] // tile.rows) * across * words["batch0"] * words["batch1"]


def choose_tile(kernel: MatmulKernel, words: Mapping[str, int], target: CudaTarget) -> Choice:
    """The tile and split of k with the least estimated time."""
    return min(tile_choices(kernel, words, target), key=lambda c: c.seconds)


def tile_choices(kernel: MatmulKernel, words: Mapping[str, int], target: CudaTarget) -> list[Choice]:
    """All tiles and splits that fit, with estimates."""
    chunks = chunk_count(words["k"])
    choices = []
    for tile in TILES.values():
        if tile.stages_in(target.shared_bytes) < 3 or tile.shared(target.shared_bytes) > target.shared_bytes:
            continue
        for splits in (1, 2, 4, 8):
            if splits > 1 and (splits > chunks or kernel.grouped or _tiles(kernel, words, tile) * 4 > tiles.COUNTERS):
                continue
            choices.append(Choice(tile, splits, _seconds(kernel, words, target, tile, splits)))
    return choices


def _seconds(kernel: MatmulKernel, words: Mapping[str, int], target: CudaTarget, tile: Tile, splits: int) -> float:
    count, k = _tiles(kernel, words, tile), words["k"]
    copied = (tile.columns + tile.rows) * k * 2 / splits
    products = tile.columns * tile.rows * k / splits
    block = max(copied / LINE_RATE, products / TILE_RATE.get(tile.name, SMALL_TILE_RATE)) + START
    waves = -(-count * splits // target.processors)
    sums = 0 if splits == 1 else 2 * count * tile.columns * tile.rows * 4 * chunk_count(k)
    return waves * block + sums / SPLIT_RATE + (START if splits > 1 else 0)


# -- f32 and f64 ------------------------------------------------------------------------------------------------------
def _plan_fma(kernel: MatmulKernel, words: Mapping[str, int], target: CudaTarget) -> KernelPlan:
    m, n, k, batch = words["m"], words["n"], words["k"], words["batch0"] * words["batch1"]
    grouped = kernel.grouped == "rows"
    axis = "k" if words["b_k"] == 1 and k > 1 else "n"
    if kernel.grouped != "depth" and m <= (FEW_GROUPED if grouped else FEW_ROWS):
        tokens, chunks = 1 if grouped or m == 1 else FEW_ROWS, chunk_count(k)
        teams = _teams(chunks, -(-n // simt.ROW_COLUMNS) * batch, target)
        shared = simt.rows_shared(kernel, k, tokens, teams, chunks)
        if shared <= target.shared_bytes:
            blocks = min(-(-n // (simt.ROW_COLUMNS * teams)), max(1, 4 * target.processors // batch))
            grid = (blocks * batch, m if grouped else 1, 1)
            return KernelPlan((Pass(f"fmarows{tokens}_{axis}", grid, 32 * chunks * teams, shared),))
    size = simt.side(kernel)
    if size == 128 and -(-m // size) * -(-n // size) * batch < target.processors:
        size = 64
    count = -(-m // size) * -(-n // (size // kernel.weights)) * batch
    threads = 256
    return KernelPlan((Pass(f"fma{size}_{axis}", (count, 1, 1), threads, simt.tile_shared(kernel, size)),))
