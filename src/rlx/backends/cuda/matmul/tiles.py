"""Many rows of A times 16-bit weights in tiles: weights and A stream through shared memory into mma fragments.

Weights are the 16-row operand of mma and rows of A its 8 columns, 16 consecutive k per step as in `rows`, so each
element of the result has the same bits in every variant. Where the order of k within a step matters, or might, it is
that of `rows`. A row of shared memory is 128 or 64 bytes, in an order in which what a warp reads meets all banks.

Blocks may split the chunks of k: every chunk sum goes to scratch memory as the registers of a thread, and the last
block of a tile adds them in order. For grouped rows a block multiplies its rows by each matrix that one of them wants.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlx.backends.cuda.kernel_plan import entry
from rlx.backends.cuda.matmul.common import CHUNKS, flag, preamble
from rlx.backends.cuda.matmul.fragments import FRAGMENTS
from rlx.backends.cuda.matmul.staging import (
    COPYING,
    COUNTERS,
    OPERANDS,
    SCRATCH,
    SPLITTING,
    WITHOUT_SPLITTING,
    staging_constants,
)  # fmt: skip
from rlx.fast_dataclass import dataclass
from rlx.lir.kernels import MatmulKernel


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of the weights and of A per block, and how they are spread over warps."""

    columns: int
    rows: int
    warps: tuple[int, int]
    stages: int
    depth: int = 64  # k per stage
    aside: bool = False  # sums of earlier chunks wait in shared memory, where registers have no room for them

    @property
    def threads(self) -> int:
        return 32 * self.warps[0] * self.warps[1]

    @property
    def name(self) -> str:
        return f"{self.columns}x{self.rows}"

    @property
    def takes_wide(self) -> bool:
        """Whether it reads A in f32 and rounds fragments, which is worth it if A is small beside the weights."""
        return self.rows <= 32

    def shared(self, shared_bytes: int, *, wide: bool = False) -> int:
        """Dynamic shared memory: as many stages as fit, and room for the sums of a tile."""
        stages = self.stages_in(shared_bytes, wide=wide) * self._stage_bytes(wide) + self._aside_bytes
        return max(stages, self.rows * (self.columns + 4) * 4)

    def stages_in(self, shared_bytes: int, *, wide: bool = False) -> int:
        return min(self.stages, (shared_bytes - self._aside_bytes) // self._stage_bytes(wide))

    def bytes_ahead(self, shared_bytes: int) -> int:
        """Bytes that a block has asked for and not yet used."""
        return (self.stages_in(shared_bytes) - 1) * self._stage_bytes(False)

    @property
    def _aside_bytes(self) -> int:
        return self.columns * self.rows * 4 if self.aside else 0

    def _stage_bytes(self, wide: bool) -> int:
        return (self.columns + self.rows * (1 + wide)) * self.depth * 2


TILES = {
    tile.name: tile
    for tile in (
        Tile(256, 128, (4, 2), 4, depth=32, aside=True),
        Tile(128, 128, (2, 2), 3, depth=32, aside=True),
        Tile(128, 64, (2, 2), 4),
        Tile(64, 128, (2, 2), 4),
        Tile(64, 64, (2, 2), 4),
        Tile(128, 32, (4, 1), 4),
        Tile(64, 32, (4, 1), 5),
        Tile(128, 16, (4, 1), 5),
        Tile(64, 16, (4, 1), 6),
    )
}

KERNEL = r"""
constexpr int THREADS = 32 * WARPS_N * WARPS_M, MI = BN / WARPS_N / 16, NI = BM / WARPS_M / 8;
constexpr int LINE = DEPTH * 2;   // bytes of a row of weights in a stage
constexpr int LEFT_LINE = DEPTH * sizeof(Left), STAGE = BN * LINE + BM * LEFT_LINE;   // bytes
constexpr int COLUMNS = BN / WEIGHTS, PITCH = BN + 4;

// sum = earlier + sum
INLINE void add(float4 earlier, float (&sum)[4]) {
  sum[0] = earlier.x + sum[0];
  sum[1] = earlier.y + sum[1];
  sum[2] = earlier.z + sum[2];
  sum[3] = earlier.w + sum[3];
}
// A lane's fragments of eight rows and 32 k, for two mma steps. IN_ORDER: k is where `rows` has it in a step, which
// A in f32 always is.
INLINE uint4 fragment_of(const T*, u32 rows, int row, int half) {
  const int lane = threadIdx.x & 31, r = lane >> 2, c = lane & 3;
  if (!IN_ORDER) return read_matrices(rows + place_of<T>(row + (lane & 7), half * 4 + (lane >> 3)));
  const uint2 first = read8(rows + place_of<T>(row + r, half * 4 + (c & 1)) + 8 * (c >> 1));
  const uint2 second = read8(rows + place_of<T>(row + r, half * 4 + (c & 1) + 2) + 8 * (c >> 1));
  return make_uint4(first.x, first.y, second.x, second.y);
}
INLINE uint4 fragment_of(const float*, u32 rows, int row, int half) {
  const int r = threadIdx.x >> 2 & 7, c = threadIdx.x & 3, piece = half * 8 + 2 * (c & 1) + (c >> 1);
  const uint4 first = read16(rows + place_of<float>(row + r, piece));
  const uint4 second = read16(rows + place_of<float>(row + r, piece + 4));
  return make_uint4(pair(__uint_as_float(first.x), __uint_as_float(first.y)),
                    pair(__uint_as_float(first.z), __uint_as_float(first.w)),
                    pair(__uint_as_float(second.x), __uint_as_float(second.y)),
                    pair(__uint_as_float(second.z), __uint_as_float(second.w)));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const __grid_constant__ Words w) {
  extern __shared__ __align__(128) u8 shared[];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, r = lane >> 2, c = lane & 3;
  const int warp_n = warp % WARPS_N, warp_m = warp / WARPS_N;

  // Tiles in groups of 8 along the rows of A: blocks that run together share operands in the L2 cache.
  const u32 tiles_m = (u32)(w.m + BM - 1) / BM, tiles_n = (u32)(w.n + COLUMNS - 1) / COLUMNS;
  const u32 batch = blockIdx.x / (tiles_m * tiles_n), b0 = batch / (u32)w.batch1, b1 = batch % (u32)w.batch1;
  const u32 tile = blockIdx.x % (tiles_m * tiles_n), band = tile / (8 * tiles_n), inside = tile % (8 * tiles_n);
  const u32 height = tiles_m - band * 8 < 8 ? tiles_m - band * 8 : 8;
  const i64 row0 = (band * 8 + inside % height) * BM, column0 = inside / height * COLUMNS;

  const Scratch scratch = scratch_of(w);
  const Rows<Left> left = rows_of_a(w, scratch, b0, b1, row0);
  const Left* a = left.at;
  const i64 a_pitch = left.pitch;
  // Rows of two weights alternate in eights; what this thread copies belongs to one of them.
  const Rows<T> right = rows_of_weights(w, scratch, b0, b1, column0, WEIGHTS == 2 ? tid / (DEPTH / 8) >> 3 & 1 : 0);
  const T* weights = right.at;
  const i64 b_pitch = right.pitch, matrix = B_IN_SCRATCH ? w.n * b_pitch : w.b_batch0;
  const i64 rows = w.m - row0, columns = w.n - column0;
  const int chunk = chunk_size(w.k);
  i64 k0 = 0, depth = w.k;
  if (BY_DEPTH) wait_for_inputs();
  if (BY_DEPTH) piece_of(w, b0, k0, depth);
  const int chunks = (u32)(depth + chunk - 1) / (u32)chunk;
  const int share = (chunks + gridDim.y - 1) / gridDim.y;   // chunks per block
  const int chunk0 = SPLIT ? blockIdx.y * share : 0, chunk1 = SPLIT ? (int)least(chunk0 + share, chunks) : chunks;
  const i64 begin = (i64)chunk0 * chunk, end = least((i64)chunk1 * chunk, depth);
  const int turns = end > begin ? (int)((end - begin + DEPTH - 1) / DEPTH) : 0;

  const u32 stages = address(shared);
  auto aligned = [](const void* p, i64 step) { return ((u64)p & 15) == 0 && step % 8 == 0; };
  const bool a_aligned = aligned(a + k0, a_pitch);
  i64 group = 0;
  auto copy_weights = [&](int turn) {
    const i64 at = begin + (i64)turn * DEPTH;
    const T* from = weights + group * matrix + k0 + at;
    const u32 to = stages + turn % STAGES * STAGE;
    copy_rows<BN, 16 / WEIGHTS>(to, from, b_pitch, columns, end - at, aligned(from, b_pitch));
  };
  auto copy_a = [&](int turn) {
    const i64 at = begin + (i64)turn * DEPTH;
    copy_rows<BM, 16>(stages + turn % STAGES * STAGE + BN * LINE, a + k0 + at, a_pitch, rows, end - at, a_aligned);
  };

  // Sums of earlier chunks.
  float total[ASIDE ? 1 : MI][ASIDE ? 1 : NI][4];
  float4* aside = (float4*)(shared + STAGES * STAGE) + tid;
  i64 next = 0;          // of grouped rows: the smallest matrix that is not done
  bool first = true;
  do {
    if (EARLY && first) {
#pragma unroll 1
      for (int s = 0; s < STAGES - 1 && s < turns; s++) copy_weights(s);
    }
    if (first) { start_next(); if (!BY_DEPTH) wait_for_inputs(); }
    if (GROUPED) {
      // The smallest matrix from `next` on among the rows of this block.
      i64 smallest = groups_of(w);
      for (int i = lane; i < BM && i < rows; i += 32) {
        const i64 g = group_of(w, row0 + i);
        if (g >= next && g < smallest) smallest = g;
      }
      for (int o = 16; o; o >>= 1) {
        const i64 other = __shfl_xor_sync(~0u, smallest, o);
        smallest = other < smallest ? other : smallest;
      }
      group = smallest;
      if (group >= groups_of(w)) break;
      next = group + 1;
    }
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; s++) {
      if (s < turns) {
        if (!EARLY || !first) copy_weights(s);
        copy_a(s);
      }
      commit();
    }
    first = false;
    float sums[MI][NI][4];
#pragma unroll
    for (int i = 0; i < MI; i++)
#pragma unroll
      for (int j = 0; j < NI; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          sums[i][j][e] = 0;
          if (!ASIDE) total[ASIDE ? 0 : i][ASIDE ? 0 : j][e] = 0;
        }

    // Fragments of the next step are read while those of this one are multiplied.
    const int wr = warp_n * MI * 16, xr = warp_m * NI * 8;
    u32 stage = stages;
    uint4 xf[NI], wf[2][2];
    auto read_x = [&](int half, uint4 (&f)[NI]) {
#pragma unroll
      for (int j = 0; j < NI; j++) f[j] = fragment_of(a, stage + BN * LINE, xr + j * 8, half);
    };
    auto read_w = [&](int half, int i, uint4 (&f)[2]) {
      f[0] = fragment_of((const T*)0, stage, wr + i * 16, half);
      f[1] = fragment_of((const T*)0, stage, wr + i * 16 + 8, half);
    };
    // Waits for the stage of a turn, and refills that of the turn before, which all warps have read.
    auto enter = [&](int turn) {
      await<STAGES - 2>();
      __syncthreads();
      if (turn + STAGES - 1 < turns) { copy_weights(turn + STAGES - 1); copy_a(turn + STAGES - 1); }
      commit();
      stage = stages + turn % STAGES * STAGE;
    };
    if (turns > 0) { enter(0); read_x(0, xf); read_w(0, 0, wf[0]); }
    int slot = 0, left = chunk;
    for (int turn = 0; turn < turns; turn++) {
#pragma unroll
      for (int half = 0; half < DEPTH / 32; half++) {
        uint4 next_x[NI], next_w[2];
#pragma unroll
        for (int i = 0; i < MI; i++) {
          if (i + 1 < MI) {
            read_w(half, i + 1, wf[i + 1 & 1]);
          } else if (half + 1 < DEPTH / 32) {
            read_x(half + 1, next_x);
            read_w(half + 1, 0, next_w);
          } else if (turn + 1 < turns) {
            enter(turn + 1);
            read_x(0, next_x);
            read_w(0, 0, next_w);
          }
          const uint4 low = wf[i & 1][0], high = wf[i & 1][1];
#pragma unroll
          for (int j = 0; j < NI; j++) mma(sums[i][j], low.x, high.x, low.y, high.y, xf[j].x, xf[j].y);
#pragma unroll
          for (int j = 0; j < NI; j++) mma(sums[i][j], low.z, high.z, low.w, high.w, xf[j].z, xf[j].w);
        }
#pragma unroll
        for (int j = 0; j < NI; j++) xf[j] = next_x[j];
        wf[0][0] = next_w[0];
        wf[0][1] = next_w[1];
      }
      left -= DEPTH;
      if (left == 0 || turn + 1 == turns) {   // the end of a chunk
        left = chunk;
#pragma unroll
        for (int i = 0; i < MI; i++)
#pragma unroll
          for (int j = 0; j < NI; j++) {
            float (&sum)[4] = sums[i][j];
            if (SPLIT && chunk0 > 0) put(scratch, blockIdx.x, chunk0 + slot, i * NI + j, sum);
            if (ASIDE) {
              float4* at = aside + (i * NI + j) * THREADS;
              add(slot > 0 ? *at : make_float4(0, 0, 0, 0), sum);
              if (turn + 1 < turns) *at = make_float4(sum[0], sum[1], sum[2], sum[3]);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
              if (!ASIDE) total[ASIDE ? 0 : i][ASIDE ? 0 : j][e] += sum[e];
              if (!ASIDE || turn + 1 < turns) sum[e] = 0;
            }
          }
        slot++;
      }
    }
    await<0>();
    __syncthreads();
    // From here on, `sums` are those of all chunks.
    if (!ASIDE) {
#pragma unroll
      for (int i = 0; i < MI * NI * 4; i++)
        sums[i / 4 / NI][i / 4 % NI][i % 4] = total[ASIDE ? 0 : i / 4 / NI][ASIDE ? 0 : i / 4 % NI][i % 4];
    }
    if (SPLIT) {
      // The first block's total stands for its chunks; the others' sums follow in order.
      if (chunk0 == 0) {
#pragma unroll
        for (int i = 0; i < MI * NI; i++) put(scratch, blockIdx.x, 0, i, sums[i / NI][i % NI]);
      }
      if (!is_last(scratch, blockIdx.x)) return;
#pragma unroll
      for (int i = 0; i < MI * NI; i++) get(scratch, blockIdx.x, 0, i, sums[i / NI][i % NI]);
#pragma unroll MI * NI <= 8 ? 4 : 1
      for (int p = share; p < chunks; p++) {
#pragma unroll
        for (int i = 0; i < MI * NI; i++) {
          float one[4];
          get(scratch, blockIdx.x, p, i, one);
#pragma unroll
          for (int e = 0; e < 4; e++) sums[i / NI][i % NI][e] += one[e];
        }
      }
    }
    // Sums to shared memory as [row of A][row of weights], so that neighbours store to neighbouring addresses.
    float* sheet = (float*)shared;
#pragma unroll
    for (int i = 0; i < MI; i++)
#pragma unroll
      for (int j = 0; j < NI; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int n = (warp_n * MI + i) * 16 + r + 8 * (e >> 1), m = (warp_m * NI + j) * 8 + 2 * c + (e & 1);
          sheet[m * PITCH + n] = sums[i][j][e];
        }
    __syncthreads();
    auto sum_at = [&](int m, int column) {
      return sheet + m * PITCH + (WEIGHTS == 2 ? (column >> 3) * 16 + (column & 7) : column);
    };
    finish_tile<BM, COLUMNS, WARPS_N * WARPS_M, 8>(w, b0, b1, row0, column0, rows, columns, group, sum_at);
    if (GROUPED) __syncthreads();
  } while (GROUPED);
}
"""

# Rounds A or the weights to 16-bit rows along k in scratch memory. A thread writes eight numbers.
NARROW = r"""
extern "C" __global__ void __launch_bounds__(256) NAME(const __grid_constant__ Words w) {
  start_next();
  wait_for_inputs();
  const u32 eights = (u32)(w.k + 7) / 8;
  const i64 pitch = scratch_pitch(w);
  const Scratch scratch = scratch_of(w);
  const u32 outer = OF_B ? (w.b_batch0 ? groups_of(w) : 1) : (w.a_batch0 ? w.batch0 : 1);
  const u32 inner = (OF_B ? w.b_batch1 : w.a_batch1) ? w.batch1 : 1;
  const u32 rows = OF_B ? w.n : w.m, count = (OF_B ? WEIGHTS : 1) * outer * inner * rows;
  const i64 along = OF_B ? w.b_k : step_of(w);
  // A block takes rows, or eights of k: neighbours read neighbours, along k if that is contiguous, else along rows.
  const u32 lines = along == 1 ? count : count / rows * eights, width = along == 1 ? eights : rows;
  const u32 step = blockDim.x < width ? blockDim.x : width, at_once = blockDim.x / step;
  for (u32 line = blockIdx.x * at_once + threadIdx.x / step; line < lines; line += gridDim.x * at_once)
  for (u32 i = threadIdx.x % step; i < width && threadIdx.x < step * at_once; i += step) {
    const u32 block = line / (along == 1 ? rows : eights), row = along == 1 ? line % rows : i;
    const i64 at = 8 * (along == 1 ? i : line % eights);
    const u32 b1 = block % inner, b0 = block / inner % outer;
    const bool whole = along == 1;
    uint4 v;
    if (OF_B) {
      const B* matrix = weights_of(w, block / (inner * outer)) + b0 * w.b_batch0 + b1 * w.b_batch1;
      const B* from = matrix + row * w.b_n + at * w.b_k;
      v = eight(from, along, w.k - at, whole && ((u64)from & 15) == 0);
    } else {
      const A* from = row_of(w, b0, b1, row) + at * along;
      v = eight(from, along, w.k - at, whole && ((u64)from & 15) == 0);
    }
    *(uint4*)((OF_B ? scratch.b : scratch.a) + ((i64)block * rows + row) * pitch + at) = v;
  }
}
"""


def tile_source(
    kernel: MatmulKernel, variant: str, tile: Tile, *,
    shared_bytes: int, in_order: bool, a: bool, b: bool, wide: bool, split: bool, early: bool,
) -> str:  # fmt: skip
    """CUDA C; `a` and `b`: the operand is in scratch memory; `wide`: A is read in f32; `split`: blocks share a tile.

    `in_order`: the bits of an mma step may depend on the order of k in it.
    """
    stages = tile.stages_in(shared_bytes, wide=wide)
    blocks = 1 if tile.threads > 128 else 2
    constants = f"""
constexpr int BN = {tile.columns}, BM = {tile.rows}, WARPS_N = {tile.warps[0]}, WARPS_M = {tile.warps[1]};
constexpr int STAGES = {stages}, BLOCKS = {blocks}, DEPTH = {tile.depth};
constexpr int COPIERS = {tile.threads}, ADDERS = {tile.threads}, FIRST_ADDER = 0;
constexpr bool EARLY = {flag(early)}, ASIDE = {flag(tile.aside)}, IN_ORDER = {flag(in_order or wide)};
typedef {"A" if wide else "T"} Left;
"""
    splitting = SPLITTING if split else WITHOUT_SPLITTING
    text = KERNEL.replace("NAME", entry(kernel, variant))
    head = preamble(kernel) + FRAGMENTS + staging_constants(a=a, b=b, split=split)
    return head + constants + SCRATCH + OPERANDS + splitting + COPYING + text


def narrow_source(kernel: MatmulKernel, variant: str, *, of_b: bool, a: bool, b: bool, split: bool) -> str:
    head = preamble(kernel) + FRAGMENTS + staging_constants(a=a, b=b, split=split)
    return f"{head}{SCRATCH}constexpr bool OF_B = {flag(of_b)};\n{NARROW.replace('NAME', entry(kernel, variant))}"


def _rounded_up(size: int) -> int:
    return -(-size // 256) * 256


def matrices_in_scratch(kernel: MatmulKernel, words: Mapping[str, int], operand: str) -> int:
    """Matrices of an operand: batch axes along which it does not change count once."""
    groups = words["groups"] if operand == "b" and kernel.grouped == "rows" else words["batch0"]
    return (groups if words[f"{operand}_batch0"] else 1) * (words["batch1"] if words[f"{operand}_batch1"] else 1)


def scratch_bytes(kernel: MatmulKernel, words: Mapping[str, int], sums: int, *, a: bool, b: bool, split: bool) -> int:
    """Bytes of scratch memory, as the kernels lay it out; `sums`: elements of all tiles, which blocks share."""
    row = -(-words["k"] // 8) * 16
    total = COUNTERS if split else 0
    if a:
        total += _rounded_up(matrices_in_scratch(kernel, words, "a") * words["m"] * row)
    if b:
        total += _rounded_up(kernel.weights * matrices_in_scratch(kernel, words, "b") * words["n"] * row)
    if split:
        total += CHUNKS * sums * 4
    return total
