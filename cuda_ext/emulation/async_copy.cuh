// The copies of ../cuda/async_copy.cuh as late as the language allows: what they will overwrite is lost at once, and a
// thread's own copies arrive when it waits for them.
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
  auto& groups = emulation::state.fibers[emulation::state.current].groups;
  for (; groups.size() > size_t{kPending}; groups.pop_front()) {
    for (const emulation::Copy& copy : groups.front()) copy.arrive();
  }
}

}  // namespace sparse_rl
