"""Plans launches of matmul kernels and writes their CUDA C.

Names of variants: `rows16x8x256_e` (16 rows of the weights per warp, 8 copies on their way per lane, 256 threads),
`tile128x64_as` and, on Hopper, `groups128x128_a` run on tensor cores, `fmarows1_k` and `fma128_n` do not, `narrowa_as`
prepares an operand. Letters say: a, b, the operand is in scratch memory; w, A is read in f32; s, blocks split k; e,
weights are read early, before earlier launches have ended; o, all at once; k, n, the axis along which weights are
contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypedDict

from rlx.backends.cuda.kernel_plan import KernelPlan, Pass, entry
from rlx.backends.cuda.matmul import rows, simt, tiles, warpgroups
from rlx.backends.cuda.matmul.common import CHUNKS, chunk_count, chunk_size, on_tensor_cores
from rlx.backends.cuda.matmul.staging import COUNTERS
from rlx.backends.cuda.matmul.tiles import TILES, Tile
from rlx.backends.cuda.matmul.warpgroups import GROUP_TILES, GroupTile
from rlx.backends.cuda.targets import CudaTarget
from rlx.dtypes import F32
from rlx.errors import LowerError
from rlx.fast_dataclass import dataclass
from rlx.lir.kernels import Kernel, MatmulKernel, weight_name

FEW_ROWS = 8  # rows of A up to which the `rows` variants run
FEW_GROUPED = 64  # the same for grouped rows, each of which is a product of its own
MOST_AT_ONCE = 100 << 10  # bytes of weights that a block asks for at once
MOST_TEAMS_AT_ONCE = 3
NARROW_THREADS = 256
# The choice of tiles rests on these; measured on an H200, and only ratios matter.
LATENCY = 2e-6  # seconds until a stage arrives, under load
READ_RATE = 45e9  # bytes per second that a processor takes
TILE_RATE = {  # products per second and processor
    "256x128": 1.3e12, "128x128": 1.3e12, "128x64": 1.1e12, "64x128": 1.1e12, "64x64": 0.9e12,
}  # fmt: skip
SMALL_TILE_RATE = 0.7e12
GROUP_RATE = {  # the same for groups of warps
    "192x128": 2.3e12, "128x192": 2.2e12, "128x128": 2.3e12, "64x128": 1.6e12, "128x64": 1.6e12,
}  # fmt: skip
GROUP_READ_RATE = 80e9
TILE_END = 1.5e-6  # the epilogue of a tile, in which a block multiplies nothing
START = 2e-6  # filling the stages, the epilogue
GROUP_ROWS = 128  # rows of A from which groups of warps are considered: with 32, tiles were as fast
NARROWING = 2e-6  # a pass that prepares A
LAST_BLOCK = 1.5e-6  # until the last block of a tile that others share may add


@dataclass(frozen=True, slots=True)
class Choice:
    """A tile and the number of blocks that share its chunks of k."""

    tile: Tile | GroupTile
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
        return rows.source(kernel, variant, **_rows_settings(variant), any_order=target.multiplies_in_groups)
    if name.startswith("tile"):
        tile = TILES[name.removeprefix("tile")]
        return tiles.tile_source(
            kernel, variant, tile,
            shared_bytes=target.shared_bytes, in_order=not target.multiplies_in_groups,
            a=a, b=b, wide=wide, split=split, early=early,
        )  # fmt: skip
    if name.startswith("groups"):
        group_tile = GROUP_TILES[name.removeprefix("groups")]
        return warpgroups.source(
            kernel, variant, group_tile, shared_bytes=target.shared_bytes, a=a, b=b, split=split, early=early
        )
    if name.startswith("narrow"):
        return tiles.narrow_source(kernel, variant, of_b=name == "narrowb", a=a, b=b, split=split)
    k_first = letters == "k"
    if name.startswith("fmarows"):
        return simt.rows_source(kernel, variant, tokens=int(name.removeprefix("fmarows")), k_first=k_first)
    return simt.tile_source(kernel, variant, size=int(name.removeprefix("fma")), k_first=k_first)


def source_with_prologue(
    kernel: MatmulKernel, variant: str, target: CudaTarget, name: str, struct: str, fetches: str, compute: str
) -> str:
    """CUDA C of a `rows` variant that computes its only row of A itself (`prologues.py`)."""
    prologue = rows.Prologue(name, struct, fetches, compute)
    settings = _rows_settings(variant)
    return rows.source(kernel, variant, **settings, any_order=target.multiplies_in_groups, prologue=prologue)


class _RowsSettings(TypedDict):
    rows: int
    loads: int
    threads: int
    early: bool
    once: bool


def _rows_settings(variant: str) -> _RowsSettings:
    sizes, _, letters = variant.removeprefix("rows").partition("_")
    height, loads, threads = map(int, sizes.split("x"))
    return {"rows": height, "loads": loads, "threads": threads, "early": "e" in letters, "once": "o" in letters}


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
@dataclass(frozen=True, slots=True)
class RowsChoice:
    """Rows of the weights per warp, teams of warps per block, copies on their way per lane, blocks per processor.

    `once`: these copies are all that a lane makes.
    """

    height: int
    teams: int
    loads: int = rows.LOADS
    resident: int = 1
    once: bool = False


def plan_rows(
    kernel: MatmulKernel, words: Mapping[str, int], target: CudaTarget, *, choice: RowsChoice | None = None
) -> KernelPlan | None:
    """The variant for few rows of A; None if they are too many."""
    m, n, k, batch = words["m"], words["n"], words["k"], words["batch0"] * words["batch1"]
    grouped = kernel.grouped == "rows"
    if kernel.grouped == "depth" or m > (FEW_GROUPED if grouped else FEW_ROWS):
        return None
    tokens, chunks = 1 if grouped else m, chunk_count(k)
    pairs = m * batch if grouped else batch

    def shared_bytes(choice: RowsChoice) -> int:
        taken = rows.shared_bytes(k, tokens, choice.height, choice.teams, chunks, choice.loads)
        # Room for two blocks per processor, one of this launch and one of the next, whose weights are on their way.
        # With more room, several of one launch gather where it is, and stay behind. Small ones may: three launches fit.
        large = choice.once and taken > target.shared_bytes // 6
        return max(taken, target.shared_bytes // 3 + 1024) if large else taken

    early = _are_early(kernel, words)
    once = early and pairs == 1 and k % 32 == 0
    choice = choice or choose_rows(n * pairs, k, kernel.weights, target, once=once)
    while shared_bytes(choice) > target.shared_bytes and choice.teams > 1:  # long rows of A leave less room
        choice = replace(choice, teams=choice.teams // 2, once=False)
    while shared_bytes(choice) > target.shared_bytes and choice.loads > rows.LOADS // 2:
        choice = replace(choice, loads=choice.loads // 2, once=False)
    if shared_bytes(choice) > target.shared_bytes:
        return None
    count = -(-n // (choice.height // kernel.weights * choice.teams))
    blocks = min(count, max(1, -(-target.processors * choice.resident // pairs)))
    threads = 32 * chunks * choice.teams
    letters = "e" * early + "o" * choice.once
    grid = (blocks * batch, m if grouped else 1, 1)
    variant = f"rows{choice.height}x{choice.loads}x{threads}_{letters}"
    return KernelPlan((Pass(variant, grid, threads, shared_bytes(choice)),))


def choose_rows(n: int, k: int, weights: int, target: CudaTarget, *, once: bool) -> RowsChoice:
    """Blocks of 16 warps, so large that a processor has one: then each gets the same share of every launch.

    Fewer warps if processors would get none. `once`: blocks may ask for all their weights before inputs are there.
    """
    small = _once(n, k, weights, target) if once else None
    if small is not None:
        return small
    chunks = chunk_count(k)
    tiles = -(-n * weights // 16)
    teams = 2 if 2 * chunks > CHUNKS else max(1, min(CHUNKS, 2 * CHUNKS // chunks, tiles // target.processors))
    return RowsChoice(16, teams)


def _once(n: int, k: int, weights: int, target: CudaTarget) -> RowsChoice | None:
    """One block per processor, which asks for all its weights at once; None if they are too many.

    The choice with the least weights for the busiest processor, then the fewest rounds.
    """
    steps, chunks, best = -(-chunk_size(k) // 32), chunk_count(k), None
    most = min(MOST_AT_ONCE, target.shared_bytes - rows.shared_bytes(k, FEW_ROWS, 8, MOST_TEAMS_AT_ONCE, chunks, 0))
    for height in (16, 8):
        if height == 8 and weights == 2:
            continue
        for teams in range(1, MOST_TEAMS_AT_ONCE + 1):
            tiles = -(-n * weights // height)
            blocks = min(-(-tiles // teams), target.processors)
            rounds = -(-tiles // (blocks * teams))
            loads = steps * rounds * (height // 8)
            size = 32 * chunks * teams * loads * 16
            if size > most or 32 * chunks * teams > rows.RESIDENT_THREADS:
                continue
            cost = (size, rounds, teams)  # the busiest processor
            if best is None or cost < best[0]:
                best = cost, RowsChoice(height, teams, loads, once=True)
    return best[1] if best is not None else None


def plan_tiles(
    kernel: MatmulKernel, words: Mapping[str, int], target: CudaTarget, *, choice: Choice | None = None
) -> KernelPlan:
    """Tiles, after passes that prepare operands which are not 16-bit rows along k."""
    choice = choice or choose_tile(kernel, words, target)
    tile, splits = choice.tile, choice.splits
    a = _narrows_a(kernel, tile)
    wide = kernel.dtype is F32 and not a
    b = words["b_k"] != 1 and words["k"] > 1
    split = splits > 1
    count = _tiles(kernel, words, tile)
    letters = "a" * a + "b" * b + "w" * wide + "s" * split
    early = "e" if _are_early(kernel, words) and not b else ""
    passes = []
    for operand in "a" * a + "b" * b:
        rows_of = words["m"] if operand == "a" else words["n"] * kernel.weights
        eights = tiles.matrices_in_scratch(kernel, words, operand) * rows_of * -(-words["k"] // 8)
        at_once = min(-(-eights // NARROW_THREADS), 16 * target.processors)
        passes.append(Pass(f"narrow{operand}_{letters}", (at_once, 1, 1), NARROW_THREADS))
    if isinstance(tile, GroupTile):  # blocks take tile after tile
        name, blocks = f"groups{tile.name}", min(count, target.processors * tile.blocks // splits)
        shared = tile.shared(target.shared_bytes)
    else:
        name, blocks, shared = f"tile{tile.name}", count, tile.shared(target.shared_bytes, wide=wide)
    passes.append(Pass(f"{name}_{letters}{early}", (blocks, splits, 1), tile.threads, shared))
    scratch = tiles.scratch_bytes(kernel, words, count * tile.columns * tile.rows, a=a, b=b, split=split)
    return KernelPlan(tuple(passes), scratch, COUNTERS if split else 0)


def _narrows_a(kernel: MatmulKernel, tile: Tile | GroupTile) -> bool:
    """Whether a pass before makes A 16-bit rows along k."""
    takes_wide = isinstance(tile, Tile) and tile.takes_wide
    return kernel.transposed or (kernel.dtype.size != 2 and not takes_wide)


def _tiles(kernel: MatmulKernel, words: Mapping[str, int], tile: Tile | GroupTile) -> int:
    across = -(-words["n"] // (tile.columns // kernel.weights))
    return -(-words["m"] // tile.rows) * across * words["batch0"] * words["batch1"]


def choose_tile(kernel: MatmulKernel, words: Mapping[str, int], target: CudaTarget) -> Choice:
    """The tile and split of k with the least estimated time."""
    return min(tile_choices(kernel, words, target), key=lambda c: c.seconds)


def tile_choices(kernel: MatmulKernel, words: Mapping[str, int], target: CudaTarget) -> list[Choice]:
    """All tiles and splits that fit, with estimates."""
    chunks = chunk_count(words["k"])
    choices = []
    candidates: list[Tile | GroupTile] = [*TILES.values()]
    if target.multiplies_in_groups and not kernel.grouped and words["m"] >= GROUP_ROWS:
        candidates += GROUP_TILES.values()
    for tile in candidates:
        if tile.stages_in(target.shared_bytes) < 3 or tile.shared(target.shared_bytes) > target.shared_bytes:
            continue
        count = _tiles(kernel, words, tile)
        may_split = not kernel.grouped and count < 2 * target.processors and 4 * count <= COUNTERS
        for splits in (1, 2, 4, 8):
            if splits > (chunks if may_split else 1):
                continue
            if isinstance(tile, GroupTile):
                seconds = _group_seconds(kernel, words, target, tile, splits)
            else:
                seconds = _seconds(kernel, words, target, tile, splits)
            choices.append(Choice(tile, splits, seconds + NARROWING * _narrows_a(kernel, tile)))
    return choices


def _seconds(kernel: MatmulKernel, words: Mapping[str, int], target: CudaTarget, tile: Tile, splits: int) -> float:
    """Estimated time: a block waits for its stages, a processor for its memory and its tensor cores."""
    blocks, chunks = _tiles(kernel, words, tile) * splits, chunk_count(words["k"])
    share = -(-chunks // splits)
    depth = min(share * chunk_size(words["k"]), words["k"])
    copied, products = (tile.columns + tile.rows) * depth * 2, tile.columns * tile.rows * depth
    shared = tile.shared(target.shared_bytes)
    resident = min(2048 // tile.threads // 8, target.shared_bytes // shared)
    rate = TILE_RATE.get(tile.name, SMALL_TILE_RATE)
    ahead = tile.bytes_ahead(target.shared_bytes)
    waits = -(-blocks // (target.processors * resident)) * copied / ahead * LATENCY
    sums = 0 if splits == 1 else tile.columns * tile.rows * 4  # bytes of a chunk
    works = -(-blocks // target.processors) * max((copied + share * sums) / READ_RATE, products / rate)
    adds = 0 if splits == 1 else LAST_BLOCK + (chunks - share + 1) * sums / READ_RATE
    return START + max(waits, works) + adds


def _group_seconds(
    kernel: MatmulKernel, words: Mapping[str, int], target: CudaTarget, tile: GroupTile, splits: int
) -> float:
    """Estimated time: blocks take tile after tile, and multiply nothing while they finish one."""
    chunks, count = chunk_count(words["k"]), _tiles(kernel, words, tile)
    share = -(-chunks // splits)
    depth = min(share * chunk_size(words["k"]), words["k"])
    copied, products = (tile.columns + tile.rows) * depth * 2, tile.columns * tile.rows * depth
    turns = -(-count // max(1, target.processors * tile.blocks // splits))
    shared = min(tile.blocks, -(-count * splits // target.processors))  # blocks that a processor runs at a time
    sums = 0 if splits == 1 else tile.columns * tile.rows * 4  # bytes of a chunk
    adds = 0 if splits == 1 else LAST_BLOCK + (chunks + 1) * sums / READ_RATE
    return START + turns * (shared * max(copied / GROUP_READ_RATE, products / GROUP_RATE[tile.name]) + TILE_END + adds)


# -- f32 and f64 ------------------------------------------------------------------------------------------------------
def _plan_fma(kernel: MatmulKernel, words: Mapping[str, int], target: CudaTarget) -> KernelPlan:
    m, n, k, batch = words["m"], words["n"], words["k"], words["batch0"] * words["batch1"]
    grouped = kernel.grouped == "rows"
    axis = "k" if words["b_k"] == 1 and k > 1 else "n"
    if kernel.grouped != "depth" and m <= (FEW_GROUPED if grouped else FEW_ROWS):
        tokens, chunks = 1 if grouped or m == 1 else FEW_ROWS, chunk_count(k)
        teams = max(1, min(CHUNKS // chunks, -(-n // simt.ROW_COLUMNS) * batch // target.processors))
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
