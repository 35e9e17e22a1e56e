// The CUDA kernels against the CPU kernels on the same inputs. Exit code 77 (skipped) without a CUDA device.
#include "check.h"
#include "core/logprob_cpu.h"
#include "core/logprob_cuda.h"
#include "device.h"
#include "oracle.h"

namespace {

using namespace mgrpo;

void expect_close(const std::vector<float>& got, const std::vector<float>& want, const char* what, int64_t width) {
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT(is_close(got[i], want[i], 1e-5), "%s[%zu] of width %ld: %g and %g", what, i, width, got[i], want[i]);
  }
}

template <class Format>
void check_width(int64_t valid, int64_t padding, int64_t offset, bool with_entropy) {
  using T = typename Format::Stored;
  constexpr DType dtype = Format::dtype;
  constexpr int64_t tokens = 5, n = 3;
  const int64_t cols = valid + padding;
  std::vector<T> logits = random_logits<Format>(tokens * cols, static_cast<uint32_t>(valid));
  const std::vector<int64_t> rows = {4, 0, 2}, targets = {valid / 2, valid - 1, valid + 1000};
  const std::vector<int32_t> inv_rows = {1, -1, 2, -1, 0};
  const std::vector<float> inv_temps = {1.f, 1 / 0.7f, 1 / 1.3f}, g_logprob = {1.5f, -0.5f, 0.f};
  const std::vector<float> g_entropy = {0.25f, 2.f, 0.f};

  OnDevice<T> d_logits(logits, offset), d_out(std::vector<T>(logits.size(), T{1}), offset);
  OnDevice<T> d_shifted(std::vector<T>(logits.size(), T{1}), offset + 1);
  OnDevice<int64_t> d_rows(rows), d_targets(targets);
  OnDevice<int32_t> d_inv_rows(inv_rows);
  OnDevice<float> d_inv_temps(inv_temps), d_g_logprob(g_logprob), d_g_entropy(g_entropy);
  std::vector<float> stats(4 * n), logprob(n), entropy(n), merged(4 * n);
  OnDevice<float> d_stats(stats), d_logprob(logprob), d_entropy(entropy), d_merged(merged);

  StatsArgs stats_args{};
  stats_args.slice = {logits.data(), dtype, tokens, cols, cols, 0, valid};
  stats_args.targets = targets.data();
  stats_args.rows = rows.data();
  stats_args.inv_temp = {inv_temps.data(), 1};
  stats_args.n = n;
  stats_args.entropy = with_entropy;
  stats_args.out = stats.data();
  cpu::stats(stats_args, 0, n);
  StatsArgs d_stats_args = stats_args;
  d_stats_args.slice.data = d_logits.data();
  d_stats_args.targets = d_targets.data();
  d_stats_args.rows = d_rows.data();
  d_stats_args.inv_temp.data = d_inv_temps.data();
  d_stats_args.out = d_stats.data();
  require(cuda::stats(d_stats_args, nullptr));
  expect_close(d_stats.host(), stats, "stats", valid);

  cpu::merge({stats.data(), 1, n, {inv_temps.data(), 1}, logprob.data(), entropy.data(), merged.data()}, 0, n);
  require(cuda::merge(
      {d_stats.data(), 1, n, {d_inv_temps.data(), 1}, d_logprob.data(), d_entropy.data(), d_merged.data()}, nullptr));
  expect_close(d_logprob.host(), logprob, "logprob", valid);
  if (with_entropy) expect_close(d_entropy.host(), entropy, "entropy", valid);

  GradArgs grad_args{};
  grad_args.slice = stats_args.slice;
  grad_args.targets = targets.data();
  grad_args.inv_rows = inv_rows.data();
  grad_args.inv_temp = {inv_temps.data(), 1};
  grad_args.n = n;
  grad_args.stats = merged.data();
  grad_args.g_logprob = g_logprob.data();
  grad_args.g_entropy = with_entropy ? g_entropy.data() : nullptr;
  std::vector<T> out(logits.size());
  grad_args.out = out.data();
  grad_args.out_row_stride = cols;
  cpu::grad(grad_args, 0, tokens);
  GradArgs d_grad_args = grad_args;
  d_grad_args.slice.data = d_logits.data();
  d_grad_args.targets = d_targets.data();
  d_grad_args.inv_rows = d_inv_rows.data();
  d_grad_args.inv_temp.data = d_inv_temps.data();
  d_grad_args.stats = d_merged.data();
  d_grad_args.g_logprob = d_g_logprob.data();
  d_grad_args.g_entropy = with_entropy ? d_g_entropy.data() : nullptr;
  d_grad_args.out = d_out.data();
  require(cuda::grad(d_grad_args, nullptr));
  d_grad_args.out = d_shifted.data();
  require(cuda::grad(d_grad_args, nullptr));
  d_grad_args.out = d_logits.data();
  require(cuda::grad(d_grad_args, nullptr));

  const std::vector<T> got = d_out.host();
  const double tolerance = 1e-5 + 2.5 * Format::half_ulp;  // the two may round to neighbours
  for (size_t i = 0; i < out.size(); ++i)
    EXPECT(
        std::fabs(Format::load(got[i]) - Format::load(out[i])) <= 1e-6f + tolerance * std::fabs(Format::load(out[i])),
        "grad[%zu] of width %ld: %g and %g", i, valid, Format::load(got[i]), Format::load(out[i]));
  EXPECT(d_logits.host() == got, "width %ld: in place differs", valid);
  EXPECT(d_shifted.host() == got, "width %ld: a buffer on another 16-byte grid differs", valid);
}

}  // namespace

int main() {
  if (!has_device()) return kSkipped;
  for (int64_t width : {1, 7, 1023, 4096, 32001, 50000}) {
    for (int64_t offset : {0, 1, 3}) {
      for (bool with_entropy : {false, true}) {
        check_width<F32>(width, 0, offset, with_entropy);
        check_width<F32>(width, 5, offset, with_entropy);
        check_width<BF16>(width, 37, offset, with_entropy);
        check_width<F16>(width, 37, offset, with_entropy);
      }
    }
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
