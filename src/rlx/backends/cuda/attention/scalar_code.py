"""CUDA C of attention without tensor cores: f32 and f64 operands, and quantised caches, as chains of fused products."""

from __future__ import annotations

ELEMENTS = r"""
// Element `i` of a row of keys or values.
INLINE Real element(const float* row, i32 i) { return (Real)row[i]; }
INLINE Real element(const double* row, i32 i) { return (Real)row[i]; }
INLINE Real element(const bf16* row, i32 i) { return (Real)widen(row[i]); }
INLINE Real element(const f16* row, i32 i) { return (Real)widen(row[i]); }
INLINE Real element(const u16* row, i32 i) {  // q8_0: blocks of a scale and 32 bytes
  const u16* block = row + i / 32 * 17;
  return (Real)widen(f16{block[0]}) * (Real)((const i8*)(block + 1))[i % 32];
}
"""

# A block has a tile of 16 rows, a slice of values, and every workers-th split. Scores: a thread has one key and eight
# rows. Weights: a warp has a row. Results: a thread has a column and several rows.
SPLITS = r"""
constexpr int THREADS = 128, ROWS = 16;
constexpr int DEPTH = 256 / sizeof(Real);  // elements of keys in shared memory at a time
constexpr int KEY_PITCH = DEPTH + 16 / sizeof(Real), SCORE_PITCH = BLOCK + 4;
constexpr int WIDTH = SLICE <= 8 ? 8 : SLICE <= 16 ? 16 : SLICE <= 32 ? 32 : SLICE <= 64 ? 64 : 128;  // threads per row
constexpr int OWN_ROWS = ROWS * WIDTH / THREADS;

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(const __grid_constant__ Words w) {
  extern __shared__ __align__(128) u8 shared[];
  Real* queries = (Real*)shared;  // [ROWS][HEAD_PITCH]
  __shared__ __align__(16) Real keys[BLOCK][KEY_PITCH];
  __shared__ __align__(16) Real scores[ROWS][SCORE_PITCH];
  __shared__ Range ranges[ROWS];
  __shared__ State parts[ROWS], states[ROWS];  // of the split, and of those before
  __shared__ Real kept[ROWS];
  __shared__ Merge factors[ROWS];
  const i32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const i32 all_rows = (i32)w.q_len * GROUP, tiles = (all_rows + ROWS - 1) / ROWS;
  const i32 slice = blockIdx.x % SLICES, tile = blockIdx.x / SLICES % tiles, unit = blockIdx.x / SLICES / tiles;
  const i32 head = unit % (i32)w.kv_heads, batch = unit / (i32)w.kv_heads, worker = blockIdx.y;
  const i32 first_row = tile * ROWS, rows = min(ROWS, all_rows - first_row);
  start_next();
  wait_for_inputs();

  const i32 newest = newest_position(w, batch);
  if (threadIdx.x < ROWS) {
    ranges[threadIdx.x] = lane < rows ? range_of(w, batch, (first_row + lane) / GROUP, newest) : NOTHING;
    states[threadIdx.x] = {lowest((Real)0), 0};
  }
  for (i32 i = threadIdx.x; i < ROWS * HEAD_PITCH; i += THREADS) {
    const i32 r = i / HEAD_PITCH, d = i % HEAD_PITCH, query = (first_row + r) / GROUP;
    const i32 query_head = head * GROUP + (first_row + r) % GROUP;
    queries[i] = r < rows && d < HEAD_DIM
                     ? (Real)widen(w.q[batch * w.q_batch + query * w.q_seq + query_head * w.q_head + d]) : (Real)0;
  }
  __syncthreads();
  const Seen seen = seen_by<ROWS>(ranges, rows);
  const i32 first_split = seen.low / SPLIT, splits = sees_any(seen) ? seen.high / SPLIT - first_split + 1 : 0;
  const i32 workers = min((i32)gridDim.y, max(splits, 1));
  if (worker >= workers) return;
  const Source source = source_of(w, batch, head);
  const i32 scratch_rows = min(ROWS, all_rows);
  const Scratch scratch = scratch_of(w, gridDim.x, blockIdx.x, most_splits(w), scratch_rows);
  const bool merges = workers == 1;

  const i32 column = slice * SLICE + threadIdx.x % WIDTH, own_row = threadIdx.x / WIDTH * OWN_ROWS;
  const bool has_column = threadIdx.x % WIDTH < SLICE && column < VALUE_DIM;
  const i32 key = threadIdx.x % BLOCK, half = threadIdx.x / BLOCK * 8;
  Real out[OWN_ROWS] = {};
  for (i32 split = worker; split < splits; split += workers) {
    const i32 begin = (first_split + split) * SPLIT;
    Real part[OWN_ROWS] = {};
    if (threadIdx.x < ROWS) parts[threadIdx.x] = {lowest((Real)0), 0};
    for (i32 start = begin; start < begin + SPLIT; start += BLOCK) {
      if (start > seen.high || start + BLOCK <= seen.low) continue;
      const i32 low = max(start, seen.low), high = min(start + BLOCK - 1, seen.high);
      Place block = {0, 0};
      if (WHOLE_BLOCKS) {
        block = place_of(w, source, start);
        if (block.k < 0) report_missing(w, seen, start, BLOCK);
      }
      const auto place = [&](i32 position) {
        if constexpr (WHOLE_BLOCKS) {
          if (block.k < 0) return block;
          return Place{block.k + (position - start) * w.k_seq, block.v + (position - start) * w.v_seq};
        } else {
          const Place own = place_of(w, source, position);
          if (own.k < 0) report_missing(w, seen, position, 1);
          return own;
        }
      };

      Real sums[8] = {};
      for (i32 depth = 0; depth < HEAD_DIM; depth += DEPTH) {
        __syncthreads();
        for (i32 i = threadIdx.x; i < BLOCK * DEPTH; i += THREADS) {
          const i32 slot = i / DEPTH, d = depth + i % DEPTH, position = start + slot;
          Real value = 0;
          if (position >= low && position <= high && d < HEAD_DIM) {
            const Place own = place(position);
            if (own.k >= 0) value = element(source.k + own.k, d);
          }
          keys[slot][i % DEPTH] = value;
        }
        __syncthreads();
        if (half < rows) {
          for (i32 d = 0; d < min(DEPTH, HEAD_DIM - depth); d += 4) {
#pragma unroll
            for (int r = 0; r < 8; r++) {
#pragma unroll
              for (int j = 0; j < 4; j++)
                sums[r] = fused(queries[(half + r) * HEAD_PITCH + depth + d + j], keys[key][d + j], sums[r]);
            }
          }
        }
      }
      if (half < rows) {
#pragma unroll
        for (int r = 0; r < 8; r++) {
          const i32 row = half + r, query = (first_row + row) / GROUP;
          const i32 query_head = head * GROUP + (first_row + row) % GROUP;
          const bool visible = row < rows && start + key >= ranges[row].low && start + key <= ranges[row].high;
          scores[row][key] =
              visible ? masked(mask_row(w, batch, query_head, query), sums[r], start + key) : lowest((Real)0);
        }
      }
      __syncthreads();
      for (i32 row = warp; row < rows; row += THREADS / 32) {
        Real top = upper(scores[row][lane], scores[row][lane + 32]);
        for (i32 step = 16; step; step /= 2) top = upper(top, __shfl_xor_sync(~0u, top, step));
        const State before = parts[row];
        top = upper(top, before.top);
        const Real base = reference(top);
        const Real near = weight(scores[row][lane] - base), far = weight(scores[row][lane + 32] - base);
        scores[row][lane] = near;
        scores[row][lane + 32] = far;
        Real total = near + far;
        for (i32 step = 16; step; step /= 2) total = total + __shfl_xor_sync(~0u, total, step);
        const Real factor = weight(before.top - base);
        __syncwarp();
        if (lane == 0) {
          kept[row] = factor;
          parts[row] = {top, fused(before.total, factor, total)};
        }
      }
      __syncthreads();
      if (has_column && own_row < rows) {
#pragma unroll
        for (int r = 0; r < OWN_ROWS; r++) part[r] = part[r] * kept[own_row + r];
#pragma unroll 4
        for (i32 position = low; position <= high; position++) {
          const Place own = place(position);
          const Real value = own.k >= 0 ? element(source.v + own.v, column) : (Real)0;
#pragma unroll
          for (int r = 0; r < OWN_ROWS; r++) {
            const Real p = scores[own_row + r][position - start];
            part[r] = p != (Real)0 ? fused(p, value, part[r]) : part[r];  // a masked value may be anything
          }
        }
      }
    }
    __syncthreads();
    if (merges) {
      if (threadIdx.x < rows) {
        const State part_state = parts[threadIdx.x];
        factors[threadIdx.x] = merge(states[threadIdx.x], part_state.top, part_state.total);
      }
      __syncthreads();
      if (own_row < rows) {
#pragma unroll
        for (int r = 0; r < OWN_ROWS; r++)
          out[r] = fused(out[r], factors[own_row + r].kept, part[r] * factors[own_row + r].added);
      }
    } else {
      if (threadIdx.x < rows) scratch.states[split * scratch_rows + threadIdx.x] = parts[threadIdx.x];
#pragma unroll
      for (int r = 0; r < OWN_ROWS; r++)
        if (own_row + r < rows && threadIdx.x % WIDTH < SLICE)
          scratch.values[(i64)(split * scratch_rows + own_row + r) * COLUMNS + threadIdx.x % WIDTH] = part[r];
    }
    __syncthreads();
  }

  const auto finish = [&](i32 r, i32 at, Real value, State state) {
    const i32 query = (first_row + r) / GROUP, query_head = head * GROUP + (first_row + r) % GROUP;
    if (r >= rows || at >= VALUE_DIM) return;
    if (at == 0) store_log_sum(w, batch, query_head, query, state);
    store(w.out + batch * w.out_batch + query * w.out_seq + query_head * w.out_head + at, value * inverse(state.total));
  };
  if (merges) {
#pragma unroll
    for (int r = 0; r < OWN_ROWS; r++)
      if (has_column && own_row + r < rows) finish(own_row + r, column, out[r], states[own_row + r]);
    return;
  }
  if (!arrives_last(scratch.arrived, workers)) return;
  combine<THREADS>(scratch, splits, scratch_rows, [&](i32 r, i32 at, const Four& sum, State state) {
    for (i32 c = 0; c < 4; c++)
      if (at + c < SLICE) finish(r, slice * SLICE + at + c, sum.x[c], state);
  });
}
"""
