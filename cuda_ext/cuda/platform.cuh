// CUDA itself, found by the include path: ../emulation/platform.cuh replaces it in tests on a CPU.
#pragma once

#include "checks.h"

#include <cstdlib>
#include <cstring>

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

// The first thing that every kernel does: with overlapping launches its blocks are there before the kernel ahead has
// ended, and wait here until all that it has written can be seen. Then the next kernel's may come.
__device__ __forceinline__ void await_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

inline bool wants_overlap() {
  static const bool wanted = [] {
    const char* value = std::getenv("SPARSE_RL_OVERLAP");
    return value && std::strcmp(value, "1") == 0;
  }();
  return wanted;
}

// Whether launches overlap: SPARSE_RL_OVERLAP=1, and the kernel was compiled to wait.
template <class Args>
bool overlaps(void (*kernel)(Args)) {
  cudaFuncAttributes attributes{};
  return wants_overlap() && cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= 90;
}

// Start a kernel on torch's current stream of the device of `on`.
template <class Args>
void enqueue(void (*kernel)(Args), dim3 grid, int threads, const Tensor& on, const Args& args) {
  const torch::stable::accelerator::DeviceGuard guard(on.get_device_index());
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream));
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early, config.numAttrs = overlaps(kernel) ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args);
  cudaGetLastError();  // else torch's next check would blame another op
  STD_TORCH_CHECK(error == cudaSuccess, "a kernel was not launched: ", cudaGetErrorString(error));
}

}  // namespace sparse_rl
