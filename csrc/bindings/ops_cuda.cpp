// The CUDA side of the ops declared in ops.cpp: device guard, current stream, launch. Compiled by the host compiler.
// rows, inv_rows and offsets are not range-checked here, since that would wait for the device. Python checks what it
// can.
#define TORCH_TARGET_VERSION 0x020a000000000000ULL
#ifndef USE_CUDA
#define USE_CUDA  // declares aoti_torch_get_current_cuda_stream
#endif
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "bindings/kept.h"
#include "bindings/logprob.h"
#include "bindings/policy_loss.h"
#include "core/kept_cuda.h"
#include "core/logprob_cuda.h"
#include "core/policy_loss_cuda.h"

namespace mgrpo {
namespace {

using torch::stable::accelerator::DeviceGuard;

cudaStream_t current_stream(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

void check_launch(cudaError_t error, const char* op) {
  STD_TORCH_CHECK(error == cudaSuccess, "mgrpo::", op, ": ", cudaGetErrorString(error));
}

void run_stats(const StatsArgs& args, const Tensor& logits) {
  const DeviceGuard guard(logits.get_device_index());
  check_launch(cuda::stats(args, current_stream(logits)), "logprob_stats");
}

void run_merge(const MergeArgs& args, const Tensor& stats) {
  const DeviceGuard guard(stats.get_device_index());
  check_launch(cuda::merge(args, current_stream(stats)), "logprob_merge");
}

void run_grad(const GradArgs& args, const Tensor& logits) {
  const DeviceGuard guard(logits.get_device_index());
  check_launch(cuda::grad(args, current_stream(logits)), "logprob_grad");
}

void run_kept_stats(const KeptStatsArgs& args, const Tensor& values) {
  const DeviceGuard guard(values.get_device_index());
  check_launch(cuda::kept_stats(args, current_stream(values)), "kept_stats");
}

void run_kept_grad(const KeptGradArgs& args, const Tensor& values) {
  const DeviceGuard guard(values.get_device_index());
  check_launch(cuda::kept_grad(args, current_stream(values)), "kept_grad");
}

void run_policy_loss(const PolicyLossArgs& args, int64_t, const Tensor& logprobs) {
  const DeviceGuard guard(logprobs.get_device_index());
  check_launch(cuda::policy_loss(args, current_stream(logprobs)), "policy_loss");
}

void run_segment_sums(const SegmentSumsArgs& args, int64_t, const Tensor& x) {
  const DeviceGuard guard(x.get_device_index());
  check_launch(cuda::segment_sums(args, current_stream(x)), "segment_sums");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mgrpo, CUDA, m) {
  m.impl("logprob_stats", TORCH_BOX(&logprob_stats<run_stats>));
  m.impl("logprob_merge", TORCH_BOX(&logprob_merge<run_merge>));
  m.impl("logprob_grad_", TORCH_BOX(&logprob_grad_<run_grad>));
  m.impl("logprob_grad_out", TORCH_BOX(&logprob_grad_out<run_grad>));
  m.impl("kept_stats", TORCH_BOX(&kept_stats<run_kept_stats>));
  m.impl("kept_grad", TORCH_BOX(&kept_grad<run_kept_grad>));
  m.impl("policy_loss", TORCH_BOX(&policy_loss<run_policy_loss>));
  m.impl("segment_sums", TORCH_BOX(&segment_sums<run_segment_sums>));
}

}  // namespace mgrpo
