// CUDA itself, found by the include path: ../emulation/platform.cuh replaces it in tests on a CPU.
#pragma once

#include "checks.h"

#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
// Only libtorch_cuda has it: weak, so that the library also loads into a CPU build of torch.
#pragma weak aoti_torch_get_current_cuda_stream
#define SPARSE_RL_KEY CUDA

namespace sparse_rl {

// Leave a kernel all of the shared memory that there is: by itself the driver might leave it room for fewer blocks.
template <class Args>
void prefer_shared(void (*kernel)(Args), const Tensor& on) {
  const torch::stable::accelerator::DeviceGuard guard(on.get_device_index());
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  STD_TORCH_CHECK(error == cudaSuccess, "a kernel was not prepared: ", cudaGetErrorString(error));
}

// Start a kernel on torch's current stream of the device of `on`.
template <class Args>
void enqueue(void (*kernel)(Args), dim3 grid, int threads, const Tensor& on, const Args& args) {
  const torch::stable::accelerator::DeviceGuard guard(on.get_device_index());
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream));
  kernel<<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "a kernel was not launched: ", cudaGetErrorString(error));
}

}  // namespace sparse_rl
