"""CUDA C of loads and conversions of 16-bit factors, shared by rows and tiles."""

from __future__ import annotations

FRAGMENTS = r"""
template <class S> INLINE T rounded(S x) { T y; store(&y, widen(x)); return y; }
template <> INLINE T rounded<T>(T x) { return x; }
// Eight numbers along k, rounded; those from `left` on are zero. `whole`: contiguous, aligned, and none past the end.
template <class S> INLINE uint4 eight(const S* at, i64 along, i64 left, bool whole) {
  if (whole && left >= 8) {
    if (sizeof(S) == 2) return *(const uint4*)at;
    const float4 low = ((const float4*)at)[0], high = ((const float4*)at)[1];
    return make_uint4(pair(low.x, low.y), pair(low.z, low.w), pair(high.x, high.y), pair(high.z, high.w));
  }
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 low = 2 * i < left ? rounded(at[2 * i * along]).bits : 0;
    const u32 high = 2 * i + 1 < left ? rounded(at[(2 * i + 1) * along]).bits : 0;
    v[i] = low | high << 16;
  }
  return make_uint4(v[0], v[1], v[2], v[3]);
}
"""
