// What attention kernels need besides `emulator.hpp`: more collectives, and the functions of `attention/instructions.py`. A product of matrices adds 16 products one after the other.
#define __forceinline__ inline
#define __noinline__
#define __align__(n) __attribute__((aligned(n)))
struct double2 { double x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
template <typename T> inline T __ldcg(const T* at) { return *at; }
template <typename A, typename B> inline auto min(A a, B b) -> decltype(a + b) { return a < b ? a : b; }
template <typename A, typename B> inline auto max(A a, B b) -> decltype(a + b) { return a > b ? a : b; }
inline float __int_as_float(u32 x) { return __uint_as_float(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline void store(float* at, float x) { *at = x; }
inline void store(double* at, double x) { *at = x; }

// -- collectives --
template <typename T> inline T __shfl_up_sync(u32 mask, T x, u32 step) {
  const u32 lane = threadIdx.x % 32;
  return emulated::exchanged(mask, x, lane >= step ? lane - step : lane);
}
inline i32 __reduce_max_sync(u32 mask, i32 x) {
  for (int step = 16; step; step /= 2) x = max(x, __shfl_xor_sync(mask, x, step));
  return x;
}
inline i32 __reduce_min_sync(u32 mask, i32 x) {
  for (int step = 16; step; step /= 2) x = min(x, __shfl_xor_sync(mask, x, step));
  return x;
}
inline u32 __ballot_sync(u32 mask, bool x) {
  u32 lanes = 0;
  for (u32 i = 0; i < 32; i++) lanes |= (u32)__shfl_sync(mask, (i32)x, i) << i;
  return lanes;
}
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline bool __any_sync(u32 mask, bool x) { return __reduce_max_sync(mask, x); }
inline int __syncthreads_or(int x) {
  static int any;
  __syncthreads();
  if (threadIdx.x == 0) any = 0;
  __syncthreads();
  if (x) any = 1;
  __syncthreads();
  return any;
}

// -- instructions --
inline float exp2_fast(float x) {
  const float y = std::exp2(x);
  return y < 1.17549435e-38f ? 0.0f : y;
}
inline u32 arrive(u32* at) { return atomicAdd(at, 1u); }
inline u32 shared_address(const void* at) { return (u32)((const u8*)at - shared_memory); }
inline void copy_chunk(u32 to, const void* from, bool present) {
  if ((u64)from % 16 || to % 16) emulated::problem = "a copy that is not aligned";
  else if (present) memcpy(shared_memory + to, from, 16);
  else memset(shared_memory + to, 0, 16);
}
inline void commit_copies() {}
template <int PENDING> inline void wait_for_copies() {}
inline void store_word(u32 to, u32 x) { memcpy(shared_memory + to, &x, 4); }
inline u32 load_word(u32 at) {
  u32 x;
  memcpy(&x, shared_memory + at, 4);
  return x;
}
inline void store_chunk(u32 to, uint4 x) { memcpy(shared_memory + to, &x, 16); }
inline uint4 load_chunk(u32 at) {
  uint4 x;
  memcpy(&x, shared_memory + at, 16);
  return x;
}
inline void load_matrices(u32 (&r)[4], u32 at) {
  const u32 lane = threadIdx.x % 32;
  for (int m = 0; m < 4; m++) r[m] = load_word(__shfl_sync(~0u, at, m * 8 + lane / 4) + lane % 4 * 4);
}
inline void load_transposed(u32 (&r)[4], u32 at) {
  const u32 lane = threadIdx.x % 32;
  for (int m = 0; m < 4; m++) {
    r[m] = 0;
    for (int e = 0; e < 2; e++) {
      const u32 row = __shfl_sync(~0u, at, m * 8 + lane % 4 * 2 + e);
      u16 x;
      memcpy(&x, shared_memory + row + lane / 4 * 2, 2);
      r[m] |= (u32)x << 16 * e;
    }
  }
}
inline u32 pair_of(bf16, float low, float high) { return to_bf16(low).bits | (u32)to_bf16(high).bits << 16; }
inline u32 pair_of(f16, float low, float high) { return to_f16(low).bits | (u32)to_f16(high).bits << 16; }
template <typename T> inline void multiply(T, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  static u32 operands[32][32][6];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) operands[warp][lane][i] = a[i];
  operands[warp][lane][4] = b0;
  operands[warp][lane][5] = b1;
  __syncwarp();
  for (int e = 0; e < 4; e++)
    for (int k = 0; k < 16; k++) {
      const u32 x = operands[warp][lane / 4 * 4 + k / 2 % 4][e / 2 + k / 8 * 2];
      const u32 y = operands[warp][(lane % 4 * 2 + e % 2) * 4 + k / 2 % 4][4 + k / 8];
      c[e] = std::fmaf(widen(T{(u16)(x >> 16 * (k & 1))}), widen(T{(u16)(y >> 16 * (k & 1))}), c[e]);
    }
  __syncwarp();
}
// Products of four warps, whose operand a is in registers: by rows of b, or by its columns, of which 64 are a panel.
template <typename T, bool COLUMNS, int N>
inline void multiply_four_warps(float (&sums)[N][4], const u32 (&a)[4], u64 b, int keep) {
  static u32 operands[32][32][4];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  memcpy(operands[warp][lane], a, sizeof(a));
  __syncwarp();
  for (int j = 0; j < N; j++)
    for (int e = 0; e < 4; e++) {
      float sum = keep ? sums[j][e] : 0;
      const u32 n = 8 * j + lane % 4 * 2 + e % 2;
      for (u32 k = 0; k < 16; k++) {
        const u32 x = operands[warp][lane / 4 * 4 + k / 2 % 4][e / 2 + k / 8 * 2];
        const u32 at = (u32)b * 16 + (COLUMNS ? n / 64 * (u32)(b >> 32) + k * 128 + n % 64 * 2 : n * 128 + k * 2);
        const T y = *(const T*)(shared_memory + (at ^ (at >> 7 & 7) << 4));
        sum = std::fmaf(widen(T{(u16)(x >> 16 * (k & 1))}), widen(y), sum);
      }
      sums[j][e] = sum;
    }
  __syncwarp();
}

// -- clusters --
inline float4 load_remote(u32 at, u32 block) { return remote<float4>(at, block); }
inline float2 load_remote_pair(u32 at, u32 block) { return remote<float2>(at, block); }
