// The copies of ../cuda/async_copy.cuh, late: what they will overwrite is lost at once, and they arrive at the barrier
// that follows when their thread has waited for them. Only the thread itself might read them before.
#pragma once

namespace sparse_rl {

inline void cp_async_zfill(uint4* to, const void* from, bool valid) {
  std::memset(to, 0xFF, sizeof(uint4));  // NaN as a number of any type
  emulation::state.fibers[emulation::state.current].copies.push_back({to, valid ? from : nullptr});
}

inline void cp_async_commit() {
  emulation::Fiber& fiber = emulation::state.fibers[emulation::state.current];
  fiber.groups.push_back(std::move(fiber.copies));
  fiber.copies.clear();
}

template <int kPending>
void cp_async_wait() {
  emulation::Fiber& fiber = emulation::state.fibers[emulation::state.current];
  for (; fiber.groups.size() > size_t{kPending}; fiber.groups.pop_front()) {
    fiber.waited.insert(fiber.waited.end(), fiber.groups.front().begin(), fiber.groups.front().end());
  }
}

}  // namespace sparse_rl
