// The CPU kernels against double precision, without torch: every width around the block and vector sizes, two slices
// merged, padding, a row without entry, in place, without entropy.
#include <algorithm>

#include "check.h"
#include "core/logprob_cpu.h"
#include "oracle.h"

namespace {

using namespace mgrpo;

template <class Format>
void check_width(int64_t valid, int64_t padding) {
  using T = typename Format::Stored;
  constexpr DType dtype = Format::dtype;
  constexpr int64_t tokens = 3, n = 2;
  const int64_t cols = valid + padding;
  std::vector<T> logits = random_logits<Format>(tokens * cols, static_cast<uint32_t>(valid));
  const std::vector<int64_t> rows = {2, 0}, targets = {valid / 2, valid - 1};
  const std::vector<int32_t> inv_rows = {1, -1, 0};
  const std::vector<float> inv_temps = {1.f, 1 / 0.7f}, g_logprob = {1.5f, -0.5f}, g_entropy = {0.25f, 2.f};
  const InverseTemperature inv_temp{inv_temps.data(), 1};

  // Two slices that meet anywhere, one of them empty when there is one column.
  const int64_t cut = valid / 3;
  std::vector<float> parts(2 * 4 * n), logprob(n), entropy(n), merged(4 * n);
  for (int part = 0; part < 2; ++part) {
    const int64_t start = part ? cut : 0, size = part ? valid - cut : cut;
    StatsArgs args{};
    args.slice = {logits.data() + start, dtype, tokens, size, cols, start, size};
    args.targets = targets.data();
    args.rows = rows.data();
    args.inv_temp = inv_temp;
    args.n = n;
    args.entropy = true;
    args.out = parts.data() + part * 4 * n;
    cpu::stats(args, 0, n);
  }
  cpu::merge({parts.data(), 2, n, inv_temp, logprob.data(), entropy.data(), merged.data()}, 0, n);

  GradArgs grad{};
  grad.slice = {logits.data(), dtype, tokens, cols, cols, 0, valid};
  grad.targets = targets.data();
  grad.inv_rows = inv_rows.data();
  grad.inv_temp = inv_temp;
  grad.n = n;
  grad.stats = merged.data();
  grad.g_logprob = g_logprob.data();
  grad.g_entropy = g_entropy.data();
  std::vector<T> out(logits.size(), T{1});
  grad.out = out.data();
  grad.out_row_stride = cols;
  cpu::grad(grad, 0, tokens);

  const double grad_tolerance = 2e-6 + Format::half_ulp;
  for (int64_t i = 0; i < n; ++i) {
    std::vector<double> x;
    for (int64_t v = 0; v < valid; ++v) x.push_back(Format::load(logits[rows[i] * cols + v]));
    const RowOracle expected = row_oracle(x, targets[i], inv_temps[i], g_logprob[i], g_entropy[i]);
    EXPECT(std::fabs(logprob[i] - expected.logprob) < 1e-5, "width %ld: %g and %g", valid, logprob[i],
           expected.logprob);
    EXPECT(std::fabs(entropy[i] - expected.entropy) < 1e-5, "width %ld: %g and %g", valid, entropy[i],
           expected.entropy);
    for (int64_t v = 0; v < cols; ++v) {
      const double got = Format::load(out[rows[i] * cols + v]), want = v < valid ? expected.grad[v] : 0;
      EXPECT(std::fabs(got - want) <= 1e-6 + grad_tolerance * std::fabs(want), "width %ld column %ld: %g and %g", valid,
             v, got, want);
    }
  }
  EXPECT(std::all_of(out.begin() + cols, out.begin() + 2 * cols, [](T v) { return v == T{0}; }),
         "width %ld: the row without entry is not zero", valid);

  grad.out = logits.data();
  cpu::grad(grad, 0, tokens);
  EXPECT(logits == out, "width %ld: in place differs", valid);
}

void check_minus_infinity() {
  // The first block of 2,048 is all -inf, as under a top-k mask: it must add nothing.
  std::vector<float> x(5000, -INFINITY);
  x[4000] = 2.f;
  x[4001] = 2.f;
  const int64_t target = 4001;
  const float one = 1.f;
  std::vector<float> stats(4), logprob(1), entropy(1), merged(4);
  StatsArgs args{};
  args.slice = {x.data(), DType::kFloat32, 1, 5000, 5000, 0, 5000};
  args.targets = &target;
  args.inv_temp = {&one, 0};
  args.n = 1;
  args.entropy = true;
  args.out = stats.data();
  cpu::stats(args, 0, 1);
  cpu::merge({stats.data(), 1, 1, {&one, 0}, logprob.data(), entropy.data(), merged.data()}, 0, 1);
  EXPECT(std::fabs(logprob[0] + std::log(2.f)) < 1e-6f, "logprob %g", logprob[0]);
  EXPECT(std::fabs(entropy[0] - std::log(2.f)) < 1e-6f, "entropy %g", entropy[0]);

  x[17] = NAN;  // among nothing but -inf
  cpu::stats(args, 0, 1);
  EXPECT(std::isnan(stats[1]), "a NaN logit got lost");
}

void check_without_entropy(int64_t width) {
  // Each block of 2,048 raises the maximum, so that the sums so far are rescaled.
  std::vector<float> x(width);
  for (int64_t i = 0; i < width; ++i) x[i] = static_cast<float>(i / 2048) + 0.5f * static_cast<float>(i % 2);
  const int64_t target = width / 2;
  const float one = 1.f;
  std::vector<float> stats(4), with_entropy(4);
  StatsArgs args{};
  args.slice = {x.data(), DType::kFloat32, 1, width, width, 0, width};
  args.targets = &target;
  args.inv_temp = {&one, 0};
  args.n = 1;
  args.out = stats.data();
  cpu::stats(args, 0, 1);
  EXPECT(stats[2] == 0.f, "width %ld: w is %g without entropy", width, stats[2]);
  args.entropy = true;
  args.out = with_entropy.data();
  cpu::stats(args, 0, 1);
  EXPECT(with_entropy[2] != 0.f, "width %ld: w is 0 with entropy", width);
  EXPECT(stats[0] == with_entropy[0] && stats[1] == with_entropy[1], "width %ld: m or s depends on entropy", width);
}

}  // namespace

int main() {
  for (int64_t width : {1, 2, 7, 16, 33, 2047, 2048, 2049, 32001}) {
    check_width<F32>(width, 0);
    check_width<F32>(width, 5);
    check_width<BF16>(width, 3);
    check_width<F16>(width, 3);
  }
  check_minus_infinity();
  for (int64_t width : {2048, 4096, 32001}) check_without_entropy(width);
  std::printf("%d failures\n", failures);
  return failures != 0;
}
