// CUDA on a host: the threads of a block are fibers that take turns at barriers and shuffles. Compiled before `SCALARS`
// and generated kernels, in place of the part of the prelude that needs a GPU.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>
#include <sys/mman.h>

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
struct Fault { i32 launch; i32 code; };

#define ON_HOST
#define INLINE inline
#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict

// -- bits and conversions --
template <typename To, typename From> inline To same_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof(y));
  return y;
}
inline float __uint_as_float(u32 x) { return same_bits<float>(x); }
inline u32 __float_as_uint(float x) { return same_bits<u32>(x); }
inline double __longlong_as_double(i64 x) { return same_bits<double>(x); }
inline i64 __double_as_longlong(double x) { return same_bits<i64>(x); }
inline float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
inline float widen(f16 x) { return (float)same_bits<_Float16>(x.bits); }
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline bf16 to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  if (x != x) return {0x7fff};
  return {(u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline f16 to_f16(float x) { return {x != x ? (u16)0x7fff : same_bits<u16>((_Float16)x)}; }
template <typename T> inline T saturated(double x, double low, double high, T least, T most) {
  return x <= low ? least : x >= high ? most : (T)x;
}
const i32 I32_MIN = -2147483647 - 1, I32_MAX = 2147483647;
const i64 I64_MIN = -9223372036854775807ll - 1, I64_MAX = 9223372036854775807ll;
inline i32 __double2int_rz(double x) { return saturated<i32>(x, -2147483648.0, 2147483647.0, I32_MIN, I32_MAX); }
inline u32 __double2uint_rz(double x) { return saturated<u32>(x, 0.0, 4294967295.0, 0, ~0u); }
inline i64 __double2ll_rz(double x) { return saturated<i64>(x, -0x1p63, 0x1p63, I64_MIN, I64_MAX); }
inline i32 __float2int_rz(float x) { return __double2int_rz(x); }
inline u32 __float2uint_rz(float x) { return __double2uint_rz(x); }
inline i64 __float2ll_rz(float x) { return __double2ll_rz(x); }
inline i32 __float2int_rn(float x) { return x != x ? 0 : __double2int_rz(nearbyint((double)x)); }
inline i64 __double2ll_rn(double x) { return x != x ? I64_MIN : __double2ll_rz(nearbyint(x)); }
inline float __double2float_rz(double x) {
  const float near = (float)x;
  return std::fabs((double)near) > std::fabs(x) ? std::nextafterf(near, 0.0f) : near;
}
inline double normcdf(double x) { return 0.5 * std::erfc(-x * 0.70710678118654752440); }
inline float normcdff(float x) { return (float)normcdf((double)x); }

// -- blocks --
struct Index3 { u32 x, y, z; };
static Index3 threadIdx, blockIdx, gridDim, blockDim;
typedef void (*Kernel)(const void*);

// -- switching between stacks: a few instructions on x86-64, `swapcontext` with its system calls elsewhere --
#if defined(__x86_64__)
struct Context { void* stack; };
extern "C" void rlx_switch(void** from, void* to);
asm(R"(
.text
.globl rlx_switch
.hidden rlx_switch
.type rlx_switch, @function
rlx_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
inline void switch_to(Context& from, Context& to) { rlx_switch(&from.stack, to.stack); }
inline void prepare(Context& context, char* stack, size_t size, void (*body)()) {
  void** top = (void**)(stack + size - 64);  // after the return address is popped, the stack is as at a call
  top[0] = (void*)body;
  top[1] = 0;
  context.stack = top - 6;
}
#else
struct Context { ucontext_t context; };
inline void switch_to(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
inline void prepare(Context& context, char* stack, size_t size, void (*body)()) {
  getcontext(&context.context);
  context.context.uc_stack.ss_sp = stack;
  context.context.uc_stack.ss_size = size;
  context.context.uc_link = 0;
  makecontext(&context.context, body, 0);
}
#endif

namespace emulated {
enum State { READY, AT_BLOCK, AT_WARP, AT_TEAM, AT_PHASE, DONE };
struct Fiber {
  Context context;
  State state;
  u32 mask;   // of the threads that it waits with; of a team, its number and threads; of a phase, its barrier and parity
  u64 given, taken;  // the value of a shuffle: of this thread, and of all once the last one has come
};
const size_t STACK = 256 * 1024;
static std::vector<Fiber> fibers;
static char* stacks;
static Context scheduler;
static u32 current;
static Kernel kernel;
static const void* words;
static const char* problem;

inline void wait(State state, u32 mask) {
  Fiber& fiber = fibers[current];
  fiber.state = state;
  fiber.mask = mask;
  const u32 self = current;
  switch_to(fiber.context, scheduler);
  current = self;
}
inline void body() {
  kernel(words);
  fibers[current].state = DONE;
  switch_to(fibers[current].context, scheduler);
}
inline void resume(u32 number) {
  current = number;
  threadIdx = {number, 0, 0};
  fibers[number].state = READY;
  switch_to(scheduler, fibers[number].context);
}
inline bool is_over(u32 phase);
// Releases the threads that a barrier waited for; false if nobody can go on.
inline bool release(u32 threads) {
  bool moved = false, all = true, ended = false;
  for (u32 i = 0; i < threads; i++) {
    all = all && (fibers[i].state == AT_BLOCK || fibers[i].state == DONE);
    ended = ended || fibers[i].state == DONE;
  }
  for (u32 i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    if (fiber.state == AT_BLOCK && all) {
      if (ended) problem = "a thread ended before a barrier of its block";
      fiber.state = READY;
      moved = true;
    } else if (fiber.state == AT_WARP) {
      const u32 warp = i / 32 * 32;
      bool together = fiber.mask >> (i % 32) & 1;
      if (!together) problem = "a thread is not in the mask that it waits with";
      for (u32 lane = 0; lane < 32; lane++)
        if (fiber.mask >> lane & 1) {
          const u32 other = warp + lane;
          together = together && other < threads && fibers[other].state == AT_WARP && fibers[other].mask == fiber.mask;
        }
      if (!together) continue;
      for (u32 lane = 0; lane < 32; lane++)
        if (fiber.mask >> lane & 1) {
          fibers[warp + lane].state = READY;
          fibers[warp + lane].taken = fibers[warp + lane].given;
        }
      moved = true;
    }
  }
  for (u32 i = 0; i < threads; i++) {
    if (fibers[i].state == AT_PHASE && is_over(fibers[i].mask)) {
      fibers[i].state = READY;
      moved = true;
    }
    if (fibers[i].state != AT_TEAM) continue;
    const u32 team = fibers[i].mask;
    u32 arrived = 0;
    for (u32 j = 0; j < threads; j++) arrived += fibers[j].state == AT_TEAM && fibers[j].mask == team;
    if (arrived < team >> 8) continue;
    for (u32 j = 0; j < threads; j++)
      if (fibers[j].state == AT_TEAM && fibers[j].mask == team) fibers[j].state = READY;
    moved = true;
  }
  return moved;
}
inline void run_block(u32 threads, bool backwards) {
  if (fibers.size() < threads) fibers.resize(threads);
  if (!stacks) stacks = (char*)mmap(0, 1024 * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (u32 i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    prepare(fiber.context, stacks + i * STACK, STACK, body);
    fiber.state = READY;
  }
  while (!problem) {
    bool running = false;
    for (u32 k = 0; k < threads; k++) {
      const u32 i = backwards ? threads - 1 - k : k;
      if (fibers[i].state == READY) resume(i);
      running = running || fibers[i].state != DONE;
    }
    if (!running) return;
    if (!release(threads)) problem = "threads wait for each other";
  }
}
template <typename T> inline T exchanged(u32 mask, T x, u32 source) {
  Fiber& fiber = fibers[current];
  const u32 warp = current / 32 * 32;
  memcpy(&fiber.given, &x, sizeof(x));
  wait(AT_WARP, mask);
  if (!(mask >> source & 1)) problem = "a shuffle reads from a thread outside its mask";
  T y;
  memcpy(&y, &fibers[warp + source].taken, sizeof(y));
  return y;
}
}  // namespace emulated

static u8* shared_memory;  // dynamic
inline void team_barrier(int number, int threads) { emulated::wait(emulated::AT_TEAM, number | threads << 8); }
inline void __syncthreads() { emulated::wait(emulated::AT_BLOCK, 0); }
inline void __syncwarp(u32 mask = ~0u) { emulated::wait(emulated::AT_WARP, mask); }
template <typename T> inline T __shfl_xor_sync(u32 mask, T x, int step, int width = 32) {
  return emulated::exchanged(mask, x, (threadIdx.x % 32) ^ step);
}
template <typename T> inline T __shfl_sync(u32 mask, T x, int source, int width = 32) {
  return emulated::exchanged(mask, x, threadIdx.x % 32 / width * width + source);
}
inline void __threadfence() {}
inline u32 atomicAdd(u32* at, u32 x) {
  const u32 old = *at;
  *at += x;
  return old;
}
inline i32 atomicCAS(i32* at, i32 expected, i32 desired) {
  const i32 old = *at;
  if (old == expected) *at = desired;
  return old;
}
inline void wait_for_inputs() {}
inline void start_next() {}
inline void report(Fault* fault, i32 launch, i32 code) {
  if (atomicCAS(&fault->code, 0, code) == 0) fault->launch = launch;
}

// Runs a grid, block after block; returns what went wrong, or null. Without `meet`, threads never wait for each other.
extern "C" const char* rlx_run(Kernel kernel, const void* words, const u32* grid, u32 threads, u64 shared, bool meet,
                               bool backwards) {
  shared_memory = (u8*)aligned_alloc(128, (shared + 255) / 128 * 128);
  memset(shared_memory, 0xff, shared);
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {threads, 1, 1};
  emulated::kernel = kernel;
  emulated::words = words;
  emulated::problem = 0;
  const u64 blocks = (u64)grid[0] * grid[1] * grid[2];
  for (u64 k = 0; k < blocks && !emulated::problem; k++) {
    const u64 block = backwards ? blocks - 1 - k : k;
    blockIdx = {(u32)(block % grid[0]), (u32)(block / grid[0] % grid[1]), (u32)(block / grid[0] / grid[1])};
    if (meet) {
      emulated::run_block(threads, backwards);
      continue;
    }
    for (u32 thread = 0; thread < threads; thread++) {
      threadIdx = {backwards ? threads - 1 - thread : thread, 0, 0};
      kernel(words);
    }
  }
  free(shared_memory);
  return emulated::problem;
}

// -- instructions of matmul kernels: copies in the background are done at once --
struct float4 { float x, y, z, w; };
struct uint4 { u32 x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline void __stcg(float4* at, float4 x) { *at = x; }
inline float4 __ldcg(const float4* at) { return *at; }
inline void store(bf16* at, float x) { *at = to_bf16(x); }
inline void store(f16* at, float x) { *at = to_f16(x); }
inline u8* aligned(const void* at) {
  if ((u64)at & 15) emulated::problem = "an access of 16 bytes is not aligned";
  return (u8*)at;
}
inline void fetch_near(const void*) {}
inline void fetch(const void* at, i64 bytes) {
  for (i64 i = 128 * (i64)threadIdx.x; i < bytes; i += 128 * (i64)blockDim.x) (void)*((const volatile u8*)at + i);
}
inline u32 address(const void* at) { return (u32)((u8*)at - shared_memory); }
inline uint4 load_once(const void* at) { return *(const uint4*)aligned(at); }
inline void copy16(u32 to, const void* from, int bytes) {
  u8* at = aligned(shared_memory + to);
  memset(at, 0, 16);
  if (bytes) memcpy(at, aligned(from), bytes);
}
inline void commit() {}
template <int N> inline void await() {}
struct float2 { float x, y; };
struct uint2 { u32 x, y; };
inline uint2 read8(u32 at) { return *(const uint2*)(shared_memory + at); }
inline uint4 read16(u32 at) { return *(const uint4*)aligned(shared_memory + at); }
inline uint4 read_matrices(u32 at) {
  const u32 lane = threadIdx.x % 32;
  u32 v[4];
  aligned(shared_memory + at);
  for (int m = 0; m < 4; m++) memcpy(v + m, shared_memory + __shfl_sync(~0u, at, m * 8 + lane / 4) + lane % 4 * 4, 4);
  return {v[0], v[1], v[2], v[3]};
}
inline void write16(u32 at, uint4 v) { *(uint4*)aligned(shared_memory + at) = v; }
inline float half_of(u32 pair, int j, bf16*) { return widen(bf16{(u16)(pair >> 16 * j)}); }
inline float half_of(u32 pair, int j, f16*) { return widen(f16{(u16)(pair >> 16 * j)}); }
// Adds products in f64, where order does not matter, or one after the other in f32, slot by slot. A GPU rounds otherwise,
// but kernels that put the same products into the same steps, or slots, give equal bits here too.
template <class T, bool IN_ORDER> inline void mma_of(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  static u32 held[32][32][6];
  u32 (&warp)[32][6] = held[threadIdx.x / 32];
  const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  const u32 own[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(warp[lane], own, sizeof(own));
  __syncwarp();
  for (int e = 0; e < 4; e++) {
    double exact = sum[e];
    for (int slot = 0; slot < 16; slot++) {
      const int holder = slot / 2 % 4, upper = slot / 8;
      const float x = half_of(warp[r * 4 + holder][2 * upper + (e >> 1)], slot & 1, (T*)0);
      const float y = half_of(warp[(2 * c + (e & 1)) * 4 + holder][4 + upper], slot & 1, (T*)0);
      exact += (double)x * y;
      sum[e] += x * y;
    }
    if (!IN_ORDER) sum[e] = (float)exact;
  }
  __syncwarp();
}
template <class T> inline u32 pair_of(float a, float b) {
  T x, y;
  store(&x, a);
  store(&y, b);
  return x.bits | (u32)y.bits << 16;
}

// -- groups of warps: products are done at once, barriers in shared memory are real --
struct PhaseBarrier { u32 count : 15, left : 15, parity : 1; };   // parity of the phase that is not over
static_assert(sizeof(PhaseBarrier) <= 8);
inline PhaseBarrier& barrier_at(u32 at) { return *(PhaseBarrier*)(shared_memory + at); }
inline void start_barrier(u32 at, int count) { barrier_at(at) = {(u32)count, (u32)count, 0}; }
inline void arrive(u32 at) {
  PhaseBarrier& barrier = barrier_at(at);
  if (--barrier.left == 0) barrier.left = barrier.count, barrier.parity ^= 1;
}
inline void arrive_after_copies(u32 at) { arrive(at); }
inline bool emulated::is_over(u32 phase) { return barrier_at(phase >> 1).parity != (phase & 1); }
inline void wait_for_phase(u32 at, u32 parity) {
  if (!emulated::is_over(at << 1 | parity)) emulated::wait(emulated::AT_PHASE, at << 1 | parity);
}
inline void see_copies() {}
inline void begin_products() {}
inline void end_products() {}
template <int N> inline void await_products() {}
inline i64 unknown(i64 x) { return x; }
template <int N> inline void give_registers() {}
template <int N> inline void take_registers() {}
inline u64 matrix_at(u32 at, u32 across = 16) {
  if (at % 1024) emulated::problem = "rows of a product begin at no multiple of 1,024 bytes";
  return at / 16 | (u64)across << 32;
}
// Like `mma_of`, 64 rows by 2 N columns; the pieces of a row are at piece ^ row % 8.
template <class T, int N> inline void multiply_group(float (&sums)[N], u64 a, u64 b, int keep) {
  auto at = [](u64 matrix, int row, int k) {
    const u32 place = (u32)matrix * 16 + row * 128 + 2 * k;
    return widen(*(const T*)(shared_memory + (place ^ (place >> 7 & 7) << 4)));
  };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  for (int i = 0; i < N; i++) {
    const int row = 16 * warp + lane / 4 + 8 * (i >> 1 & 1), column = 8 * (i >> 2) + 2 * (lane & 3) + (i & 1);
    double sum = keep ? sums[i] : 0;
    for (int k = 0; k < 16; k++) sum += (double)at(a, row, k) * at(b, column, k);
    sums[i] = (float)sum;
  }
}
