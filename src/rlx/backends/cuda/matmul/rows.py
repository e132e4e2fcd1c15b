"""Few rows of A times 16-bit weights, limited by memory speed: every lane copies its own mma fragments.

A block holds the rows of A in shared memory, rounded to the type of the weights. A warp multiplies one chunk of k by
8, 16 or 32 rows of the weights (columns of B), which are the 16-row operand of mma; the rows of A are its 8 columns.
A lane copies 16 bytes, eight consecutive k of one row, to shared memory: so much can be on its way that registers would
not hold it, before earlier launches have ended. Two mma steps take 32 k. The lane that has copied them reads them,
without barriers, and lanes exchange halves, so that each step has 16 consecutive k. Blocks that copy all their weights
at once meet in any case before they read: on Hopper they load whole fragments (`ldmatrix`), which takes a fifth of the
instructions. The sums of chunks meet in shared memory.
"""

from __future__ import annotations

from rlx.backends.cuda.kernel_plan import entry
from rlx.backends.cuda.matmul.common import flag, preamble
from rlx.backends.cuda.matmul.fragments import FRAGMENTS
from rlx.fast_dataclass import dataclass
from rlx.lir.kernels import MatmulKernel

ALL = "\n  const Words& w = all.product;"
LOADS = 16  # copies of 16 bytes on their way per lane
RESIDENT_THREADS = 768  # of a processor, for which registers are enough

KERNEL = r"""
constexpr int STEPS = LOADS / ROWS;         // of 32 k, whose copies are on their way
constexpr int TILE = 8 * ROWS / WEIGHTS;    // columns
constexpr int SUMS = (ROWS + 1) / 2;        // mma accumulators

// Columns from the start of a tile to row 0 of group `group`.
INLINE int column_of(int group) { return 8 * (WEIGHTS == 2 ? group >> 1 : group); }

// Lanes 0 and 1 of a row have the first 16 of 32 k, lanes 2 and 3 the others. Gives each lane four of the first (x, y)
// and four of the others (z, w): those of `first_of`, and 16 further.
INLINE int first_of(int c) { return 8 * (c & 1) + 4 * (c >> 1); }
INLINE uint4 exchanged(uint4 f) {
  const bool upper = threadIdx.x & 2;
  const u32 x = __shfl_xor_sync(~0u, upper ? f.x : f.z, 2), y = __shfl_xor_sync(~0u, upper ? f.y : f.w, 2);
  return upper ? make_uint4(x, y, f.z, f.w) : make_uint4(f.x, f.y, x, y);
}

// Where the row that this lane names for `ldmatrix` begins: matrices of 8 rows and 8 k, in the order of mma's operand.
INLINE u32 fragment_row(int lane, u32 next_group) {
  const int row = lane & 7, group = ROWS > 1 ? lane >> 3 & 1 : 0, chunk = ROWS > 1 ? lane >> 4 : lane >> 3;
  return group * next_group + row * 64 + (chunk ^ (row >> 1)) * 16;
}

// Adds 32 k of loaded fragments to the sums; `at`: the row named by this lane, `x`: the same of the rows of A.
INLINE void step_of_fragments(float (&sums)[SUMS][4], u32 at, u32 next_group, u32 x) {
  const uint4 b = read_matrices(x);
#pragma unroll
  for (int i = 0; i < SUMS; i++) {
    const uint4 a = read_matrices(at + 2 * i * next_group);
    if (ROWS == 1) {
      mma(sums[i], a.x, 0, a.y, 0, b.x, b.y);
      mma(sums[i], a.z, 0, a.w, 0, b.z, b.w);
    } else {
      const uint4 other = read_matrices((at + 2 * i * next_group) ^ 32);  // the second 16 k
      mma(sums[i], a.x, a.y, a.z, a.w, b.x, b.y);
      mma(sums[i], other.x, other.y, other.z, other.w, b.z, b.w);
    }
  }
}

// Adds 32 k to the sums.
INLINE void step(float (&sums)[SUMS][4], const uint4 (&f)[ROWS], uint4 x) {
#pragma unroll
  for (int i = 0; i < SUMS; i++) {
    const uint4 low = f[2 * i], high = 2 * i + 1 < ROWS ? f[2 * i + 1 < ROWS ? 2 * i + 1 : 0] : make_uint4(0, 0, 0, 0);
    mma(sums[i], low.x, high.x, low.y, high.y, x.x, x.y);
    mma(sums[i], low.z, high.z, low.w, high.w, x.z, x.w);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(PARAMETERS) {
  extern __shared__ __align__(128) u8 shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, r = lane >> 2, c = lane & 3;
  const int k = (int)w.k, chunk = chunk_size(k), chunks = k > 0 ? (k + chunk - 1) / chunk : 1;
  const int part = warp % chunks, team = warp / chunks, teams = blockDim.x / (32 * chunks);
  const u32 blocks = gridDim.x / (u32)(w.batch0 * w.batch1);        // per matrix
  const u32 batch = blockIdx.x / blocks, b0 = batch / (u32)w.batch1, b1 = batch % (u32)w.batch1;
  const i64 first_row = GROUPED ? blockIdx.y : 0;
  const int m = GROUPED ? 1 : (int)w.m;
  const int pitch = (k + 63) / 64 * 64 + 16;                       // of a row of x, in elements
  T* xs = (T*)shared;
  float* meeting = (float*)(shared + (i64)m * pitch * 2);          // [2][teams][chunks][ROWS][m][8]
  // [STEPS][ROWS][threads][16 bytes]: what this thread copies. Where fragments are loaded, chunk c of row r is at
  // c ^ r / 2 of its row, so that eight rows are in different banks.
  const u32 copies = (address(meeting + 2 * teams * chunks * ROWS * m * 8) + 127) & ~127u, next_copy = 16 * blockDim.x;
  const u32 own_copies = copies + 16 * (LOADED ? threadIdx.x ^ (r >> 1 & 3) : threadIdx.x);
  const u32 own_fragments = copies + 512 * warp + fragment_row(lane, next_copy);
  const int per_chunk = ROWS * m * 8, per_team = chunks * per_chunk;
  const int begin = part * chunk, depth = k % chunk ? (int)least(chunk, k - begin) : chunk, steps = (depth + 31) / 32;
  const int tiles = (u32)(w.n + TILE - 1) / TILE, stride = blocks * teams;
  const int first_tile = blockIdx.x % blocks * teams + team;
  i64 group_offset = b0 * w.b_batch0 + b1 * w.b_batch1;

  const bool whole_rows = w.b_n % 8 == 0 && w.b_batch0 % 8 == 0 && w.b_batch1 % 8 == 0;
  const bool direct = w.n >= TILE && w.b_k == 1 && k > 0 && k % 32 == 0 && whole_rows
      && ((u64)weights_of(w, 0) & 15) == 0 && ((u64)weights_of(w, WEIGHTS - 1) & 15) == 0;
  const B* at[WEIGHTS] = {};
  auto from = [&](int g, int s) { return at[WEIGHTS == 2 ? g & 1 : 0] + column_of(g) * w.b_n + s * 32; };
  // The last tile begins early enough to be whole; it stores only what is its own.
  auto locate = [&](int t) {
#pragma unroll
    for (int i = 0; i < WEIGHTS; i++)
      at[i] = weights_of(w, i) + group_offset + (least((i64)t * TILE, w.n - TILE) + r) * w.b_n + begin + 8 * c;
  };
  // Copies the next step of 32 k, of this tile or a later one. A step is one group, also where there is none left.
  int next_tile = first_tile, next_step = 0;
  auto copy_next = [&](int slot) {
    if (next_tile < tiles) {
      if (next_step == 0) locate(next_tile);
#pragma unroll
      for (int g = 0; g < ROWS; g++) copy16(own_copies + (slot * ROWS + g) * next_copy, from(g, next_step), 16);
      if (++next_step == steps) next_step = 0, next_tile += stride;
    }
    commit();
  };
  auto fill = [&] {
    if (direct)
      for (int slot = 0; slot < STEPS; slot++) copy_next(slot);
  };
FETCHES  if (EARLY) fill();
  start_next();
  wait_for_inputs();
  if (GROUPED) group_offset = group_of(w, first_row) * w.b_batch0;
  if (!EARLY) fill();
ROWS_OF_A
  if (ONCE) await<0>();
  __syncthreads();

  // Sums of rows that are not there are never read.
  const T* own = xs + (r < m ? r : 0) * pitch + begin + first_of(c);
  auto fragment = [&](int s) {
    const uint2 first = *(const uint2*)(own + 32 * s), other = *(const uint2*)(own + 32 * s + 16);
    return make_uint4(first.x, first.y, other.x, other.y);
  };
  const u32 own_row = address(xs) + 2 * (((lane & 7) < m ? lane & 7 : 0) * pitch + begin) + 16 * (lane >> 3);
  const bool few = m * TILE <= 32 * chunks;  // a thread finishes at most one element of a tile
  int turn = 0, slot = 0;
  for (int tile = first_tile; tile < tiles; tile += stride) {
    const int first = direct ? (int)least((i64)tile * TILE, w.n - TILE) : tile * TILE;
    // What the epilogue reads is on its way during the products.
    Reads reads = {};
    const int one = part * 32 + lane;
    if (few) {
      const int n = first + one % TILE;
      if (one < m * TILE && n < w.n) reads = read_at(w, b0, b1, first_row + one / TILE, n);
    } else {
      for (int i = one; i < m * TILE; i += 32 * chunks) {
        const int n = first + i % TILE;
        if (n < w.n) expect(w, b0, b1, first_row + i / TILE, n);
      }
    }
    float sums[SUMS][4] = {};
    if (direct && LOADED) {
#pragma unroll 4
      for (int s = 0; s < steps; s++, slot++)
        step_of_fragments(sums, own_fragments + slot * ROWS * next_copy, next_copy, own_row + 64 * s);
    } else if (direct) {
#pragma unroll 4
      for (int s = 0; s < steps; s++) {
        await<STEPS - 1>();
        uint4 f[ROWS];
#pragma unroll
        for (int g = 0; g < ROWS; g++) f[g] = exchanged(read16(own_copies + (slot * ROWS + g) * next_copy));
        step(sums, f, fragment(s));
        copy_next(slot);
        slot = slot + 1 == STEPS ? 0 : slot + 1;
      }
    } else {
      for (int s = 0; s < steps; s++) {
        uint4 one[ROWS];
#pragma unroll
        for (int g = 0; g < ROWS; g++) {
          const int depth_at = begin + 32 * s + first_of(c);
          const i64 column = least((i64)first + column_of(g) + r, w.n - 1);
          const B* row = weights_of(w, WEIGHTS == 2 ? g & 1 : 0) + group_offset + column * w.b_n;
          one[g] = two_fours(row + depth_at * w.b_k, w.b_k, k - depth_at);
        }
        step(sums, one, fragment(s));
      }
    }
    // Sums of chunks: two buffers in turn, so that one barrier per tile is enough.
    float* here = meeting + (turn * teams + team) * per_team;
    turn ^= 1;
#pragma unroll
    for (int g = 0; g < ROWS; g++)
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (2 * c + j < m) here[part * per_chunk + (g * m + 2 * c + j) * 8 + r] = sums[g >> 1][2 * (g & 1) + j];
    team_barrier(team + 1, 32 * chunks);
    for (int i = part * 32 + lane; i < m * TILE; i += 32 * chunks) {
      const int token = i / TILE, column = i % TILE;
      const int g = WEIGHTS == 2 ? 2 * (column >> 3) : column >> 3;
      const float* sum = here + (g * m + token) * 8 + (column & 7);
      float parts[WEIGHTS][MOST_CHUNKS], acc = 0, acc1 = 0;
#pragma unroll
      for (int p = 0; p < MOST_CHUNKS * WEIGHTS; p++)
        parts[p / MOST_CHUNKS][p % MOST_CHUNKS] =
            p % MOST_CHUNKS < chunks ? sum[p % MOST_CHUNKS * per_chunk + p / MOST_CHUNKS * m * 8] : 0;
#pragma unroll
      for (int p = 0; p < MOST_CHUNKS; p++) {
        if (p < chunks) acc += parts[0][p];
        if (WEIGHTS == 2 && p < chunks) acc1 += parts[WEIGHTS - 1][p];
      }
      const int n = first + column;
      if (n < w.n && n >= tile * TILE) {
        const i64 at = first_row + token;
        finish(w, b0, b1, at, n, acc, acc1, few ? reads : read_at(w, b0, b1, at, n));
      }
    }
  }
}
"""


# Rows of A to shared memory, rounded; several loads of a thread are in flight.
COPY = r"""
  {
    const int eights = (k + 31) / 32 * 4, count = m * eights;
    const A* a = row_of(w, b0, b1, first_row);
    const i64 along = step_of(w), row = TRANSPOSED ? 1 : w.a_row;
    const bool whole = !TRANSPOSED && k % 32 == 0 && ((u64)a & 15) == 0 && row % 8 == 0;
    auto place = [&](int i, int& token) { token = i / eights; return 8 * (i - token * eights); };
    if (whole) {
      for (int i = threadIdx.x; i < count; i += AT_ONCE * blockDim.x) {
        uint4 v[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
          int token;
          const int at8 = place(i + j * blockDim.x, token);
          if (i + j * blockDim.x < count) v[j] = eight(a + token * row + at8, 1, 8, true);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
          int token;
          const int at8 = place(i + j * blockDim.x, token);
          if (i + j * blockDim.x < count) *(uint4*)(xs + token * pitch + at8) = v[j];
        }
      }
    } else {
      for (int i = threadIdx.x; i < count; i += blockDim.x) {
        int token;
        const int at8 = place(i, token);
        *(uint4*)(xs + token * pitch + at8) = eight(a + token * row + at8 * along, along, k - at8, false);
      }
    }
  }
"""


@dataclass(frozen=True)
class Prologue:
    """Code that computes the only row of A (`prologues.py`).

    The name of the kernel, its parameter struct, statements that fetch operands early, and those that compute the row.
    """

    name: str
    struct: str
    fetches: str
    compute: str


def source(
    kernel: MatmulKernel, variant: str, *, rows: int, loads: int, threads: int, early: bool, once: bool,
    any_order: bool, prologue: Prologue | None = None,
) -> str:  # fmt: skip
    """CUDA C; `rows` of the weights per warp; `early`: weights are read before earlier launches have ended.

    `once`: all weights of a block are on their way at the same time. `any_order`: the bits of a step of mma do not
    depend on the order of its k.
    """
    constants = f"""
constexpr int ROWS = {rows // 8}, LOADS = {loads}, AT_ONCE = 2;
constexpr int THREADS = {threads}, BLOCKS = {max(1, RESIDENT_THREADS // threads)};
constexpr bool EARLY = {flag(early)}, ONCE = {flag(once)}, LOADED = {flag(once and any_order)};
"""
    if prologue is None:
        name, parameters, fetches, code = entry(kernel, variant), "const __grid_constant__ Words w", "", COPY
    else:
        name, parameters, fetches, code = (
            prologue.name, "const __grid_constant__ All all", prologue.fetches, prologue.compute
        )  # fmt: skip
        constants = f"{prologue.struct}\n{constants}"
    text = KERNEL.replace("(PARAMETERS) {", f"({parameters}) {{" + ("" if prologue is None else ALL))
    text = text.replace("NAME", name).replace("FETCHES", fetches).replace("ROWS_OF_A\n", code)
    return preamble(kernel) + FRAGMENTS + constants + text


def shared_bytes(k: int, m: int, rows: int, teams: int, chunks: int, loads: int) -> int:
    """Dynamic shared memory of a block."""
    pitch = -(-k // 64) * 64 + 16
    copies = loads // (rows // 8) * (rows // 8) * 32 * teams * chunks * 16
    return m * pitch * 2 + 2 * teams * chunks * (rows // 8) * m * 8 * 4 + 128 + copies
