"""Many rows of A times 16-bit weights on Hopper: groups of four warps multiply out of shared memory (wgmma).

One group of a block copies stages of A and the weights, 64 k at a time; the others multiply 64 rows of A each. They
meet at barriers of each stage: `full` counts copies, `empty` the warps that have read it. A block takes tile after
tile, so the stages of the next one are on their way during the epilogue. An instruction adds 16 consecutive k to the
sums, as in `rows` and `tiles`, with the same bits; sums of chunks are added up in registers.

Blocks may split the chunks of k, and operands may be in scratch memory, as for `tiles`.
"""

from __future__ import annotations

from rlx.backends.cuda.kernel_plan import entry
from rlx.backends.cuda.matmul.common import flag, multiplied, preamble
from rlx.backends.cuda.matmul.fragments import FRAGMENTS
from rlx.backends.cuda.matmul.instructions import WARPGROUPS, multiply_group
from rlx.backends.cuda.matmul.staging import (
    COPYING,
    OPERANDS,
    SCRATCH,
    SPLITTING,
    WITHOUT_SPLITTING,
    staging_constants,
)
from rlx.fast_dataclass import dataclass
from rlx.lir.kernels import MatmulKernel

DEPTH = 64  # k per stage: rows of 128 bytes, which the instructions read swizzled
PIECE = 32  # columns whose sums a warp passes to the epilogue at once, through shared memory
ALIGNMENT = 1024  # of a stage
BARRIERS = 16  # bytes of a stage's two
DECLARED = 128  # bytes of shared memory that a kernel declares itself
RESERVED = 1024  # bytes of shared memory that each block of a processor takes besides


@dataclass(frozen=True, slots=True)
class GroupTile:
    """Rows of the weights and groups of 64 rows of A per block."""

    columns: int
    groups: int
    registers: int  # per thread that multiplies
    copying_registers: int  # per thread that copies
    blocks: int = 1  # per processor

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def name(self) -> str:
        return f"{self.columns}x{self.rows}"

    def stages_in(self, shared_bytes: int) -> int:
        own = (shared_bytes + RESERVED) // self.blocks - RESERVED - DECLARED
        return min(8, (own - self._fixed_bytes) // (self._stage_bytes + BARRIERS))

    def shared(self, shared_bytes: int) -> int:
        """Dynamic shared memory: stages, their barriers, and the sums of warps on their way to the epilogue."""
        return self._fixed_bytes + self.stages_in(shared_bytes) * (self._stage_bytes + BARRIERS)

    @property
    def _fixed_bytes(self) -> int:
        return ALIGNMENT + 4 * self.groups * 16 * (PIECE + 8) * 4

    @property
    def _stage_bytes(self) -> int:
        return (self.columns + self.rows) * DEPTH * 2


GROUP_TILES = {
    tile.name: tile
    for tile in (
        GroupTile(192, 2, 224, 56),
        GroupTile(128, 2, 224, 56),
        GroupTile(128, 3, 152, 56),
        GroupTile(128, 1, 168, 88, blocks=2),
        GroupTile(64, 2, 224, 56),
    )
}

KERNEL = r"""
constexpr int LINE = DEPTH * 2, STAGE = (BN + BM) * LINE;   // bytes
constexpr int COLUMNS = BN / WEIGHTS, PITCH = PIECE + 8, BAND = 8;

struct Barriers { u32 full, empty; };   // of the first stage; the next are 8 bytes further
struct Place { i64 b0, b1, row0, column0; };
// Tiles in bands along the rows of A: blocks that run together share operands in the L2 cache.
INLINE u32 tiles_of(i64 size, int each) { return (u32)(size + each - 1) / each; }
INLINE u32 tile_count(const Words& w) {
  return tiles_of(w.m, BM) * tiles_of(w.n, COLUMNS) * (u32)w.batch0 * (u32)w.batch1;
}
INLINE Place place_of(const Words& w, u32 tile) {
  const u32 tiles_m = tiles_of(w.m, BM), tiles_n = tiles_of(w.n, COLUMNS);
  const u32 batch = tile / (tiles_m * tiles_n), one = tile % (tiles_m * tiles_n);
  const u32 band = one / (BAND * tiles_n), inside = one % (BAND * tiles_n);
  const u32 height = tiles_m - band * BAND < BAND ? tiles_m - band * BAND : BAND;
  const i64 row0 = (i64)(band * BAND + inside % height) * BM, column0 = (i64)(inside / height) * COLUMNS;
  return {batch / (u32)w.batch1, batch % (u32)w.batch1, row0, column0};
}
// The chunks of k that a block adds up.
struct Share { int chunk, chunks, share, first, last; i64 begin, end; };
INLINE Share share_of(const Words& w) {
  const int chunk = chunk_size(w.k), chunks = (u32)(w.k + chunk - 1) / (u32)chunk;
  const int share = (chunks + gridDim.y - 1) / gridDim.y;
  const int first = SPLIT ? least(blockIdx.y * share, chunks) : 0, last = SPLIT ? least(first + share, chunks) : chunks;
  return {chunk, chunks, share, first, last, (i64)first * chunk, least((i64)last * chunk, w.k)};
}

// Copies 16 bytes of every sixteenth row of a stage.
template <int COUNT> INLINE void copy_sixteens(u32 to, const T* from, i64 step) {
#pragma unroll
  for (int i = 0; i < COUNT; i++, from += step) copy16(to + i * 16 * LINE, from, 16);
}

INLINE void copy_stages(const Words& w, u32 stages, Barriers barriers) {
  const Scratch scratch = scratch_of(w);
  const Share own = share_of(w);
  const u32 count = tile_count(w);
  // Rows of two weights alternate in eights; what this thread copies belongs to one of them.
  const int weight = WEIGHTS == 2 ? threadIdx.x / (DEPTH / 8) >> 3 & 1 : 0;
  auto aligned = [](const void* p, i64 step) { return ((u64)p & 15) == 0 && step % 8 == 0; };
  auto weights_of_tile = [&](Place at) { return rows_of_weights(w, scratch, at.b0, at.b1, at.column0, weight); };
  auto copy_weights = [&](Rows<T> from, i64 columns, int stage, i64 k) {
    copy_rows<BN, 16 / WEIGHTS>(stages + stage * STAGE + BM * LINE, from.at + k, from.pitch, columns, own.end - k,
        aligned(from.at, from.pitch));
  };
  int early = 0;   // stages whose weights are on their way
  if (EARLY && blockIdx.x < count) {
    const Place at = place_of(w, blockIdx.x);
#pragma unroll 1
    for (i64 k = own.begin; early < STAGES && k < own.end; k += DEPTH)
      copy_weights(weights_of_tile(at), w.n - at.column0, early++, k);
  }
  start_next();
  wait_for_inputs();
  int stage = 0;
  u32 phase = 1;
#pragma unroll 1
  for (u32 tile = blockIdx.x; tile < count; tile += gridDim.x) {
    const Place at = place_of(w, tile);
    const Rows<T> right = weights_of_tile(at);
    const Rows<Left> left = rows_of_a(w, scratch, at.b0, at.b1, at.row0);
    const bool a_aligned = aligned(left.at, left.pitch), both = a_aligned && aligned(right.at, right.pitch);
    // Most tiles need no checks: nothing is past an end.
    const bool inside = both && own.end % DEPTH == 0 && w.m - at.row0 >= BM && w.n - at.column0 >= COLUMNS;
    const int piece = threadIdx.x % 8, row = threadIdx.x / 8;
    const u32 to = stages + place_of<T>(row, piece);
    const T* a = left.at + row * left.pitch + 8 * piece;
    const T* b = right.at + (WEIGHTS == 2 ? row & 7 : row) * right.pitch + 8 * piece;
#pragma unroll 1
    for (i64 k = own.begin; k < own.end; k += DEPTH) {
      wait_for_phase(barriers.empty + 8 * stage, phase);
      if (early > 0) early--;
      else if (inside) copy_sixteens<BN / 16>(to + stage * STAGE + BM * LINE, b + k, 16 / WEIGHTS * right.pitch);
      else copy_weights(right, w.n - at.column0, stage, k);
      if (inside) copy_sixteens<BM / 16>(to + stage * STAGE, a + k, 16 * left.pitch);
      else copy_rows<BM, 16>(stages + stage * STAGE, left.at + k, left.pitch, w.m - at.row0, own.end - k, a_aligned);
      if (!both) await<0>();
      if (both) arrive_after_copies(barriers.full + 8 * stage); else arrive(barriers.full + 8 * stage);
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
  }
}

INLINE void multiply_stages(const Words& w, u32 stages, Barriers barriers, float* sheets) {
  const int lane = threadIdx.x & 31, r = lane >> 2, c = lane & 3, warp = threadIdx.x / 32 - 4;
  const Scratch scratch = scratch_of(w);
  const Share own = share_of(w);
  const u32 count = tile_count(w);
  float* sheet = sheets + warp * 16 * PITCH;
  int stage = 0;
  u32 phase = 0;
  wait_for_inputs();
#pragma unroll 1
  for (u32 tile = blockIdx.x; tile < count; tile += gridDim.x) {
    float total[BN / 2], sums[BN / 2];
#pragma unroll
    for (int i = 0; i < BN / 2; i++) total[i] = 0;
#pragma unroll 1
    for (int chunk = own.first; chunk < own.last; chunk++) {
      const i64 begin = (i64)chunk * own.chunk;
      const int turns = (int)(least(own.chunk, own.end - begin) + DEPTH - 1) / DEPTH;
      u32 before = 0;
#pragma unroll 1
      for (int turn = 0; turn < turns; turn++) {
        wait_for_phase(barriers.full + 8 * stage, phase);
        see_copies();
        const u64 a = matrix_at(stages + stage * STAGE + warp / 4 * 64 * LINE);
        const u64 b = matrix_at(stages + stage * STAGE + BM * LINE);
        begin_products();
#pragma unroll
        for (int step = 0; step < DEPTH / 16; step++) multiply(sums, a + 2 * step, b + 2 * step, turn > 0 || step > 0);
        end_products();
        if (turn > 0) {
          await_products<1>();
          if (lane == 0) arrive(barriers.empty + 8 * before);
        }
        before = stage;
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
      await_products<0>();
      if (lane == 0) arrive(barriers.empty + 8 * before);
#pragma unroll
      for (int i = 0; i < BN / 2; i++) {
        if (SPLIT && own.first > 0 && i % 4 == 0) put(scratch, tile, chunk, i / 4, sums + i);
        total[i] += sums[i];
      }
    }
    if (SPLIT) {
      // The first block's total stands for its chunks; the others' sums follow in order.
      if (own.first == 0) {
#pragma unroll
        for (int i = 0; i < BN / 8; i++) put(scratch, tile, 0, i, total + 4 * i);
      }
      if (!is_last(scratch, tile)) continue;
#pragma unroll
      for (int i = 0; i < BN / 8; i++) get(scratch, tile, 0, i, total + 4 * i);
#pragma unroll 1
      for (int chunk = own.share; chunk < own.chunks; chunk++) {
#pragma unroll
        for (int i = 0; i < BN / 8; i++) {
          float four[4];
          get(scratch, tile, chunk, i, four);
#pragma unroll
          for (int e = 0; e < 4; e++) total[4 * i + e] += four[e];
        }
      }
    }
    // A warp's sums go through shared memory, so that neighbours store to neighbouring addresses.
    const Place at = place_of(w, tile);
    const i64 row0 = at.row0 + 16 * warp;
#pragma unroll
    for (int piece = 0; piece < BN / PIECE; piece++) {
      const i64 column0 = at.column0 + piece * (PIECE / WEIGHTS);
      __syncwarp();
#pragma unroll
      for (int j = 0; j < PIECE / 8; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float* two = total + (piece * (PIECE / 8) + j) * 4 + 2 * h;
          *(float2*)(sheet + (r + 8 * h) * PITCH + 8 * j + 2 * c) = make_float2(two[0], two[1]);
        }
      __syncwarp();
      auto sum_at = [&](int m, int column) {
        return sheet + m * PITCH + (WEIGHTS == 2 ? (column >> 3) * 16 + (column & 7) : column);
      };
      finish_rows<16, PIECE / WEIGHTS, 16 / WEIGHTS, 8>(
          w, at.b0, at.b1, unknown(row0), column0, w.m - row0, w.n - column0, 0, 0, 1, sum_at);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const __grid_constant__ Words w) {
  extern __shared__ __align__(128) u8 shared[];
  const u32 before = (ALIGNMENT - address(shared) % ALIGNMENT) % ALIGNMENT, stages = address(shared) + before;
  const Barriers barriers = {stages + STAGES * STAGE, stages + STAGES * STAGE + 8 * STAGES};
  float* sheets = (float*)(shared + before + STAGES * (STAGE + 16));
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      start_barrier(barriers.full + 8 * s, COPIERS);
      start_barrier(barriers.empty + 8 * s, ADDERS / 32);
    }
  }
  __syncthreads();
  if (threadIdx.x < COPIERS) {
    give_registers<COPYING_REGISTERS>();
    copy_stages(w, stages, barriers);
  } else {
    take_registers<REGISTERS>();
    multiply_stages(w, stages, barriers, sheets);
  }
}
"""


def source(
    kernel: MatmulKernel,
    variant: str,
    tile: GroupTile,
    *,
    shared_bytes: int,
    a: bool,
    b: bool,
    split: bool,
    early: bool,
) -> str:
    """CUDA C; `a` and `b`: the operand is in scratch memory; `split`: blocks share a tile; `early`: as for rows."""
    constants = f"""
constexpr int BN = {tile.columns}, BM = {tile.rows}, STAGES = {tile.stages_in(shared_bytes)}, DEPTH = {DEPTH};
constexpr int THREADS = {tile.threads}, BLOCKS = {tile.blocks}, PIECE = {PIECE};
constexpr int COPIERS = 128, ADDERS = {tile.threads - 128}, FIRST_ADDER = 128;
constexpr int COPYING_REGISTERS = {tile.copying_registers}, REGISTERS = {tile.registers}, ALIGNMENT = {ALIGNMENT};
constexpr bool EARLY = {flag(early)}, IN_ORDER = false;
typedef T Left;
"""
    head = preamble(kernel) + WARPGROUPS + multiply_group(multiplied(kernel), tile.columns) + FRAGMENTS
    shared = SCRATCH + OPERANDS + (SPLITTING if split else WITHOUT_SPLITTING) + COPYING
    constants += staging_constants(a=a, b=b, split=split)
    return head + constants + shared + KERNEL.replace("NAME", entry(kernel, variant))
