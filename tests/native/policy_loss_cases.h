// Ragged sequences for the policy loss, and every combination of its settings.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "core/policy_loss.h"

struct Batch {
  std::vector<float> logprobs, old_logprobs, ref_logprobs, rollout_logprobs, advantages, weights, keep;
  std::vector<float> seq_advantages, seq_log_ratio, seq_log_rho, seq_log_rho_mask;
  std::vector<int32_t> cu_seqlens;

  int64_t num_seqs() const { return static_cast<int64_t>(cu_seqlens.size()) - 1; }
};

// Sequences of these lengths. Every fifth token has weight 0 over values that are not finite, every seventh no finite
// old logprob, every eleventh none of the engine; the first sequence has log ratios of +-50.
inline Batch make_batch(const std::vector<int32_t>& lengths) {
  std::mt19937 generator(7);
  std::normal_distribution<float> normal;
  constexpr float kNotFinite[] = {NAN, INFINITY, -INFINITY};
  Batch batch;
  batch.cu_seqlens.push_back(0);
  for (int32_t length : lengths) {
    batch.cu_seqlens.push_back(batch.cu_seqlens.back() + length);
    batch.seq_advantages.push_back(normal(generator));
    for (std::vector<float>* x : {&batch.seq_log_ratio, &batch.seq_log_rho, &batch.seq_log_rho_mask})
      x->push_back(length ? 0.3f * normal(generator) : NAN);
  }
  for (int32_t i = 0; i < batch.cu_seqlens.back(); ++i) {
    const bool is_extreme = i < lengths[0];
    const float not_finite = kNotFinite[i % 3], logprob = -1.5f + 0.5f * normal(generator);
    const float old = logprob + (is_extreme ? (i % 2 ? 50.f : -50.f) : 0.4f * normal(generator));
    const bool is_trained = i % 5 != 4;
    batch.weights.push_back(is_trained ? 0.1f + std::fabs(normal(generator)) : 0.f);
    batch.logprobs.push_back(is_trained ? logprob : not_finite);
    batch.old_logprobs.push_back(is_trained && i % 7 != 6 ? old : not_finite);
    const float ref = logprob + (is_extreme ? (i % 3 ? 50.f : -50.f) : 0.5f * normal(generator));
    batch.ref_logprobs.push_back(is_trained ? ref : not_finite);
    batch.rollout_logprobs.push_back(is_trained && i % 11 != 10 ? old + 0.3f * normal(generator) : not_finite);
    batch.advantages.push_back(is_trained ? normal(generator) : not_finite);
    batch.keep.push_back(is_trained ? 0.5f * static_cast<float>(i % 3) : not_finite);
  }
  return batch;
}

// What stays when operands of a call are left out; bit k of `absent` leaves out the k-th.
enum Optional { kRef = 1, kRollout = 2, kKeep = 4, kTokenAdvantages = 8, kSeqRho = 16, kSeqRhoMask = 32 };

// The arguments of a call, except its results.
inline mgrpo::PolicyLossArgs arguments(const Batch& batch, const mgrpo::PolicyConfig& config, int absent) {
  const auto unless = [&](int bit, const std::vector<float>& x) { return absent & bit ? nullptr : x.data(); };
  mgrpo::PolicyLossArgs args{};
  args.config = config;
  args.logprobs = batch.logprobs.data();
  args.old_logprobs = batch.old_logprobs.data();
  args.ref_logprobs = unless(kRef, batch.ref_logprobs);
  args.rollout_logprobs = unless(kRollout, batch.rollout_logprobs);
  args.advantage_per_sequence = (absent & kTokenAdvantages) != 0;
  args.advantages = args.advantage_per_sequence ? batch.seq_advantages.data() : batch.advantages.data();
  args.weights = batch.weights.data();
  args.keep = unless(kKeep, batch.keep);
  args.cu_seqlens = batch.cu_seqlens.data();
  args.num_seqs = batch.num_seqs();
  if (config.ratio_level != mgrpo::RatioLevel::kToken) args.seq_log_ratio = batch.seq_log_ratio.data();
  args.seq_log_rho = unless(kSeqRho, batch.seq_log_rho);
  args.seq_log_rho_mask = unless(kSeqRhoMask, batch.seq_log_rho_mask);
  return args;
}

// Calls check(config) with every surrogate, ratio level, KL estimator with and without bias correction, delta and dual
// clip on and off, and rho off, free, clamped, masked, and both.
template <class Check>
void for_each_config(Check check) {
  using namespace mgrpo;
  constexpr float kBounds[][4] = {{0, 0, 0, 0}, {0.75f, 1.25f, 0, 0}, {0, 0, 0.7f, 1.4f}, {0.75f, 1.25f, 0.7f, 1.4f}};
  for (Surrogate surrogate : {Surrogate::kPpoClip, Surrogate::kCispo, Surrogate::kReinforce}) {
    for (RatioLevel level : {RatioLevel::kToken, RatioLevel::kSequence, RatioLevel::kSequenceToken}) {
      for (int others = 0; others < 4 * 2 * 2 * 2 * 5; ++others) {
        int rest = others;
        const auto next = [&rest](int count) {
          const int choice = rest % count;
          rest /= count;
          return choice;
        };
        PolicyConfig config{};
        config.surrogate = surrogate;
        config.ratio_level = level;
        config.ratio_low = 0.8f;
        config.ratio_high = 1.3f;
        config.kl_estimator = static_cast<KlEstimator>(next(4));
        config.kl_bias_correction = next(2) == 1;
        config.delta = next(2) ? 1.6f : 0.f;
        config.dual_clip = next(2) ? 1.5f : 0.f;
        config.beta = 0.1f;
        const int rho = next(5);
        config.use_rho = rho > 0;
        if (rho > 0) {
          const float* bounds = kBounds[rho - 1];
          config.rho_clamp_low = bounds[0];
          config.rho_clamp_high = bounds[1];
          config.rho_mask_low = bounds[2];
          config.rho_mask_high = bounds[3];
        }
        check(config);
      }
    }
  }
}
