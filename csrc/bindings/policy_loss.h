// The policy loss from tensors to argument structs. The function that runs on the device is a template argument, so
// that ops.cpp and ops_cuda.cpp share all of this.
#pragma once

#include <iterator>
#include <tuple>
#include <type_traits>
#include <vector>

#include "bindings/checks.h"
#include "core/policy_loss.h"

namespace mgrpo {

// The vectors' element count and device are those of `like`.
inline const float* floats(const Tensor& x, const char* name, int64_t numel, const Tensor& like) {
  check_operand(x, name, ScalarType::Float, numel, like);
  return x.const_data_ptr<float>();
}

inline const float* floats(const OptionalTensor& x, const char* name, int64_t numel, const Tensor& like) {
  return x ? floats(*x, name, numel, like) : nullptr;
}

inline int64_t num_seqs_of(const Tensor& cu_seqlens) {
  STD_TORCH_CHECK(cu_seqlens.numel() >= 1, "cu_seqlens must be [num_seqs + 1], got no element");
  return cu_seqlens.numel() - 1;
}

inline const int32_t* cu_seqlens_of(const Tensor& cu_seqlens, const Tensor& like) {
  check_operand(cu_seqlens, "cu_seqlens", ScalarType::Int, cu_seqlens.numel(), like);
  return cu_seqlens.const_data_ptr<int32_t>();
}

// A setting from its number: an enum must be one of its values, a float or a bool may be anything.
template <class T>
T setting_of(double value, const char* name) {
  if constexpr (std::is_enum_v<T>) {
    constexpr int kCount = static_cast<int>(T::kCount);
    STD_TORCH_CHECK(value >= 0 && value < kCount, name, "=", value, " is outside [0, ", kCount - 1, "]");
    return static_cast<T>(static_cast<int>(value));
  } else {
    return static_cast<T>(value);
  }
}

inline PolicyConfig config_of(const std::vector<double>& settings) {
  STD_TORCH_CHECK(settings.size() == std::size(kSettingNames), "settings must have ", std::size(kSettingNames),
                  " numbers, got ", settings.size());
  PolicyConfig config{};
  size_t i = 0;
#define MGRPO_UNPACK(Type, name) config.name = setting_of<Type>(settings[i++], #name);
  MGRPO_POLICY_SETTINGS(MGRPO_UNPACK)
#undef MGRPO_UNPACK
  return config;
}

template <auto kRun>
std::tuple<Tensor, Tensor, Tensor> policy_loss(
    const Tensor& logprobs, const Tensor& old_logprobs, const OptionalTensor& ref_logprobs,
    const OptionalTensor& rollout_logprobs, const Tensor& advantages, const Tensor& weights, const OptionalTensor& keep,
    const Tensor& cu_seqlens, const OptionalTensor& seq_log_ratio, const OptionalTensor& seq_log_rho,
    const OptionalTensor& seq_log_rho_mask, const std::vector<double>& settings) {
  const int64_t n = logprobs.numel(), num_seqs = num_seqs_of(cu_seqlens);
  const PolicyConfig config = config_of(settings);
  STD_TORCH_CHECK((config.ratio_level == RatioLevel::kToken) != seq_log_ratio.has_value(),
                  "seq_log_ratio belongs to ratio_level 1 and 2");
  STD_TORCH_CHECK(advantages.numel() == n || advantages.numel() == num_seqs, "advantages must have ", n, " or ",
                  num_seqs, " elements, got ", advantages.numel());

  Tensor grad = new_vector(logprobs, n), seq_grad = new_vector(logprobs, num_seqs);
  Tensor sums = torch::stable::new_empty(logprobs, {num_seqs, kNumColumns}, ScalarType::Float);
  PolicyLossArgs args{};
  args.config = config;
  args.logprobs = floats(logprobs, "logprobs", n, logprobs);
  args.old_logprobs = floats(old_logprobs, "old_logprobs", n, logprobs);
  args.ref_logprobs = floats(ref_logprobs, "ref_logprobs", n, logprobs);
  args.rollout_logprobs = floats(rollout_logprobs, "rollout_logprobs", n, logprobs);
  args.advantages = floats(advantages, "advantages", advantages.numel(), logprobs);
  args.advantage_per_sequence = advantages.numel() != n;
  args.weights = floats(weights, "weights", n, logprobs);
  args.keep = floats(keep, "keep", n, logprobs);
  args.cu_seqlens = cu_seqlens_of(cu_seqlens, logprobs);
  args.num_seqs = num_seqs;
  args.seq_log_ratio = floats(seq_log_ratio, "seq_log_ratio", num_seqs, logprobs);
  args.seq_log_rho = floats(seq_log_rho, "seq_log_rho", num_seqs, logprobs);
  args.seq_log_rho_mask = floats(seq_log_rho_mask, "seq_log_rho_mask", num_seqs, logprobs);
  args.grad = grad.mutable_data_ptr<float>();
  args.seq_grad = seq_grad.mutable_data_ptr<float>();
  args.sums = sums.mutable_data_ptr<float>();
  kRun(args, n, logprobs);
  return {grad, seq_grad, sums};
}

template <auto kRun>
Tensor segment_sums(const Tensor& x, const Tensor& weights, const Tensor& cu_seqlens) {
  const int64_t n = x.numel(), num_seqs = num_seqs_of(cu_seqlens);
  Tensor out = torch::stable::new_empty(x, {2, num_seqs}, ScalarType::Float);
  SegmentSumsArgs args{};
  args.x = floats(x, "x", n, x);
  args.weights = floats(weights, "weights", n, x);
  args.cu_seqlens = cu_seqlens_of(cu_seqlens, x);
  args.num_seqs = num_seqs;
  args.out = out.mutable_data_ptr<float>();
  kRun(args, n, x);
  return out;
}

}  // namespace mgrpo
