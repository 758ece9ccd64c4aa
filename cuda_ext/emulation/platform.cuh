// Enough of CUDA's language to run the kernels on a CPU, one block after another, every thread a coroutine.
//
// For tests only: it finds wrong arithmetic, wrong indices and, by running the threads of a block in another order at
// every launch, sometimes warp by warp as far as each gets alone, results that depend on a missing barrier. It does
// not measure speed.
#pragma once

#include "checks.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulation {

constexpr int kWarp = 32;
constexpr size_t kStack = 128 << 10;

struct Barrier {
  int arrived = 0, members = 0;
  unsigned rounds = 0;
};

// Sixteen bytes on their way to shared memory, zeros if `from` is null.
struct Copy {
  void* to;
  const void* from;

  void arrive() const {
    if (from) {
      std::memcpy(to, from, 16);
    } else {
      std::memset(to, 0, 16);
    }
  }
};

struct Fiber {
  void* stack_pointer = nullptr;
  std::vector<char> stack;
  bool done = false, vote = false;
  const Barrier* barrier = nullptr;  // the barrier that it waits at, and since which round
  unsigned round = 0;
  std::vector<Copy> copies;              // asynchronous ones of no group yet
  std::deque<std::vector<Copy>> groups;  // not waited for
  std::vector<Copy> waited;              // they arrive at the next barrier

  bool still_copies() const {
    const auto some = [](const std::vector<Copy>& group) { return !group.empty(); };
    return some(copies) || some(waited) || std::any_of(groups.begin(), groups.end(), some);
  }
  void land() {
    for (const Copy& copy : waited) copy.arrive();
    waited.clear();
  }
  bool can_run() const { return !done && (!barrier || barrier->rounds != round); }
};

struct State {
  std::vector<Fiber> fibers;
  void* scheduler = nullptr;
  unsigned current = 0, launches = 0;
  Barrier block;
  std::vector<Barrier> warps;
  std::vector<uint32_t> mail;  // words that the lanes of a warp exchange
  void (*body)(const void*) = nullptr;
  const void* argument = nullptr;
};
inline State state;
inline dim3 thread_index, block_index, block_size, grid_size;

extern "C" void sparse_rl_switch(void** save, void* load);
asm(R"(
.text
.weak sparse_rl_switch
sparse_rl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

inline void yield() { sparse_rl_switch(&state.fibers[state.current].stack_pointer, state.scheduler); }

inline void release(Barrier& barrier) {
  if (barrier.arrived > 0 && barrier.arrived >= barrier.members) barrier.arrived = 0, ++barrier.rounds;
}

inline void wait(Barrier& barrier) {
  Fiber& fiber = state.fibers[state.current];
  fiber.barrier = &barrier;
  fiber.round = barrier.rounds;
  ++barrier.arrived;
  release(barrier);
  if (!fiber.can_run()) yield();
  fiber.barrier = nullptr;
}

inline Barrier& warp() { return state.warps[state.current / kWarp]; }

inline void fail(const char* reason) {
  std::fprintf(stderr, "emulation: %s\n", reason);
  std::abort();
}

inline void enter() {
  state.body(state.argument);
  if (state.fibers[state.current].still_copies()) fail("a thread ends before its asynchronous copies have arrived");
  state.fibers[state.current].done = true;
  --warp().members, --state.block.members;
  release(warp());
  release(state.block);
  yield();
  std::terminate();
}

inline void start(Fiber& fiber) {
  fiber.stack.resize(kStack);
  fiber.done = false;
  fiber.barrier = nullptr;
  fiber.copies.clear(), fiber.groups.clear(), fiber.waited.clear();
  auto top = reinterpret_cast<uintptr_t>(fiber.stack.data() + kStack) & ~uintptr_t{15};
  auto** words = reinterpret_cast<void**>(top) - 8;  // six registers, the return address, padding of the alignment
  std::memset(words, 0, 8 * sizeof(void*));
  words[6] = reinterpret_cast<void*>(&enter);
  fiber.stack_pointer = words;
}

// Run until it waits; returns whether it could run at all.
inline bool run_thread(unsigned t) {
  if (!state.fibers[t].can_run()) return false;
  state.current = t;
  thread_index = dim3(t);
  sparse_rl_switch(&state.scheduler, state.fibers[t].stack_pointer);
  return true;
}

inline void run_block(unsigned threads) {
  state.fibers.resize(std::max<size_t>(state.fibers.size(), threads));
  state.warps.assign((threads + kWarp - 1) / kWarp, Barrier{});
  state.mail.assign(state.warps.size() * kWarp * 16, 0);
  state.block = Barrier{0, static_cast<int>(threads), 0};
  for (unsigned t = 0; t < threads; ++t) start(state.fibers[t]), ++state.warps[t / kWarp].members;
  const bool backwards = state.launches % 2, warp_by_warp = state.launches / 2 % 2;
  const unsigned together = warp_by_warp ? kWarp : threads;  // threads that take turns until all of them wait
  for (bool busy = true; busy;) {
    busy = false;
    for (unsigned first = 0; first < threads; first += together) {
      for (bool moved = true; moved; moved = moved && warp_by_warp) {
        moved = false;
        for (unsigned i = first; i < std::min(first + together, threads); ++i) {
          moved = run_thread(backwards ? threads - 1 - i : i) || moved;
        }
        busy = busy || moved;
      }
    }
  }
  if (std::any_of(state.fibers.begin(), state.fibers.begin() + threads, [](const Fiber& f) { return !f.done; })) {
    fail("some threads of a block wait at a barrier that the others never reach");
  }
}

template <class Kernel, class Args>
void launch(Kernel kernel, dim3 grid, unsigned threads, const Args& args) {
  struct Call {
    Kernel kernel;
    const Args* args;
  } call{kernel, &args};
  state.body = [](const void* p) { static_cast<const Call*>(p)->kernel(*static_cast<const Call*>(p)->args); };
  state.argument = &call;
  ++state.launches;
  grid_size = grid;
  block_size = dim3(threads);
  const unsigned blocks = grid.x * grid.y;
  for (unsigned i = 0; i < blocks; ++i) {
    const unsigned b = state.launches % 2 ? blocks - 1 - i : i;
    block_index = dim3(b % grid.x, b / grid.x);
    run_block(threads);
  }
}

// Every lane publishes up to 16 words; `read(lane)` returns those of another one.
template <class Read>
auto exchange(const uint32_t* words, int count, Read read) {
  uint32_t* mail = state.mail.data() + state.current / kWarp * kWarp * 16;
  std::copy(words, words + count, mail + state.current % kWarp * 16);
  wait(warp());
  auto result = read(mail);
  wait(warp());
  return result;
}

}  // namespace emulation

#define threadIdx emulation::thread_index
#define blockIdx emulation::block_index
#define blockDim emulation::block_size
#define gridDim emulation::grid_size

// Barriers of the program, after which asynchronous copies that were waited for are there: not those of a shuffle.
inline void __syncthreads() {
  emulation::state.fibers[emulation::state.current].land();
  emulation::wait(emulation::state.block);
}
inline int __syncthreads_or(int vote) {
  emulation::state.fibers[emulation::state.current].vote = vote != 0;
  __syncthreads();
  int any = 0;
  for (unsigned t = 0; t < blockDim.x; ++t) any |= emulation::state.fibers[t].vote;
  __syncthreads();  // all have been read
  return any;
}
inline void __syncwarp() {
  emulation::state.fibers[emulation::state.current].land();
  emulation::wait(emulation::warp());
}

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  static_assert(sizeof(T) == 4);
  uint32_t word;
  std::memcpy(&word, &value, 4);
  word = emulation::exchange(&word, 1, [=](const uint32_t* mail) { return mail[lane % 32 * 16]; });
  std::memcpy(&value, &word, 4);
  return value;
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ lanes);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, int lanes) {
  const int own = static_cast<int>(threadIdx.x % 32);
  return __shfl_sync(mask, value, own < lanes ? own : own - lanes);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, int lanes) {
  const int own = static_cast<int>(threadIdx.x % 32);
  return __shfl_sync(mask, value, own + lanes > 31 ? own : own + lanes);
}

inline unsigned __ballot_sync(unsigned, bool vote) {
  const uint32_t word = vote;
  return emulation::exchange(&word, 1, [](const uint32_t* mail) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= mail[lane * 16] << lane;
    return votes;
  });
}

inline int atomicCAS(int* place, int expected, int value) {
  const int was = *place;
  if (was == expected) *place = value;
  return was;
}
inline int atomicAdd(int* place, int value) { return (*place += value) - value; }
inline unsigned atomicAdd(unsigned* place, unsigned value) { return (*place += value) - value; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __uint_as_float(unsigned u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline unsigned __float_as_uint(float f) {
  unsigned u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}

#define SPARSE_RL_KEY CPU

namespace sparse_rl {

template <class Args>
void prefer_shared(void (*)(Args), const Tensor&) {}

inline void await_previous() {}  // a kernel has ended when the next one begins

template <class Args>
void enqueue(void (*kernel)(Args), dim3 grid, int threads, const Tensor&, const Args& args) {
  emulation::launch(kernel, grid, static_cast<unsigned>(threads), args);
}

}  // namespace sparse_rl
