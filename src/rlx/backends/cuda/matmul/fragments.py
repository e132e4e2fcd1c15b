"""CUDA C of loads, conversions and mma steps for 16-bit factors, shared by rows and tiles."""

from __future__ import annotations

from rlx.backends.cuda.loops.operations import MEMORY
from rlx.backends.cuda.matmul.common import multiplied
from rlx.dtypes import BF16
from rlx.lir.kernels import OUT_OF_RANGE, MatmulKernel

FRAGMENTS = r"""
INLINE void mma(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm(MMA " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// 16 bytes that are read once.
INLINE uint4 load_once(const void* at) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}
// Two numbers, rounded; the first is in the low half.
INLINE u32 pair(float first, float second) {
  u32 v;
  asm(PAIR " %0, %1, %2;" : "=r"(v) : "f"(second), "f"(first));
  return v;
}
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
INLINE void team_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(number), "r"(threads) : "memory");
}
"""


def fragment_types(kernel: MatmulKernel) -> str:
    """The factors' type, the instructions for it, and the matrix that a row selects."""
    kind = multiplied(kernel)
    name = "bf16" if kind is BF16 else "f16"
    group = f"""
  const i64 group = (i64)w.index[row];
  if (group >= 0 && group < w.groups) return group;
  report(w.fault, (i32)w.launch, {OUT_OF_RANGE});"""
    return f"""
typedef {MEMORY[kind.name]} T;
INLINE i64 group_of(const Words& w, i64 row) {{{group if kernel.grouped == "rows" else ""}
  return 0;
}}
#undef MMA
#undef PAIR
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32"
#define PAIR "cvt.rn.{name}x2.f32"
"""
