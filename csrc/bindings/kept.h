// The ops of kept sets from tensors to argument structs; see bindings/logprob.h.
#pragma once

#include "bindings/checks.h"
#include "core/kept.h"

namespace mgrpo {

inline KeptSets kept_sets(const Tensor& values, const Tensor& ids, const Tensor& offsets, const Tensor& targets,
                          const Tensor& inv_temp) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  const int64_t n = targets.numel();
  STD_TORCH_CHECK(values.numel() <= kMax && n < kMax, "more than 2^31 - 1 entries or targets");
  check_operand(values, "values", ScalarType::Float, values.numel(), values);
  check_operand(ids, "ids", ScalarType::Int, values.numel(), values);
  check_operand(offsets, "offsets", ScalarType::Int, n + 1, values);
  check_operand(targets, "targets", ScalarType::Long, n, values);
  KeptSets sets{};
  sets.values = values.const_data_ptr<float>();
  sets.ids = ids.const_data_ptr<int32_t>();
  sets.offsets = offsets.const_data_ptr<int32_t>();
  sets.targets = targets.const_data_ptr<int64_t>();
  sets.inv_temp = inv_temp_of(inv_temp, n, values);
  sets.n = n;
  return sets;
}

template <auto kRun>
Tensor kept_stats(const Tensor& values, const Tensor& ids, const Tensor& offsets, const Tensor& targets,
                  const Tensor& inv_temp, bool entropy) {
  Tensor out = new_stats(values, targets.numel());
  kRun(KeptStatsArgs{kept_sets(values, ids, offsets, targets, inv_temp), entropy, out.mutable_data_ptr<float>()},
       values);
  return out;
}

template <auto kRun>
Tensor kept_grad(const Tensor& values, const Tensor& ids, const Tensor& offsets, const Tensor& targets,
                 const Tensor& inv_temp, const Tensor& stats, const Tensor& g_logprob,
                 const OptionalTensor& g_entropy) {
  const int64_t n = targets.numel();
  check_operand(stats, "stats", ScalarType::Float, 4 * n, values);
  check_operand(g_logprob, "g_logprob", ScalarType::Float, n, values);
  if (g_entropy) check_operand(*g_entropy, "g_entropy", ScalarType::Float, n, values);
  Tensor out = new_vector(values, values.numel());
  KeptGradArgs args{};
  args.sets = kept_sets(values, ids, offsets, targets, inv_temp);
  args.stats = stats.const_data_ptr<float>();
  args.g_logprob = g_logprob.const_data_ptr<float>();
  args.g_entropy = g_entropy ? g_entropy->const_data_ptr<float>() : nullptr;
  args.out = out.mutable_data_ptr<float>();
  kRun(args, values);
  return out;
}

}  // namespace mgrpo
