// The multiplication of ../cuda/tensor_core.cuh, which has a picture of the layout, in loops: the lanes exchange
// their words.
#pragma once

namespace sparse_rl {

template <class T>
SPARSE_RL_DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t own[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
  emulation::exchange(own, 6, [&](const uint32_t* mail) {
    auto half = [](uint32_t word, int high) { return element<T>(high ? word >> 16 : word & 0xFFFFu); };
    for (int i = 0; i < 4; ++i) {
      const int r = row + i / 2 * 8, n = column + i % 2;
      for (int k = 0; k < 16; ++k) {
        const uint32_t* left = mail + (r % 8 * 4 + k % 8 / 2) * 16;
        const uint32_t* right = mail + (n * 4 + k % 8 / 2) * 16;
        c[i] += half(left[k / 8 * 2 + r / 8], k % 2) * half(right[4 + k / 8], k % 2);
      }
    }
    return 0;
  });
}

}  // namespace sparse_rl
