// append_attend as torch calls it: append and decode_attention, one after the other, in one launch where there is one.
#pragma once

#include "append.h"
#include "decode_attention.h"

#include <type_traits>

namespace sparse_rl {

// The attention counts the token that is appended: its lengths are those of before.
template <class T, class P = T>
struct AppendAttend {
  Append<T, P> append;
  Attention<T, P> attention;
};

template <class Backend>
void append_attend(
    const Tensor& projected, const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm,
    double epsilon, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, const Tensor& slots,
    const Tensor& seen, const Tensor& offsets, const Tensor& capacities, const Tensor& key_pool,
    const Tensor& value_pool, const Tensor& position_pool, const Tensor& lengths,
    const std::optional<Tensor>& query_ring, const Tensor& query, double scale, int64_t max_length, const Tensor& out,
    const std::optional<Tensor>& partials, const std::optional<Tensor>& errors) {
  with_append<Backend>(
      projected, query_norm, key_norm, epsilon, cos, sin, slots, seen, offsets, capacities, key_pool, value_pool,
      position_pool, lengths, query_ring, query, errors, Op::append_attend, [&](const auto& append) {
        with_decode_attention<Backend>(
            query, key_pool, value_pool, slots, offsets, lengths, scale, max_length, out, {}, {}, partials, errors,
            Op::append_attend, [&](const auto& attention) {
              using T = std::remove_const_t<std::remove_pointer_t<decltype(append.projected)>>;
              using P = std::remove_pointer_t<decltype(append.key_pool)>;
              if constexpr (std::is_same_v<std::decay_t<decltype(attention)>, Attention<T, P>>) {
                Backend::run(AppendAttend<T, P>{append, attention}, key_pool);
              } else {
                STD_TORCH_CHECK(false, "append and attention take other types");  // never: both read the pools
              }
            });
      });
}

}  // namespace sparse_rl
