// What the op headers ask of the CPU kernels, whose structs derive from it: which pools they take, and the C++ type.
#pragma once

#include "heads.h"
#include "vec.h"

namespace sparse_rl {

struct Cpu {
  // Call `run` with a zero of the C++ type behind `dtype`.
  template <class Run>
  static void dispatch(ScalarType dtype, Run run) {
    SPARSE_RL_DISPATCH(dtype, run);
  }

  // The same with the type of the queries and that of the pools, which differ nowhere here.
  template <class Run>
  static void dispatch(ScalarType stored, ScalarType, Run run) {
    dispatch(stored, [&](auto zero) { run(zero, zero); });
  }

  static PoolShape check_pool(const Tensor& key_pool) {
    const PoolShape pool = check_key_pool(key_pool);
    dispatch(pool.dtype, [](auto) {});
    return pool;
  }
};

// unit(b, h) for every row and KV head, in parallel.
template <class Unit>
void for_heads(const Heads& heads, Unit unit) {
  torch::stable::parallel_for(0, heads.num_rows * heads.num_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) unit(i / heads.num_heads, i % heads.num_heads);
  });
}

}  // namespace sparse_rl
