// Device memory for the tests of the CUDA kernels, and the exit code of a test that was skipped.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

constexpr int kSkipped = 77;  // CMakeLists.txt tells ctest

inline bool has_device() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) return true;
  std::printf("skipped: no CUDA device\n");
  return false;
}

inline void require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

// A vector on the device, `offset` elements into its allocation so that rows need not start on a 16-byte boundary.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& host, int64_t offset = 0) : size_(host.size()), offset_(offset) {
    require(cudaMalloc(&base_, (host.size() + offset + 1) * sizeof(T)));
    require(cudaMemcpy(data(), host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~OnDevice() { cudaFree(base_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  T* data() { return static_cast<T*>(base_) + offset_; }
  std::vector<T> host() {
    std::vector<T> copy(size_);
    require(cudaMemcpy(copy.data(), data(), size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return copy;
  }

 private:
  void* base_ = nullptr;
  size_t size_;
  int64_t offset_;
};
