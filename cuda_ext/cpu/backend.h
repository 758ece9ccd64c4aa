// What the op headers need from the CPU kernels, whose structs derive from it: supported pools, and the C++ type.
#pragma once

#include "heads.h"
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

}  // namespace sparse_rl
