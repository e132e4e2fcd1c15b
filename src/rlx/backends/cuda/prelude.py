"""CUDA C shared by all generated kernels: types, conversions, faults, programmatic dependent launch.

Header-free, so that NVRTC needs no include folders. Host code reads none of it.
"""

from __future__ import annotations

from rlx.backends.cuda.scalars import SCALARS

BASE = r"""
typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
struct bf16 { u16 bits; };
struct f16 { u16 bits; };

// A kernel's first fault: the number of its launch, and the code (`lir/kernels.py`).
struct Fault { i32 launch; i32 code; };

#define INLINE __device__ __forceinline__

// -- 16-bit floats: widened on load, rounded to nearest even on store --
INLINE float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
INLINE float widen(f16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
INLINE float widen(float x) { return x; }
INLINE double widen(double x) { return x; }
INLINE bf16 to_bf16(float x) { bf16 y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
INLINE f16 to_f16(float x) { f16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
INLINE void store(bf16* at, float x) { *at = to_bf16(x); }
INLINE void store(f16* at, float x) { *at = to_f16(x); }
INLINE void store(float* at, float x) { *at = x; }
INLINE void store(double* at, double x) { *at = x; }

// -- programmatic dependent launch: a kernel may start before the one before it has ended --
// Call `wait_for_inputs` before reading what an earlier launch wrote, or writing anything; weights may be read before.
INLINE void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
INLINE void start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Some of the threads of a block meet; barrier 0 is that of all threads.
INLINE void team_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(number), "r"(threads) : "memory");
}
// Asks for memory in the L2 cache: the threads of a block share the lines.
INLINE void fetch(const void* at, i64 bytes) {
  for (i64 i = 128 * (i64)threadIdx.x; i < bytes; i += 128 * (i64)blockDim.x)
    asm volatile("prefetch.global.L2 [%0];" :: "l"((const u8*)at + i));
}

__device__ __noinline__ void report(Fault* fault, i32 launch, i32 code) {
  if (atomicCAS(&fault->code, 0, code) == 0) fault->launch = launch;
}
"""

PRELUDE = BASE + SCALARS
