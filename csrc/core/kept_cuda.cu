#include "core/kept_cuda.h"

#include <math_constants.h>

namespace mgrpo::cuda {
namespace {

// A set has some ten entries, a few have hundreds: a warp for each, and several of them in a block.
constexpr int kWarp = 32;
constexpr int kThreads = 128;
constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ int64_t set_of_warp() {
  return (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / kWarp;
}

// One warp owns one set and reads its values twice, the second time from the cache.
//   1. Maximum and the target's value.
//   2. s and w relative to that maximum. Lanes fold by shuffles, always in the same order: the result of a set depends
//      only on that set.
template <bool kEntropy>
__global__ void __launch_bounds__(kThreads) kept_stats_kernel(const KeptStatsArgs args) {
  const KeptSets& sets = args.sets;
  const int64_t i = set_of_warp(), n = sets.n;
  if (i >= n) return;  // whole warps leave: the shuffles below are among those that stay
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t begin = sets.offsets[i] + lane, end = sets.offsets[i + 1], target = sets.targets[i];
  const float inv_temp = sets.inv_temp.data[i * sets.inv_temp.stride];

  // 1. A NaN is no maximum; it shows in step 2.
  float m = -CUDART_INF_F, t = -CUDART_INF_F;
  for (int64_t j = begin; j < end; j += kWarp) {
    const float value = sets.values[j];
    m = fmaxf(m, value);
    if (sets.ids[j] == target) t = value;
  }
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    m = fmaxf(m, __shfl_xor_sync(kFullWarp, m, offset));
    t = fmaxf(t, __shfl_xor_sync(kFullWarp, t, offset));
  }

  // 2.
  float s = 0.f, w = 0.f;
  for (int64_t j = begin; j < end; j += kWarp) {
    const KeptTerm term = kept_term(sets.values[j], m, inv_temp);
    s += term.e;
    if constexpr (kEntropy) w += term.e * term.shifted;
  }
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    s += __shfl_xor_sync(kFullWarp, s, offset);
    if constexpr (kEntropy) w += __shfl_xor_sync(kFullWarp, w, offset);
  }
  if (lane != 0) return;
  args.out[i] = m;
  args.out[n + i] = s;
  args.out[2 * n + i] = w;
  args.out[3 * n + i] = t;
}

// One warp owns one set: each lane reads and writes every 32nd of its entries.
__global__ void __launch_bounds__(kThreads) kept_grad_kernel(const KeptGradArgs args) {
  const KeptSets& sets = args.sets;
  const int64_t i = set_of_warp();
  if (i >= sets.n) return;
  const KeptRowGrad row = kept_row_grad(args, i);
  for (int64_t j = sets.offsets[i] + threadIdx.x % kWarp; j < sets.offsets[i + 1]; j += kWarp)
    args.out[j] = kept_grad_entry(row, sets.values[j], sets.ids[j]);
}

unsigned blocks_for(int64_t sets) { return static_cast<unsigned>((sets * kWarp + kThreads - 1) / kThreads); }

}  // namespace

cudaError_t kept_stats(const KeptStatsArgs& args, cudaStream_t stream) {
  if (args.sets.n == 0) return cudaSuccess;
  if (args.entropy)
    kept_stats_kernel<true><<<blocks_for(args.sets.n), kThreads, 0, stream>>>(args);
  else
    kept_stats_kernel<false><<<blocks_for(args.sets.n), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t kept_grad(const KeptGradArgs& args, cudaStream_t stream) {
  if (args.sets.n == 0) return cudaSuccess;
  kept_grad_kernel<<<blocks_for(args.sets.n), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace mgrpo::cuda
