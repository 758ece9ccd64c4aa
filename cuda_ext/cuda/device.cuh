// Shared by all CUDA kernels: types, 16-byte loads, sums over a warp, launching on torch's stream.
//
// A kernel takes one struct by value. Nothing here allocates or waits, so every launch can be captured in a CUDA graph.
// <platform.cuh> is CUDA itself; tests use the one of ../emulation, which runs the same sources on a CPU.
#pragma once

#include "entries.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Half.h>

#include <limits>

#include <platform.cuh>

namespace sparse_rl {

using torch::headeronly::BFloat16;
using Float8 = torch::headeronly::Float8_e4m3fn;
using torch::headeronly::Half;

constexpr unsigned kAll = 0xFFFFFFFFu;  // all lanes of a warp
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

template <class T>
constexpr int kWidth = 16 / static_cast<int>(sizeof(T));  // elements of a 16-byte load

SPARSE_RL_DEVICE uint4 load16(const void* p) { return *static_cast<const uint4*>(p); }

template <class T>
SPARSE_RL_DEVICE float element(uint32_t bits) {
  return static_cast<float>(T(static_cast<unsigned short>(bits), T::from_bits()));
}

// Sixteen bytes as floats.
template <class T>
SPARSE_RL_DEVICE void unpack(uint4 v, float (&x)[kWidth<T>]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = __uint_as_float(words[i]);
    } else {
      x[2 * i] = element<T>(words[i] & 0xFFFFu);
      x[2 * i + 1] = element<T>(words[i] >> 16);
    }
  }
}

// Eight elements as floats.
template <class T>
SPARSE_RL_DEVICE void load8(const T* p, float (&x)[8]) {
  constexpr int Width = kWidth<T>;
#pragma unroll
  for (int part = 0; part < 8 / Width; ++part) {
    float some[Width];
    unpack<T>(load16(p + part * Width), some);
#pragma unroll
    for (int i = 0; i < Width; ++i) x[part * Width + i] = some[i];
  }
}

template <class T>
SPARSE_RL_DEVICE T narrow(float x) {
  return static_cast<T>(x);
}

// Two 16-bit numbers in a word, the first in the lower half.
template <class T>
SPARSE_RL_DEVICE uint32_t pack(float low, float high) {
  return static_cast<uint32_t>(narrow<T>(low).x) | static_cast<uint32_t>(narrow<T>(high).x) << 16;
}

// Over groups of `Lanes` neighboring lanes; all of them get the result.
template <int Lanes = 32>
SPARSE_RL_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int step = Lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}

template <int Lanes = 32>
SPARSE_RL_DEVICE float warp_max(float x) {
#pragma unroll
  for (int step = Lanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, step));
  return x;
}

// The factor from sums relative to `before` to sums relative to `now`; 0 if there is nothing so far.
SPARSE_RL_DEVICE float rescale(float before, float now) {
  return before == now ? 1.0f : before == kNegInf ? 0.0f : expf(before - now);
}

// A kernel cannot raise: it skips what cannot be done and reports it once, to the host. The first report stays.
SPARSE_RL_DEVICE void complain(const Report& report, Fault fault, int64_t slot) {
  constexpr int64_t kMost = (1 << 23) - 1;
  if (!report.word) return;
  const int64_t named = slot < 0 ? 0 : slot > kMost ? kMost : slot;
  const auto word = static_cast<int32_t>(report.op) | static_cast<int32_t>(fault) << 4 | static_cast<int32_t>(named) << 8;
  atomicCAS(report.word, 0, word);
}

// Live entries of one head. Rows to skip, and numbers that no pool can have, have no entries.
struct SlotSpan {
  int64_t slot, head, start;  // slot is -1 for a row to skip
  int length;
};

SPARSE_RL_DEVICE bool inside(int64_t start, int64_t length, int64_t limit, int64_t pool_rows) {
  return length >= 0 && length <= limit && start >= 0 && start <= pool_rows - length;
}

SPARSE_RL_DEVICE SlotSpan find_slot_span(const Heads& heads, int64_t b, int64_t h, int64_t limit, int64_t pool_rows) {
  SlotSpan span{heads.slots[b], 0, 0, 0};
  if (span.slot == -1) return {-1, 0, 0, 0};
  if (span.slot < 0 || span.slot >= heads.num_slots) {
    if (threadIdx.x == 0) complain(heads.report, Fault::slot, span.slot);
    return {-1, 0, 0, 0};
  }
  span.head = span.slot * heads.num_heads + h;
  const int length = heads.lengths[span.head];
  if (!inside(heads.offsets[span.head], length, limit, pool_rows)) {
    if (threadIdx.x == 0) complain(heads.report, Fault::run, span.slot);
    return {-1, 0, 0, 0};
  }
  span.start = heads.offsets[span.head];
  span.length = length;
  return span;
}

// A head of a scoring op. Those whose numbers cannot be are skipped, too, and reported.
SPARSE_RL_DEVICE Span find_span(const Entries& all, int64_t u) {
  Span span = all.span(u);
  const bool exists = span.slot >= 0 && span.slot < all.num_slots;
  if (exists && inside(span.start, span.length, all.num_entries, all.pool_rows)) return span;
  if (threadIdx.x == 0 && span.slot != -1) complain(all.report, exists ? Fault::run : Fault::slot, span.slot);
  span.slot = -1, span.length = 0;
  return span;
}

inline void check_aligned(const char* name, const void* p) {
  STD_TORCH_CHECK(
      reinterpret_cast<uintptr_t>(p) % 16 == 0, name, " does not start at a multiple of 16 bytes: pass ", name,
      ".clone()");
}

// What the op headers need from the CUDA kernels, whose structs derive from it: supported pools, and the C++ type.
struct Device {
  // Call `run` with a zero of the C++ type of `dtype`.
  template <class Run>
  static void dispatch(ScalarType dtype, Run run) {
    switch (dtype) {
      case ScalarType::Float: run(float{}); break;
      case ScalarType::BFloat16: run(BFloat16{}); break;
      case ScalarType::Half: run(Half{}); break;
      default:
        STD_TORCH_CHECK(
            false, "keys (with float8 pools the queries) are ", dtype_text(dtype),
            ", the CUDA kernels take float32, bfloat16 and float16");
    }
  }

  // The same with zeros of the types of the queries and the pools, which differ if pools are float8.
  template <class Run>
  static void dispatch(ScalarType stored, ScalarType computed, Run run) {
    if (stored == ScalarType::Float8_e4m3fn) {
      dispatch(computed, [&](auto zero) { run(zero, Float8{}); });
    } else {
      dispatch(stored, [&](auto zero) { run(zero, zero); });
    }
  }

  // Rows of whole 16-byte words, which all kernels read and write.
  static void check_rows(const char* name, const Tensor& rows) {
    const int64_t dim = check_head_dim(rows);
    const ScalarType dtype = rows.scalar_type();
    dispatch(dtype, ScalarType::Float, [](auto, auto) {});
    const int whole = dtype == ScalarType::Float8_e4m3fn ? 16 : 8;
    STD_TORCH_CHECK(
        dim % whole == 0, "head_dim is ", dim, ", the CUDA kernels take multiples of ", whole, " with ",
        dtype_text(dtype));
    check_aligned(name, pointer<char>(rows));
    for (int64_t i = 0; i + 1 < rows.dim(); ++i) {
      const bool fits = rows.size(i) == 1 || rows.stride(i) * static_cast<int64_t>(rows.element_size()) % 16 == 0;
      STD_TORCH_CHECK(fits, name, " has rows that do not start at multiples of 16 bytes: pass ", name, ".clone()");
    }
  }
};

// Enqueue on torch's current stream of the device of `on`. An empty grid is no launch.
template <class Args>
void launch(void (*kernel)(Args), int64_t blocks, int64_t rows, int threads, const Tensor& on, const Args& args) {
  if (blocks == 0 || rows == 0) return;
  STD_TORCH_CHECK(blocks < (int64_t{1} << 31) && rows < 65536, "too many blocks: ", blocks, " times ", rows);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(rows));
  enqueue(kernel, grid, threads, on, args);
}

}  // namespace sparse_rl
