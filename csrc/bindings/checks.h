// From tensors to the kernels' argument structs, with checks of every shape, dtype and device.
// These checks keep the kernels memory-safe; the error messages for users are in Python.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <limits>
#include <optional>

#include "core/logprob.h"

namespace mgrpo {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline bool same_device(const Tensor& a, const Tensor& b) {
  return a.is_cuda() == b.is_cuda() && a.get_device_index() == b.get_device_index();
}

// A vector or matrix that the kernels read or write through a plain pointer.
inline void check_operand(const Tensor& x, const char* name, ScalarType dtype, int64_t numel, const Tensor& logits) {
  STD_TORCH_CHECK(x.scalar_type() == dtype, name, " has the wrong dtype");
  STD_TORCH_CHECK(x.is_contiguous(), name, " must be contiguous");
  STD_TORCH_CHECK(x.numel() == numel, name, " must have ", numel, " elements, got ", x.numel());
  STD_TORCH_CHECK(same_device(x, logits), name, " must be on the device of the first argument");
}

inline DType dtype_of(const Tensor& x, const char* name) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, bfloat16 or float16");
  }
}

inline void check_logits(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.dim() == 2, name, " must be [tokens, vocab/tp], got ", x.dim(), " dimensions");
  dtype_of(x, name);
  STD_TORCH_CHECK(x.stride(1) == 1 || x.size(1) <= 1, name, " must have unit column stride, got ", x.stride(1));
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  STD_TORCH_CHECK(x.size(0) <= kMax && x.size(1) <= kMax, name, " has more than 2^31 - 1 rows or columns");
}

// Rows that overlap would be written by several threads at once.
inline void check_writable(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.size(0) <= 1 || x.stride(0) >= x.size(1), name, " has overlapping rows: row stride ", x.stride(0),
                  " for ", x.size(1), " columns");
}

inline Slice slice_of(const Tensor& logits, int64_t vocab_start, int64_t valid_cols) {
  check_logits(logits, "logits");
  STD_TORCH_CHECK(valid_cols >= 0 && valid_cols <= logits.size(1), "valid_cols=", valid_cols, " is outside [0, ",
                  logits.size(1), "]");
  return {logits.const_data_ptr(),
          dtype_of(logits, "logits"),
          logits.size(0),
          logits.size(1),
          logits.stride(0),
          vocab_start,
          valid_cols};
}

// One value for all n entries, or n values.
inline InverseTemperature inv_temp_of(const Tensor& inv_temp, int64_t n, const Tensor& logits) {
  const int64_t numel = inv_temp.numel();
  STD_TORCH_CHECK(numel == 1 || numel == n, "inv_temp must have 1 or ", n, " elements, got ", numel);
  check_operand(inv_temp, "inv_temp", ScalarType::Float, numel, logits);
  return {inv_temp.const_data_ptr<float>(), numel == 1 ? 0 : 1};
}

inline StatsArgs stats_args(const Tensor& logits, const Tensor& targets, const std::optional<Tensor>& rows,
                            int64_t vocab_start, int64_t valid_cols, const Tensor& inv_temp, bool entropy,
                            const Tensor& out) {
  StatsArgs args{};
  args.slice = slice_of(logits, vocab_start, valid_cols);
  args.n = rows ? rows->numel() : logits.size(0);
  STD_TORCH_CHECK(args.n <= std::numeric_limits<int32_t>::max(), "more than 2^31 - 1 targets");
  check_operand(targets, "targets", ScalarType::Long, args.n, logits);
  if (rows) check_operand(*rows, "rows", ScalarType::Long, args.n, logits);
  args.targets = targets.const_data_ptr<int64_t>();
  args.rows = rows ? rows->const_data_ptr<int64_t>() : nullptr;
  args.inv_temp = inv_temp_of(inv_temp, args.n, logits);
  args.entropy = entropy;
  args.out = out.mutable_data_ptr<float>();
  return args;
}

inline MergeArgs merge_args(const Tensor& stats, const Tensor& inv_temp, const Tensor& logprob, const Tensor& entropy,
                            const Tensor& merged) {
  check_operand(stats, "stats", ScalarType::Float, stats.numel(), stats);
  MergeArgs args{};
  args.stats = stats.const_data_ptr<float>();
  args.parts = stats.size(0);
  args.n = stats.size(2);
  args.inv_temp = inv_temp_of(inv_temp, args.n, stats);
  args.logprob = logprob.mutable_data_ptr<float>();
  args.entropy = entropy.mutable_data_ptr<float>();
  args.merged = merged.mutable_data_ptr<float>();
  return args;
}

inline GradArgs grad_args(const Tensor& logits, const Tensor& out, const Tensor& targets,
                          const std::optional<Tensor>& inv_rows, int64_t vocab_start, int64_t valid_cols,
                          const Tensor& inv_temp, const Tensor& stats, const Tensor& g_logprob,
                          const std::optional<Tensor>& g_entropy) {
  GradArgs args{};
  args.slice = slice_of(logits, vocab_start, valid_cols);
  check_logits(out, "out");
  check_writable(out, "out");
  STD_TORCH_CHECK(out.scalar_type() == logits.scalar_type() && same_device(out, logits) &&
                      out.size(0) == logits.size(0) && out.size(1) == logits.size(1),
                  "out must have the dtype, device and shape of logits");
  args.n = targets.numel();
  check_operand(targets, "targets", ScalarType::Long, args.n, logits);
  if (inv_rows)
    check_operand(*inv_rows, "inv_rows", ScalarType::Int, logits.size(0), logits);
  else
    STD_TORCH_CHECK(args.n == logits.size(0), "without inv_rows there must be ", logits.size(0), " targets, got ",
                    args.n);
  check_operand(stats, "stats", ScalarType::Float, 4 * args.n, logits);
  check_operand(g_logprob, "g_logprob", ScalarType::Float, args.n, logits);
  if (g_entropy) check_operand(*g_entropy, "g_entropy", ScalarType::Float, args.n, logits);
  args.out = out.mutable_data_ptr();
  args.out_row_stride = out.stride(0);
  args.targets = targets.const_data_ptr<int64_t>();
  args.inv_rows = inv_rows ? inv_rows->const_data_ptr<int32_t>() : nullptr;
  args.inv_temp = inv_temp_of(inv_temp, args.n, logits);
  args.stats = stats.const_data_ptr<float>();
  args.g_logprob = g_logprob.const_data_ptr<float>();
  args.g_entropy = g_entropy ? g_entropy->const_data_ptr<float>() : nullptr;
  return args;
}

// The results of an op, on the device of x.
inline Tensor new_stats(const Tensor& x, int64_t n) { return torch::stable::new_empty(x, {4, n}, ScalarType::Float); }
inline Tensor new_vector(const Tensor& x, int64_t n) { return torch::stable::new_empty(x, {n}, ScalarType::Float); }

inline void check_parts(const Tensor& stats) {
  STD_TORCH_CHECK(stats.dim() == 3 && stats.size(1) == 4, "stats must be [parts, 4, n]");
}

}  // namespace mgrpo
