// Copies from global to shared memory that need no registers and do not wait: cp.async.
//
// A thread begins copies, closes them into groups, and waits until all of its groups but the last few have arrived. The
// copies of other lanes are there when those lanes have waited and a barrier has followed. Found by the include path:
// those of ../emulation arrive late.
#pragma once

#include "device.cuh"

namespace sparse_rl {

// Begin to copy 16 bytes, past the first-level cache; zeros, and nothing is read, if they are not `valid`.
SPARSE_RL_DEVICE void cp_async_zfill(uint4* to, const void* from, bool valid) {
  const auto place = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

SPARSE_RL_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all groups of this thread but the last kPending have arrived.
template <int kPending>
SPARSE_RL_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace sparse_rl
