// The CUDA kernels of kept sets against the CPU kernels on the same inputs. Exit code 77 (skipped) without a CUDA
// device.
#include "check.h"
#include "core/kept_cpu.h"
#include "core/kept_cuda.h"
#include "core/logprob_cpu.h"
#include "device.h"
#include "kept_cases.h"

namespace {

using namespace mgrpo;

void expect_close(const std::vector<float>& got, const std::vector<float>& want, const char* what) {
  for (size_t i = 0; i < want.size(); ++i)
    EXPECT(is_close(got[i], want[i], 1e-5) || (std::isnan(got[i]) && std::isnan(want[i])), "%s[%zu]: %g and %g", what,
           i, got[i], want[i]);
}

void check_case(bool with_entropy) {
  KeptCase test = make_kept_case();
  const int64_t n = static_cast<int64_t>(test.targets.size());
  const InverseTemperature inv_temp{test.inv_temps.data(), 1};
  const KeptSets sets{test.values.data(), test.ids.data(), test.offsets.data(), test.targets.data(), inv_temp, n};
  std::vector<float> stats(4 * n), logprob(n), entropy(n), merged(4 * n), grad(test.values.size(), 1.f);
  OnDevice<float> d_values(test.values), d_inv_temps(test.inv_temps), d_stats(stats), d_grad(grad);
  OnDevice<float> d_g_logprob(test.g_logprob), d_g_entropy(test.g_entropy);
  OnDevice<int32_t> d_ids(test.ids), d_offsets(test.offsets);
  OnDevice<int64_t> d_targets(test.targets);
  const KeptSets d_sets{d_values.data(), d_ids.data(), d_offsets.data(), d_targets.data(), {d_inv_temps.data(), 1}, n};

  cpu::kept_stats({sets, with_entropy, stats.data()}, 0, n);
  require(cuda::kept_stats({d_sets, with_entropy, d_stats.data()}, nullptr));
  expect_close(d_stats.host(), stats, "stats");

  cpu::merge({stats.data(), 1, n, inv_temp, logprob.data(), entropy.data(), merged.data()}, 0, n);
  OnDevice<float> d_merged(merged);
  const float *g_entropy = test.g_entropy.data(), *d_g_entropy_data = d_g_entropy.data();
  cpu::kept_grad({sets, merged.data(), test.g_logprob.data(), with_entropy ? g_entropy : nullptr, grad.data()}, 0, n);
  require(cuda::kept_grad(
      {d_sets, d_merged.data(), d_g_logprob.data(), with_entropy ? d_g_entropy_data : nullptr, d_grad.data()},
      nullptr));
  expect_close(d_grad.host(), grad, "grad");
}

}  // namespace

int main() {
  if (!has_device()) return kSkipped;
  check_case(true);
  check_case(false);
  require(mgrpo::cuda::kept_stats({}, nullptr));  // no set, no launch
  std::printf("%d failures\n", failures);
  return failures != 0;
}
