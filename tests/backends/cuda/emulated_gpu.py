"""Runs matmul kernels without a GPU: their CUDA C compiled by the host's C++ compiler, a fiber per thread.

`mma` adds its 16 products one after the other in f32, slot by slot. A GPU rounds otherwise, but results of variants
that put products into the same slots are equal bit by bit here too. Copies in the background are done at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.backends.cuda.kernel_plan import KernelPlan, entry
from rlx.backends.cuda.matmul.common import multiplied
from rlx.backends.cuda.matmul.generator import MatmulGenerator
from rlx.backends.cuda.matmul.instructions import instructions
from rlx.backends.cuda.targets import SM_90, CudaTarget
from rlx.lir.kernels import MatmulKernel

COMPILER = shutil.which("g++")
HEADER = r"""
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>
typedef signed char i8; typedef unsigned char u8; typedef short i16; typedef unsigned short u16; typedef int i32;
typedef unsigned int u32; typedef long long i64; typedef unsigned long long u64;
struct bf16 { u16 bits; }; struct f16 { u16 bits; };
struct Fault { i32 launch; i32 code; };
struct float4 { float x, y, z, w; }; struct uint4 { u32 x, y, z, w; };
struct dim3_ { u32 x, y, z; };
#define INLINE inline
#define __global__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n)
static dim3_ threadIdx, blockIdx, gridDim, blockDim;
static u8* shared_memory;
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float as_float(u32 bits) { float y; memcpy(&y, &bits, 4); return y; }
static u32 as_bits(float x) { u32 y; memcpy(&y, &x, 4); return y; }
static float widen(bf16 x) { return as_float((u32)x.bits << 16); }
static float widen(f16 x) { _Float16 y; memcpy(&y, &x, 2); return (float)y; }
static float widen(float x) { return x; }
static double widen(double x) { return x; }
static bf16 to_bf16(float x) { u32 b = as_bits(x); return {(u16)((b + 0x7fff + (b >> 16 & 1)) >> 16)}; }
static f16 to_f16(float x) { _Float16 y = (_Float16)x; f16 z; memcpy(&z, &y, 2); return z; }
static void store(bf16* at, float x) { *at = to_bf16(x); }
static void store(f16* at, float x) { *at = to_f16(x); }
static void wait_for_inputs() {}
static void start_next() {}
static void report(Fault* fault, i32 launch, i32 code) { if (!fault->code) *fault = {launch, code}; }

// -- fibers: a thread runs until it waits for others --
struct Barrier { int arrived = 0; u64 phase = 0; };
static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static std::vector<char> done;
static int current;
static Barrier barriers[17], warps[64];
static void yield_() { swapcontext(&fibers[current], &scheduler); }
static void wait_at(Barrier& b, int count) {
  const u64 phase = b.phase;
  if (++b.arrived == count) { b.arrived = 0; b.phase++; return; }
  while (b.phase == phase) yield_();
}
static void __syncthreads() { wait_at(barriers[0], blockDim.x); }
static void __syncwarp() { wait_at(warps[threadIdx.x / 32], 32); }
INLINE void team_barrier(int number, int threads) { wait_at(barriers[number], threads); }
static u64 exchange[64][32][8];
static i64 __shfl_xor_sync(u32, i64 x, int mask) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  exchange[warp][lane][0] = (u64)x;
  __syncwarp();
  const i64 y = (i64)exchange[warp][lane ^ mask][0];
  __syncwarp();
  return y;
}
static void __threadfence() {}
static u32 atomicAdd(u32* at, u32 x) { const u32 old = *at; *at += x; return old; }
static void __stcg(float4* at, float4 x) { *at = x; }
static float4 __ldcg(const float4* at) { return *at; }

// -- instructions --
INLINE u32 address(const void* p) { return (u32)((u8*)p - shared_memory); }
static void aligned(const void* p) { if ((u64)p & 15) { fprintf(stderr, "unaligned access\n"); abort(); } }
INLINE uint4 load_once(const void* at) { aligned(at); return *(const uint4*)at; }
INLINE void copy16(u32 to, const void* from, int bytes) {
  u8* at = shared_memory + to;
  aligned(at); if (bytes) aligned(from);
  memset(at, 0, 16); memcpy(at, from, bytes);
}
INLINE void commit() {}
template <int N> INLINE void await() {}
INLINE uint4 read16(u32 at) { aligned(shared_memory + at); return *(const uint4*)(shared_memory + at); }
INLINE void write16(u32 at, uint4 v) { aligned(shared_memory + at); *(uint4*)(shared_memory + at) = v; }
static float half_of(u32 pair, int j, bf16*) { return as_float(j ? pair & 0xffff0000u : pair << 16); }
static float half_of(u32 pair, int j, f16*) { return widen(f16{(u16)(pair >> 16 * j)}); }
template <class T> static void mma_of(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  const u32 own[6] = {a0, a1, a2, a3, b0, b1};
  for (int i = 0; i < 6; i++) exchange[warp][lane][i] = own[i];
  __syncwarp();
  for (int e = 0; e < 4; e++) {
    const int column = 2 * c + (e & 1);
    for (int slot = 0; slot < 16; slot++) {
      const int holder = slot / 2 % 4, upper = slot / 8;
      const float x = half_of(exchange[warp][r * 4 + holder][2 * upper + (e >> 1)], slot & 1, (T*)0);
      const float y = half_of(exchange[warp][column * 4 + holder][4 + upper], slot & 1, (T*)0);
      sum[e] += x * y;
    }
  }
  __syncwarp();
}
static u32 pair_of(bf16 a, bf16 b) { return a.bits | (u32)b.bits << 16; }
static u32 pair_of(f16 a, f16 b) { return a.bits | (u32)b.bits << 16; }

static void (*body)(const void*);
static const void* arguments;
static void fiber() { body(arguments); done[current] = 1; swapcontext(&fibers[current], &scheduler); }
static void run(void (*kernel)(const void*), const void* words, const u32* grid, u32 threads, i64 shared) {
  static const size_t STACK = 96 << 10;
  std::vector<char> stacks(STACK * threads);
  shared_memory = (u8*)aligned_alloc(128, (shared + 127) / 128 * 128 + 128);
  memset(shared_memory, 0xff, shared);
  gridDim = {grid[0], grid[1], grid[2]}; blockDim = {threads, 1, 1};
  body = kernel; arguments = words; fibers.resize(threads); done.assign(threads, 0);
  for (u32 z = 0; z < grid[2]; z++) for (u32 y = 0; y < grid[1]; y++) for (u32 x = 0; x < grid[0]; x++) {
    for (u32 t = 0; t < threads; t++) {
      getcontext(&fibers[t]);
      fibers[t].uc_stack.ss_sp = &stacks[STACK * t]; fibers[t].uc_stack.ss_size = STACK; fibers[t].uc_link = &scheduler;
      makecontext(&fibers[t], fiber, 0);
      done[t] = 0;
    }
    for (Barrier& b : barriers) b = Barrier();
    for (Barrier& b : warps) b = Barrier();
    for (bool alive = true; alive;) {
      alive = false;
      for (u32 t = 0; t < threads; t++) if (!done[t]) {
        alive = true; current = t; blockIdx = {x, y, z}; threadIdx = {t, 0, 0};
        swapcontext(&scheduler, &fibers[t]);
      }
    }
  }
  free(shared_memory);
}
"""
OF_TYPE = r"""
INLINE void mma(float (&s)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { mma_of<T>(s, a0, a1, a2, a3, b0, b1); }
INLINE u32 pair(float a, float b) { T x, y; store(&x, a); store(&y, b); return pair_of(x, y); }
"""


class Emulated:
    """Variants of a kernel, compiled for the host on first use."""

    def __init__(self, kernel: MatmulKernel, folder: Path, target: CudaTarget = SM_90) -> None:
        self.kernel, self.folder, self.target = kernel, folder, target
        self.libraries: dict[str, Any] = {}

    def launch(self, plan: KernelPlan, words: Mapping[str, Any]) -> int:
        """Runs the passes of a plan; arrays give their addresses. Returns the fault code."""
        scratch = np.full(plan.scratch + 256, 0xFF, np.uint8)  # NaN: nothing reads what nobody wrote
        scratch = scratch[-scratch.ctypes.data % 256 :]
        scratch[: plan.zeroed] = 0
        fault = np.zeros(2, np.int32)
        values = [words[w].ctypes.data if isinstance(words[w], np.ndarray) else int(words[w]) for w in self.kernel.words]
        block = np.array([*values, scratch.ctypes.data, fault.ctypes.data, 0], np.int64)
        for one in plan.passes:
            grid = np.array(one.grid, np.uint32)
            self._library(one.variant).run_kernel(
                block.ctypes.data_as(ctypes.c_void_p), grid.ctypes.data_as(ctypes.c_void_p),
                ctypes.c_uint32(one.threads), ctypes.c_int64(one.shared),
            )  # fmt: skip
        assert not scratch[: plan.zeroed].any()
        return int(fault[1])

    def _library(self, variant: str) -> Any:
        if variant not in self.libraries:
            self.libraries[variant] = ctypes.CDLL(str(self._compile(variant)))
        return self.libraries[variant]

    def _compile(self, variant: str) -> Path:
        name = entry(self.kernel, variant)
        kind = multiplied(self.kernel)
        text = MatmulGenerator().source(self.kernel, variant, self.target)
        text = text.replace(instructions(kind), OF_TYPE if kind.size == 2 else "")
        text = text.replace("extern __shared__ __align__(128) u8 shared[];", "u8* shared = shared_memory;")
        assert "asm" not in text
        call = f"static void call(const void* w) {{ {name}_::{name}(*(const {name}_::Words*)w); }}"
        export = 'extern "C" void run_kernel(const void* w, const u32* g, u32 t, i64 s) { run(call, w, g, t, s); }'
        source = f"{HEADER}\n{text}\n{call}\n{export}\n"
        digest = hashlib.blake2b(source.encode(), digest_size=8).hexdigest()
        path = self.folder / f"{digest}.so"
        if not path.exists():
            (self.folder / f"{digest}.cpp").write_text(source)
            command = ["g++", "-O1", "-w", "-std=c++20", "-shared", "-fPIC", "-ffp-contract=off", "-o", path]
            subprocess.run([*map(str, command), str(self.folder / f"{digest}.cpp")], check=True, capture_output=True)
        return path


def strides(view: Any) -> Sequence[int]:
    """Strides of an array in elements."""
    return [s // view.itemsize for s in view.strides]
