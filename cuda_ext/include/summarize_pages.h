// summarize_pages as torch calls it: its arguments, their check, and the struct for a kernel.
#pragma once

#include "pages.h"

namespace sparse_rl {

template <class T>
struct Summary {
  const T* key_pool;
  Kept<T> kept;
  int64_t page_size, pool_rows;
  bool newest_only;
  Heads heads;

  // The pages to summarize of a head of `length` entries: complete ones, or the one the newest entry has completed.
  SPARSE_RL_DEVICE int64_t end(int64_t length) const { return length / page_size; }
  SPARSE_RL_DEVICE int64_t begin(int64_t length) const {
    if (!newest_only) return 0;
    return length % page_size == 0 && length > 0 ? end(length) - 1 : end(length);
  }
};

template <class Backend>
void summarize_pages(
    const Tensor& key_pool, const Tensor& slots, const Tensor& offsets, const Tensor& lengths, int64_t page_size,
    bool newest_only, const Tensor& summaries, const std::optional<Tensor>& errors) {
  const PoolShape pool = check_pool<Backend>(key_pool);
  const Heads heads = check_heads(slots, offsets, lengths, key_pool, errors, Op::summarize_pages);
  check_page_size(page_size);
  Backend::dispatch(pool.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto kept =
        check_summaries<T>(summaries, key_pool, pool.dtype, heads.num_slots, heads.num_heads, pool.dim);
    const Summary<T> op{pointer<T>(key_pool), kept, page_size, pool.rows, newest_only, heads};
    Backend::run(op, key_pool);
  });
}

}  // namespace sparse_rl
