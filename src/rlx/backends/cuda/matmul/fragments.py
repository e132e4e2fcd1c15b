"""CUDA C of loads and conversions of 16-bit factors, shared by rows and tiles."""

from __future__ import annotations

FRAGMENTS = r"""
template <class S> INLINE T rounded(S x) { T y; store(&y, widen(x)); return y; }
template <> INLINE T rounded<T>(T x) { return x; }
// Two numbers along k, rounded; those from `left` on are zero. Rare, so it is not part of the code that runs once.
template <class S> __device__ __noinline__ u32 two(const S* at, i64 along, i64 left) {
  const u32 low = left > 0 ? rounded(at[0]).bits : 0, high = left > 1 ? rounded(at[along]).bits : 0;
  return low | high << 16;
}
// Eight numbers along k, rounded; those from `left` on are zero. `whole`: contiguous, aligned, and none past the end.
template <class S> INLINE uint4 eight(const S* at, i64 along, i64 left, bool whole) {
  if (whole && left >= 8) {
    if (sizeof(S) == 2) return *(const uint4*)at;
    const float4 low = ((const float4*)at)[0], high = ((const float4*)at)[1];
    return make_uint4(pair(low.x, low.y), pair(low.z, low.w), pair(high.x, high.y), pair(high.z, high.w));
  }
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = two(at + 2 * i * along, along, left - 2 * i);
  return make_uint4(v[0], v[1], v[2], v[3]);
}
// A lane's numbers of 32 k for two mma steps: four pairs, eight k apart.
template <class S> INLINE uint4 four_pairs(const S* at, i64 along, i64 left) {
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = two(at + 8 * i * along, along, left - 8 * i);
  return make_uint4(v[0], v[1], v[2], v[3]);
}
"""
