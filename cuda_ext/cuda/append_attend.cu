// append_attend: what append and decode_attention do, in one launch where tensor cores attend to up to eight query heads
// of a KV head.
//
// The block of a KV head, or of a split of its entries, first normalizes and rotates its queries; the block of the last
// split, which alone reads the new entry, writes it. Lengths grow when nobody reads them any more: at the end of the
// only block of a head or, with several splits, in the launch that adds these up. Bits are those of the two ops.

#include "append.cuh"
#include "append_attend.h"
#include "attention_launch.cuh"

namespace sparse_rl {
namespace {

// The place of the new entry in the head of this block, -1 for none; the same in all blocks of a head.
template <class T, class P>
SPARSE_RL_DEVICE int new_place(const Append<T, P>& op, int64_t slot) {
  return slot < 0 ? -1 : free_place(op, slot, blockIdx.x % static_cast<unsigned>(op.heads.num_heads));
}

template <class T, class P>
SPARSE_RL_DEVICE void grow(const Append<T, P>& op, int64_t slot, int place) {
  __syncthreads();  // all threads have read the length
  const int64_t H = op.heads.num_heads;
  if (place >= 0 && threadIdx.x == 0) op.lengths[slot * H + blockIdx.x % static_cast<unsigned>(H)] = place + 1;
}

template <class T, class P, int kHeadDim, bool kPadded, int kThisBlock>
SPARSE_RL_DEVICE void append_and_attend(const AppendAttend<T, P>& op) {
  const Append<T, P>& append = op.append;
  const auto heads = static_cast<unsigned>(append.heads.num_heads);
  const int64_t b = blockIdx.x / heads, h = blockIdx.x % heads, slot = appended_slot(append, b);
  const int place = new_place(append, slot);
  const auto prepare = [&](const auto& work) {
    const bool is_last = work.split + 1 == work.num_splits;
    for (int i = threadIdx.x / 32; i <= work.num_heads; i += kThisBlock / 32) {
      if (i < work.num_heads) {
        append_query(append, b, h * op.attention.group + i, slot, is_last);
      } else if (is_last && place >= 0) {
        write_entry(append, b, h, slot, place);
      }
    }
    __syncthreads();
  };
  attend_with_tensor_cores<T, P, kHeadDim, kPadded, false, kThisBlock>(op.attention, place >= 0 ? 1 : 0, prepare);
  if (gridDim.y == 1) grow(append, slot, place);
}

template <class T, class P, int kHeadDim, bool kPadded>
__global__ void __launch_bounds__(kAttendThreads, kHeadDim == 64 ? 6 : 4) append_attend_tensor(AppendAttend<T, P> op) {
  await_previous();
  append_and_attend<T, P, kHeadDim, kPadded, kAttendThreads>(op);
}

template <class T, class P>
__global__ void __launch_bounds__(kWideAttendThreads, 4) append_attend_wide(AppendAttend<T, P> op) {
  await_previous();
  append_and_attend<T, P, 256, true, kWideAttendThreads>(op);
}

template <class T, class P>
__global__ void __launch_bounds__(kCombineThreads, 8) combine_appended_kernel(AppendAttend<T, P> op) {
  await_previous();
  const auto heads = static_cast<unsigned>(op.append.heads.num_heads);
  const int64_t slot = appended_slot(op.append, blockIdx.x / heads);
  const int place = new_place(op.append, slot);
  combine_splits<false>(op.attention, place >= 0 ? 1 : 0);
  grow(op.append, slot, place);
}

struct Kernel : Device {
  template <class T, class P>
  static void run(const AppendAttend<T, P>& op, const Tensor& on) {
    if constexpr (sizeof(T) == 2) {
      if (op.attention.group <= kHeadsPerBlock && op.attention.dim <= 256) return run_together(op, on);
    }
    launch_append(op.append, on);
    launch_attention<false>(op.attention, on);
  }

  template <class T, class P>
  static void run_together(const AppendAttend<T, P>& op, const Tensor& on) {
    const int64_t dim = op.attention.dim, units = op.append.heads.num_rows * op.append.heads.num_heads;
    const int64_t splits = checked_splits<false>(op.attention);
    const auto start = [&](void (*kernel)(AppendAttend<T, P>), int threads) {
      prefer_shared(kernel, on);
      launch(kernel, units, splits, threads, on, op);
    };
    if (dim == 64) {
      start(append_attend_tensor<T, P, 64, false>, kAttendThreads);
    } else if (dim == 128) {
      start(append_attend_tensor<T, P, 128, false>, kAttendThreads);
    } else if (dim < 128) {
      start(append_attend_tensor<T, P, 128, true>, kAttendThreads);
    } else {
      start(append_attend_wide<T, P>, kWideAttendThreads);
    }
    if (splits > 1) launch(combine_appended_kernel<T, P>, units, 1, kCombineThreads, on, op);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, SPARSE_RL_KEY, m) { m.impl("append_attend", TORCH_BOX(&append_attend<Kernel>)); }

}  // namespace sparse_rl
