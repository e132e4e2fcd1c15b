"""CUDA C of attention on tensor cores: queries, keys and values of 16 bits, f32 sums, tiles of 16 rows per warp."""

from __future__ import annotations

# Tiles of keys and values in shared memory have rows of an odd number of 16-byte chunks, so that eight rows at the same
# column are in different banks. Elements beyond HEAD_DIM and VALUE_DIM, and keys that no row sees, are zeros.
TILES = r"""
constexpr int HEAD_STEPS = (HEAD_DIM + 15) / 16;        // of 16 elements of a head
constexpr int HEAD_PITCH = (HEAD_STEPS * 2 | 1) * 16;   // bytes of a row of a tile of keys
constexpr int VALUE_PITCH = (SLICE / 8 | 1) * 16;       // SLICE is a multiple of 16
// Groups of four warps read panels: columns in sixty-fours, whose chunks are at chunk ^ row % 8.
constexpr int PANEL = BLOCK * 128;
template <bool VALUES> INLINE u32 chunk_at(u32 tile, i32 row, i32 chunk) {
  if (PANELS) return tile + (chunk >> 3) * PANEL + row * 128 + ((chunk ^ row) & 7) * 16;
  return tile + row * (VALUES ? VALUE_PITCH : HEAD_PITCH) + chunk * 16;
}
constexpr bool CHUNKS = HEAD_DIM % 8 == 0 && VALUE_DIM % 8 == 0;

INLINE void show_copies();  // to products

constexpr u32 ONES = STORED_ONE << 16 | STORED_ONE;
INLINE bool is_finite(u32 bits) { return (bits & STORED_EXPONENT) != STORED_EXPONENT; }
INLINE u32 finite(u32 pair) {  // without infinities and NaN
  return (is_finite(pair & 0xffff) ? pair & 0xffff : 0) | (is_finite(pair >> 16) ? pair & 0xffff0000 : 0);
}

// -- from memory to tiles --
// Copies element by element what cannot be copied in chunks: rows of any length and alignment.
__device__ __noinline__ void gather_chunk(u32 to, const Stored* row, i32 column, i32 end) {
  u32 x[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 low = column + 2 * i < end ? row[column + 2 * i].bits : 0;
    const u32 high = column + 2 * i + 1 < end ? row[column + 2 * i + 1].bits : 0;
    x[i] = low | high << 16;
  }
  store_chunk(to, {x[0], x[1], x[2], x[3]});
}

// Copies a block of keys or values one by one: what is not in one page, or not aligned.
template <bool VALUES, int THREADS>
__device__ __noinline__ void gather_block(
    const Words& w, const Source& source, u32 tile, Place place, i32 block, i32 start, Seen seen, i32 column,
    bool aligned, i32 fresh) {
  constexpr int WIDTH = VALUES ? SLICE / 8 : HEAD_STEPS * 2, END = VALUES ? VALUE_DIM : HEAD_DIM;
  const Stored* base = VALUES ? source.v : source.k;
  const i64 stride = VALUES ? w.v_seq : w.k_seq;
  const i32 low = max(start, seen.low), high = min(start + BLOCK - 1, seen.high);
  const bool exists = place.k >= 0;
  const Stored* rows = base + (exists ? (VALUES ? place.v : place.k) : 0);
#pragma unroll 1
  for (int i = threadIdx.x; i < BLOCK * WIDTH; i += THREADS) {
    const i32 slot = i / WIDTH, chunk = i % WIDTH, from = column + chunk * 8, key = start + slot;
    if (key >= fresh && key <= high) continue;
    bool present = exists && key >= low && key <= high && from < END;
    const Stored* row = rows + slot * stride;
    if (!WHOLE_BLOCKS && present) {
      const Place own = place_of(w, source, key);
      present = own.k >= 0;
      row = base + (VALUES ? own.v : own.k);
      if (!present) report_missing(w, seen, key, 1);
    }
    const u32 to = chunk_at<VALUES>(tile, block + slot, chunk);
    if (CHUNKS && aligned) copy_chunk(to, present ? row + from : base, present);
    else gather_chunk(to, row, from, present ? END : 0);
  }
}

// Starts to copy keys, or the columns of a slice of values, from position `first` on; those that no row sees are zeros.
// Those from `fresh` on are left out if they are seen: the program writes them itself (`load_fresh`).
template <bool VALUES, int COUNT, int THREADS>
INLINE void load_tile(
    const Words& w, const Source& source, u32 tile, i32 first, const Seen& seen, i32 column, bool aligned,
    i32 fresh = LARGEST) {
  constexpr int WIDTH = VALUES ? SLICE / 8 : HEAD_STEPS * 2, END = VALUES ? VALUE_DIM : HEAD_DIM;
  constexpr int ROUND = THREADS / WIDTH;  // keys that all threads copy at once, where their rows divide them
  const Stored* base = VALUES ? source.v : source.k;
  const i64 stride = VALUES ? w.v_seq : w.k_seq;
#pragma unroll 1
  for (int block = 0; block < COUNT; block += BLOCK) {
    const i32 start = first + block, low = max(start, seen.low), high = min(start + BLOCK - 1, seen.high);
    Place place = {0, 0};
    if (WHOLE_BLOCKS && low <= high) {
      place = place_of(w, source, start);
      if (place.k < 0) report_missing(w, seen, start, BLOCK);
    }
    const bool exists = place.k >= 0;
    const Stored* rows = base + (exists ? (VALUES ? place.v : place.k) : 0);
    if (CHUNKS && WHOLE_BLOCKS && THREADS % WIDTH == 0 && BLOCK % ROUND == 0 && aligned) {
      const i32 slot = threadIdx.x / WIDTH, chunk = threadIdx.x % WIDTH;
      const Stored* from = rows + slot * stride + column + chunk * 8;
      const bool is_column = exists && column + chunk * 8 < END;
#pragma unroll
      for (int i = 0; i < BLOCK / ROUND; i++, from += ROUND * stride) {
        const i32 key = start + slot + i * ROUND;
        if (key >= fresh && key <= high) continue;
        const u32 to = chunk_at<VALUES>(tile, block + slot + i * ROUND, chunk);
        copy_chunk(to, from, is_column && key >= low && key <= high);
      }
    } else {
      gather_block<VALUES, THREADS>(w, source, tile, place, block, start, seen, column, aligned, fresh);
    }
  }
}

// A chunk of a key or value: where it is, and where it goes. Keys that do not exist are zeros.
struct Chunk {
  const Stored* row;
  u32 to;
  i32 column;
  bool exists;
};
// Chunk `i` of those of the fresh keys of a tile that begins at `first`.
template <bool VALUES>
INLINE Chunk fresh_chunk(
    const Words& w, const Source& source, u32 tile, i32 first, i32 fresh, const Seen& seen, i32 i) {
  constexpr int WIDTH = VALUES ? SLICE / 8 : HEAD_STEPS * 2;
  const i32 key = max(fresh, first) + i / WIDTH, chunk = i % WIDTH;
  const Stored* base = VALUES ? source.v : source.k;
  const u32 to = chunk_at<VALUES>(tile, key - first, chunk);
  if (key > seen.high) return {base, to, chunk * 8, false};
  const Place place = place_of(w, source, key);
  if (place.k < 0) report_missing(w, seen, key, 1);
  return {base + (place.k < 0 ? 0 : VALUES ? place.v : place.k), to, chunk * 8, place.k >= 0};
}
template <bool VALUES>
__device__ __noinline__ Chunk later_chunk(
    const Words& w, const Source& source, u32 tile, i32 first, i32 fresh, Seen seen, i32 i) {
  return fresh_chunk<VALUES>(w, source, tile, first, fresh, seen, i);
}
// Starts to copy the keys from `fresh` on that rows see. `own` is this thread's first chunk, whose place is known.
template <bool VALUES, int COUNT, int THREADS>
INLINE void load_fresh(
    const Words& w, const Source& source, u32 tile, i32 first, const Seen& seen, bool aligned, i32 fresh,
    const Chunk& own) {
  constexpr int WIDTH = VALUES ? SLICE / 8 : HEAD_STEPS * 2, END = VALUES ? VALUE_DIM : HEAD_DIM;
  const i32 count = (min(first + COUNT - 1, seen.high) - max(fresh, first) + 1) * WIDTH;
#pragma unroll 1
  for (i32 i = threadIdx.x; i < count; i += THREADS) {
    const Chunk chunk = i < THREADS ? own : later_chunk<VALUES>(w, source, tile, first, fresh, seen, i);
    const bool present = chunk.exists && chunk.column < END;
    if (CHUNKS && aligned) copy_chunk(chunk.to, present ? chunk.row + chunk.column : chunk.row, present);
    else gather_chunk(chunk.to, chunk.row, chunk.column, present ? END : 0);
  }
}

// Whether rows of keys and values can be copied in chunks of 16 bytes.
INLINE bool is_aligned(const Words& w, const Source& source) {
  return ((u64)source.k | (u64)source.v | (u64)row_strides(w) * sizeof(Stored)) % 16 == 0;
}

// -- values that are not finite --
// Zero times infinity is not zero, but a masked key contributes nothing. So infinities and NaN are added where weights
// are not zero, and removed from the tile before products. Threads look after the chunks that they have copied.
template <int COUNT, int THREADS> INLINE bool has_infinite(u32 tile) {
  bool result = false;
#pragma unroll 4
  for (int i = threadIdx.x; i < COUNT * (SLICE / 8); i += THREADS) {
    const uint4 x = load_chunk(chunk_at<true>(tile, i / (SLICE / 8), i % (SLICE / 8)));
    result |= finite(x.x) != x.x || finite(x.y) != x.y || finite(x.z) != x.z || finite(x.w) != x.w;
  }
  return result;
}
template <int COUNT, int THREADS> INLINE void remove_infinite(u32 tile) {
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < COUNT * (SLICE / 8); i += THREADS) {
    const u32 at = chunk_at<true>(tile, i / (SLICE / 8), i % (SLICE / 8));
    const uint4 x = load_chunk(at);
    store_chunk(at, {finite(x.x), finite(x.y), finite(x.z), finite(x.w)});
  }
  show_copies();
  __syncthreads();
}
// Adds what is not finite of a key to the results of two rows, if their weights are not zero. `chunk`: of 8 columns.
template <int TILES_OF_8>
INLINE void add_infinite(float (&c)[TILES_OF_8][4], u32 tile, i32 key, i32 chunk, bool first, bool second) {
#pragma unroll
  for (int i = 0; i < TILES_OF_8; i++) {
    const u32 pair = load_word(chunk_at<true>(tile, key, chunk + i) + (threadIdx.x & 3) * 4);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const u32 bits = e ? pair >> 16 : pair & 0xffff;
      if (is_finite(bits)) continue;
      if (first) c[i][e] += widen(Stored{(u16)bits});
      if (second) c[i][2 + e] += widen(Stored{(u16)bits});
    }
  }
}

// -- products --
// Two elements of a query, rounded to the type of keys. `PAIRS`: rows are aligned to pairs.
INLINE u32 pair_at(const float* at) {
  const float2 x = *(const float2*)at;
  return pair_of(Stored{}, x.x, x.y);
}
INLINE u32 pair_at(const bf16* at) { return pair_of(Stored{}, widen(at[0]), widen(at[1])); }
INLINE u32 pair_at(const f16* at) { return pair_of(Stored{}, widen(at[0]), widen(at[1])); }
template <bool PAIRS> INLINE u32 query_pair(const Query* row, i32 column) {
  if constexpr (PAIRS) return row && column < HEAD_DIM ? pair_at(row + column) : pair_of(Stored{}, 0.0f, 0.0f);
  const float low = row && column < HEAD_DIM ? widen(row[column]) : 0.0f;
  const float high = row && column + 1 < HEAD_DIM ? widen(row[column + 1]) : 0.0f;
  return pair_of(Stored{}, low, high);
}

// Elements 16 · step on of rows lane / 4 and lane / 4 + 8, as an operand of products.
template <bool PAIRS = false> INLINE void load_query(u32 (&a)[4], const Query* row, const Query* row8, i32 step) {
  const i32 column = step * 16 + (threadIdx.x & 3) * 2;
  a[0] = query_pair<PAIRS>(row, column);
  a[1] = query_pair<PAIRS>(row8, column);
  a[2] = query_pair<PAIRS>(row, column + 8);
  a[3] = query_pair<PAIRS>(row8, column + 8);
}

// Products of 16 rows with 8 · TILES_OF_8 keys from `tile` on; `queries(a, step)` loads 16 elements of the rows.
template <int TILES_OF_8, typename Queries>
INLINE void multiply_keys(float (&s)[TILES_OF_8][4], Queries queries, u32 tile) {
  const i32 lane = threadIdx.x & 31;
  const u32 at = tile + ((lane & 7) + (lane >> 4) * 8) * HEAD_PITCH + (lane >> 3 & 1) * 16;
#pragma unroll
  for (int i = 0; i < TILES_OF_8; i++) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0;
#pragma unroll
  for (int step = 0; step < HEAD_STEPS; step++) {
    u32 a[4];
    queries(a, step);
#pragma unroll
    for (int i = 0; i < TILES_OF_8; i += 2) {
      u32 b[4];
      load_matrices(b, at + i * 8 * HEAD_PITCH + step * 32);
      multiply(Stored{}, s[i], a, b[0], b[1]);
      multiply(Stored{}, s[i + 1], a, b[2], b[3]);
    }
  }
}

// Adds weights times values for 16 keys of `tile`.
template <int TILES_OF_8> INLINE void multiply_values(float (&c)[TILES_OF_8][4], const u32 (&p)[4], u32 tile) {
  const i32 lane = threadIdx.x & 31;
  const u32 at = tile + ((lane & 7) + (lane >> 3 & 1) * 8) * VALUE_PITCH + (lane >> 4) * 16;
#pragma unroll
  for (int i = 0; i < TILES_OF_8; i += 2) {
    u32 b[4];
    load_transposed(b, at + i * 16);
    multiply(Stored{}, c[i], p, b[0], b[1]);
    multiply(Stored{}, c[i + 1], p, b[2], b[3]);
  }
}

// -- scores and weights --
struct Row {  // of a thread: two of them, 8 apart
  Range range;
  MaskRow mask;
};
// Turns products into scores; -inf for keys that a row does not see. `first` is the position of this lane's first key.
template <int TILES_OF_8> INLINE void score(float (&s)[TILES_OF_8][4], const Row (&rows)[2], i32 first, bool common) {
  if (RAW && common) return;
#pragma unroll
  for (int i = 0; i < TILES_OF_8; i++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const Row& row = rows[e >> 1];
      const i32 key = first + i * 8 + (e & 1);
      const bool visible = common || (key >= row.range.low && key <= row.range.high);
      s[i][e] = visible ? masked(row.mask, s[i][e], key) : lowest(0.0f);
    }
  }
}
// The largest score of each row; lanes of a row agree. HALVES: 1 if rows from 8 on do not matter.
template <int TILES_OF_8, int HALVES = 2> INLINE void largest(float (&top)[2], const float (&s)[TILES_OF_8][4]) {
#pragma unroll
  for (int j = 0; j < HALVES; j++) {
#pragma unroll
    for (int i = 0; i < TILES_OF_8; i++) top[j] = fmaxf(top[j], fmaxf(s[i][2 * j], s[i][2 * j + 1]));
    top[j] = fmaxf(top[j], __shfl_xor_sync(~0u, top[j], 1));
    top[j] = fmaxf(top[j], __shfl_xor_sync(~0u, top[j], 2));
  }
}
INLINE u32 weights_of(float low, float high, float base) {  // `base` is in base-2 units
  const float unit = (float)UNIT;
  return pair_of(Stored{}, exp2_fast(__fmaf_rn(low, unit, -base)), exp2_fast(__fmaf_rn(high, unit, -base)));
}
"""

# Queries, keys and values are there. See `heads.py` for those that blocks prepare themselves.
NO_HEADS = r"""
typedef Words All;
INLINE const Words& words_of(const All& all) { return all; }
INLINE void fetch_for_heads(const All&) {}
INLINE void prepare_heads(const All&, u8*, i32, bool) {}
INLINE const Query* queries_of(const All& all, u8*, i32) { return all.q; }
"""

# A block has a tile of 16 rows and takes every workers-th split: four warps share the keys of a split for scores, and
# the columns of values for products. A block that takes all splits merges them itself; else the last one does.
SPLITS = r"""
constexpr int PAIRS = SLICE / 16, OWN_PAIRS = (PAIRS + 3) / 4;  // pairs of tiles of 8 columns
constexpr int KEY_BYTES = SPLIT * HEAD_PITCH, VALUE_BYTES = SPLIT * VALUE_PITCH, WEIGHT_PITCH = (SPLIT / 8 | 1) * 16;
constexpr int WEIGHTS_AT = SEPARATE ? KEY_BYTES + VALUE_BYTES : (KEY_BYTES > VALUE_BYTES ? KEY_BYTES : VALUE_BYTES);
constexpr int QUERIES_AT = WEIGHTS_AT + 16 * WEIGHT_PITCH, QUERY_PAIRS = HEAD_STEPS * 8;  // pairs of a row of queries
constexpr int HEADS_AT = QUERIES_AT + 16 * HEAD_PITCH;                                    // what `prepare_heads` leaves
constexpr int HALVES = MOST_ROWS > 8 ? 2 : 1;                                              // of a tile that have rows

INLINE void attend(const All& all, i32 number, i32 count, i32 worker) {
  const Words& w = words_of(all);
  extern __shared__ __align__(128) u8 shared[];
  __shared__ float tops[4][16];
  __shared__ Range ranges[16];
  const i32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, line = lane >> 2;
  const u32 keys = shared_address(shared), values = SEPARATE ? keys + KEY_BYTES : keys, weights = keys + WEIGHTS_AT;
  const u32 query_tile = keys + QUERIES_AT;
  const i32 all_rows = SINGLE ? GROUP : (i32)w.q_len * GROUP, tiles = (all_rows + 15) / 16;
  const i32 tile = number % tiles, unit = number / tiles, kv_heads = (i32)w.kv_heads;
  const i32 head = unit % kv_heads, batch = unit / kv_heads;
  const i32 first_row = tile * 16, rows = min(16, all_rows - first_row);
  if (!REST && !EARLY) {
    wait_for_inputs();
    start_next();
  }

  fetch_pages(w, batch, worker);
  fetch_for_heads(all);
  const i32 newest = newest_position(w, batch);
  Seen seen;
  if constexpr (SINGLE) {
    const Range own = range_of(w, batch, 0, newest);
    seen = {own.low, own.high, own.low, own.high, 1, nullptr};
  } else {
    if (threadIdx.x < 16)
      ranges[threadIdx.x] = lane < rows ? range_of(w, batch, (first_row + lane) / GROUP, newest) : NOTHING;
    __syncthreads();
    seen = seen_by<16>(ranges, rows);
  }
  const i32 first_split = seen.low / SPLIT, splits = sees_any(seen) ? seen.high / SPLIT - first_split + 1 : 0;
  const i32 workers = REST ? 1 : min((i32)gridDim.y, max(splits, 1));
  if (worker >= workers) return;

  const Source source = source_of(w, batch, head);
  const bool aligned = is_aligned(w, source), uneven = is_uneven(seen);
#pragma unroll 1
  for (i32 i = rows * QUERY_PAIRS + threadIdx.x; i < 16 * QUERY_PAIRS; i += 128)
    store_word(query_tile + i / QUERY_PAIRS * HEAD_PITCH + i % QUERY_PAIRS * 4, 0);
  const i32 own_split = (first_split + worker) * SPLIT;
  const i32 fresh = EARLY ? max(first_appended(w), seen.low) : 0;
  Chunk key = {}, value = {};
  if (EARLY) {
    if (splits) load_tile<false, SPLIT, 128>(w, source, keys, own_split, seen, 0, aligned, fresh);
    if (SEPARATE && splits) load_tile<true, SPLIT, 128>(w, source, values, own_split, seen, 0, aligned, fresh);
    if (splits) key = fresh_chunk<false>(w, source, keys, own_split, fresh, seen, threadIdx.x);
    if (SEPARATE && splits) value = fresh_chunk<true>(w, source, values, own_split, fresh, seen, threadIdx.x);
    start_next();
    wait_for_inputs();
    prepare_heads(all, shared + HEADS_AT, unit, worker == max(splits - 1, 0) % workers);
    if (splits) load_fresh<false, SPLIT, 128>(w, source, keys, own_split, seen, aligned, fresh, key);
    commit_copies();
    if (SEPARATE && splits) load_fresh<true, SPLIT, 128>(w, source, values, own_split, seen, aligned, fresh, value);
  } else {
    if (splits) load_tile<false, SPLIT, 128>(w, source, keys, own_split, seen, 0, aligned);
    commit_copies();
    if (SEPARATE && splits) load_tile<true, SPLIT, 128>(w, source, values, own_split, seen, 0, aligned);
  }
  if (SEPARATE) commit_copies();

  const Query* q = queries_of(all, shared + HEADS_AT, unit);
#pragma unroll 1
  for (i32 i = threadIdx.x; i < rows * QUERY_PAIRS; i += 128) {
    const i32 r = i / QUERY_PAIRS, pair = i % QUERY_PAIRS, query = (first_row + r) / GROUP;
    const Query* row = q + batch * w.q_batch + query * w.q_seq + (head * GROUP + (first_row + r) % GROUP) * w.q_head;
    store_word(query_tile + r * HEAD_PITCH + pair * 4, query_pair<false>(row, 2 * pair));
  }
  Row own_rows[2];
#pragma unroll
  for (int j = 0; j < HALVES; j++) {
    const i32 r = line + 8 * j, query = (first_row + r) / GROUP, query_head = head * GROUP + (first_row + r) % GROUP;
    own_rows[j].range = SINGLE ? Range{seen.low, seen.high} : ranges[r];
    own_rows[j].mask = {};
    if (r < rows) own_rows[j].mask = mask_row(w, batch, query_head, query);
  }
  const auto loaded = [&](u32(&x)[4], int step) {
    load_matrices(x, query_tile + (lane & 15) * HEAD_PITCH + step * 32 + (lane >> 4) * 16);
  };

  const i32 scratch_rows = min(16, all_rows);
  const Scratch scratch = scratch_of(w, count, number, most_splits(w), scratch_rows);
  const bool merges = workers == 1;
  float out[OWN_PAIRS][2][4] = {};
  State state[2] = {{lowest(0.0f), 0}, {lowest(0.0f), 0}};
#pragma unroll 1
  for (i32 split = worker; split < splits; split += EACH ? splits : workers) {
    const i32 begin = (first_split + split) * SPLIT, next = begin + workers * SPLIT;
    const bool more = !EACH && split + workers < splits;
    if (SEPARATE) wait_for_copies<1>(); else wait_for_copies<0>();
    __syncthreads();
    float s[4][4];
    multiply_keys<4>(s, loaded, keys + warp * 32 * HEAD_PITCH);
    score<4>(s, own_rows, begin + warp * 32 + (lane & 3) * 2, is_common(seen, begin, SPLIT));
    float top[2] = {lowest(0.0f), lowest(0.0f)};
    largest<4, HALVES>(top, s);
    if ((lane & 3) == 0) {
      tops[warp][line] = top[0];
      if (HALVES == 2) tops[warp][line + 8] = top[1];
    }
    __syncthreads();  // every warp is done with the keys
    if (SEPARATE) {
      if (more) load_tile<false, SPLIT, 128>(w, source, keys, next, seen, 0, aligned);
    } else {
      load_tile<true, SPLIT, 128>(w, source, values, begin, seen, 0, aligned);
    }
    commit_copies();

    float split_top[2] = {}, kept[2] = {};  // the largest score of the split; what the second block leaves of the first
#pragma unroll
    for (int j = 0; j < HALVES; j++) {
      const i32 r = line + 8 * j;
      const float first = fmaxf(tops[0][r], tops[1][r]);
      split_top[j] = fmaxf(first, fmaxf(tops[2][r], tops[3][r]));
      kept[j] = weight(first - reference(split_top[j]));
      const float base = reference(warp < 2 ? first : split_top[j]) * (float)UNIT;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32 pair = weights_of(s[i][2 * j], s[i][2 * j + 1], base);
        const u32 to = weights + r * WEIGHT_PITCH + (warp * 32 + i * 8 + (lane & 3) * 2) * 2;
        store_word(to, pair);
      }
    }
    if (SEPARATE) wait_for_copies<1>(); else wait_for_copies<0>();
    bool infinite_values = false;
    if (uneven) infinite_values = __syncthreads_or(has_infinite<SPLIT, 128>(values));
    else __syncthreads();

    float part[OWN_PAIRS][2][4] = {}, sums[4] = {};
    if (infinite_values) {
#pragma unroll 1
      for (i32 key = 0; key < SPLIT; key++) {
        const u16* own = (const u16*)(shared + WEIGHTS_AT + line * WEIGHT_PITCH) + key;
        const bool first = own[0], second = own[8 * WEIGHT_PITCH / 2];
#pragma unroll
        for (int i = 0; i < OWN_PAIRS; i++)
          if (warp + 4 * i < PAIRS)
            add_infinite<2>(part[i], values, key, (warp + 4 * i) * 2, first, second);
      }
      remove_infinite<SPLIT, 128>(values);
    }
#pragma unroll
    for (int step = 0; step < SPLIT / 16; step++) {
      if (step == BLOCK / 16) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          sums[e] *= kept[e >> 1];
#pragma unroll
          for (int i = 0; i < OWN_PAIRS; i++) part[i][0][e] *= kept[e >> 1], part[i][1][e] *= kept[e >> 1];
        }
      }
      u32 p[4];
      load_matrices(p, weights + (lane & 15) * WEIGHT_PITCH + step * 32 + (lane >> 4) * 16);
      multiply(Stored{}, sums, p, ONES, ONES);
#pragma unroll
      for (int i = 0; i < OWN_PAIRS; i++)
        if (warp + 4 * i < PAIRS)
          multiply_values<2>(part[i], p, values + step * 16 * VALUE_PITCH + (warp + 4 * i) * 32);
    }
    __syncthreads();  // every warp is done with the values
    if (SEPARATE) {
      if (more) load_tile<true, SPLIT, 128>(w, source, values, next, seen, 0, aligned);
    } else if (more) {
      load_tile<false, SPLIT, 128>(w, source, keys, next, seen, 0, aligned);
    }
    commit_copies();

#pragma unroll
    for (int j = 0; j < HALVES; j++) {
      const i32 r = line + 8 * j;
      if (merges) {
        const Merge factors = merge(state[j], split_top[j], sums[2 * j]);
#pragma unroll
        for (int i = 0; i < OWN_PAIRS; i++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            float& value = out[i][e >> 1][2 * j + (e & 1)];
            value = fused(value, factors.kept, part[i][e >> 1][2 * j + (e & 1)] * factors.added);
          }
      } else if (r < rows) {
        if (warp == 0 && (lane & 3) == 0) scratch.states[split * scratch_rows + r] = {split_top[j], sums[2 * j]};
        float* to = scratch.values + (i64)(split * scratch_rows + r) * COLUMNS;
#pragma unroll
        for (int i = 0; i < OWN_PAIRS; i++)
#pragma unroll
          for (int t = 0; t < 2; t++) {
            const i32 column = (warp + 4 * i) * 16 + t * 8 + (lane & 3) * 2;
            if (warp + 4 * i < PAIRS)
              *(float2*)(to + column) = make_float2(part[i][t][2 * j], part[i][t][2 * j + 1]);
          }
      }
    }
  }

  if (merges) {
#pragma unroll
    for (int j = 0; j < HALVES; j++) {
      const i32 r = line + 8 * j, query = (first_row + r) / GROUP, query_head = head * GROUP + (first_row + r) % GROUP;
      if (r >= rows) continue;
      if (warp == 0 && (lane & 3) == 0) store_log_sum(w, batch, query_head, query, state[j]);
      Result* to = w.out + batch * w.out_batch + query * w.out_seq + query_head * w.out_head;
      const float factor = inverse(state[j].total);
#pragma unroll
      for (int i = 0; i < OWN_PAIRS; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const i32 column = (warp + 4 * i) * 16 + (e >> 1) * 8 + (lane & 3) * 2 + (e & 1);
          if (column < VALUE_DIM) store(to + column, out[i][e >> 1][2 * j + (e & 1)] * factor);
        }
    }
    return;
  }
  if (!arrives_last(scratch.arrived, workers)) return;
  combine<128>(scratch, splits, scratch_rows, [&](i32 r, i32 column, const Four& sum, State total) {
    const i32 query = (first_row + r) / GROUP, query_head = head * GROUP + (first_row + r) % GROUP;
    if (r >= rows) return;
    if (column == 0) store_log_sum(w, batch, query_head, query, total);
    Result* to = w.out + batch * w.out_batch + query * w.out_seq + query_head * w.out_head;
    const float factor = inverse(total.total);
    for (i32 c = 0; c < 4; c++)
      if (column + c < VALUE_DIM) store(to + column + c, sum.x[c] * factor);
  });
}

extern "C" __global__ void __launch_bounds__(128) ENTRY(const __grid_constant__ All all) {
  if constexpr (REST) {
    wait_for_inputs();
    start_next();
    const Words& w = words_of(all);
    const i32 units = (i32)(w.batch * w.kv_heads);
    for (i32 unit = blockIdx.x; unit < units; unit += gridDim.x) {
      const i32 token = unit / (i32)w.kv_heads, tokens = max(REST / GROUP, 1);
      if (is_shared(w, token, token / tokens * tokens, tokens)) continue;
      attend(all, unit, units, 0);
      __syncthreads();
    }
  } else {
    attend(all, blockIdx.x, gridDim.x, blockIdx.y);
  }
}
"""

# Products of four warps together (wgmma), or of each by itself.
GROUP_PRODUCTS = r"""
INLINE void show_copies() { see_copies(); }
template <int STEPS> INLINE void products_with_keys(float (&s)[BLOCK / 8][4], const u32 (&a)[STEPS][4], u32 keys) {
  begin_products();
#pragma unroll
  for (int step = 0; step < STEPS; step++)
    multiply_rows(s, a[step], matrix_at(keys + step / 4 * PANEL) + step % 4 * 2, step > 0);
  end_products();
  await_products<0>();
}
INLINE void start_products_with_values(float (&part)[SLICE / 8][4], const u32 (&p)[BLOCK / 16][4], u32 values) {
  begin_products();
#pragma unroll
  for (int step = 0; step < BLOCK / 16; step++)
    multiply_columns(part, p[step], matrix_at(values, PANEL) + step * 128, 1);
  end_products();
}
"""
SINGLE_PRODUCTS = r"""
INLINE void show_copies() {}
template <int STEPS> INLINE void products_with_keys(float (&)[BLOCK / 8][4], const u32 (&)[STEPS][4], u32) {}
INLINE void start_products_with_values(float (&)[SLICE / 8][4], const u32 (&)[BLOCK / 16][4], u32) {}
template <int N> INLINE void await_products() {}
"""

# A block has WARPS · 16 rows and walks all their keys, block by block, with the next one on its way. A warp has 16
# rows, with the results of the current split and those of all splits before in registers. With PANELS its four warps
# multiply together: rows that see nothing of a block have weights of zero there.
ROW_TILES = r"""
constexpr int THREADS = WARPS * 32, TILE_ROWS = WARPS * 16, COLUMN_TILES = SLICE / 8;
constexpr int KEY_BYTES = PANELS ? (HEAD_STEPS + 3) / 4 * PANEL : BLOCK * HEAD_PITCH;
constexpr int STAGE_BYTES = KEY_BYTES + (PANELS ? (SLICE + 63) / 64 * PANEL : BLOCK * VALUE_PITCH);

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(const __grid_constant__ Words w) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ Range ranges[TILE_ROWS];
  __shared__ bool members[RAGGED ? TILE_ROWS : 1];  // of the current sequence
  const i32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, line = lane >> 2;
  const u32 start = shared_address(shared), stages = PANELS ? (start + 1023) / 1024 * 1024 : start;
  const u32 query_tile = stages + STAGES * STAGE_BYTES + warp * 16 * HEAD_PITCH;
  const i32 all_rows = (i32)(RAGGED ? w.batch : w.q_len) * GROUP, tiles = (all_rows + TILE_ROWS - 1) / TILE_ROWS;
  const i32 slice = blockIdx.x % SLICES, place = blockIdx.x / SLICES, kv_heads = (i32)w.kv_heads;
  const i32 units = RAGGED ? kv_heads : (i32)w.batch * kv_heads;
  // Tiles at the end see the most keys: they go first.
  const i32 unit = place % units, tile = tiles - 1 - place / units, head = unit % kv_heads;
  const i32 first_row = tile * TILE_ROWS, rows = min(TILE_ROWS, all_rows - first_row);
  // A row of the tile: ragged tokens are batch entries of one query.
  struct At { i32 batch, query, head; };
  const auto at_row = [&](i32 r) {
    const i32 token = (first_row + r) / GROUP, query_head = head * GROUP + (first_row + r) % GROUP;
    return RAGGED ? At{token, 0, query_head} : At{unit / kv_heads, token, query_head};
  };
  start_next();
  wait_for_inputs();

  Row own_rows[2];
  const Query* queries[2];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const i32 r = warp * 16 + line + 8 * j;
    const At at = at_row(r);
    own_rows[j].mask = {};
    if (r < rows) own_rows[j].mask = mask_row(w, at.batch, at.head, at.query);
    queries[j] = r < rows ? w.q + at.batch * w.q_batch + at.query * w.q_seq + at.head * w.q_head : nullptr;
  }
  u32 a[QUERIES_IN_REGISTERS ? HEAD_STEPS : 1][4];
#pragma unroll
  for (int step = 0; step < HEAD_STEPS; step++) {
    if constexpr (QUERIES_IN_REGISTERS) {
      load_query(a[step], queries[0], queries[1], step);
    } else {
      load_query(a[0], queries[0], queries[1], step);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32 to = query_tile + (line + (i & 1) * 8) * HEAD_PITCH + step * 32 + (i >> 1) * 16 + (lane & 3) * 4;
        store_word(to, a[0][i]);
      }
    }
  }
  __syncwarp();
  const auto loaded = [&](u32(&x)[4], int step) {
    if constexpr (QUERIES_IN_REGISTERS) {
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = a[step][i];
    } else {
      load_matrices(x, query_tile + (lane & 15) * HEAD_PITCH + step * 32 + (lane >> 4) * 16);
    }
  };

  float out[COLUMN_TILES][4] = {}, part[COLUMN_TILES][4] = {}, sums[4] = {};
  State state[2] = {{lowest(0.0f), 0}, {lowest(0.0f), 0}};
  float split_top[2] = {lowest(0.0f), lowest(0.0f)};
  bool fresh = true;  // nothing of the current split is in `part`
  const auto merge_split = [&] {
    if (fresh) return;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const Merge factors = merge(state[j], split_top[j], sums[2 * j]);
#pragma unroll
      for (int i = 0; i < COLUMN_TILES; i++) {
        out[i][2 * j] = fused(out[i][2 * j], factors.kept, part[i][2 * j] * factors.added);
        out[i][2 * j + 1] = fused(out[i][2 * j + 1], factors.kept, part[i][2 * j + 1] * factors.added);
        part[i][2 * j] = part[i][2 * j + 1] = 0;
      }
      sums[2 * j] = sums[2 * j + 1] = 0;
      split_top[j] = lowest(0.0f);
    }
    fresh = true;
  };
  bool written[2] = {!RAGGED, !RAGGED};
  // Once for the tile, or, if ragged, for each sequence that has several tokens in it.
  for (i32 token = 0; token < (RAGGED ? rows / GROUP : 1); token++) {
    const At leader = at_row(token * GROUP);
    bool member = threadIdx.x < rows;
    if constexpr (RAGGED) {
      const i32 from = first_row / GROUP, count = rows / GROUP;
      if (!is_shared(w, leader.batch, from, count) || is_repeated(w, leader.batch, from)) continue;
      member = member && table_row(w, at_row(threadIdx.x).batch) == table_row(w, leader.batch);
    }
    __syncthreads();
    const i32 newest = newest_position(w, leader.batch);
    if (threadIdx.x < TILE_ROWS) {
      const At at = at_row(threadIdx.x);
      ranges[threadIdx.x] = member ? range_of(w, at.batch, at.query, newest) : NOTHING;
      if (RAGGED) members[threadIdx.x] = member;
    }
    __syncthreads();
    const Seen seen = seen_by<TILE_ROWS>(ranges, rows);
    const Seen own = seen_by<16>(ranges + warp * 16, min(16, rows - warp * 16));
    const Source source = source_of(w, leader.batch, head);
    const bool aligned = is_aligned(w, source), uneven = is_uneven(seen);
    const i32 first = seen.low / BLOCK, last = sees_any(seen) ? seen.high / BLOCK : first - 1;
    const auto load = [&](i32 block) {
      const u32 stage = stages + (STAGES == 2 && (block & 1) ? STAGE_BYTES : 0);
      load_tile<false, BLOCK, THREADS>(w, source, stage, block * BLOCK, seen, 0, aligned);
      load_tile<true, BLOCK, THREADS>(w, source, stage + KEY_BYTES, block * BLOCK, seen, slice * SLICE, aligned);
      commit_copies();
    };
    if (first <= last) load(first);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      own_rows[j].range = ranges[warp * 16 + line + 8 * j];
      if (RAGGED) written[j] = written[j] || members[warp * 16 + line + 8 * j];
    }
    for (i32 block = first; block <= last; block++) {
      const i32 begin = block * BLOCK;
      const u32 keys = stages + (STAGES == 2 && (block & 1) ? STAGE_BYTES : 0), values = keys + KEY_BYTES;
      wait_for_copies<0>();
      show_copies();
      bool infinite_values = false;
      // The block is there, and every warp is done with the one before.
      if (uneven && !is_common(seen, begin, BLOCK))
        infinite_values = __syncthreads_or(has_infinite<BLOCK, THREADS>(values));
      else
        __syncthreads();
      if (STAGES == 2 && block < last) load(block + 1);
      if (block % BLOCKS_OF_SPLIT == 0) merge_split();
      const bool visible = begin <= own.high && begin + BLOCK > own.low;
      u32 p[BLOCK / 16][4] = {};
      float s[BLOCK / 8][4];
      if constexpr (PANELS) products_with_keys(s, a, keys);
      if (visible) {
        if constexpr (!PANELS) multiply_keys<BLOCK / 8>(s, loaded, keys);
        score<BLOCK / 8>(s, own_rows, begin + (lane & 3) * 2, is_common(own, begin, BLOCK));
        float top[2] = {split_top[0], split_top[1]}, kept[2], base[2];
        largest<BLOCK / 8>(top, s);
#pragma unroll
        for (int j = 0; j < 2; j++) {
          kept[j] = weight(split_top[j] - reference(top[j]));
          base[j] = reference(top[j]) * (float)UNIT;
          split_top[j] = top[j];
        }
        if (!fresh && __any_sync(~0u, kept[0] != 1 || kept[1] != 1)) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            sums[e] *= kept[e >> 1];
#pragma unroll
            for (int i = 0; i < COLUMN_TILES; i++) part[i][e] *= kept[e >> 1];
          }
        }
        fresh = false;
#pragma unroll
        for (int step = 0; step < BLOCK / 16; step++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const float(&pair)[4] = s[2 * step + (i >> 1)];
            p[step][i] = weights_of(pair[2 * (i & 1)], pair[2 * (i & 1) + 1], base[i & 1]);
          }
      }
      if (infinite_values) {
        if (visible) {
#pragma unroll 1
          for (i32 key = 0; key < BLOCK; key++) {
            u32 first = 0, second = 0;
#pragma unroll
            for (int i = 0; i < BLOCK / 8; i++)
              if (i == key / 8) first = p[i >> 1][2 * (i & 1)], second = p[i >> 1][2 * (i & 1) + 1];
            first = __shfl_sync(~0u, first, line * 4 + (key % 8 >> 1)) >> 16 * (key & 1) & 0xffff;
            second = __shfl_sync(~0u, second, line * 4 + (key % 8 >> 1)) >> 16 * (key & 1) & 0xffff;
            add_infinite(part, values, key, 0, first, second);
          }
        }
        remove_infinite<BLOCK, THREADS>(values);
      }
      if constexpr (PANELS) start_products_with_values(part, p, values);
      if (visible) {
#pragma unroll
        for (int step = 0; step < BLOCK / 16; step++) {
          multiply(Stored{}, sums, p[step], ONES, ONES);
          if constexpr (!PANELS) multiply_values<COLUMN_TILES>(part, p[step], values + step * 16 * VALUE_PITCH);
        }
      }
      if constexpr (PANELS) await_products<0>();
      if (STAGES == 1) {
        __syncthreads();
        if (block < last) load(block + 1);
      }
    }
    merge_split();
  }

#pragma unroll
  for (int j = 0; j < 2; j++) {
    const i32 r = warp * 16 + line + 8 * j;
    const At at = at_row(r);
    if (r >= rows || !written[j]) continue;
    if (slice == 0 && (lane & 3) == 0) store_log_sum(w, at.batch, at.head, at.query, state[j]);
    Result* to = w.out + at.batch * w.out_batch + at.query * w.out_seq + at.head * w.out_head;
    const float factor = inverse(state[j].total);
#pragma unroll
    for (int i = 0; i < COLUMN_TILES; i++) {
      const i32 column = slice * SLICE + i * 8 + (lane & 3) * 2;
      if (column < VALUE_DIM) store(to + column, out[i][2 * j] * factor);
      if (column + 1 < VALUE_DIM) store(to + column + 1, out[i][2 * j + 1] * factor);
    }
  }
}
"""
