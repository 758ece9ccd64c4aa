// One multiplication on tensor cores, mma.m16n8k16, the layout of its registers, and what brings numbers into it.
//
// c (16, 8) += a (16, 16) b (16, 8); lane 4 r + q of a warp, r from 0 to 7 and q from 0 to 3, holds
//
//        a, rows of 16              b, columns of 16      c, rows of 8
//        2q 2q+1    2q+8 2q+9             r                 2q 2q+1
//      +---------+---------+        2q  +----+            +---------+
//    r | a[0]    | a[2]    |        2q+1| b0 |          r | c[0..1] |
//      +---------+---------+        2q+8+----+            +---------+
//  r+8 | a[1]    | a[3]    |        2q+9| b1 |        r+8 | c[2..3] |
//      +---------+---------+            +----+            +---------+
//
// a and b in words of two 16-bit numbers, the first of them in the lower half; c in float32.
#pragma once

#include "device.cuh"

#include <type_traits>

namespace sparse_rl {

template <class T>
SPARSE_RL_DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Four 8 x 8 matrices of 16-bit numbers from shared memory: lane l has the address of row l % 8 of matrix l / 8, 16
// bytes. Lane 4 r + q gets row r, columns 2q and 2q+1, of each, as a[0] of the picture; transposed it gets column r of
// rows 2q and 2q+1.
template <bool kTransposed>
SPARSE_RL_DEVICE void ldmatrix_x4(uint32_t (&matrix)[4], const uint4* row) {
  const auto place = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(place)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(place)
                 : "memory");
  }
}

// An 8 x 8 matrix, of which lane 4 r + q has row r, columns 2q and 2q+1, transposed.
SPARSE_RL_DEVICE uint32_t movmatrix_trans(uint32_t word) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
  return result;
}

}  // namespace sparse_rl
