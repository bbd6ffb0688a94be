// What ops need of torch to launch kernels on the tensors' device.
#pragma once

#include "tensor.h"

#ifdef BERTFAST_CUDA_ON_CPU

#include <driver_types.h>

#include "host.h"

#define BERTFAST_CUDA_KEY CPU

#else

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/headeronly/util/Exception.h>

#include <array>
#include <atomic>

// The dispatch key of STABLE_TORCH_LIBRARY_IMPL.
#define BERTFAST_CUDA_KEY CUDA

#endif

namespace bertfast {

#ifdef BERTFAST_CUDA_ON_CPU

class OnDevice {
 public:
  explicit OnDevice(const Tensor&) { emulator::forget_tensors(); }

  cudaStream_t stream() const { return nullptr; }
  int multiprocessors() const { return emulator::multiprocessors(); }
};

// Every tensor of a kernel is named here, with the memory that it may touch.
inline void name_tensor(const Tensor& tensor) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto item = static_cast<int64_t>(tensor.element_size());
  emulator::know_tensor(tensor.const_data_ptr(), tensor.numel() == 0 ? 0 : (last + 1) * item);
}

#else

// Makes the device of `tensor` the current one, as launches need it, for as long as this lives.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& tensor) : index_(tensor.get_device_index()), guard_(index_) {}

  cudaStream_t stream() const {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream));
    return static_cast<cudaStream_t>(stream);
  }

  int multiprocessors() const {
    static std::array<std::atomic<int>, 64> known{};  // 0: not asked yet
    const auto slot = static_cast<size_t>(index_);
    int count = slot < known.size() ? known[slot].load(std::memory_order_relaxed) : 0;
    if (count == 0) {
      const cudaError_t status = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, index_);
      if (status != cudaSuccess) cudaGetLastError();  // else torch's next check of a launch reports it as its own
      STD_TORCH_CHECK(status == cudaSuccess, "cudaDeviceGetAttribute: ", cudaGetErrorString(status));
      if (slot < known.size()) known[slot].store(count, std::memory_order_relaxed);
    }
    return count;
  }

 private:
  int32_t index_;
  torch::stable::accelerator::DeviceGuard guard_;
};

inline void name_tensor(const Tensor&) {}

#endif

inline const void* data(const Tensor& tensor) {
  name_tensor(tensor);
  return tensor.const_data_ptr();
}
inline void* mutable_data(const Tensor& tensor) {
  name_tensor(tensor);
  return tensor.mutable_data_ptr();
}
template <class T>
const T* data(const Tensor& tensor) {
  name_tensor(tensor);
  return tensor.const_data_ptr<T>();
}
template <class T>
T* mutable_data(const Tensor& tensor) {
  name_tensor(tensor);
  return tensor.mutable_data_ptr<T>();
}

}  // namespace bertfast
