"""CUDA C of the scalar operations that generated loops call: integers that wrap, saturating casts, packs, reductions.

Part of `PRELUDE`. Where PTX has an instruction that C++ lacks, a plain C++ version stands beside it, so that the same
source also compiles on a host (`ON_HOST`).
"""

from __future__ import annotations

SCALARS = r"""
#ifndef ON_HOST
#pragma nv_diag_suppress 177, 186  // generated code has unused names, and compares unsigned integers with 0
#endif

// -- integers: quotients round down (`floor_*`) or have non-negative operands; a zero divisor gives 0 --
INLINE i32 quot(i32 a, i32 b) { return b == 0 ? 0 : (i32)((u32)a / (u32)b); }
INLINE i32 rem(i32 a, i32 b) { return b == 0 ? 0 : (i32)((u32)a % (u32)b); }
INLINE i64 quot(i64 a, i64 b) {
  if (b == 0) return 0;
  return ((u64)a | (u64)b) >> 32 ? (i64)((u64)a / (u64)b) : (i64)((u32)a / (u32)b);
}
INLINE i64 rem(i64 a, i64 b) {
  if (b == 0) return 0;
  return ((u64)a | (u64)b) >> 32 ? (i64)((u64)a % (u64)b) : (i64)((u32)a % (u32)b);
}
template <typename T> INLINE T floor_quotient(T a, T b) {
  if (b == 0) return 0;
  if ((T)-1 > (T)0) return (T)(a / b);
  if (b == (T)-1) return (T)(0 - (u64)a);
  const T quotient = (T)(a / b), rest = (T)(a % b);
  return rest != 0 && ((rest < 0) != (b < 0)) ? (T)(quotient - 1) : quotient;
}
template <typename T> INLINE T floor_rest(T a, T b) {
  if (b == 0) return 0;
  if ((T)-1 > (T)0) return (T)(a % b);
  if (b == (T)-1) return 0;
  const T rest = (T)(a % b);
  return rest != 0 && ((rest < 0) != (b < 0)) ? (T)(rest + b) : rest;
}
template <typename T> INLINE T magnitude(T x) { return x < (T)0 ? (T)(0 - (u64)x) : x; }
INLINE float magnitude(float x) { return fabsf(x); }
INLINE double magnitude(double x) { return fabs(x); }

// -- the larger and the smaller of two values; NaN if one is --
template <typename T> INLINE T larger(T a, T b) { return a > b ? a : b; }
template <typename T> INLINE T smaller(T a, T b) { return a < b ? a : b; }
INLINE double larger(double a, double b) { return a != a ? a : a > b ? a : b; }
INLINE double smaller(double a, double b) { return a != a ? a : a < b ? a : b; }
#ifndef ON_HOST
INLINE float larger(float a, float b) { float c; asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c; }
INLINE float smaller(float a, float b) { float c; asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c; }
INLINE i32 dot_bytes(i32 total, i32 x, i32 y) {
  i32 c; asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(c) : "r"(x), "r"(y), "r"(total)); return c;
}
#else
INLINE float larger(float a, float b) { return a != a ? a : a > b ? a : b; }
INLINE float smaller(float a, float b) { return a != a ? a : a < b ? a : b; }
INLINE i32 dot_bytes(i32 total, i32 x, i32 y) {
  for (int k = 0; k < 4; k++) total += (i32)((u32)x >> 8 * k & 255) * (i32)(i8)((u32)y >> 8 * k);
  return total;
}
#endif

// -- casts: floats to integers truncate and saturate, NaN becomes 0; f64 to 16 bits rounds once --
INLINE i32 float_to_i32(float x) { return x != x ? 0 : __float2int_rz(x); }
INLINE i32 float_to_i32(double x) { return x != x ? 0 : __double2int_rz(x); }
INLINE u32 float_to_u32(float x) { return x != x ? 0 : __float2uint_rz(x); }
INLINE u32 float_to_u32(double x) { return x != x ? 0 : __double2uint_rz(x); }
INLINE i64 float_to_i64(float x) { return x != x ? 0 : __float2ll_rz(x); }
INLINE i64 float_to_i64(double x) { return x != x ? 0 : __double2ll_rz(x); }
INLINE i32 between(i32 x, i32 low, i32 high) { return x < low ? low : x > high ? high : x; }
template <typename T> INLINE i16 float_to_i16(T x) { return (i16)between(float_to_i32(x), -32768, 32767); }
template <typename T> INLINE i8 float_to_i8(T x) { return (i8)between(float_to_i32(x), -128, 127); }
template <typename T> INLINE u8 float_to_u8(T x) { return (u8)between(float_to_i32(x), 0, 255); }
INLINE float to_odd(double x) {
  const float near = __double2float_rz(x);
  return (double)near == x || x != x ? near : __uint_as_float(__float_as_uint(near) | 1);
}

// -- bits --
INLINE i32 order_key(float x) {
  const i32 raw = (i32)__float_as_uint(x + 0.0f);
  return x != x ? 0x7fffffff : raw ^ (raw >> 31 & 0x7fffffff);
}
INLINE i64 order_key(double x) {
  const i64 raw = __double_as_longlong(x + 0.0);
  return x != x ? 0x7fffffffffffffffll : raw ^ (raw >> 63 & 0x7fffffffffffffffll);
}
INLINE i32 nearest(float x) { return __float2int_rn(x); }
INLINE i64 nearest(double x) { return __double2ll_rn(x); }

// -- packs: neighbouring elements in accesses of up to 16 bytes where the address allows --
__device__ constexpr int pack_alignment(int bytes) { return bytes < 16 ? bytes : 16; }
template <int N, typename T> struct alignas(pack_alignment(N * (int)sizeof(T))) Pack { T v[N]; };
template <int N, typename T> INLINE bool is_aligned(const T* at) {
  return ((u64)at & (pack_alignment(N * (int)sizeof(T)) - 1)) == 0;
}
template <int N, typename T> INLINE Pack<N, T> load_pack(const T* at) {
  if (is_aligned<N, T>(at)) return *(const Pack<N, T>*)at;
  Pack<N, T> pack;
#pragma unroll
  for (int i = 0; i < N; i++) pack.v[i] = at[i];
  return pack;
}
template <int N, typename T> INLINE void store_pack(T* at, const Pack<N, T>& pack) {
  if (is_aligned<N, T>(at)) { *(Pack<N, T>*)at = pack; return; }
#pragma unroll
  for (int i = 0; i < N; i++) at[i] = pack.v[i];
}

// -- reductions over the threads of a unit, in a fixed order; all threads get the same bits --
struct SumOf {
  static INLINE float of(float a, float b) { return a + b; }
  static INLINE double of(double a, double b) { return a + b; }
  template <typename T> static INLINE T of(T a, T b) { return (T)((u64)a + (u64)b); }
};
struct ProdOf {
  static INLINE float of(float a, float b) { return a * b; }
  static INLINE double of(double a, double b) { return a * b; }
  template <typename T> static INLINE T of(T a, T b) { return (T)((u64)a * (u64)b); }
};
struct MaxOf { template <typename T> static INLINE T of(T a, T b) { return larger(a, b); } };
struct MinOf { template <typename T> static INLINE T of(T a, T b) { return smaller(a, b); } };
INLINE float shuffled(float x) { return x; }
INLINE double shuffled(double x) { return x; }
INLINE i64 shuffled(i64 x) { return x; }
template <typename T> INLINE i32 shuffled(T x) { return (i32)x; }
template <int LANES, typename Op, typename T> INLINE T reduce_warp(T x, u32 mask) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) x = Op::of(x, (T)__shfl_xor_sync(mask, shuffled(x), step, LANES));
  return (T)__shfl_sync(mask, shuffled(x), 0, LANES);
}
// Writes the partial result of the warp of `thread` to `slots`.
template <typename Op, typename T> INLINE void reduce_to_slots(T x, u64* slots, int thread) {
  x = reduce_warp<32, Op>(x, ~0u);
  if (thread % 32 == 0) *(T*)(slots + thread / 32) = x;
}
template <int LANES, typename Op, typename T> INLINE T reduce_slots(const u64* slots) {
  return reduce_warp<LANES / 32, Op>(*(const T*)(slots + threadIdx.x % (LANES / 32)), ~0u);
}
"""
