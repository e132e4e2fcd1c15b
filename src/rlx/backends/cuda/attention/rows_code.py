"""CUDA C shared by the attention kernels: which keys a row sees, where they are, scores, and how splits are combined.

Keys are cut into splits of 128 absolute positions, splits into blocks of 64. Within a split, the softmax of a row is
online, block by block; splits are merged in order by one formula. So the bits of a row depend on its query and the keys
that it sees only: not on other rows of a tile, on the chunks of a prompt, or on how splits are spread over the GPU.
"""

from __future__ import annotations

ROWS = r"""
constexpr int BLOCK = 64, SPLIT = 128, BLOCKS_OF_SPLIT = SPLIT / BLOCK;
constexpr i32 LARGEST = 0x7fffffff;
constexpr bool MASKED = CUSTOM || BIAS || SEGMENTS;  // by an operand

INLINE float lowest(float) { return __int_as_float(0xff800000); }
INLINE double lowest(double) { return __longlong_as_double(0xfff0000000000000ll); }
INLINE float upper(float a, float b) { return fmaxf(a, b); }
INLINE double upper(double a, double b) { return fmax(a, b); }
INLINE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
INLINE double fused(double a, double b, double c) { return __fma_rn(a, b, c); }

// The weight of a score `x` above the reference. Scores are stored in units of UNIT for base 2, NATURAL for base e.
INLINE float weight(float x) { return exp2_fast(x * (float)UNIT); }
INLINE double weight(double x) { return exp(x * (double)NATURAL); }
INLINE float natural_log(float x) { return logf(x); }
INLINE double natural_log(double x) { return log(x); }
INLINE float tanh_of(float x) { return tanhf(x); }
INLINE double tanh_of(double x) { return tanh(x); }
INLINE Real reference(Real top) { return top == lowest(top) ? (Real)0 : top; }  // finite before the first visible key
INLINE Real inverse(Real total) { return total == (Real)0 ? (Real)0 : (Real)1 / total; }
INLINE Real log_sum(Real top, Real total) { return fused(top, (Real)NATURAL, natural_log(total)); }

// State of a row: the largest score, and the sum of weights relative to it.
struct State { Real top, total; };
// What the merge of a split does to a row: value = value · kept + value of the split · added.
struct Merge { Real kept, added; };
INLINE Merge merge(State& row, Real top, Real total) {
  const Real highest = upper(row.top, top), base = reference(highest);
  const Merge factors = {weight(row.top - base), weight(top - base)};
  row.top = highest;
  row.total = fused(row.total, factors.kept, total * factors.added);
  return factors;
}

// The first and last key that a row may attend to; none if high < low.
struct Range { i32 low, high; };
constexpr Range NOTHING = {0, -1};

// The keys that some rows of a tile see, and those that all of them see.
struct Seen {
  i32 low, high, common_low, common_high, rows;
  const Range* ranges;
};
template <int ROWS> INLINE Seen seen_by(const Range* ranges, i32 rows) {
  Seen seen = {LARGEST, -1, 0, LARGEST, rows, ranges};
#pragma unroll
  for (i32 r = threadIdx.x & 31; r < ROWS; r += 32) {
    if (r >= rows) continue;
    const Range own = ranges[r];
    const bool any = own.high >= own.low;
    seen.low = min(seen.low, any ? own.low : LARGEST);
    seen.high = max(seen.high, own.high);
    seen.common_low = max(seen.common_low, any ? own.low : LARGEST);
    seen.common_high = min(seen.common_high, own.high);
  }
  seen.low = __reduce_min_sync(~0u, seen.low);
  seen.high = __reduce_max_sync(~0u, seen.high);
  seen.common_low = __reduce_max_sync(~0u, seen.common_low);
  seen.common_high = __reduce_min_sync(~0u, seen.common_high);
  return seen;
}
INLINE bool sees_any(const Seen& seen) { return seen.high >= seen.low; }
// Whether all rows see all of these keys.
INLINE bool is_common(const Seen& seen, i32 first, i32 count) {
  return !MASKED && first >= seen.common_low && first + count - 1 <= seen.common_high;
}
// Whether some row sees a key of these; windows of rows far from each other leave gaps.
INLINE bool is_seen(const Seen& seen, i32 first, i32 count) {
  if (SINGLE) return seen.low < first + count && seen.high >= first;
  for (i32 r = 0; r < seen.rows; r++)
    if (seen.ranges[r].low < first + count && seen.ranges[r].high >= first) return true;
  return false;
}
// Whether a key may be visible to some rows and not to others.
INLINE bool is_uneven(const Seen& seen) {
  return MASKED || (!SINGLE && (seen.low != seen.common_low || seen.high != seen.common_high));
}
"""

# Positions are data: a query of a cache has one, and the table of its row says where pages are.
CACHED_ROWS = r"""
template <typename W> INLINE i32 table_row(const W& w, i32 batch) {
  if constexpr (RAGGED) return w.rows[batch];
  return batch;
}

// Ragged tokens are cut into tiles. A sequence with several tokens in a tile has keys to share between them; the others
// are left to blocks with few rows. Called by whole warps.
constexpr i32 LEAST_SHARED = 4;
template <typename W> INLINE bool is_shared(const W& w, i32 token, i32 first, i32 tokens) {
  if constexpr (!RAGGED) return false;
  const i32 row = table_row(w, token), end = min(first + tokens, (i32)w.batch);
  i32 same = 0;
  for (i32 start = first; start < end; start += 32) {
    const i32 other = start + (threadIdx.x & 31);
    same += __popc(__ballot_sync(~0u, other < end && table_row(w, other) == row));
  }
  return same >= LEAST_SHARED;
}
// Whether an earlier token of the tile is of the same sequence.
template <typename W> INLINE bool is_repeated(const W& w, i32 token, i32 first) {
  const i32 row = table_row(w, token);
  bool repeated = false;
  for (i32 start = first; start < token; start += 32) {
    const i32 other = start + (threadIdx.x & 31);
    repeated |= __any_sync(~0u, other < token && table_row(w, other) == row);
  }
  return repeated;
}

// The highest position among the tokens of a row; a ring must still hold what its queries see. Called by whole warps.
INLINE i32 newest_position(const Words& w, i32 batch) {
  i32 newest = -1;
  if constexpr (RING) {
    const i32 lane = threadIdx.x & 31;
    if constexpr (RAGGED) {
      const i32 row = table_row(w, batch);
      for (i64 i = lane; i < w.batch; i += 32)
        if (table_row(w, (i32)i) == row) newest = max(newest, w.positions[i * w.positions_batch]);
    } else {
      for (i64 i = lane; i < w.q_len; i += 32) newest = max(newest, w.positions[batch * w.positions_batch + i]);
    }
    newest = __reduce_max_sync(~0u, newest);
  }
  return newest;
}

INLINE Range range_of(const Words& w, i32 batch, i32 query, i32 newest) {
  const i64 position = w.positions[batch * w.positions_batch + query];
  if (position < 0) return NOTHING;
  const i64 oldest = WINDOW ? max(position + 1 - (i64)WINDOW, 0ll) : 0;
  if (RING ? newest - oldest >= w.capacity : position >= w.capacity) {
    report(w.fault, (i32)w.launch, BEYOND_CAPACITY);
    return NOTHING;
  }
  if constexpr (RAGGED) {
    const i32 row = table_row(w, batch);
    if (row < 0 || row >= w.table_rows) {
      report(w.fault, (i32)w.launch, OUTSIDE_TABLE);
      return NOTHING;
    }
  }
  return {(i32)oldest, (i32)position};
}

// The first position that the program appends to any row: what is before it was there when the program began. Called by
// whole warps.
template <typename W> INLINE i32 first_appended(const W& w) {
  i32 first = LARGEST;
  const i32 queries = (i32)w.q_len, count = (i32)w.batch * queries;
  for (i32 i = threadIdx.x & 31; i < count; i += 32) {
    const i32 position = w.positions[i / queries * w.positions_batch + i % queries];
    first = min(first, position < 0 ? LARGEST : position);
  }
  return __reduce_min_sync(~0u, first);
}

// Asks for the pages of a split while positions are on their way.
template <typename W> INLINE void fetch_pages(const W& w, i32 batch, i32 split) {
  if constexpr (!RING && !RAGGED) {
    const i64 block = (i64)split * SPLIT / PAGE;
    if (block * PAGE < w.capacity) fetch_near(w.table + batch * w.table_row + block);
  }
}

// The page of a position; -1 if it does not exist.
INLINE i32 page_of(const Words& w, i32 row, i32 position) {
  const i64 place = RING ? position % w.capacity : position;
  const i32 page = w.table[row * w.table_row + place / PAGE];
  return page >= 0 && page < w.pages ? page : -1;
}

// Where keys and values of one head of a row are.
struct Source {
  const Stored *k, *v;
  i32 row;
};
INLINE Source source_of(const Words& w, i32 batch, i32 head) {
  return {w.k + head * w.k_head, w.v + head * w.v_head, table_row(w, batch)};
}
constexpr bool WHOLE_BLOCKS = PAGE % BLOCK == 0;  // a block of keys is in one page

struct Place { i64 k, v; };  // offsets of a key and a value; k is negative if there is no page
INLINE Place place_of(const Words& w, const Source& source, i32 position) {
  const i32 page = page_of(w, source.row, position);
  if (page < 0) return {-1, 0};
  const i32 slot = (RING ? (i32)(position % w.capacity) : position) % PAGE;
  return {page * w.k_page + slot * w.k_seq, page * w.v_page + slot * w.v_seq};
}
// Reports a missing page that some row needs.
INLINE void report_missing(const Words& w, const Seen& seen, i32 first, i32 count) {
  if (is_seen(seen, first, count)) report(w.fault, (i32)w.launch, OUTSIDE_POOL);
}
INLINE i64 row_strides(const Words& w) { return w.k_page | w.k_seq | w.v_page | w.v_seq; }
INLINE i64 most_splits(const Words& w) { return (w.capacity + SPLIT - 1) / SPLIT + (RING ? 1 : 0); }
"""

DENSE_ROWS = r"""
INLINE i32 newest_position(const Words&, i32) { return -1; }
template <typename W> INLINE i32 first_appended(const W&) { return 0; }
template <typename W> INLINE void fetch_pages(const W&, i32, i32) {}
template <typename W> INLINE i32 table_row(const W&, i32 batch) { return batch; }
template <typename W> INLINE bool is_shared(const W&, i32, i32, i32) { return false; }
template <typename W> INLINE bool is_repeated(const W&, i32, i32) { return false; }

INLINE Range range_of(const Words& w, i32, i32 query, i32) {
  const i64 last = w.k_len - w.q_len + query + AHEAD;
  const i64 low = WINDOW ? max(last + 1 - (i64)WINDOW, 0ll) : 0;
  const i64 high = LIMITED ? min(last, w.k_len - 1) : w.k_len - 1;
  return high < low ? NOTHING : Range{(i32)low, (i32)high};
}

struct Source {
  const Stored *k, *v;
};
INLINE Source source_of(const Words& w, i32 batch, i32 head) {
  return {w.k + batch * w.k_batch + head * w.k_head, w.v + batch * w.v_batch + head * w.v_head};
}
constexpr bool WHOLE_BLOCKS = true;

struct Place { i64 k, v; };
INLINE Place place_of(const Words& w, const Source&, i32 position) {
  return {position * w.k_seq, position * w.v_seq};
}
INLINE void report_missing(const Words&, const Seen&, i32, i32) {}
INLINE i64 row_strides(const Words& w) { return w.k_seq | w.v_seq; }
INLINE i64 most_splits(const Words& w) { return (w.k_len + SPLIT - 1) / SPLIT; }
"""

# What the mask operand says about a key.
MASKS = r"""
struct MaskRow {
  const Mask* mask;  // of the keys
  i32 own;           // segment of the query
};
template <typename W> INLINE MaskRow mask_row(const W& w, i32 batch, i32 head, i32 query) {
  if constexpr (SEGMENTS) return {w.mask + batch * w.mask_batch, (i32)w.mask[batch * w.mask_batch + query]};
  if constexpr (CUSTOM) return {w.mask + batch * w.mask_batch, 0};
  if constexpr (BIAS) return {w.mask + batch * w.mask_batch + head * w.mask_head + query * w.mask_query, 0};
  return {nullptr, 0};
}
template <typename T> INLINE float widen_mask(T x) { return (float)x; }
INLINE float widen_mask(bf16 x) { return widen(x); }
INLINE float widen_mask(f16 x) { return widen(x); }
INLINE double widen_mask(double x) { return x; }
INLINE bool keeps(bool x) { return x; }
template <typename T> INLINE bool keeps(T x) { return widen_mask(x) >= 0.5f; }

// The score of a visible key, given q · k; -inf for one that the mask operand hides.
template <typename Row> INLINE Real masked(const Row& row, Real product, i32 key) {
  Real score = product;
  if constexpr (!RAW) {
    score = product * (Real)SCALE;
    if constexpr (SOFTCAP != 0) score = tanh_of(score * (Real)INVERSE_SOFTCAP) * (Real)SOFTCAP;
  }
  if constexpr (SEGMENTS) {
    if (row.own < 0 || (i32)row.mask[key] != row.own) return lowest(score);
  } else if constexpr (CUSTOM) {
    if (!keeps(row.mask[key])) return lowest(score);
  } else if constexpr (BIAS) {
    const Real bias = (Real)widen_mask(row.mask[key]);
    if (bias == lowest(bias)) return bias;
    score = score + bias;
  }
  if constexpr (!RAW) score = score * (Real)(1 / NATURAL);
  return score;
}
"""

# Splits of a row are left in scratch memory by several blocks; the one that finishes last combines them in order.
COMBINE = r"""
constexpr int COLUMNS = (SLICE + 3) / 4 * 4;  // of a row of partial results
constexpr int MOST_ROWS = SINGLE ? GROUP : 16;

struct Scratch {
  u32* arrived;  // blocks that have left their splits, one count per unit
  State* states;
  Real* values;
};
INLINE i64 round_up(i64 x, i64 to) { return (x + to - 1) / to * to; }
INLINE Scratch scratch_of(const Words& w, i64 units, i64 unit, i64 most_splits, i64 rows) {
  u8* states = w.scratch + round_up(units * (i64)sizeof(u32), 256);
  u8* values = states + round_up(units * most_splits * rows * (i64)sizeof(State), 256);
  return {(u32*)w.scratch + unit, (State*)states + unit * most_splits * rows,
          (Real*)values + unit * most_splits * rows * COLUMNS};
}

struct Four { Real x[4]; };
INLINE Four load_four(const float* at) { const float4 v = __ldcg((const float4*)at); return {{v.x, v.y, v.z, v.w}}; }
INLINE Four load_four(const double* at) {
  const double2 a = __ldcg((const double2*)at), b = __ldcg((const double2*)at + 1);
  return {{(Real)a.x, (Real)a.y, (Real)b.x, (Real)b.y}};
}
INLINE State load_state(const State* at) {
  if constexpr (sizeof(Real) == 4) {
    const float2 v = __ldcg((const float2*)at);
    return {(Real)v.x, (Real)v.y};
  } else {
    const double2 v = __ldcg((const double2*)at);
    return {(Real)v.x, (Real)v.y};
  }
}

// Whether this is the last of `blocks` blocks to leave its splits; all threads of the block call it.
INLINE bool arrives_last(u32* arrived, u32 blocks) {
  __shared__ u32 before;
  __syncthreads();
  if (threadIdx.x == 0) before = arrive(arrived);
  __syncthreads();
  const bool last = before == blocks - 1;
  if (last && threadIdx.x == 0) *arrived = 0;  // for the next launch
  return last;
}

// Merges the splits of `rows` rows in order; `finish(row, column, values, state)` gets four columns at a time.
constexpr int MERGED = 32, LOADED = sizeof(Real) == 4 ? 8 : 4;  // splits at a time; with values in registers
template <int THREADS, typename Finish>
INLINE void combine(const Scratch& scratch, i32 splits, i32 rows, Finish finish) {
  __shared__ Merge factors[MOST_ROWS][MERGED];
  __shared__ Real totals[MOST_ROWS][MERGED];
  __shared__ Real carried[MOST_ROWS];  // the largest score so far
  const i32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const i32 items = rows * (COLUMNS / 4);
  for (i32 first = 0; first < items; first += THREADS) {
    const i32 item = first + threadIdx.x, row = item / (COLUMNS / 4), column = item % (COLUMNS / 4) * 4;
    const Real* values = scratch.values + (i64)row * COLUMNS + column;
    const auto load = [&](Four(&loaded)[LOADED], i32 begin) {
#pragma unroll
      for (i32 i = 0; i < LOADED; i++)
        if (item < items && begin + i < splits) loaded[i] = load_four(values + (i64)(begin + i) * rows * COLUMNS);
    };
    Four sum = {}, current[LOADED], next[LOADED];
    State state = {lowest((Real)0), 0};
    load(current, 0);
    for (i32 begin = 0; begin < splits; begin += MERGED) {
      __syncthreads();
      for (i32 r = warp; r < rows; r += THREADS / 32) {
        // The state before split i is a running maximum, which has no rounding: a scan gives the bits of the loop.
        const State own = begin + lane < splits ? load_state(scratch.states + (begin + lane) * rows + r)
                                                : State{lowest((Real)0), 0};
        const Real start = begin ? carried[r] : lowest((Real)0);
        Real top = upper(own.top, start);
        for (i32 step = 1; step < 32; step *= 2) {
          const Real other = __shfl_up_sync(~0u, top, step);
          if (lane >= step) top = upper(top, other);
        }
        const Real other = __shfl_up_sync(~0u, top, 1), before = lane ? other : start, base = reference(top);
        factors[r][lane] = {weight(before - base), weight(own.top - base)};
        totals[r][lane] = own.total;
        __syncwarp();
        if (lane == 31) carried[r] = top;
      }
      __syncthreads();
#pragma unroll 1
      for (i32 part = 0; part < MERGED && begin + part < splits; part += LOADED) {
        load(next, begin + part + LOADED);
#pragma unroll
        for (i32 i = 0; i < LOADED; i++) {
          if (item < items && begin + part + i < splits) {
            const Merge factor = factors[row][part + i];
#pragma unroll
            for (i32 c = 0; c < 4; c++) sum.x[c] = fused(sum.x[c], factor.kept, current[i].x[c] * factor.added);
            state.total = fused(state.total, factor.kept, totals[row][part + i] * factor.added);
          }
        }
#pragma unroll
        for (i32 i = 0; i < LOADED; i++) current[i] = next[i];
      }
      if (item < items) state.top = carried[row];
    }
    if (item < items) finish(row, column, sum, state);
  }
}
"""

LOG_SUM = r"""
template <typename W> INLINE void store_log_sum(const W& w, i32 batch, i32 head, i32 query, State state) {
  if constexpr (LSE) w.lse[batch * w.lse_batch + head * w.lse_head + query] = log_sum(state.top, state.total);
}
"""
