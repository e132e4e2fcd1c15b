"""PTX that the matmul kernels use, as CUDA C functions."""

from __future__ import annotations

from rlx.dtypes import BF16, DType

COMMON = r"""
INLINE void fetch_near(const void* at) { asm volatile("prefetch.global.L1 [%0];" :: "l"(at)); }
"""

TENSOR_CORES = r"""
// sum += a b: 16 rows of a, 8 columns of b, 16 products deep.
INLINE void mma(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Two numbers, rounded; the first is in the low half.
INLINE u32 pair(float first, float second) {
  u32 v;
  asm("cvt.rn.TYPEx2.f32 %0, %1, %2;" : "=r"(v) : "f"(second), "f"(first));
  return v;
}
// 16 bytes that are read once.
INLINE uint4 load_once(const void* at) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}
// Shared memory by address. `copy16` copies that many bytes in the background and sets the rest of 16 to zero.
INLINE u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
INLINE void copy16(u32 to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
}
INLINE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> INLINE void await() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
INLINE uint2 read8(u32 at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
  return v;
}
INLINE uint4 read16(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
// Four matrices of 8 rows and 16 bytes, whose rows are at the addresses of lanes 8 i to 8 i + 7: a lane gets of each
// the bytes 4 (lane % 4) of row lane / 4.
INLINE uint4 read_matrices(u32 at) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
INLINE void write16(u32 at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" :: "r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
"""


def instructions(kind: DType) -> str:
    """Functions for factors of a type."""
    return COMMON + (TENSOR_CORES.replace("TYPE", "bf16" if kind is BF16 else "f16") if kind.size == 2 else "")


WARPGROUPS = r"""
// Barriers in shared memory: a phase ends when all have arrived. The first phase is 0, the next 1, then 0.
INLINE void start_barrier(u32 at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at), "r"(count) : "memory");
}
INLINE void arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at) : "memory"); }
// Arrives when the copies that this thread has started are over.
INLINE void arrive_after_copies(u32 at) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(at) : "memory");
}
// Waits until a phase of this parity is over; the one before the first has parity 1.
INLINE void wait_for_phase(u32 at, u32 parity) {
  asm volatile("{\n.reg .pred over;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
      "@over bra OVER;\nbra AGAIN;\nOVER:\n}" :: "r"(at), "r"(parity) : "memory");
}
// Lets products see what has been copied.
INLINE void see_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Products of a group of four warps run in the background, from `begin_products` to `await_products`.
INLINE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> INLINE void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}
// Describes rows of 128 bytes in shared memory, whose pieces of 16 bytes are at piece ^ row % 8. `across`: bytes from
// 64 columns to the next 64, where products add up over rows.
INLINE u64 matrix_at(u32 at, u32 across = 16) {
  return (u64)((at & 0x3ffff) >> 4) | (u64)(across >> 4) << 16 | 64ull << 32 | 1ull << 62;
}
// The same number, of which the compiler does not know that: it computes addresses again and keeps none in registers.
INLINE i64 unknown(i64 x) {
  asm volatile("" : "+l"(x));
  return x;
}
template <int N> INLINE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N)); }
template <int N> INLINE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N)); }
"""


def multiply_group(kind: DType, columns: int) -> str:
    """A function that multiplies 64 rows of a by `columns` rows of b, 16 deep."""
    count, name = columns // 2, "bf16" if kind is BF16 else "f16"
    sums, outputs = ",".join(f"%{i}" for i in range(count)), ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    return f"""
// sums = a b, plus the sums before if they are kept.
INLINE void multiply(float (&sums)[{count}], u64 a, u64 b, int keep) {{
  asm volatile("{{\\n.reg .pred keep;\\nsetp.ne.b32 keep, %{count + 2}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{name}.{name} "
      "{{{sums}}}, %{count}, %{count + 1}, keep, 1, 1, 0, 0;\\n}}"
      : {outputs} : "l"(a), "l"(b), "r"(keep));
}}
"""


def multiply_registers(kind: DType, columns: int, *, name: str, transposed: bool) -> str:
    """A function that multiplies 64 rows of a, in the registers of four warps, by rows or columns of b, 16 deep."""
    element, tiles = "bf16" if kind is BF16 else "f16", columns // 8
    count = columns // 2
    sums = ",".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(sums[{i // 4}][{i % 4}])' for i in range(count))
    a = ",".join(f"%{count + i}" for i in range(4))
    return f"""
INLINE void {name}(float (&sums)[{tiles}][4], const u32 (&a)[4], u64 b, int keep) {{
  asm volatile("{{\\n.reg .pred keep;\\nsetp.ne.b32 keep, %{count + 5}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element}.{element} "
      "{{{sums}}}, {{{a}}}, %{count + 4}, keep, 1, 1, {int(transposed)};\\n}}"
      : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}}
"""
