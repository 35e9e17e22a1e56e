// The CPU kernels of the policy loss against double precision, without torch: every combination of settings, each
// optional operand left out, gradients against differences of the loss.
#include <algorithm>
#include <array>

#include "check.h"
#include "core/policy_loss_cpu.h"
#include "policy_loss_cases.h"

namespace {

using namespace mgrpo;

// A trained token as the formulas want it: no missing number, no null pointer.
struct Token {
  double logprob, old_logprob, advantage, weight, factor;  // factor: of the policy term
  bool has_ref, has_rollout;
  double ref_logprob, rollout_logprob, seq_log_ratio;
  double rho, mask_rho;
};

double held(double x, double limit) { return std::min(std::max(x, -limit), limit); }

Token token_at(const PolicyLossArgs& args, int64_t i, int64_t s) {
  Token token{};
  token.logprob = args.logprobs[i];
  token.old_logprob = std::isfinite(args.old_logprobs[i]) ? args.old_logprobs[i] : args.logprobs[i];
  token.advantage = args.advantages[args.advantage_per_sequence ? s : i];
  token.weight = args.weights[i];
  token.factor = args.keep ? args.keep[i] : 1;
  token.has_ref = args.ref_logprobs != nullptr;
  if (token.has_ref) token.ref_logprob = args.ref_logprobs[i];
  token.has_rollout = args.rollout_logprobs && std::isfinite(args.rollout_logprobs[i]);
  if (token.has_rollout) token.rollout_logprob = args.rollout_logprobs[i];
  if (args.seq_log_ratio) token.seq_log_ratio = args.seq_log_ratio[s];
  const double log_rho = token.has_rollout ? token.old_logprob - token.rollout_logprob : 0;
  token.rho = std::exp(held(args.seq_log_rho ? args.seq_log_rho[s] : log_rho, 10));
  token.mask_rho = std::exp(held(args.seq_log_rho_mask ? args.seq_log_rho_mask[s] : log_rho, 10));
  return token;
}

using Columns = std::array<double, kNumColumns>;

// What the token adds to each column. Gradients are differences in logprob and seq_log_ratio; the token's own fields of
// these names are where the formula takes a constant.
Columns columns_of(const PolicyConfig& config, const Token& token, double logprob, double seq_log_ratio) {
  Columns columns{};
  const double advantage = token.advantage;
  double r, constant_r;
  if (config.ratio_level == RatioLevel::kToken) {
    r = std::exp(held(logprob - token.old_logprob, 40));
    constant_r = std::exp(held(token.logprob - token.old_logprob, 40));
  } else {
    constant_r = std::exp(held(token.seq_log_ratio, 40));
    r = config.ratio_level == RatioLevel::kSequence ? std::exp(held(seq_log_ratio, 40))
                                                    : constant_r * std::exp(logprob - token.logprob);
  }

  double policy;
  if (config.surrogate == Surrogate::kReinforce) {
    policy = -advantage * logprob;
  } else if (config.surrogate == Surrogate::kCispo) {
    policy = -advantage * std::clamp<double>(constant_r, config.ratio_low, config.ratio_high) * logprob;
    columns[kClippedLow] = constant_r < config.ratio_low;
    columns[kClippedHigh] = constant_r > config.ratio_high;
  } else if (advantage >= 0) {
    policy = -advantage * std::min<double>(r, config.ratio_high);
    columns[kClippedHigh] = r > config.ratio_high;
  } else {
    policy = -advantage * std::max<double>(r, config.ratio_low);
    columns[kClippedLow] = r < config.ratio_low;
    for (double bound : {config.delta, config.dual_clip}) {
      if (bound == 0 || policy <= -advantage * bound) continue;
      policy = -advantage * bound;
      columns[kBounded] = 1;
    }
  }

  double factor = token.factor;
  if (config.use_rho) {
    double rho = token.rho;
    if (config.rho_clamp_low != 0) rho = std::max<double>(rho, config.rho_clamp_low);
    if (config.rho_clamp_high != 0) rho = std::min<double>(rho, config.rho_clamp_high);
    columns[kRhoClamped] = rho != token.rho;
    columns[kRhoDroppedLow] = config.rho_mask_low != 0 && token.mask_rho < config.rho_mask_low;
    columns[kRhoDroppedHigh] = config.rho_mask_high != 0 && token.mask_rho > config.rho_mask_high;
    if (columns[kRhoDroppedLow] != 0 || columns[kRhoDroppedHigh] != 0) rho = 0;
    columns[kRho] = rho;
    factor *= rho;
  }
  columns[kPolicy] = factor * policy;
  if (factor == 0) columns[kClippedLow] = columns[kClippedHigh] = columns[kBounded] = 0;

  if (token.has_ref) {
    const double d = held(logprob - token.ref_logprob, 40);
    const double kls[] = {d, d * d / 2, std::exp(-d) - 1 + d, r * d};
    for (int k = 0; k < 4; ++k) columns[kKl0 + k] = kls[k];
    columns[kPenalty] = config.beta * kls[static_cast<int>(config.kl_estimator)] * (config.kl_bias_correction ? r : 1);
  }
  columns[kLoss] = token.weight * (columns[kPolicy] + columns[kPenalty]);
  columns[kCount] = 1;
  columns[kRatio] = r;
  columns[kRatioDeviation] = (r - 1) * (r - 1);
  columns[kApproxKl] = std::pow(token.logprob - token.old_logprob, 2) / 2;
  columns[kMismatchMax] = -INFINITY;
  if (token.has_rollout) {
    const double mismatch = token.old_logprob - token.rollout_logprob;
    columns[kKnownRollout] = 1;
    columns[kMismatch] = columns[kMismatchMax] = std::fabs(mismatch);
    columns[kMismatchSquare] = mismatch * mismatch;
    columns[kMismatchTail] = std::exp(mismatch) < 0.9 || std::exp(mismatch) > 1.1;
    columns[kRolloutKl] = token.rollout_logprob - token.logprob;
  }
  return columns;
}

// The two terms are taken separately: next to a policy loss of e^40 a penalty has no digits left.
double slope(const PolicyConfig& config, const Token& token, double d_logprob, double d_seq) {
  const Columns ahead = columns_of(config, token, token.logprob + d_logprob, token.seq_log_ratio + d_seq);
  const Columns behind = columns_of(config, token, token.logprob - d_logprob, token.seq_log_ratio - d_seq);
  double sum = 0;
  for (Column column : {kPolicy, kPenalty}) sum += (ahead[column] - behind[column]) / (2 * (d_logprob + d_seq));
  return token.weight * sum;
}

void expect_close(double got, double want, double tolerance, const PolicyConfig& config, const char* what, int64_t i) {
  EXPECT(is_close(got, want, tolerance),
         "%s[%ld] at surrogate %d, level %d, kl %d, corrected %d, delta %g, dual clip %g, rho %d: %g and %g", what, i,
         static_cast<int>(config.surrogate), static_cast<int>(config.ratio_level),
         static_cast<int>(config.kl_estimator), config.kl_bias_correction, config.delta, config.dual_clip,
         config.use_rho, got, want);
}

void check_config(const Batch& batch, const PolicyConfig& config, int absent) {
  const int64_t num_seqs = batch.num_seqs();
  std::vector<float> grad(batch.logprobs.size(), NAN), seq_grad(num_seqs, NAN), sums(num_seqs * kNumColumns, NAN);
  PolicyLossArgs args = arguments(batch, config, absent);
  args.grad = grad.data();
  args.seq_grad = seq_grad.data();
  args.sums = sums.data();
  cpu::policy_loss(args, 0, num_seqs / 2);
  cpu::policy_loss(args, num_seqs / 2, num_seqs);

  constexpr double kStep = 1e-6;
  for (int64_t s = 0; s < num_seqs; ++s) {
    Columns total{};
    total[kMismatchMax] = -INFINITY;
    double seq_slope = 0;
    for (int64_t i = batch.cu_seqlens[s]; i < batch.cu_seqlens[s + 1]; ++i) {
      if (batch.weights[i] == 0) {
        EXPECT(grad[i] == 0, "a token of weight 0 has the gradient %g", grad[i]);
        continue;
      }
      const Token token = token_at(args, i, s);
      const Columns columns = columns_of(config, token, token.logprob, token.seq_log_ratio);
      for (int column = 0; column < kMismatchMax; ++column) total[column] += columns[column];
      total[kMismatchMax] = std::max(total[kMismatchMax], columns[kMismatchMax]);
      seq_slope += slope(config, token, 0, kStep);
      expect_close(grad[i], slope(config, token, kStep, 0), 1e-5, config, "grad", i);
    }
    expect_close(seq_grad[s], seq_slope, 1e-5, config, "seq_grad", s);
    for (int column = 0; column < kNumColumns; ++column)
      expect_close(sums[s * kNumColumns + column], total[column], 2e-5, config, "sums", s * kNumColumns + column);
  }
}

void check_segment_sums(const Batch& batch) {
  const int64_t num_seqs = batch.num_seqs();
  std::vector<float> out(2 * num_seqs, NAN);
  cpu::segment_sums({batch.logprobs.data(), batch.weights.data(), batch.cu_seqlens.data(), num_seqs, out.data()}, 0,
                    num_seqs);
  for (int64_t s = 0; s < num_seqs; ++s) {
    double total = 0, weight = 0;
    for (int64_t i = batch.cu_seqlens[s]; i < batch.cu_seqlens[s + 1]; ++i) {
      weight += batch.weights[i];
      if (batch.weights[i] != 0) total += static_cast<double>(batch.weights[i]) * batch.logprobs[i];
    }
    EXPECT(is_close(out[s], total, 1e-6), "sequence %ld: %g and %g", s, out[s], total);
    EXPECT(is_close(out[num_seqs + s], weight, 1e-6), "sequence %ld: weights %g and %g", s, out[num_seqs + s], weight);
  }
}

}  // namespace

int main() {
  const Batch batch = make_batch({5, 0, 37, 1, 90, 8});
  for_each_config([&](const PolicyConfig& config) {
    check_config(batch, config, kSeqRho | kSeqRhoMask);
    check_config(batch, config, 0);
  });
  PolicyConfig config{};
  config.ratio_low = 0.8f;
  config.ratio_high = 1.3f;
  config.use_rho = true;
  config.rho_clamp_high = 1.25f;
  config.rho_mask_low = 0.7f;
  config.beta = 0.1f;
  for (int absent = 0; absent < 64; ++absent) check_config(batch, config, absent);
  check_config(make_batch({0}), config, 0);
  check_segment_sums(batch);
  std::printf("%d failures\n", failures);
  return failures != 0;
}
