"""CUDA C of the gradient of attention: weights are recomputed tile by tile, sums have one order, nothing is atomic."""

from __future__ import annotations

# A block has 16 fixed rows, queries (for dq) or keys (for dk and dv), and streams the other side in blocks of 64. The
# products q · k and dy · v of a tile give its weights p and its ds; then a thread adds up one column of several rows.
TILES = r"""
constexpr int THREADS = 128, ROWS = 16;
constexpr int DEPTH = 256 / sizeof(Real), STREAM_PITCH = DEPTH + 16 / sizeof(Real), FACTOR_PITCH = BLOCK + 4;
constexpr int LARGEST_DIM = KEYS && VALUE_DIM > HEAD_DIM ? VALUE_DIM : HEAD_DIM;
constexpr int WIDTH =
    LARGEST_DIM <= 8 ? 8 : LARGEST_DIM <= 16 ? 16 : LARGEST_DIM <= 32 ? 32 : LARGEST_DIM <= 64 ? 64 : 128;
constexpr int OWN_ROWS = ROWS * WIDTH / THREADS;
constexpr int KEY_SLICES = (HEAD_DIM + WIDTH - 1) / WIDTH, VALUE_SLICES = KEYS ? (VALUE_DIM + WIDTH - 1) / WIDTH : 0;

// A row of queries: head and query of the tensors.
struct QueryRow { i32 query, head; };
INLINE QueryRow query_row(i32 head, i32 row) { return {row / GROUP, head * GROUP + row % GROUP}; }

template <int SIZE, typename Load>
INLINE void multiply_rows(
    Real (&sums)[8], const Real* fixed, Real (&stream)[BLOCK][STREAM_PITCH], i32 rows, i32 streamed, Load load) {
  constexpr int PITCH = (SIZE + 3) / 4 * 4;
  const i32 column = threadIdx.x % BLOCK, half = threadIdx.x / BLOCK * 8;
#pragma unroll
  for (int r = 0; r < 8; r++) sums[r] = 0;
  for (i32 depth = 0; depth < SIZE; depth += DEPTH) {
    __syncthreads();
    for (i32 i = threadIdx.x; i < BLOCK * DEPTH; i += THREADS) {
      const i32 slot = i / DEPTH, d = depth + i % DEPTH;
      stream[slot][i % DEPTH] = slot < streamed && d < SIZE ? load(slot, d) : (Real)0;
    }
    __syncthreads();
    if (half < rows) {
      for (i32 d = 0; d < min(DEPTH, SIZE - depth); d += 4) {
#pragma unroll
        for (int r = 0; r < 8; r++)
#pragma unroll
          for (int j = 0; j < 4; j++)
            sums[r] = fused(fixed[(half + r) * PITCH + depth + d + j], stream[column][d + j], sums[r]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(const __grid_constant__ Words w) {
  extern __shared__ __align__(128) u8 shared[];
  constexpr int HEAD_PITCH = (HEAD_DIM + 3) / 4 * 4, VALUE_PITCH = (VALUE_DIM + 3) / 4 * 4;
  Real* heads = (Real*)shared;                   // [ROWS][HEAD_PITCH]: q or k
  Real* values = heads + ROWS * HEAD_PITCH;      // [ROWS][VALUE_PITCH]: dy or v
  __shared__ __align__(16) Real stream[BLOCK][STREAM_PITCH];
  __shared__ __align__(16) Real factors[ROWS][FACTOR_PITCH];  // p or ds
  __shared__ Range ranges[BLOCK];                             // of query rows: fixed or streamed
  __shared__ Real log_sums[BLOCK], deltas[BLOCK];
  const i32 query_rows = (i32)w.q_len * GROUP, keys = (i32)w.k_len, all = KEYS ? keys : query_rows;
  const i32 tiles = (all + ROWS - 1) / ROWS, slice = blockIdx.x % (KEY_SLICES + VALUE_SLICES);
  const i32 place = blockIdx.x / (KEY_SLICES + VALUE_SLICES), first = place % tiles * ROWS, unit = place / tiles;
  const i32 head = unit % (i32)w.kv_heads, batch = unit / (i32)w.kv_heads, rows = min(ROWS, all - first);
  const bool of_values = slice >= KEY_SLICES;  // the result is dv
  start_next();
  wait_for_inputs();

  const auto q_at = [&](i32 row) {
    const QueryRow at = query_row(head, row);
    return w.q + batch * w.q_batch + at.query * w.q_seq + at.head * w.q_head;
  };
  const auto dy_at = [&](i32 row) {
    const QueryRow at = query_row(head, row);
    return w.dy + batch * w.dy_batch + at.query * w.dy_seq + at.head * w.dy_head;
  };
  const auto k_at = [&](i32 key) { return w.k + batch * w.k_batch + key * w.k_seq + head * w.k_head; };
  const auto v_at = [&](i32 key) { return w.v + batch * w.v_batch + key * w.v_seq + head * w.v_head; };
  // Ranges, logsumexp and delta of query rows from `start` on.
  const auto describe = [&](i32 start, i32 count) {
    for (i32 r = threadIdx.x; r < count; r += THREADS) {
      const QueryRow at = query_row(head, start + r);
      const bool exists = start + r < query_rows;
      ranges[r] = exists ? range_of(w, batch, at.query, -1) : NOTHING;
      log_sums[r] = exists ? reference(w.lse[batch * w.lse_batch + at.head * w.lse_head + at.query]) : (Real)0;
      deltas[r] = exists ? w.delta[batch * w.delta_batch + at.head * w.delta_head + at.query] : (Real)0;
    }
  };
  for (i32 i = threadIdx.x; i < ROWS * HEAD_PITCH; i += THREADS) {
    const i32 r = i / HEAD_PITCH, d = i % HEAD_PITCH;
    heads[i] = r < rows && d < HEAD_DIM ? (Real)widen(KEYS ? k_at(first + r)[d] : q_at(first + r)[d]) : (Real)0;
  }
  for (i32 i = threadIdx.x; i < ROWS * VALUE_PITCH; i += THREADS) {
    const i32 r = i / VALUE_PITCH, d = i % VALUE_PITCH;
    values[i] = r < rows && d < VALUE_DIM ? (Real)widen(KEYS ? v_at(first + r)[d] : dy_at(first + r)[d]) : (Real)0;
  }
  if (!KEYS) describe(first, ROWS);
  __syncthreads();

  i32 begin = 0, end = query_rows;
  if constexpr (!KEYS) {
    const Seen seen = seen_by<ROWS>(ranges, rows);
    begin = sees_any(seen) ? seen.low / BLOCK * BLOCK : 0, end = seen.high + 1;
  }
  const i32 column = (of_values ? slice - KEY_SLICES : slice) * WIDTH + threadIdx.x % WIDTH;
  const i32 own_row = threadIdx.x / WIDTH * OWN_ROWS, at = threadIdx.x % BLOCK, half = threadIdx.x / BLOCK * 8;
  const bool has_column = column < (of_values ? VALUE_DIM : HEAD_DIM);
  Real out[OWN_ROWS] = {};
  for (i32 start = begin; start < end; start += BLOCK) {
    const i32 streamed = min(BLOCK, end - start);
    if constexpr (KEYS) {
      __syncthreads();
      describe(start, BLOCK);
      __syncthreads();
      const Range own = threadIdx.x < BLOCK ? ranges[threadIdx.x] : NOTHING;
      if (!__syncthreads_or(own.low < first + rows && own.high >= first)) continue;
    }
    Real scores[8], gains[8];
    multiply_rows<HEAD_DIM>(scores, heads, stream, rows, streamed, [&](i32 slot, i32 d) {
      return (Real)widen(KEYS ? q_at(start + slot)[d] : k_at(start + slot)[d]);
    });
    if (!of_values) {
      multiply_rows<VALUE_DIM>(gains, values, stream, rows, streamed, [&](i32 slot, i32 d) {
        return (Real)widen(KEYS ? dy_at(start + slot)[d] : v_at(start + slot)[d]);
      });
    }
    if (half < rows) {
#pragma unroll
      for (int r = 0; r < 8; r++) {
        const i32 row = KEYS ? at : half + r, key = KEYS ? first + half + r : start + at;
        const QueryRow query = query_row(head, KEYS ? start + at : first + half + r);
        const bool exists = half + r < rows && at < streamed;
        Real p = 0, ds = 0;
        if (exists && key >= ranges[row].low && key <= ranges[row].high) {
          const Real score = masked(mask_row(w, batch, query.head, query.query), scores[r], key);
          p = weight(score - log_sums[row]);
          if (!of_values && p != (Real)0) {
            Real slope = (Real)SCALE;
            if constexpr (SOFTCAP != 0) {
              const Real bent = tanh_of(scores[r] * (Real)SCALE * (Real)INVERSE_SOFTCAP);
              slope = fused(-bent, bent, (Real)1) * (Real)SCALE;
            }
            ds = p * (gains[r] - deltas[row]) * slope;
          }
        }
        factors[half + r][at] = of_values ? p : ds;
      }
    }
    __syncthreads();
    if (has_column && own_row < rows) {
#pragma unroll 4
      for (i32 slot = 0; slot < streamed; slot++) {
        Real value;
        if constexpr (KEYS)
          value = (Real)widen(of_values ? dy_at(start + slot)[column] : q_at(start + slot)[column]);
        else
          value = (Real)widen(k_at(start + slot)[column]);
#pragma unroll
        for (int r = 0; r < OWN_ROWS; r++) {
          const Real factor = factors[own_row + r][slot];
          out[r] = factor != (Real)0 ? fused(factor, value, out[r]) : out[r];  // what is masked may be anything
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < OWN_ROWS; r++) {
    if (!has_column || own_row + r >= rows) continue;
    const i32 row = first + own_row + r;
    if constexpr (!KEYS) {
      const QueryRow query = query_row(head, row);
      store(w.dq + batch * w.dq_batch + query.query * w.dq_seq + query.head * w.dq_head + column, out[r]);
    } else if (of_values) {
      store(w.dv + batch * w.dv_batch + row * w.dv_seq + head * w.dv_head + column, out[r]);
    } else {
      store(w.dk + batch * w.dk_batch + row * w.dk_seq + head * w.dk_head + column, out[r]);
    }
  }
}
"""
