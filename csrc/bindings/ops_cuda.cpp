// The CUDA side of the ops declared in ops.cpp: device guard, current stream, launch. Compiled by the host compiler.
// rows and inv_rows are not range-checked here: that would wait for the device. Python checks what it can.
#define TORCH_TARGET_VERSION 0x020a000000000000ULL
#ifndef USE_CUDA
#define USE_CUDA  // declares aoti_torch_get_current_cuda_stream
#endif
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "bindings/checks.h"
#include "bindings/policy_loss.h"
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

Tensor logprob_stats(const Tensor& logits, const Tensor& targets, const OptionalTensor& rows, int64_t vocab_start,
                     int64_t valid_cols, const Tensor& inv_temp, bool entropy) {
  const DeviceGuard guard(logits.get_device_index());
  Tensor out = new_stats(logits, targets.numel());
  const StatsArgs args = stats_args(logits, targets, rows, vocab_start, valid_cols, inv_temp, entropy, out);
  check_launch(cuda::stats(args, current_stream(logits)), "logprob_stats");
  return out;
}

std::tuple<Tensor, Tensor, Tensor> logprob_merge(const Tensor& stats, const Tensor& inv_temp) {
  check_parts(stats);
  const DeviceGuard guard(stats.get_device_index());
  const int64_t n = stats.size(2);
  Tensor logprob = new_vector(stats, n), entropy = new_vector(stats, n), merged = new_stats(stats, n);
  check_launch(cuda::merge(merge_args(stats, inv_temp, logprob, entropy, merged), current_stream(stats)),
               "logprob_merge");
  return {logprob, entropy, merged};
}

void logprob_grad_out(const Tensor& logits, Tensor out, const Tensor& targets, const OptionalTensor& inv_rows,
                      int64_t vocab_start, int64_t valid_cols, const Tensor& inv_temp, const Tensor& stats,
                      const Tensor& g_logprob, const OptionalTensor& g_entropy) {
  const DeviceGuard guard(logits.get_device_index());
  const GradArgs args =
      grad_args(logits, out, targets, inv_rows, vocab_start, valid_cols, inv_temp, stats, g_logprob, g_entropy);
  check_launch(cuda::grad(args, current_stream(logits)), "logprob_grad");
}

void logprob_grad_(Tensor logits, const Tensor& targets, const OptionalTensor& inv_rows, int64_t vocab_start,
                   int64_t valid_cols, const Tensor& inv_temp, const Tensor& stats, const Tensor& g_logprob,
                   const OptionalTensor& g_entropy) {
  logprob_grad_out(logits, logits, targets, inv_rows, vocab_start, valid_cols, inv_temp, stats, g_logprob, g_entropy);
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
  m.impl("logprob_stats", TORCH_BOX(&logprob_stats));
  m.impl("logprob_merge", TORCH_BOX(&logprob_merge));
  m.impl("logprob_grad_", TORCH_BOX(&logprob_grad_));
  m.impl("logprob_grad_out", TORCH_BOX(&logprob_grad_out));
  m.impl("policy_loss", TORCH_BOX(&policy_loss<run_policy_loss>));
  m.impl("segment_sums", TORCH_BOX(&segment_sums<run_segment_sums>));
}

}  // namespace mgrpo
