"""The instructions of GPUs that attention uses, as functions: copies to shared memory, matrices, products, exp2."""

from __future__ import annotations

SCALAR = r"""
INLINE float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INLINE void fetch_near(const void* at) { asm volatile("prefetch.global.L1 [%0];" ::"l"(at)); }
// Counts a block whose results, ordered before by a barrier, are visible to the one that counts last.
INLINE u32 arrive(u32* at) {
  u32 before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(at) : "memory");
  return before;
}
"""

TENSOR = r"""
INLINE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }
INLINE void copy_chunk(u32 to, const void* from, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0) : "memory");
}
INLINE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> INLINE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
INLINE void store_word(u32 to, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }
INLINE u32 load_word(u32 at) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}
INLINE void store_chunk(u32 to, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
INLINE uint4 load_chunk(u32 at) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory");
  return x;
}
INLINE void load_matrices(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
INLINE void load_transposed(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

// -- elements of 16 bits: two in a word --
INLINE u32 pair_of(bf16, float low, float high) {
  u32 x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
INLINE u32 pair_of(f16, float low, float high) {
  u32 x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
INLINE void multiply(bf16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
INLINE void multiply(f16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
"""

CLUSTERS = r"""
// All threads of a cluster that have not ended meet; they see what the others wrote to shared memory.
INLINE void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Shared memory of another block of the cluster.
INLINE float4 load_remote(u32 at, u32 block) {
  float4 x;
  asm volatile("{ .reg .u32 there; mapa.shared::cluster.u32 there, %4, %5;"
               " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at), "r"(block) : "memory");
  return x;
}
INLINE float2 load_remote_pair(u32 at, u32 block) {
  float2 x;
  asm volatile("{ .reg .u32 there; mapa.shared::cluster.u32 there, %2, %3;"
               " ld.shared::cluster.v2.f32 {%0, %1}, [there]; }"
               : "=f"(x.x), "=f"(x.y) : "r"(at), "r"(block) : "memory");
  return x;
}
"""
