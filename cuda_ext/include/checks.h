// Checks that refuse bad arguments with a message instead of a crash. Used by the header of every op.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

namespace sparse_rl {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline constexpr int64_t kAnySize = -1;      // a size that check_tensor ignores
inline constexpr int64_t kMaxHeadDim = 512;  // bounds the stack buffers of the CPU kernels

inline std::string shape_text(const int64_t* sizes, size_t count) {
  std::string text = "(";
  for (size_t i = 0; i < count; ++i) {
    text += (i ? ", " : "") + (sizes[i] == kAnySize ? std::string("any") : std::to_string(sizes[i]));
  }
  return text + ")";
}

inline const char* dtype_text(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Double: return "float64";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    default: return "another type";
  }
}

// The text of a string argument. Deletes the handle: a parameter of type std::string would do the same except for a
// copy that the conversion of torch 2.13 leaks at every call.
inline std::string take_string(StringHandle handle) {
  size_t length = 0;
  const char* data = nullptr;
  const bool read = torch_string_length(handle, &length) == 0 && torch_string_c_str(handle, &data) == 0;
  std::string text = read ? std::string(data, length) : std::string();
  torch_delete_string(handle);
  STD_TORCH_CHECK(read, "a text argument cannot be read");
  return text;
}

// Whether the elements are contiguous in the dimensions from `first` on.
inline bool is_dense(const Tensor& t, int64_t first) {
  int64_t expected = 1;
  for (int64_t i = t.dim() - 1; i >= first; expected *= t.size(i--)) {
    if (t.size(i) != 1 && t.stride(i) != expected) return t.numel() == 0;
  }
  return true;
}

// Shape, dtype, layout and device of one argument; `device_of` is the tensor whose device all must share. Contiguous
// from dimension `dense_from` on.
inline void check_tensor(
    const char* name, const Tensor& t, const Tensor& device_of, ScalarType dtype,
    std::initializer_list<int64_t> shape, int64_t dense_from = 0) {
  auto sizes = t.sizes();
  bool same = sizes.size() == shape.size();
  size_t i = 0;
  for (int64_t want : shape) same = same && (want == kAnySize || sizes[i] == want), ++i;
  STD_TORCH_CHECK(
      same, name, " has shape ", shape_text(sizes.data(), sizes.size()), ", expected ",
      shape_text(shape.begin(), shape.size()));
  STD_TORCH_CHECK(
      t.scalar_type() == dtype, name, " is ", dtype_text(t.scalar_type()), ", expected ", dtype_text(dtype));
  STD_TORCH_CHECK(
      dense_from ? is_dense(t, dense_from) : t.is_contiguous(), name, " is not contiguous: pass ", name,
      ".contiguous()");
  STD_TORCH_CHECK(
      t.is_cpu() == device_of.is_cpu() && t.get_device_index() == device_of.get_device_index(), name,
      " is on another device than the pools");
}

inline void check_tensor(
    const char* name, const std::optional<Tensor>& t, const Tensor& device_of, ScalarType dtype,
    std::initializer_list<int64_t> shape) {
  if (t.has_value()) check_tensor(name, *t, device_of, dtype, shape);
}

template <class T>
T* pointer(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

template <class T>
T* pointer(const std::optional<Tensor>& t) {
  return t.has_value() ? pointer<T>(*t) : nullptr;
}

// The type of queries, new keys and values: the pools' own type, with float8 pools the given tensor's.
inline ScalarType computing_type(ScalarType stored, const Tensor& given) {
  return stored == ScalarType::Float8_e4m3fn ? given.scalar_type() : stored;
}

// The type of a log of deaths: whichever of three it has.
inline ScalarType event_type(const std::optional<Tensor>& death) {
  const ScalarType own = death ? death->scalar_type() : ScalarType::Int;
  return own == ScalarType::Byte || own == ScalarType::Short ? own : ScalarType::Int;
}

// The pools (rows, D) all ops share: dtype of the key pool, head size, number of rows.
struct PoolShape {
  ScalarType dtype;
  int64_t rows, dim;
};

inline int64_t check_head_dim(const Tensor& rows) {
  const int64_t dim = rows.dim() > 0 ? rows.size(rows.dim() - 1) : 0;
  STD_TORCH_CHECK(
      dim > 0 && dim <= kMaxHeadDim, "head_dim is ", dim, ", the native kernels take 1 to ", kMaxHeadDim,
      ": set SPARSE_RL_NATIVE=0 for the PyTorch reference");
  return dim;
}

template <class Backend>
PoolShape check_pool(const Tensor& key_pool) {
  STD_TORCH_CHECK(key_pool.dim() == 2, "key_pool must be (rows, head_dim), got ", key_pool.dim(), " dimensions");
  const PoolShape pool{key_pool.scalar_type(), key_pool.size(0), key_pool.size(1)};
  check_tensor("key_pool", key_pool, key_pool, pool.dtype, {pool.rows, pool.dim});
  Backend::check_rows("key_pool", key_pool);
  return pool;
}

// Hq / H of a tensor with query heads in dimension 1.
inline int64_t check_group(const char* name, const Tensor& queries, int64_t num_dims, int64_t num_heads) {
  const int64_t all = queries.dim() == num_dims ? queries.size(1) : 0;
  STD_TORCH_CHECK(
      num_heads > 0 && all % num_heads == 0, name, " has ", all, " heads, expected a multiple of the ", num_heads,
      " KV heads");
  return all / num_heads;
}

}  // namespace sparse_rl
