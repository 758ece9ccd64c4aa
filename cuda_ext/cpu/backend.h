// What the op headers need from the CPU kernels, whose structs derive from it: supported pools, and the C++ type.
#pragma once

#include "entries.h"
#include "vec.h"

namespace sparse_rl {

struct Cpu {
  // Call `run` with a zero of the C++ type of `dtype`.
  template <class Run>
  static void dispatch(ScalarType dtype, Run run) {
    SPARSE_RL_DISPATCH(dtype, run);
  }

  // The same with the types of the queries and the pools, which never differ here.
  template <class Run>
  static void dispatch(ScalarType stored, ScalarType, Run run) {
    dispatch(stored, [&](auto zero) { run(zero, zero); });
  }

  static void check_rows(const char*, const Tensor& rows) {
    check_head_dim(rows);
    dispatch(rows.scalar_type(), [](auto) {});
  }
};

// Call unit(b, h) for every row and KV head, in parallel, at least `grain` of them in a thread.
template <class Unit>
void for_heads(int64_t num_rows, int64_t num_heads, Unit unit, int64_t grain = 1) {
  torch::stable::parallel_for(0, num_rows * num_heads, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) unit(i / num_heads, i % num_heads);
  });
}

// Refuse heads that do not fit, as check_run does.
inline void check_spans(const Entries& all) {
  for (int64_t b = 0; b < all.num_rows; ++b) check_slot(all.slots[b], all.num_slots);
  for (int64_t u = 0; u < all.count; ++u) {
    const Span span = all.span(u);
    if (span.slot >= 0) check_run(span.start, span.length, all.num_entries, "the entries of scores", all.pool_rows);
  }
}

// Call unit(u, place) for every head of all layers, in parallel; no two have the same place of `places` at a time.
template <class Unit>
void for_spans(const Entries& all, int64_t places, Unit unit) {
  torch::stable::parallel_for(0, places, 1, [&](int64_t begin, int64_t end) {
    for (int64_t place = begin; place < end; ++place) {
      for (int64_t u = place; u < all.count; u += places) unit(u, place);
    }
  });
}

}  // namespace sparse_rl
