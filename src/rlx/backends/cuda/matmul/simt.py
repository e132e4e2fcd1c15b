"""Products of f32 and f64 as chains of FMAs, in the same chunks as on tensor cores. Operands have any strides.

`tile` gives a thread a square of the result. `rows`, for few rows of A, gives a warp a chunk of k and a lane a column:
weights that are contiguous along k pass through shared memory, so that lanes read neighbouring addresses.
"""

from __future__ import annotations

from rlx.backends.cuda.kernel_plan import entry
from rlx.backends.cuda.matmul.common import flag, preamble
from rlx.dtypes import F64
from rlx.lir.kernels import MatmulKernel

ROW_COLUMNS = 32  # columns per warp of `rows`

TILE = r"""
constexpr int DEPTH = 16, ACROSS = SIDE / EACH, THREADS = ACROSS * ACROSS, COPIES = SIDE * DEPTH / THREADS;
constexpr int PITCH = SIDE + 4, COLUMNS = SIDE / WEIGHTS;

extern "C" __global__ void __launch_bounds__(THREADS) NAME(const __grid_constant__ Words w) {
  extern __shared__ __align__(128) u8 shared[];
  Acc (*ws)[DEPTH][PITCH] = (Acc (*)[DEPTH][PITCH])shared;
  Acc (*xs)[DEPTH][PITCH] = ws + 2;
  start_next();
  wait_for_inputs();
  const int tid = threadIdx.x, tn = tid % ACROSS, tm = tid / ACROSS;
  const u32 tiles_m = (u32)(w.m + SIDE - 1) / SIDE, tiles_n = (u32)(w.n + COLUMNS - 1) / COLUMNS;
  const u32 batch = blockIdx.x / (tiles_m * tiles_n), b0 = batch / (u32)w.batch1, b1 = batch % (u32)w.batch1;
  const u32 tile = blockIdx.x % (tiles_m * tiles_n);
  const i64 row0 = tile % tiles_m * SIDE, column0 = tile / tiles_m * COLUMNS;
  const i64 rows = w.m - row0, columns = w.n - column0;
  i64 k0 = 0, depth = w.k;
  piece_of(w, b0, k0, depth);
  const int chunk = chunk_size(w.k), turns = (u32)(depth + DEPTH - 1) / DEPTH;
  const A* a = row_of(w, b0, b1, row0) + k0 * step_of(w);
  const i64 a_row = TRANSPOSED ? 1 : w.a_row, a_k = step_of(w);
  i64 group = 0, next = 0;
  Acc wr[COPIES], xr[COPIES];
  // The part of a stage that this thread copies: neighbours follow the contiguous axis.
  auto fetch = [&](int turn) {
    const i64 base = GROUPED ? group * w.b_batch0 : b0 * w.b_batch0 + b1 * w.b_batch1;
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
      const int at = tid + i * THREADS;
      const int k = K_FIRST ? at % DEPTH : at / SIDE, n = K_FIRST ? at / DEPTH : at % SIDE, column = n % COLUMNS;
      const i64 depth_at = (i64)turn * DEPTH + k;
      const bool inside = depth_at < depth && column < columns;
      const B* from = weights_of(w, n / COLUMNS) + base + (k0 + depth_at) * w.b_k + (column0 + column) * w.b_n;
      wr[i] = inside ? (Acc)widen(*from) : (Acc)0;
      const int ak = TRANSPOSED ? at / SIDE : at % DEPTH, m = TRANSPOSED ? at % SIDE : at / DEPTH;
      const i64 a_at = (i64)turn * DEPTH + ak;
      xr[i] = a_at < depth && m < rows ? (Acc)widen(a[m * a_row + a_at * a_k]) : (Acc)0;
    }
  };
  auto keep = [&](int turn) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
      const int at = tid + i * THREADS;
      ws[turn & 1][K_FIRST ? at % DEPTH : at / SIDE][K_FIRST ? at / DEPTH : at % SIDE] = wr[i];
      xs[turn & 1][TRANSPOSED ? at / SIDE : at % DEPTH][TRANSPOSED ? at % SIDE : at / DEPTH] = xr[i];
    }
  };
  do {
    if (GROUPED) {
      i64 smallest = groups_of(w);
      for (int i = tid & 31; i < SIDE && i < rows; i += 32) {
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
    Acc sums[EACH][EACH], total[EACH][EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
      for (int j = 0; j < EACH; j++) sums[i][j] = total[i][j] = 0;
    if (turns > 0) { fetch(0); keep(0); }
    __syncthreads();
    int left = chunk;
    for (int turn = 0; turn < turns; turn++) {
      if (turn + 1 < turns) fetch(turn + 1);
#pragma unroll
      for (int k = 0; k < DEPTH; k++) {
        Acc wv[EACH], xv[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
          wv[i] = ws[turn & 1][k][i / 4 * 4 * ACROSS + tn * 4 + i % 4];
          xv[i] = xs[turn & 1][k][i / 4 * 4 * ACROSS + tm * 4 + i % 4];
        }
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
          for (int j = 0; j < EACH; j++) sums[i][j] = fused(wv[i], xv[j], sums[i][j]);
      }
      left -= DEPTH;
      if (left == 0 || turn + 1 == turns) {
        left = chunk;
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
          for (int j = 0; j < EACH; j++) { total[i][j] += sums[i][j]; sums[i][j] = 0; }
      }
      if (turn + 1 < turns) keep(turn + 1);
      __syncthreads();
    }
    Acc* sheet = (Acc*)shared;
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
      for (int j = 0; j < EACH; j++)
        sheet[(j / 4 * 4 * ACROSS + tm * 4 + j % 4) * PITCH + i / 4 * 4 * ACROSS + tn * 4 + i % 4] = total[i][j];
    __syncthreads();
    finish_tile<SIDE, COLUMNS, THREADS / 32, COLUMNS>(
        w, b0, b1, row0, column0, rows, columns, group, [&](int m, int column) { return sheet + m * PITCH + column; });
    if (GROUPED) __syncthreads();
  } while (GROUPED);
}
"""

ROWS = r"""
constexpr int TILE = 32, WARP_PITCH = 33;

extern "C" __global__ void __launch_bounds__(256) NAME(const __grid_constant__ Words w) {
  extern __shared__ __align__(128) u8 shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int k = (int)w.k, chunk = chunk_size(k), chunks = k > 0 ? (k + chunk - 1) / chunk : 1;
  const int part = warp % chunks, team = warp / chunks, teams = blockDim.x / (32 * chunks);
  const u32 blocks = gridDim.x / (u32)(w.batch0 * w.batch1);
  const u32 batch = blockIdx.x / blocks, b0 = batch / (u32)w.batch1, b1 = batch % (u32)w.batch1;
  const i64 first_row = GROUPED ? blockIdx.y : 0;
  const int m = GROUPED ? 1 : (int)w.m, pitch = (k + 31) / 32 * 32;
  Acc* xs = (Acc*)shared;                                                    // [TOKENS][pitch]
  Acc* own = xs + (i64)TOKENS * pitch + warp * TILE * WARP_PITCH;            // weights of this warp
  Acc* meeting = xs + (i64)TOKENS * pitch + blockDim.x * WARP_PITCH;   // [2][teams][chunks][WEIGHTS][TOKENS][TILE]
  const int per_chunk = WEIGHTS * TOKENS * TILE, per_team = chunks * per_chunk;
  start_next();
  wait_for_inputs();
  const i64 base = GROUPED ? group_of(w, first_row) * w.b_batch0 : b0 * w.b_batch0 + b1 * w.b_batch1;
  const A* a = row_of(w, b0, b1, first_row);
  const i64 along = step_of(w), row = TRANSPOSED ? 1 : w.a_row;
  for (int i = threadIdx.x; i < TOKENS * pitch; i += blockDim.x) {
    const int token = i / pitch, at = i - token * pitch;
    xs[i] = token < m && at < k ? (Acc)widen(a[token * row + at * along]) : (Acc)0;
  }
  __syncthreads();
  const int begin = part * chunk, depth = (int)least(chunk, k - begin);
  const int tiles = (u32)(w.n + TILE - 1) / TILE;
  int turn = 0;
  for (int tile = blockIdx.x % blocks * teams + team; tile < tiles; tile += blocks * teams) {
    Acc sums[WEIGHTS][TOKENS];
#pragma unroll
    for (int which = 0; which < WEIGHTS; which++) {
#pragma unroll
      for (int t = 0; t < TOKENS; t++) sums[which][t] = 0;
      const B* from = weights_of(w, which) + base + (i64)begin * w.b_k;
      if (K_FIRST) {
        B ahead[TILE];
        auto fetch = [&](int at) {
#pragma unroll
          for (int i = 0; i < TILE; i++)
            if (at + lane < depth) ahead[i] = from[least(tile * TILE + i, w.n - 1) * w.b_n + at + lane];
        };
        fetch(0);
        for (int at = 0; at < depth; at += 32) {
          __syncwarp();
#pragma unroll
          for (int i = 0; i < TILE; i++) own[i * WARP_PITCH + lane] = at + lane < depth ? (Acc)widen(ahead[i]) : (Acc)0;
          __syncwarp();
          if (at + 32 < depth) fetch(at + 32);
#pragma unroll 8
          for (int i = 0; i < 32; i++) {
            const Acc v = own[lane * WARP_PITCH + i];
#pragma unroll
            for (int t = 0; t < TOKENS; t++) sums[which][t] = fused(v, xs[t * pitch + begin + at + i], sums[which][t]);
          }
        }
      } else {
        const B* column = from + least(tile * TILE + lane, w.n - 1) * w.b_n;
#pragma unroll 8
        for (int i = 0; i < depth; i++) {
          const Acc v = (Acc)widen(column[i * w.b_k]);
#pragma unroll
          for (int t = 0; t < TOKENS; t++) sums[which][t] = fused(v, xs[t * pitch + begin + i], sums[which][t]);
        }
      }
    }
    Acc* here = meeting + (turn * teams + team) * per_team;
    turn ^= 1;
#pragma unroll
    for (int which = 0; which < WEIGHTS; which++)
#pragma unroll
      for (int t = 0; t < TOKENS; t++) here[part * per_chunk + (which * TOKENS + t) * TILE + lane] = sums[which][t];
    team_barrier(team + 1, 32 * chunks);
    for (int i = part * 32 + lane; i < m * TILE; i += 32 * chunks) {
      const i64 n = tile * TILE + i % TILE;
      Acc acc = 0, acc1 = 0;
      for (int p = 0; p < chunks; p++) {
        acc += here[p * per_chunk + i];
        if (WEIGHTS == 2) acc1 += here[p * per_chunk + TOKENS * TILE + i];
      }
      if (n < w.n) {
        const i64 at = first_row + i / TILE;
        finish(w, b0, b1, at, n, acc, acc1, read_at(w, b0, b1, at, n));
      }
    }
  }
}
"""


def _head(kernel: MatmulKernel, k_first: bool) -> str:
    return f"""{preamble(kernel)}
constexpr bool K_FIRST = {flag(k_first)};
INLINE float fused(float a, float b, float c) {{ return fmaf(a, b, c); }}
INLINE double fused(double a, double b, double c) {{ return fma(a, b, c); }}
"""


def side(kernel: MatmulKernel) -> int:
    """Rows and columns of a tile."""
    return 64 if kernel.accumulator is F64 else 128


def tile_source(kernel: MatmulKernel, variant: str, *, size: int, k_first: bool) -> str:
    constants = f"constexpr int SIDE = {size}, EACH = {size // 16};\n"
    return _head(kernel, k_first) + constants + TILE.replace("NAME", entry(kernel, variant))


def tile_shared(kernel: MatmulKernel, size: int) -> int:
    each = kernel.accumulator.size
    return max(4 * 16 * (size + 4), size * (size + 4)) * each


def rows_source(kernel: MatmulKernel, variant: str, *, tokens: int, k_first: bool) -> str:
    constants = f"constexpr int TOKENS = {tokens};\n"
    return _head(kernel, k_first) + constants + ROWS.replace("NAME", entry(kernel, variant))


def rows_shared(kernel: MatmulKernel, k: int, tokens: int, teams: int, chunks: int) -> int:
    """Dynamic shared memory of a block of `rows`."""
    warps = teams * chunks
    meeting = 2 * warps * kernel.weights * tokens * ROW_COLUMNS
    return kernel.accumulator.size * (tokens * -(-k // 32) * 32 + warps * 32 * 33 + meeting)
