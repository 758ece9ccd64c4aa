// The struct for the kernels of decode_attention and page_attention.
#pragma once

#include "heads.h"

namespace sparse_rl {

// T is the compute type, P the type of the pools.
template <class T, class P = T>
struct Attention {
  const T* query;
  const P *key_pool, *value_pool;
  T* out;
  float *lse, *probs;  // null where not wanted
  int64_t group, dim, max_length, num_probs, pool_rows;
  float scale;
  Heads heads;
  const int32_t* pages = nullptr;  // (B, H, width), in page_attention only
  int width = 0, page_size = 1;
};

}  // namespace sparse_rl
