// Shared by the ops on pages: the vectors of every page.
#pragma once

#include "heads.h"

namespace sparse_rl {

// The vectors of pages, (S, H, C, P, D): the means (C = 1), or the largest and the smallest elements (C = 2).
template <class T>
struct Kept {
  T* data;
  int64_t num_vectors, num_pages, dim;

  // The c-th vector of a page of the i-th (slot, head).
  SPARSE_RL_DEVICE T* at(int64_t i, int64_t c, int64_t page) const {
    return data + ((i * num_vectors + c) * num_pages + page) * dim;
  }
};

template <class T>
Kept<T> check_summaries(
    const Tensor& summaries, const Tensor& like, ScalarType dtype, int64_t S, int64_t H, int64_t D) {
  check_tensor("summaries", summaries, like, dtype, {S, H, kAnySize, kAnySize, D});
  const Kept<T> kept{pointer<T>(summaries), summaries.size(2), summaries.size(3), D};
  STD_TORCH_CHECK(
      kept.num_vectors == 1 || kept.num_vectors == 2, "summaries have ", kept.num_vectors,
      " vectors per page, expected 1 (means) or 2 (bounds)");
  return kept;
}

inline void check_page_size(int64_t page_size) {
  STD_TORCH_CHECK(page_size > 0, "page_size is ", page_size, ", expected at least 1 entry");
}

}  // namespace sparse_rl
