// The GRPO loss of one token, for the CPU and the CUDA kernel, and the arguments of both. No torch here.
//
// With l, l_old, l_ref, l_roll the log-probabilities of a sampled token under the policy, the policy at the start of
// the batch, the reference and the engine, A the advantage and k the factor `keep`:
//
//   r      = e^(l - l_old), or one value per sequence (RatioLevel)
//   ppo    = -min(min(r, delta) A, clip(r, ratio_low, ratio_high) A), for A < 0 at most -A dual_clip
//   cispo  = -A clip(r, ratio_low, ratio_high) l, r a constant
//   reinforce = -A l
//   rho    = e^(l_old - l_roll), clamped; 0 where it lies outside the mask bounds; a constant
//   kl     = one of d, d^2/2, e^-d - 1 + d, r d with d = l - l_ref, times r under bias correction
//   loss   = weight (rho k policy + beta kl)
//
// A token of weight 0 adds exactly 0 to everything, whatever its values, NaN included. Where l_old is not finite the
// token counts as on-policy (r = 1); where l_roll is not finite, rho is 1.
//
// Papers: PPO arXiv 1707.06347, dual clip 1912.09729, delta (INTELLECT-2) 2505.07291, CISPO 2506.13585, GSPO
// 2507.18071, truncated importance sampling (Yao et al. 2025), IcePop 2510.18855, KL estimators: Schulman 2020 and
// 2512.21852.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.h"

namespace mgrpo {

// Each enum ends with the number of its values; Python's names for them are in the same order in
// mgrpo/ops/settings.py.
enum class Surrogate { kPpoClip, kCispo, kReinforce, kCount };
// kSequence: the ratio is e^seq_log_ratio, which has a gradient of its own. kSequenceToken: that value, but with
// the gradient of each token's log-probability.
enum class RatioLevel { kToken, kSequence, kSequenceToken, kCount };
enum class KlEstimator { k0, k1, k2, k3, kCount };

// Every setting, as (type, name), in the order in which the op takes their values: the only list of them in C++.
//   ratio_low, ratio_high   bounds of the ratio; ratio_low 0: no lower one
//   delta, dual_clip        0: off
//   rho_*                   0: off
#define MGRPO_POLICY_SETTINGS(X) \
  X(Surrogate, surrogate)        \
  X(RatioLevel, ratio_level)     \
  X(float, ratio_low)            \
  X(float, ratio_high)           \
  X(float, delta)                \
  X(float, dual_clip)            \
  X(float, beta)                 \
  X(KlEstimator, kl_estimator)   \
  X(bool, kl_bias_correction)    \
  X(bool, use_rho)               \
  X(float, rho_clamp_low)        \
  X(float, rho_clamp_high)       \
  X(float, rho_mask_low)         \
  X(float, rho_mask_high)

struct PolicyConfig {
#define MGRPO_FIELD(Type, name) Type name;
  MGRPO_POLICY_SETTINGS(MGRPO_FIELD)
#undef MGRPO_FIELD
};

#define MGRPO_NAME(Type, name) #name,
constexpr const char* kSettingNames[] = {MGRPO_POLICY_SETTINGS(MGRPO_NAME)};
#undef MGRPO_NAME

// What is added up over the trained tokens of a sequence; the last one is a maximum.
enum Column {
  kLoss,   // weighted, as it enters the total
  kCount,  // trained tokens
  kPolicy,
  kPenalty,  // beta kl
  kRatio,
  kRatioDeviation,  // (r - 1)^2
  kApproxKl,        // (l - l_old)^2 / 2
  kClippedLow,
  kClippedHigh,
  kBounded,  // by delta or dual_clip
  kKl0,
  kKl1,
  kKl2,
  kKl3,
  kRho,  // the weight that was used
  kRhoClamped,
  kRhoDroppedLow,
  kRhoDroppedHigh,
  kKnownRollout,    // tokens with a finite l_roll; only these are in the columns below
  kMismatch,        // |l_old - l_roll|
  kMismatchSquare,  // (l_old - l_roll)^2
  kMismatchTail,    // e^(l_old - l_roll) outside [0.9, 1.1]
  kRolloutKl,       // l_roll - l, an estimate of KL(engine, policy)
  kMismatchMax,     // -inf if there is none
  kNumColumns
};

// Differences of log-probabilities are clamped here, with gradient 0 beyond: e^40 is still finite in fp32.
constexpr float kLogRatioLimit = 40.f;
constexpr float kLogRhoLimit = 10.f;

// Vectors of n tokens; cu_seqlens [num_seqs + 1] cuts them into sequences. Pointers marked ? may be null.
struct PolicyLossArgs {
  PolicyConfig config;
  const float *logprobs, *old_logprobs;
  const float *ref_logprobs, *rollout_logprobs;  // ?
  const float* advantages;                       // [n], or [num_seqs]
  bool advantage_per_sequence;
  const float* weights;
  const float* keep;  // ? factor of the policy term
  const int32_t* cu_seqlens;
  int64_t num_seqs;
  const float* seq_log_ratio;     // [num_seqs], ? at RatioLevel::kToken
  const float* seq_log_rho;       // [num_seqs] ? log of the rho that weighs, null: each token's own
  const float* seq_log_rho_mask;  // [num_seqs] ? log of the rho that is compared with the mask bounds
  float* grad;                    // [n] d loss / d logprobs
  float* seq_grad;                // [num_seqs] d loss / d seq_log_ratio
  float* sums;                    // [num_seqs, kNumColumns]
};

struct Clamped {
  float value;
  bool is_inside;
};

MGRPO_HOST_DEVICE Clamped clamp(float x, float limit) {
  return {x < -limit ? -limit : (x > limit ? limit : x), x >= -limit && x <= limit};
}

MGRPO_HOST_DEVICE bool is_finite(float x) { return x - x == 0.f; }

// A number and its derivatives with respect to the token's log-probability and the sequence's log ratio.
struct Dual {
  float value, d_token, d_seq;
};

MGRPO_HOST_DEVICE Dual policy_ratio(const PolicyConfig& config, float log_ratio, float seq_log_ratio) {
  const Clamped x = clamp(config.ratio_level == RatioLevel::kToken ? log_ratio : seq_log_ratio, kLogRatioLimit);
  const float r = expf(x.value);
  switch (config.ratio_level) {
    case RatioLevel::kToken:
      return {r, x.is_inside ? r : 0.f, 0.f};
    case RatioLevel::kSequence:
      return {r, 0.f, x.is_inside ? r : 0.f};
    default:
      return {r, r, 0.f};
  }
}

// The surrogate before rho and keep. `sums` is the row of this token.
template <class Sums>
MGRPO_HOST_DEVICE Dual surrogate_loss(const PolicyConfig& config, Dual r, float logprob, float advantage, Sums& sums) {
  if (config.surrogate == Surrogate::kReinforce) return {-advantage * logprob, -advantage, 0.f};
  const float low = config.ratio_low, high = config.ratio_high;
  const float held = r.value < low ? low : (r.value > high ? high : r.value);
  if (config.surrogate == Surrogate::kCispo) {
    sums[kClippedLow] = r.value < low;
    sums[kClippedHigh] = r.value > high;
    return {-advantage * held * logprob, -advantage * held, 0.f};
  }
  const bool is_above_delta = config.delta > 0.f && r.value > config.delta;
  const float unclipped = (is_above_delta ? config.delta : r.value) * advantage;
  const float clipped = held * advantage;
  const bool takes_clipped = clipped < unclipped;
  const bool is_inside = r.value >= low && r.value <= high;
  float loss = takes_clipped ? -clipped : -unclipped;
  float slope = (takes_clipped ? is_inside : !is_above_delta) ? -advantage : 0.f;  // in r
  sums[kClippedLow] = takes_clipped && r.value < low;
  sums[kClippedHigh] = takes_clipped && r.value > high;
  sums[kBounded] = !takes_clipped && is_above_delta && advantage != 0.f;
  if (config.dual_clip > 0.f && advantage < 0.f && loss > -advantage * config.dual_clip) {
    loss = -advantage * config.dual_clip;
    slope = 0.f;
    sums[kBounded] = 1.f;
  }
  return {loss, slope * r.d_token, slope * r.d_seq};
}

// The weight of the policy term that corrects for the engine's different probabilities.
template <class Sums>
MGRPO_HOST_DEVICE float rho_weight(const PolicyConfig& config, float log_rho, float log_rho_mask, Sums& sums) {
  const float rho = expf(clamp(log_rho, kLogRhoLimit).value), mask_rho = expf(clamp(log_rho_mask, kLogRhoLimit).value);
  const bool is_low = config.rho_mask_low > 0.f && mask_rho < config.rho_mask_low;
  const bool is_high = config.rho_mask_high > 0.f && mask_rho > config.rho_mask_high;
  float weight = rho;
  if (config.rho_clamp_low > 0.f && weight < config.rho_clamp_low) weight = config.rho_clamp_low;
  if (config.rho_clamp_high > 0.f && weight > config.rho_clamp_high) weight = config.rho_clamp_high;
  sums[kRhoClamped] = weight != rho;
  sums[kRhoDroppedLow] = is_low;
  sums[kRhoDroppedHigh] = is_high;
  return is_low || is_high ? 0.f : weight;
}

// The KL estimate chosen by the config; all four values go into `sums`.
template <class Sums>
MGRPO_HOST_DEVICE Dual kl_estimate(const PolicyConfig& config, Dual r, float log_ratio_to_ref, Sums& sums) {
  const Clamped d = clamp(log_ratio_to_ref, kLogRatioLimit);
  const float slope = d.is_inside ? 1.f : 0.f, x = d.value, e = expm1f(-x);
  sums[kKl0] = x;
  sums[kKl1] = 0.5f * x * x;
  sums[kKl2] = e + x;
  sums[kKl3] = r.value * x;
  Dual kl{};
  switch (config.kl_estimator) {
    case KlEstimator::k0:
      kl = {x, slope, 0.f};
      break;
    case KlEstimator::k1:
      kl = {0.5f * x * x, slope * x, 0.f};
      break;
    case KlEstimator::k2:
      kl = {e + x, slope * -e, 0.f};
      break;
    default:
      kl = {r.value * x, slope * r.value + x * r.d_token, x * r.d_seq};
  }
  if (!config.kl_bias_correction) return kl;
  // Where the ratio is the token's own, the e^-d of the two terms cancel and leave d r, which fp32 would lose when e^-d
  // is large. They are therefore computed together.
  const float d_token = config.kl_estimator == KlEstimator::k2 ? e * (r.d_token - slope * r.value) + x * r.d_token
                                                               : kl.d_token * r.value + kl.value * r.d_token;
  return {kl.value * r.value, d_token, kl.d_seq * r.value + kl.value * r.d_seq};
}

// The weighted loss of token i in sequence s, for tokens whose weight is not 0. `sums` is set to 0 by the caller and
// gets what this token adds to each column.
template <class Sums>
MGRPO_HOST_DEVICE Dual token_loss(const PolicyLossArgs& args, int64_t i, int64_t s, Sums& sums) {
  const PolicyConfig& config = args.config;
  const float logprob = args.logprobs[i], weight = args.weights[i];
  const float advantage = args.advantages[args.advantage_per_sequence ? s : i];
  const float old = is_finite(args.old_logprobs[i]) ? args.old_logprobs[i] : logprob;

  const Dual r = policy_ratio(config, logprob - old, args.seq_log_ratio ? args.seq_log_ratio[s] : 0.f);
  Dual policy = surrogate_loss(config, r, logprob, advantage, sums);

  float log_rho = 0.f;
  const bool knows_rollout = args.rollout_logprobs && is_finite(args.rollout_logprobs[i]);
  if (knows_rollout) {
    const float mismatch = old - args.rollout_logprobs[i];
    log_rho = clamp(mismatch, kLogRhoLimit).value;
    const float rho = expf(log_rho);
    sums[kKnownRollout] = 1.f;
    sums[kMismatch] = fabsf(mismatch);
    sums[kMismatchSquare] = mismatch * mismatch;
    sums[kMismatchTail] = rho < 0.9f || rho > 1.1f;
    sums[kRolloutKl] = args.rollout_logprobs[i] - logprob;
    sums[kMismatchMax] = fabsf(mismatch);
  }
  float factor = args.keep ? args.keep[i] : 1.f;
  if (config.use_rho) {
    const float rho = rho_weight(config, args.seq_log_rho ? args.seq_log_rho[s] : log_rho,
                                 args.seq_log_rho_mask ? args.seq_log_rho_mask[s] : log_rho, sums);
    sums[kRho] = rho;
    factor *= rho;
  }
  if (factor == 0.f) {
    sums[kClippedLow] = sums[kClippedHigh] = sums[kBounded] = 0.f;
    policy = {0.f, 0.f, 0.f};
  } else {
    policy = {factor * policy.value, factor * policy.d_token, factor * policy.d_seq};
  }

  Dual penalty{};
  if (args.ref_logprobs) {
    const Dual kl = kl_estimate(config, r, logprob - args.ref_logprobs[i], sums);
    if (config.beta != 0.f) penalty = {config.beta * kl.value, config.beta * kl.d_token, config.beta * kl.d_seq};
  }

  sums[kLoss] = weight * (policy.value + penalty.value);
  sums[kCount] = 1.f;
  sums[kPolicy] = policy.value;
  sums[kPenalty] = penalty.value;
  sums[kRatio] = r.value;
  sums[kRatioDeviation] = (r.value - 1.f) * (r.value - 1.f);
  sums[kApproxKl] = 0.5f * (logprob - old) * (logprob - old);
  return {sums[kLoss], weight * (policy.d_token + penalty.d_token), weight * (policy.d_seq + penalty.d_seq)};
}

// x [n], weights [n] cut by cu_seqlens -> out [2, num_seqs]: sum of weights x, and sum of weights. Tokens of weight 0
// are not read.
struct SegmentSumsArgs {
  const float *x, *weights;
  const int32_t* cu_seqlens;
  int64_t num_seqs;
  float* out;
};

}  // namespace mgrpo
