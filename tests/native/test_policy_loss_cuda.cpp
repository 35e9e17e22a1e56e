// The CUDA kernels of the policy loss against the CPU kernels on the same inputs, every result twice. Exit code 77
// (skipped) without a CUDA device.
#include <cmath>
#include <cstring>
#include <memory>

#include "check.h"
#include "core/policy_loss_cpu.h"
#include "core/policy_loss_cuda.h"
#include "device.h"
#include "policy_loss_cases.h"

namespace {

using namespace mgrpo;

struct Results {
  std::vector<float> grad, seq_grad, sums;

  explicit Results(const Batch& batch)
      : grad(batch.logprobs.size(), NAN), seq_grad(batch.num_seqs(), NAN), sums(batch.num_seqs() * kNumColumns, NAN) {}
};

// The batch's vectors on the device. Pointers of a call's arguments are exchanged for them.
class DeviceBatch {
 public:
  explicit DeviceBatch(const Batch& batch)
      : host_{&batch.logprobs,
              &batch.old_logprobs,
              &batch.ref_logprobs,
              &batch.rollout_logprobs,
              &batch.advantages,
              &batch.weights,
              &batch.keep,
              &batch.seq_advantages,
              &batch.seq_log_ratio,
              &batch.seq_log_rho,
              &batch.seq_log_rho_mask},
        cu_seqlens_(batch.cu_seqlens) {
    for (const std::vector<float>* x : host_) device_.emplace_back(new OnDevice<float>(*x));
  }

  const float* at(const float* pointer) {
    for (size_t k = 0; k < host_.size(); ++k)
      if (pointer && pointer == host_[k]->data()) return device_[k]->data();
    return nullptr;
  }

  Results run(const Batch& batch, PolicyLossArgs args) {
    for (const float** x :
         {&args.logprobs, &args.old_logprobs, &args.ref_logprobs, &args.rollout_logprobs, &args.advantages,
          &args.weights, &args.keep, &args.seq_log_ratio, &args.seq_log_rho, &args.seq_log_rho_mask})
      *x = at(*x);
    args.cu_seqlens = cu_seqlens_.data();
    Results results(batch);
    OnDevice<float> grad(results.grad), seq_grad(results.seq_grad), sums(results.sums);
    args.grad = grad.data();
    args.seq_grad = seq_grad.data();
    args.sums = sums.data();
    require(cuda::policy_loss(args, nullptr));
    results.grad = grad.host();
    results.seq_grad = seq_grad.host();
    results.sums = sums.host();
    return results;
  }

  std::vector<float> segment_sums(const Batch& batch) {
    OnDevice<float> out(std::vector<float>(2 * batch.num_seqs(), NAN));
    require(cuda::segment_sums(
        {at(batch.logprobs.data()), at(batch.weights.data()), cu_seqlens_.data(), batch.num_seqs(), out.data()},
        nullptr));
    return out.host();
  }

 private:
  std::vector<const std::vector<float>*> host_;
  std::vector<std::unique_ptr<OnDevice<float>>> device_;
  OnDevice<int32_t> cu_seqlens_;
};

void expect_close(const std::vector<float>& got, const std::vector<float>& want, double tolerance, const char* what) {
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT(is_close(got[i], want[i], tolerance), "%s[%zu]: %g and %g", what, i, got[i], want[i]);
  }
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void check(const Batch& batch, DeviceBatch& device, const PolicyConfig& config, int absent) {
  Results want(batch);
  PolicyLossArgs args = arguments(batch, config, absent);
  args.grad = want.grad.data();
  args.seq_grad = want.seq_grad.data();
  args.sums = want.sums.data();
  cpu::policy_loss(args, 0, batch.num_seqs());

  const Results got = device.run(batch, args), again = device.run(batch, args);
  // The same formulas; expf may differ in the last bit, and the device adds up in fp32.
  expect_close(got.grad, want.grad, 1e-5, "grad");
  expect_close(got.seq_grad, want.seq_grad, 1e-4, "seq_grad");
  expect_close(got.sums, want.sums, 1e-4, "sums");
  EXPECT(same_bits(got.grad, again.grad) && same_bits(got.seq_grad, again.seq_grad) && same_bits(got.sums, again.sums),
         "two runs differ");
}

}  // namespace

int main() {
  if (!has_device()) return kSkipped;
  // A block is 256 threads: less than a warp, warps in part, one block's round exactly, one more, and several.
  const Batch batch = make_batch({5, 0, 1, 31, 33, 255, 256, 257, 3000});
  DeviceBatch device(batch);
  for_each_config([&](const PolicyConfig& config) { check(batch, device, config, kSeqRho | kSeqRhoMask); });
  PolicyConfig config{};
  config.ratio_low = 0.8f;
  config.ratio_high = 1.3f;
  config.use_rho = true;
  config.rho_clamp_high = 1.25f;
  config.rho_mask_low = 0.7f;
  config.beta = 0.1f;
  for (RatioLevel level : {RatioLevel::kToken, RatioLevel::kSequence}) {
    config.ratio_level = level;
    for (int absent = 0; absent < 64; ++absent) check(batch, device, config, absent);
  }

  std::vector<float> want(2 * batch.num_seqs());
  cpu::segment_sums(
      {batch.logprobs.data(), batch.weights.data(), batch.cu_seqlens.data(), batch.num_seqs(), want.data()}, 0,
      batch.num_seqs());
  expect_close(device.segment_sums(batch), want, 1e-5, "segment_sums");
  EXPECT(same_bits(device.segment_sums(batch), device.segment_sums(batch)), "two runs of segment_sums differ");

  const Batch none = make_batch({0, 0});
  DeviceBatch nothing(none);
  check(none, nothing, config, kSeqRho);
  require(cuda::policy_loss(PolicyLossArgs{}, nullptr));  // no sequence: no launch
  require(cuda::segment_sums(SegmentSumsArgs{}, nullptr));
  std::printf("%d failures\n", failures);
  return failures != 0;
}
