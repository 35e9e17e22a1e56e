#include <math_constants.h>

#include "core/policy_loss_cuda.h"

namespace mgrpo::cuda {
namespace {

// A response of a thousand tokens gives each thread a few; more threads would only lengthen the final reduction.
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ float fold_warp(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
  return value;
}

__device__ __forceinline__ float fold_warp_max(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, offset));
  return value;
}

// One block owns one sequence; its threads walk the tokens at stride kThreads, one pass, about 32 bytes per token.
//   1. Each token's gradient is written, its columns are added to the thread's own sums, in registers.
//   2. Warps fold by shuffles, then one thread per column adds the warps in their order. There are no atomics: the
//      result is bitwise the same from run to run, whatever else is in the pack.
__global__ void __launch_bounds__(kThreads) policy_loss_kernel(const PolicyLossArgs args) {
  const int64_t s = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  float sums[kNumColumns] = {};
  sums[kMismatchMax] = -CUDART_INF_F;
  float seq_grad = 0.f;

  // 1.
  const int64_t end = args.cu_seqlens[s + 1];
  for (int64_t i = args.cu_seqlens[s] + thread; i < end; i += kThreads) {
    if (args.weights[i] == 0.f) {
      args.grad[i] = 0.f;
      continue;
    }
    float token[kNumColumns] = {};
    const Dual loss = token_loss(args, i, s, token);
    args.grad[i] = loss.d_token;
    seq_grad += loss.d_seq;
#pragma unroll
    for (int column = 0; column < kMismatchMax; ++column) sums[column] += token[column];
    if (token[kKnownRollout] != 0.f) sums[kMismatchMax] = fmaxf(sums[kMismatchMax], token[kMismatchMax]);
  }

  // 2.
  __shared__ float of_warp[kWarps][kNumColumns + 1];
  const int warp = thread / 32;
#pragma unroll
  for (int column = 0; column < kMismatchMax; ++column) {
    const float value = fold_warp(sums[column]);
    if (thread % 32 == 0) of_warp[warp][column] = value;
  }
  const float largest = fold_warp_max(sums[kMismatchMax]);
  seq_grad = fold_warp(seq_grad);
  if (thread % 32 == 0) {
    of_warp[warp][kMismatchMax] = largest;
    of_warp[warp][kNumColumns] = seq_grad;
  }
  __syncthreads();
  if (thread > kNumColumns) return;
  float total = of_warp[0][thread];
#pragma unroll
  for (int w = 1; w < kWarps; ++w)
    total = thread == kMismatchMax ? fmaxf(total, of_warp[w][thread]) : total + of_warp[w][thread];
  if (thread == kNumColumns)
    args.seq_grad[s] = total;
  else
    args.sums[s * kNumColumns + thread] = total;
}

// One block owns one sequence, folded as above.
__global__ void __launch_bounds__(kThreads) segment_sums_kernel(const SegmentSumsArgs args) {
  const int64_t s = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  float total = 0.f, weight = 0.f;
  const int64_t end = args.cu_seqlens[s + 1];
  for (int64_t i = args.cu_seqlens[s] + thread; i < end; i += kThreads) {
    const float w = args.weights[i];
    if (w == 0.f) continue;
    total += w * args.x[i];
    weight += w;
  }
  __shared__ float of_warp[kWarps][2];
  total = fold_warp(total);
  weight = fold_warp(weight);
  if (thread % 32 == 0) {
    of_warp[thread / 32][0] = total;
    of_warp[thread / 32][1] = weight;
  }
  __syncthreads();
  if (thread >= 2) return;
  float sum = of_warp[0][thread];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += of_warp[w][thread];
  args.out[thread * args.num_seqs + s] = sum;
}

}  // namespace

cudaError_t policy_loss(const PolicyLossArgs& args, cudaStream_t stream) {
  if (args.num_seqs == 0) return cudaSuccess;
  policy_loss_kernel<<<static_cast<unsigned>(args.num_seqs), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t segment_sums(const SegmentSumsArgs& args, cudaStream_t stream) {
  if (args.num_seqs == 0) return cudaSuccess;
  segment_sums_kernel<<<static_cast<unsigned>(args.num_seqs), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace mgrpo::cuda
