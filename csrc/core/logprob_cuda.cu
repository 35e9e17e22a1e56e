#include "core/logprob_cuda.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

namespace mgrpo::cuda {
namespace {

using bf16 = __nv_bfloat16;
using f16 = __half;

// Loads in flight per thread. Four of 16 bytes cover the latency of HBM at the occupancy these kernels reach.
constexpr int kUnroll = 4;
// From this length on a row keeps 512 threads busy for several rounds; below it, 256 waste less on the remainder.
constexpr int64_t kWideRow = 32768;
constexpr unsigned kFullWarp = 0xffffffffu;
// Exponents are clamped here where they are multiplied by their power of two: 2^-160 is 0 in fp32, and -inf * 0 is NaN.
constexpr float kMinExponent = -160.f;

__device__ __forceinline__ float exp2_approx(float d) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(d));
  return power;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }
__device__ __forceinline__ void store(float* y, float value) { *y = value; }
__device__ __forceinline__ void store(bf16* y, float value) { *y = __float2bfloat16_rn(value); }
__device__ __forceinline__ void store(f16* y, float value) { *y = __float2half_rn(value); }

__device__ __forceinline__ float2 to_floats(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
__device__ __forceinline__ float2 to_floats(__half2 pair) { return __half22float2(pair); }
__device__ __forceinline__ void store(__nv_bfloat162* y, float a, float b) { *y = __floats2bfloat162_rn(a, b); }
__device__ __forceinline__ void store(__half2* y, float a, float b) { *y = __floats2half2_rn(a, b); }

// 16 bytes of a row.
template <class T>
struct Pack;

template <>
struct Pack<float> {
  static constexpr int kSize = 4;
  static __device__ __forceinline__ void unpack(const uint4& bits, float (&x)[kSize]) {
    x[0] = __uint_as_float(bits.x);
    x[1] = __uint_as_float(bits.y);
    x[2] = __uint_as_float(bits.z);
    x[3] = __uint_as_float(bits.w);
  }
  static __device__ __forceinline__ uint4 pack(const float (&x)[kSize]) {
    return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
  }
  static __device__ __forceinline__ float max(const uint4& bits) {
    float x[kSize];
    unpack(bits, x);
    return fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
  }
};

// Of a type of 16 bits, which the hardware handles in pairs.
template <class Pair>
struct PackOfPairs {
  static constexpr int kSize = 8;
  static __device__ __forceinline__ void unpack(const uint4& bits, float (&x)[kSize]) {
    const Pair* pairs = reinterpret_cast<const Pair*>(&bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = to_floats(pairs[i]);
      x[2 * i] = two.x;
      x[2 * i + 1] = two.y;
    }
  }
  static __device__ __forceinline__ uint4 pack(const float (&x)[kSize]) {
    uint4 bits;
    Pair* pairs = reinterpret_cast<Pair*>(&bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) store(pairs + i, x[2 * i], x[2 * i + 1]);
    return bits;
  }
  static __device__ __forceinline__ float max(const uint4& bits) {
    const Pair* pairs = reinterpret_cast<const Pair*>(&bits);
    const float2 m = to_floats(__hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3])));
    return fmaxf(m.x, m.y);
  }
};

template <>
struct Pack<bf16> : PackOfPairs<__nv_bfloat162> {};
template <>
struct Pack<f16> : PackOfPairs<__half2> {};

// How a row is divided: scalars up to the first 16-byte boundary, packs, and the remaining scalars.
struct Split {
  int head, packs, tail;  // tail: first column after the packs
};

template <class T>
__device__ __forceinline__ Split split_row(const T* row, int cols) {
  const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(row) & 15);
  const int head = min(misaligned ? (16 - misaligned) / static_cast<int>(sizeof(T)) : 0, cols);
  const int packs = (cols - head) / Pack<T>::kSize;
  return {head, packs, head + packs * Pack<T>::kSize};
}

// Running statistics of some logits, s and w relative to m, w in units of log 2.
struct Sums {
  float m, s, w;
};

// Raises the reference to a new maximum. This happens a few times per row, so its exponential is off the common path.
template <bool kEntropy>
__device__ __forceinline__ void raise_max(Sums& sums, float m, float scale) {
  if (!(m > sums.m)) return;
  if (sums.m > -CUDART_INF_F) {
    const float d = fmaxf((sums.m - m) * scale, kMinExponent);
    const float k = exp2_approx(d);
    if constexpr (kEntropy) sums.w = k * fmaf(d, sums.s, sums.w);
    sums.s *= k;
  }
  sums.m = m;
}

// While every logit so far is -inf, 0 replaces the maximum: -inf then adds nothing, and NaN still propagates.
__device__ __forceinline__ float reference_of(float m) { return m > -CUDART_INF_F ? m : 0.f; }

template <bool kEntropy>
__device__ __forceinline__ void add_logit(Sums& sums, float x, float reference, float scale) {
  const float d = (x - reference) * scale;
  const float e = exp2_approx(d);
  sums.s += e;
  if constexpr (kEntropy) sums.w = fmaf(e, fmaxf(d, kMinExponent), sums.w);
}

template <class T, bool kEntropy>
__device__ __forceinline__ void add_pack(Sums& sums, const uint4& bits, float reference, float scale) {
  float x[Pack<T>::kSize];
  Pack<T>::unpack(bits, x);
#pragma unroll
  for (int j = 0; j < Pack<T>::kSize; ++j) add_logit<kEntropy>(sums, x[j], reference, scale);
}

template <bool kEntropy>
__device__ __forceinline__ void add_sums(Sums& sums, Sums other, float scale) {
  const float m = fmaxf(sums.m, other.m);
  raise_max<kEntropy>(sums, m, scale);
  raise_max<kEntropy>(other, m, scale);
  sums.s += other.s;
  if constexpr (kEntropy) sums.w += other.w;
}

// One block owns one entry: a row of logits [cols], read once, 16 bytes per load.
//   1. Each thread walks the row at stride kThreads; a batch of kUnroll packs raises the thread's maximum once
//      (packed bf16 maximum), then costs one exponential per element.
//   2. Threads fold by shuffles, warps through shared memory, always in the same order: the result of a row depends
//      only on that row, not on the batch around it or on the run.
template <class T, bool kEntropy, int kThreads>
__global__ void __launch_bounds__(kThreads) stats_kernel(const StatsArgs args) {
  const int64_t i = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const int cols = static_cast<int>(args.slice.valid_cols);
  const T* row = static_cast<const T*>(args.slice.data) + (args.rows ? args.rows[i] : i) * args.slice.row_stride;
  const float inv_temp = args.inv_temp.data[i * args.inv_temp.stride];
  const float scale = inv_temp * kLog2E;
  const Split split = split_row(row, cols);
  Sums sums{-CUDART_INF_F, 0.f, 0.f};

  // 1. This thread's share: at most one head scalar, one tail scalar, and packs.
  const auto add_scalar = [&](int column) {
    const float x = to_float(row[column]);
    raise_max<kEntropy>(sums, x, scale);
    add_logit<kEntropy>(sums, x, reference_of(sums.m), scale);
  };
  if (thread < split.head) add_scalar(thread);
  if (split.tail + thread < cols) add_scalar(split.tail + thread);

  const uint4* packs = reinterpret_cast<const uint4*>(row + split.head);
  int k = thread;
  for (; k + (kUnroll - 1) * kThreads < split.packs; k += kUnroll * kThreads) {
    uint4 bits[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) bits[u] = __ldcs(packs + k + u * kThreads);
    float m = Pack<T>::max(bits[0]);
#pragma unroll
    for (int u = 1; u < kUnroll; ++u) m = fmaxf(m, Pack<T>::max(bits[u]));
    raise_max<kEntropy>(sums, m, scale);
    const float reference = reference_of(sums.m);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) add_pack<T, kEntropy>(sums, bits[u], reference, scale);
  }
  for (; k < split.packs; k += kThreads) {
    const uint4 bits = __ldcs(packs + k);
    raise_max<kEntropy>(sums, Pack<T>::max(bits), scale);
    add_pack<T, kEntropy>(sums, bits, reference_of(sums.m), scale);
  }

  // 2. Fold.
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    Sums other{__shfl_xor_sync(kFullWarp, sums.m, offset), __shfl_xor_sync(kFullWarp, sums.s, offset), 0.f};
    if constexpr (kEntropy) other.w = __shfl_xor_sync(kFullWarp, sums.w, offset);
    add_sums<kEntropy>(sums, other, scale);
  }
  __shared__ Sums of_warp[kThreads / 32];
  if (thread % 32 == 0) of_warp[thread / 32] = sums;
  __syncthreads();
  if (thread != 0) return;
  for (int warp = 1; warp < kThreads / 32; ++warp) add_sums<kEntropy>(sums, of_warp[warp], scale);

  const int64_t n = args.n, target = args.targets[i] - args.slice.vocab_start;
  args.out[i] = sums.m;
  args.out[n + i] = sums.s;
  args.out[2 * n + i] = kEntropy ? sums.w * kLn2 : 0.f;
  args.out[3 * n + i] = target >= 0 && target < cols ? to_float(row[target]) : -CUDART_INF_F;
}

// One thread owns one entry and adds its parts in their order.
__global__ void merge_kernel(const MergeArgs args) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < args.n) merge_entry(args, i);
}

// One block owns one row: x [valid_cols] is read once, y [cols] written once; y may be x, since every column is read by
// the thread that writes it. The target's column gets its extra term in the thread that owns it; padding gets zeros.
// Without an entry, or with zero cotangents, the row is only written.
template <class T, bool kEntropy, int kThreads>
__global__ void __launch_bounds__(kThreads) grad_kernel(const GradArgs args) {
  constexpr int kSize = Pack<T>::kSize;
  const int64_t row = blockIdx.x, n = args.n;
  const int thread = static_cast<int>(threadIdx.x);
  const int cols = static_cast<int>(args.slice.cols);
  const T* x = static_cast<const T*>(args.slice.data) + row * args.slice.row_stride;
  T* y = static_cast<T*>(args.out) + row * args.out_row_stride;

  const int64_t i = args.inv_rows ? args.inv_rows[row] : row;
  const float g_logprob = i >= 0 ? args.g_logprob[i] : 0.f;
  float g_entropy = 0.f;
  if constexpr (kEntropy) g_entropy = i >= 0 ? args.g_entropy[i] : 0.f;

  const Split split = split_row(y, cols);
  uint4* y_packs = reinterpret_cast<uint4*>(y + split.head);
  if (g_logprob == 0.f && g_entropy == 0.f) {
    if (thread < split.head) store(y + thread, 0.f);
    if (split.tail + thread < cols) store(y + split.tail + thread, 0.f);
    for (int k = thread; k < split.packs; k += kThreads) __stcs(y_packs + k, make_uint4(0, 0, 0, 0));
    return;
  }

  // y = 2^d (k0 + k1 d), d = (x - m) scale, plus `add` in the target's column.
  const int valid = static_cast<int>(args.slice.valid_cols);
  const float inv_temp = args.inv_temp.data[i * args.inv_temp.stride];
  const float scale = inv_temp * kLog2E, add = inv_temp * g_logprob;
  const float m = args.stats[i], s = args.stats[n + i];
  float k0 = -add / s, k1 = 0.f;
  if constexpr (kEntropy) {
    k0 = inv_temp * (g_entropy * (args.stats[2 * n + i] / s) - g_logprob) / s;
    k1 = -inv_temp * g_entropy * kLn2 / s;
  }
  const int64_t global_column = args.targets[i] - args.slice.vocab_start;
  const int target = global_column >= 0 && global_column < valid ? static_cast<int>(global_column) : -1;

  const auto grad_of_logit = [&](float logit) {
    const float d = (logit - m) * scale;
    const float e = exp2_approx(d);
    if constexpr (kEntropy) return e * fmaf(k1, fmaxf(d, kMinExponent), k0);
    return e * k0;
  };
  const auto do_scalar = [&](int column) {
    const float value = column < valid ? grad_of_logit(to_float(x[column])) : 0.f;
    store(y + column, column == target ? value + add : value);
  };
  const auto do_pack = [&](int k, const uint4& bits) {
    float value[kSize];
    Pack<T>::unpack(bits, value);
    const int first = split.head + k * kSize;
#pragma unroll
    for (int j = 0; j < kSize; ++j) value[j] = grad_of_logit(value[j]);
    if (static_cast<unsigned>(target - first) < static_cast<unsigned>(kSize)) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) value[j] += target - first == j ? add : 0.f;
    }
    __stcs(y_packs + k, Pack<T>::pack(value));
  };

  // A new buffer may be aligned to 16 bytes differently from a row of a strided view; scalars are used then.
  const bool same_grid = ((reinterpret_cast<uintptr_t>(x) ^ reinterpret_cast<uintptr_t>(y)) & 15) == 0;
  if (!same_grid) {
    for (int column = thread; column < cols; column += kThreads) do_scalar(column);
    return;
  }
  // Packs that hold only valid columns; then, as scalars, the pack where padding begins and everything after it.
  const int valid_packs = max(valid - split.head, 0) / kSize;
  const uint4* x_packs = reinterpret_cast<const uint4*>(x + split.head);
  if (thread < split.head) do_scalar(thread);
  int k = thread;
  for (; k + (kUnroll - 1) * kThreads < valid_packs; k += kUnroll * kThreads) {
    uint4 bits[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) bits[u] = __ldcs(x_packs + k + u * kThreads);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) do_pack(k + u * kThreads, bits[u]);
  }
  for (; k < valid_packs; k += kThreads) do_pack(k, __ldcs(x_packs + k));
  for (int column = split.head + valid_packs * kSize + thread; column < cols; column += kThreads) do_scalar(column);
}

template <class T, bool kEntropy>
cudaError_t launch_stats(const StatsArgs& args, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(args.n);
  if (args.slice.valid_cols >= kWideRow)
    stats_kernel<T, kEntropy, 512><<<blocks, 512, 0, stream>>>(args);
  else
    stats_kernel<T, kEntropy, 256><<<blocks, 256, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class T, bool kEntropy>
cudaError_t launch_grad(const GradArgs& args, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(args.slice.tokens);
  if (args.slice.cols >= kWideRow)
    grad_kernel<T, kEntropy, 512><<<blocks, 512, 0, stream>>>(args);
  else
    grad_kernel<T, kEntropy, 256><<<blocks, 256, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t stats(const StatsArgs& args, cudaStream_t stream) {
  if (args.n == 0) return cudaSuccess;
  switch (args.slice.dtype) {
    case DType::kFloat32:
      return args.entropy ? launch_stats<float, true>(args, stream) : launch_stats<float, false>(args, stream);
    case DType::kBFloat16:
      return args.entropy ? launch_stats<bf16, true>(args, stream) : launch_stats<bf16, false>(args, stream);
    case DType::kFloat16:
      return args.entropy ? launch_stats<f16, true>(args, stream) : launch_stats<f16, false>(args, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t merge(const MergeArgs& args, cudaStream_t stream) {
  if (args.n == 0) return cudaSuccess;
  constexpr int kThreads = 128;
  merge_kernel<<<static_cast<unsigned>((args.n + kThreads - 1) / kThreads), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t grad(const GradArgs& args, cudaStream_t stream) {
  if (args.slice.tokens == 0 || args.slice.cols == 0) return cudaSuccess;
  switch (args.slice.dtype) {
    case DType::kFloat32:
      return args.g_entropy ? launch_grad<float, true>(args, stream) : launch_grad<float, false>(args, stream);
    case DType::kBFloat16:
      return args.g_entropy ? launch_grad<bf16, true>(args, stream) : launch_grad<bf16, false>(args, stream);
    case DType::kFloat16:
      return args.g_entropy ? launch_grad<f16, true>(args, stream) : launch_grad<f16, false>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace mgrpo::cuda
