// The logprob ops from tensors to argument structs. The function that runs on the device is a template argument, so
// that ops.cpp and ops_cuda.cpp share all of this.
#pragma once

#include <tuple>

#include "bindings/checks.h"

namespace mgrpo {

template <auto kRun>
Tensor logprob_stats(const Tensor& logits, const Tensor& targets, const OptionalTensor& rows, int64_t vocab_start,
                     int64_t valid_cols, const Tensor& inv_temp, bool entropy) {
  Tensor out = new_stats(logits, targets.numel());
  kRun(stats_args(logits, targets, rows, vocab_start, valid_cols, inv_temp, entropy, out), logits);
  return out;
}

template <auto kRun>
std::tuple<Tensor, Tensor, Tensor> logprob_merge(const Tensor& stats, const Tensor& inv_temp) {
  check_parts(stats);
  const int64_t n = stats.size(2);
  Tensor logprob = new_vector(stats, n), entropy = new_vector(stats, n), merged = new_stats(stats, n);
  kRun(merge_args(stats, inv_temp, logprob, entropy, merged), stats);
  return {logprob, entropy, merged};
}

template <auto kRun>
void logprob_grad_out(const Tensor& logits, Tensor out, const Tensor& targets, const OptionalTensor& inv_rows,
                      int64_t vocab_start, int64_t valid_cols, const Tensor& inv_temp, const Tensor& stats,
                      const Tensor& g_logprob, const OptionalTensor& g_entropy) {
  kRun(grad_args(logits, out, targets, inv_rows, vocab_start, valid_cols, inv_temp, stats, g_logprob, g_entropy),
       logits);
}

template <auto kRun>
void logprob_grad_(Tensor logits, const Tensor& targets, const OptionalTensor& inv_rows, int64_t vocab_start,
                   int64_t valid_cols, const Tensor& inv_temp, const Tensor& stats, const Tensor& g_logprob,
                   const OptionalTensor& g_entropy) {
  logprob_grad_out<kRun>(logits, logits, targets, inv_rows, vocab_start, valid_cols, inv_temp, stats, g_logprob,
                         g_entropy);
}

}  // namespace mgrpo
