"""CUDA C shared by kernels that stream operands through stages of shared memory: copies, scratch memory, split k."""

from __future__ import annotations

from rlx.backends.cuda.matmul.common import flag

COUNTERS = 1 << 16  # bytes of scratch for counters of tiles, if blocks split k

COPYING = r"""
// The place of 16 bytes in rows of a stage: what lanes read at a time meets all banks.
template <class S> INLINE u32 place_of(int row, int piece) {
  int moved = DEPTH == 64 ? piece ^ (row & 7) : piece ^ (row >> 1 & 3);
  if (IN_ORDER) moved = DEPTH == 64 ? piece ^ (row & 3) << 1 : piece ^ (row & 2);
  if (sizeof(S) == 4) moved = piece ^ (row & 1) << 2;
  return row * DEPTH * (int)sizeof(S) + (moved << 4);
}
// 16 bytes of a row that are not aligned; numbers from `left` on are zero.
INLINE uint4 gathered(const T* at, i64 left) { return eight(at, 1, left, false); }
INLINE uint4 gathered(const float* at, i64 left) {
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = i < left ? __float_as_uint(at[i]) : 0;
  return make_uint4(v[0], v[1], v[2], v[3]);
}

// Copies `ROWS` rows of a stage to shared memory: 16 bytes per thread and turn. Row i is at from + i * pitch; rows from
// `rows` on and k from `depth` on are zero.
template <int ROWS, int TURN, class S>
INLINE void copy_rows(u32 to, const S* from, i64 pitch, i64 rows, i64 depth, bool aligned) {
  constexpr int EACH = 16 / sizeof(S), PIECES = DEPTH / EACH, STEP = COPIERS / PIECES;
  const int piece = threadIdx.x % PIECES, first = threadIdx.x / PIECES;
  const i64 left = depth - EACH * piece;
  const int bytes = left >= EACH ? 16 : left > 0 ? (int)sizeof(S) * (int)left : 0;
  auto taken_by = [](int row) { return (row >> 4) * TURN + (TURN == 16 ? row & 15 : row & 7); };
  if (aligned) {
#pragma unroll
    for (int i = 0; i < ROWS / STEP; i++) {
      const int row = first + i * STEP, taken = taken_by(row);
      copy16(to + place_of<S>(row, piece), from + taken * pitch + EACH * piece, taken < rows ? bytes : 0);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < ROWS / STEP; i++) {
      const int row = first + i * STEP, taken = taken_by(row);
      write16(to + place_of<S>(row, piece), gathered(from + taken * pitch + EACH * piece, taken < rows ? left : 0));
    }
  }
}
"""

SPLITTING = r"""
// Registers of a thread at one chunk of a tile; `piece` is four sums.
INLINE float4* place(const Scratch& scratch, int tile, int chunk, int piece) {
  constexpr int PIECES = BN * BM / 4 / ADDERS;
  const i64 block = ((i64)tile * MOST_CHUNKS + chunk) * PIECES + piece;
  return (float4*)scratch.sums + block * ADDERS + (threadIdx.x - FIRST_ADDER);
}
INLINE void put(const Scratch& scratch, int tile, int chunk, int piece, const float* sum) {
  __stcg(place(scratch, tile, chunk, piece), make_float4(sum[0], sum[1], sum[2], sum[3]));
}
INLINE void get(const Scratch& scratch, int tile, int chunk, int piece, float* sum) {
  const float4 v = __ldcg(place(scratch, tile, chunk, piece));
  sum[0] = v.x; sum[1] = v.y; sum[2] = v.z; sum[3] = v.w;
}
// Whether this block is the last of its tile to arrive; it leaves the counter at zero.
INLINE bool is_last(const Scratch& scratch, int tile) {
  __shared__ bool last;
  __threadfence();
  team_barrier(1, ADDERS);
  if (threadIdx.x == FIRST_ADDER) {
    u32* counter = scratch.counters + tile;
    last = atomicAdd(counter, 1u) == gridDim.y - 1;
    if (last) *counter = 0;
  }
  team_barrier(1, ADDERS);
  if (last) __threadfence();
  return last;
}
"""

WITHOUT_SPLITTING = r"""
INLINE void put(const Scratch&, int, int, int, const float*) {}
INLINE void get(const Scratch&, int, int, int, float*) {}
INLINE bool is_last(const Scratch&, int) { return true; }
"""

SCRATCH = r"""
// Scratch memory: counters, A and the weights as 16-bit rows along k, sums of chunks.
struct Scratch { u32* counters; T* a; T* b; i64 b_size; float* sums; };
INLINE i64 rounded_up(i64 bytes) { return (bytes + 255) / 256 * 256; }
INLINE i64 scratch_pitch(const Words& w) { return (u32)(w.k + 7) / 8 * 8; }   // of operands there
INLINE Scratch scratch_of(const Words& w) {
  const i64 pitch = scratch_pitch(w);
  const i64 lefts = (w.a_batch0 ? w.batch0 : 1) * (w.a_batch1 ? w.batch1 : 1);
  const i64 matrices = (w.b_batch0 ? groups_of(w) : 1) * (w.b_batch1 ? w.batch1 : 1);
  u8* at = w.scratch + (SPLIT ? COUNTERS : 0);
  Scratch s;
  s.counters = (u32*)w.scratch;
  s.a = (T*)at;
  at += A_IN_SCRATCH ? rounded_up(lefts * w.m * pitch * 2) : 0;
  s.b = (T*)at;
  s.b_size = matrices * w.n * pitch;
  at += B_IN_SCRATCH ? rounded_up(WEIGHTS * s.b_size * 2) : 0;
  s.sums = (float*)at;
  return s;
}
"""

OPERANDS = r"""
// Rows of 16-bit numbers, or A in f32, along k.
template <class S> struct Rows { const S* at; i64 pitch; };
INLINE Rows<Left> rows_of_a(const Words& w, const Scratch& scratch, i64 b0, i64 b1, i64 row0) {
  if (!A_IN_SCRATCH) return {(const Left*)row_of(w, b0, b1, row0), w.a_row};
  const i64 matrix = (w.a_batch0 ? b0 : 0) * (w.a_batch1 ? w.batch1 : 1) + (w.a_batch1 ? b1 : 0);
  return {(const Left*)scratch.a + (matrix * w.m + row0) * scratch_pitch(w), scratch_pitch(w)};
}
// Of grouped rows, those of the first matrix.
INLINE Rows<T> rows_of_weights(const Words& w, const Scratch& scratch, i64 b0, i64 b1, i64 column0, int weight) {
  const i64 pitch = B_IN_SCRATCH ? scratch_pitch(w) : w.b_n;
  const T* first = B_IN_SCRATCH ? scratch.b + weight * scratch.b_size : (const T*)weights_of(w, weight);
  const T* at = first + column0 * pitch;
  if (GROUPED) return {at, pitch};
  const i64 matrix = (w.b_batch0 ? b0 : 0) * (w.b_batch1 ? w.batch1 : 1) + (w.b_batch1 ? b1 : 0);
  return {at + (B_IN_SCRATCH ? matrix * w.n * pitch : b0 * w.b_batch0 + b1 * w.b_batch1), pitch};
}
"""


def staging_constants(*, a: bool, b: bool, split: bool) -> str:
    """Which operands are in scratch memory, and whether blocks share a tile."""
    return f"""
constexpr bool A_IN_SCRATCH = {flag(a)}, B_IN_SCRATCH = {flag(b)}, SPLIT = {flag(split)};
constexpr i64 COUNTERS = {COUNTERS};
"""
