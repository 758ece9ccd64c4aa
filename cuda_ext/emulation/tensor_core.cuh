// What ../cuda/tensor_core.cuh has, with a picture of the layout, in loops: the lanes exchange their words.
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

template <bool kTransposed>
SPARSE_RL_DEVICE void ldmatrix_x4(uint32_t (&matrix)[4], const uint4* row) {
  const auto address = reinterpret_cast<uint64_t>(row);
  const uint32_t own[2] = {static_cast<uint32_t>(address), static_cast<uint32_t>(address >> 32)};
  const int lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
  emulation::exchange(own, 2, [&](const uint32_t* mail) {
    auto number = [&](int of, int line, int column) -> uint32_t {
      const uint32_t* words = mail + (of * 8 + line) * 16;
      return reinterpret_cast<const uint16_t*>(static_cast<uint64_t>(words[1]) << 32 | words[0])[column];
    };
    for (int i = 0; i < 4; ++i) {
      matrix[i] = kTransposed ? number(i, 2 * q, r) | number(i, 2 * q + 1, r) << 16
                              : number(i, r, 2 * q) | number(i, r, 2 * q + 1) << 16;
    }
    return 0;
  });
}

SPARSE_RL_DEVICE uint32_t movmatrix_trans(uint32_t word) {
  const int lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
  return emulation::exchange(&word, 1, [=](const uint32_t* mail) {
    auto number = [=](int line) { return mail[(line * 4 + r / 2) * 16] >> r % 2 * 16 & 0xFFFFu; };
    return number(2 * q) | number(2 * q + 1) << 16;
  });
}

}  // namespace sparse_rl
