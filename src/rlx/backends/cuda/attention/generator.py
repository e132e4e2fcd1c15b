"""CUDA C of `AttentionKernel`: which kernels run a launch, with which grid, and their source.

Tensor cores take keys and values of 16 bits: `rows_64` has many rows per block and walks their keys, as has `groups_64`
on Hopper (`rows_128`, `groups_128` and `rows_64_shared`, with queries in shared memory, are not taken by plans);
`splits` has few rows and spreads the keys over blocks; `token` is the same for one query per sequence, where less code
means less time, and `token_each` that with a block for every split. Other types have `scalar`, which does both. All
variants of a kernel give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlx.backends.cuda.attention import instructions, rows_code, scalar_code, tensor_code
from rlx.backends.cuda.attention.code_constants import constants, on_tensor_cores, stored, words
from rlx.backends.cuda.kernel_plan import KernelPlan, Pass, entry
from rlx.backends.cuda.matmul.instructions import WARPGROUPS, multiply_registers
from rlx.backends.cuda.targets import CudaTarget
from rlx.dtypes import DType
from rlx.lir.kernels import AttentionKernel, Kernel

SPLIT, BLOCK = 128, 64  # keys, as in `rows_code`
TILE = 16  # rows of a tile
STATIC_SHARED = {
    "rows": 2 << 10,
    "groups": 2 << 10,
    "splits": 8 << 10,
    "splits_early": 8 << 10,
    "token": 8 << 10,
    "token_each": 8 << 10,
    "scalar": 44 << 10,
}  # bytes that kernels declare, at most
EACH_WAVES = 2  # times the blocks that the GPU has room for: so many may have one split each, or none and end at once
FEW_TOKENS = 64  # ragged tokens up to which each is by itself
MOST_SCRATCH = 256 << 20  # bytes of results of splits; a launch that would leave more takes its splits in order
MOST_QUERIES = 48 << 10  # bytes of queries of a tile of `scalar`
WIDEST_SLICE = 128  # columns of values per block
PANEL_ALIGNMENT = 1024  # of tiles that groups of warps read


def takes(dtype: DType, storage: DType, head_dim: int) -> bool:
    """Whether kernels take queries of this type and size over keys of type `storage`."""
    on_tensor_cores = storage.size == 2 and storage.is_float and head_dim <= 256
    return on_tensor_cores or TILE * head_dim * max(4, dtype.size) <= MOST_QUERIES


class AttentionGenerator:
    """Writes CUDA C for `AttentionKernel`."""

    def plan(self, kernel: Kernel, words: Mapping[str, int], target: CudaTarget) -> KernelPlan:
        assert isinstance(kernel, AttentionKernel)
        rows, units = words["q_len"] * kernel.group, words["batch"] * words["kv_heads"]
        if not rows * units:
            return KernelPlan(())
        if on_tensor_cores(kernel):
            if kernel.ragged and words["batch"] > FEW_TOKENS and 4 * TILE % kernel.group == 0:
                return _ragged(kernel, words, target)
            blocks = units * -(-rows // (4 * TILE)) * slices(kernel)
            groups = in_groups(kernel, target)
            shared = rows_shared(kernel, 4, target, groups=groups)
            # Two blocks of 64 rows per processor are faster than one of 128. A few rows have their keys spread instead.
            enough = rows > 2 * TILE and blocks >= target.processors // 2
            if enough and shared + STATIC_SHARED["rows"] <= target.shared_bytes:
                return KernelPlan((Pass("groups_64" if groups else "rows_64", (blocks, 1, 1), 128, shared),))
            early = target.capability >= 90 and kernel.appends and all(words[w] < 0 for w in _places(kernel))
            shared = splits_shared(kernel, target)
            variant = "splits_early" if early else "splits"
            if early and rows == kernel.group <= TILE and not kernel.ragged:
                room = EACH_WAVES * target.processors * _resident("token", shared, target)
                variant = "token_each" if most_splits(kernel, words) * units <= room else "token"
            return spread(kernel, variant, words, target, 1, shared)
        return spread(kernel, "scalar", words, target, slices(kernel), scalar_shared(kernel))

    def source(self, kernel: Kernel, variant: str, target: CudaTarget) -> str:
        assert isinstance(kernel, AttentionKernel)
        return self.source_with_heads(kernel, variant, target, entry(kernel, variant), tensor_code.NO_HEADS)

    def source_with_heads(
        self, kernel: AttentionKernel, variant: str, target: CudaTarget, name: str, heads: str
    ) -> str:
        """CUDA C; `heads` is what `splits` calls to prepare queries, keys and values (`heads.py`)."""
        common = [
            instructions.SCALAR,
            rows_code.ROWS,
            rows_code.CACHED_ROWS if kernel.cached else rows_code.DENSE_ROWS,
            rows_code.MASKS,
        ]
        if variant == "scalar":
            more = {
                "SLICE": min(kernel.value_dim, WIDEST_SLICE),
                "SLICES": slices(kernel),
                "HEAD_PITCH": _pitch(kernel),
            }
            parts = [*common, rows_code.COMBINE, rows_code.LOG_SUM, scalar_code.ELEMENTS, scalar_code.SPLITS]
        elif variant.startswith(("splits", "rest", "token")):
            one = variant.startswith("token")
            more = {"SLICE": _rounded(kernel.value_dim, 16), "SEPARATE": separate(kernel, target)}
            more["EARLY"], more["PANELS"] = one or variant == "splits_early", False
            more["SINGLE"], more["EACH"] = one, variant == "token_each"
            more["REST"] = int(variant.removeprefix("rest_")) if variant.startswith("rest_") else 0
            parts = [
                *common,
                rows_code.COMBINE,
                rows_code.LOG_SUM,
                instructions.TENSOR,
                tensor_code.TILES,
                tensor_code.SINGLE_PRODUCTS,
                heads,
                tensor_code.SPLITS,
            ]
        else:
            warps, shared = _tile(variant)
            more = {"SLICE": slice_width(kernel), "SLICES": slices(kernel), "WARPS": warps}
            groups = variant.startswith("groups")
            more["PANELS"] = groups
            more["QUERIES_IN_REGISTERS"] = kernel.head_dim <= 128 and not shared
            more["STAGES"] = stages(kernel, warps, target, queries=shared, groups=groups)
            products = [_group_instructions(kernel), tensor_code.GROUP_PRODUCTS]
            if not groups:
                products = [tensor_code.SINGLE_PRODUCTS]
            instructions_and_tiles = [instructions.TENSOR, tensor_code.TILES]
            parts = [*common, rows_code.LOG_SUM, *instructions_and_tiles, *products, tensor_code.ROW_TILES]
        text = "\n".join([constants(kernel, more, tensor=on_tensor_cores(kernel)), words(kernel), *parts])
        return text.replace("ENTRY(", f"{name}(")


def _places(kernel: AttentionKernel) -> tuple[str, ...]:
    """The operands that say where keys are. If no launch writes them, blocks know early which keys they read.

    They copy those that the program does not append before earlier launches have ended.
    """
    return ("positions", "table", "rows") if kernel.ragged else ("positions", "table")


# -- sizes ------------------------------------------------------------------------------------------------------------
def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to


def slice_width(kernel: AttentionKernel) -> int:
    """Columns of values per block of `rows_*`."""
    return min(_rounded(kernel.value_dim, 16), WIDEST_SLICE)


def slices(kernel: AttentionKernel) -> int:
    return -(-kernel.value_dim // WIDEST_SLICE)


def _pitch(kernel: AttentionKernel) -> int:
    """Elements per row of queries in `scalar`."""
    return _rounded(kernel.head_dim, 4)


def scalar_shared(kernel: AttentionKernel) -> int:
    return TILE * _pitch(kernel) * max(4, kernel.dtype.size)


def _row_bytes(elements: int) -> int:
    """Bytes of a row of a tile: an odd number of chunks of 16 bytes."""
    return (_rounded(elements, 16) // 8 | 1) * 16


def separate(kernel: AttentionKernel, target: CudaTarget) -> bool:
    """Whether `splits` has memory for keys and values at the same time."""
    both = SPLIT * (_row_bytes(kernel.head_dim) + _row_bytes(kernel.value_dim)) + _small_tiles(kernel)
    return both + STATIC_SHARED["splits"] <= target.shared_bytes


def _small_tiles(kernel: AttentionKernel) -> int:
    """Bytes of weights and queries in `splits`."""
    return TILE * (_row_bytes(SPLIT) + _row_bytes(kernel.head_dim))


def splits_shared(kernel: AttentionKernel, target: CudaTarget) -> int:
    tiles = [SPLIT * _row_bytes(kernel.head_dim), SPLIT * _row_bytes(kernel.value_dim)]
    return (sum(tiles) if separate(kernel, target) else max(tiles)) + _small_tiles(kernel)


def in_groups(kernel: AttentionKernel, target: CudaTarget) -> bool:
    """Whether four warps multiply together: queries come from registers, values from whole panels of 64 columns."""
    return target.multiplies_in_groups and kernel.head_dim <= 128 and slice_width(kernel) % 64 == 0


def _group_instructions(kernel: AttentionKernel) -> str:
    keys = multiply_registers(stored(kernel), BLOCK, name="multiply_rows", transposed=False)
    values = multiply_registers(stored(kernel), slice_width(kernel), name="multiply_columns", transposed=True)
    return WARPGROUPS + keys + values


def _stage_bytes(kernel: AttentionKernel, groups: bool) -> int:
    if groups:
        return BLOCK * 128 * (-(-kernel.head_dim // 64) + -(-slice_width(kernel) // 64))
    return BLOCK * (_row_bytes(kernel.head_dim) + _row_bytes(slice_width(kernel)))


def _tile(variant: str) -> tuple[int, bool]:
    """Warps of a variant `rows_64` or `rows_64_shared`, and whether its queries are in shared memory."""
    _, rows, *shared = variant.split("_")
    return int(rows) // TILE, bool(shared)


def _query_bytes(kernel: AttentionKernel, warps: int, queries: bool) -> int:
    """Bytes of queries that are in shared memory: if asked for, or if they do not fit into registers."""
    return warps * TILE * _row_bytes(kernel.head_dim) if kernel.head_dim > 128 or queries else 0


def stages(
    kernel: AttentionKernel, warps: int, target: CudaTarget, *, queries: bool = False, groups: bool = False
) -> int:
    """Blocks of keys and values in memory: the current one, and the next if there is space."""
    total = _query_bytes(kernel, warps, queries) + 2 * _stage_bytes(kernel, groups) + STATIC_SHARED["rows"]
    return 2 if total <= target.shared_bytes else 1


def rows_shared(
    kernel: AttentionKernel, warps: int, target: CudaTarget, *, queries: bool = False, groups: bool = False
) -> int:
    count = stages(kernel, warps, target, queries=queries, groups=groups)
    return _query_bytes(kernel, warps, queries) + count * _stage_bytes(kernel, groups) + PANEL_ALIGNMENT * groups


# -- ragged tokens ----------------------------------------------------------------------------------------------------
def _ragged(kernel: AttentionKernel, words: Mapping[str, int], target: CudaTarget) -> KernelPlan:
    """Tiles for sequences with several tokens, then the other tokens one by one: which they are is data."""
    tokens, heads = words["batch"], words["kv_heads"]
    tiles = heads * -(-tokens * kernel.group // (4 * TILE)) * slices(kernel)
    shared = splits_shared(kernel, target)
    blocks = min(tokens * heads, target.processors * _resident("splits", shared, target))
    groups = in_groups(kernel, target)
    name, rows_bytes = "groups_64" if groups else "rows_64", rows_shared(kernel, 4, target, groups=groups)
    rows = Pass(name, (tiles, 1, 1), 128, rows_bytes)
    return KernelPlan((rows, Pass("rest_64", (blocks, 1, 1), 128, shared)))


def _resident(variant: str, shared: int, target: CudaTarget) -> int:
    """Blocks per processor."""
    return max(1, min(4, target.shared_bytes // (shared + STATIC_SHARED[variant])))


# -- splits -----------------------------------------------------------------------------------------------------------
def most_splits(kernel: AttentionKernel, words: Mapping[str, int]) -> int:
    """Splits that a row may see."""
    keys = words["capacity"] if kernel.cached else words["k_len"]
    return max(1, -(-keys // SPLIT) + kernel.ring)


def spread(
    kernel: AttentionKernel, variant: str, words: Mapping[str, int], target: CudaTarget, slices: int, shared: int
) -> KernelPlan:
    """Blocks of 16 rows, and as many workers for each as the GPU has space for, or one for every split."""
    rows = words["q_len"] * kernel.group
    units = words["batch"] * words["kv_heads"] * -(-rows // TILE) * slices
    most = most_splits(kernel, words)
    room = max(1, target.processors * _resident(variant, shared, target) // units)
    workers = most if variant == "token_each" else min(most, room, 65535)
    real = 8 if kernel.dtype.size == 8 else 4
    columns = _rounded(kernel.value_dim, 16) if on_tensor_cores(kernel) else min(_rounded(kernel.value_dim, 4), 128)
    counts = _rounded(units * 4, 256)
    states = _rounded(units * most * min(TILE, rows) * 2 * real, 256)
    scratch = counts + states + units * most * min(TILE, rows) * columns * real
    if workers == 1 or scratch > MOST_SCRATCH:
        return KernelPlan((Pass(variant, (units, 1, 1), 128, shared),))
    return KernelPlan((Pass(variant, (units, workers, 1), 128, shared),), scratch, zeroed=counts)
