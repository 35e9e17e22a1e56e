// The CPU kernels of kept sets against double precision, without torch.
#include "check.h"
#include "core/kept_cpu.h"
#include "core/logprob_cpu.h"
#include "kept_cases.h"
#include "oracle.h"

namespace {

using namespace mgrpo;

void check_case(bool with_entropy) {
  KeptCase test = make_kept_case();
  const int64_t n = static_cast<int64_t>(test.targets.size());
  const InverseTemperature inv_temp{test.inv_temps.data(), 1};
  const KeptSets sets{test.values.data(), test.ids.data(), test.offsets.data(), test.targets.data(), inv_temp, n};
  std::vector<float> stats(4 * n), logprob(n), entropy(n), merged(4 * n), grad(test.values.size(), 1.f);
  cpu::kept_stats({sets, with_entropy, stats.data()}, 0, n);
  cpu::merge({stats.data(), 1, n, inv_temp, logprob.data(), entropy.data(), merged.data()}, 0, n);
  cpu::kept_grad(
      {sets, merged.data(), test.g_logprob.data(), with_entropy ? test.g_entropy.data() : nullptr, grad.data()}, 0, n);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t begin = test.offsets[i], size = test.offsets[i + 1] - begin;
    const std::vector<double> x(test.values.begin() + begin, test.values.begin() + begin + size);
    int64_t target = 0;
    while (target < size && test.ids[begin + target] != test.targets[i]) ++target;
    if (i == test.without_target) {
      EXPECT(target == size && std::isinf(logprob[i]) && logprob[i] < 0, "logprob %g without a target", logprob[i]);
      continue;
    }
    if (i == test.without_cotangent) {
      EXPECT(std::isnan(logprob[i]), "a NaN got lost: %g", logprob[i]);
      for (int64_t j = begin; j < begin + size; ++j) EXPECT(grad[j] == 0.f, "gradient %g without cotangent", grad[j]);
      continue;
    }
    const RowOracle want =
        row_oracle(x, target, test.inv_temps[i], test.g_logprob[i], with_entropy ? test.g_entropy[i] : 0.);
    EXPECT(is_close(logprob[i], want.logprob, 1e-5), "set %ld: %g and %g", i, logprob[i], want.logprob);
    if (with_entropy)
      EXPECT(is_close(entropy[i], want.entropy, 1e-5), "set %ld: %g and %g", i, entropy[i], want.entropy);
    for (int64_t k = 0; k < size; ++k)
      EXPECT(is_close(grad[begin + k], want.grad[k], 1e-5), "set %ld entry %ld: %g and %g", i, k, grad[begin + k],
             want.grad[k]);
    if (size == 1)
      EXPECT(logprob[i] == 0.f && grad[begin] == 0.f, "one token: %g, gradient %g", logprob[i], grad[begin]);
    if (!with_entropy) EXPECT(stats[2 * n + i] == 0.f, "w is %g without entropy", stats[2 * n + i]);
  }
}

void check_foreign_set() {
  // All of a set may be another shard's.
  const std::vector<float> values(3, -INFINITY), one(1, 1.f);
  const std::vector<int32_t> ids = {4, 5, 6}, offsets = {0, 3};
  const std::vector<int64_t> targets = {5};
  std::vector<float> stats(4);
  cpu::kept_stats({{values.data(), ids.data(), offsets.data(), targets.data(), {one.data(), 0}, 1}, true, stats.data()},
                  0, 1);
  EXPECT(stats[0] == -INFINITY && stats[1] == 0.f && stats[2] == 0.f && stats[3] == -INFINITY, "%g %g %g %g", stats[0],
         stats[1], stats[2], stats[3]);
}

}  // namespace

int main() {
  check_case(true);
  check_case(false);
  check_foreign_set();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
