#include "core/logprob_cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

// One binary that uses the widest vectors of the machine it runs on. Other compilers and processors get one version.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MGRPO_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MGRPO_MULTIVERSION
#endif
// Templates cannot be cloned. They must be inlined into cloned functions to be compiled for their target.
#define MGRPO_INLINE inline __attribute__((always_inline))

namespace mgrpo::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
// 8 KiB of fp32: the second sweep over a block finds it in L1.
constexpr int64_t kBlock = 2048;
// Below this 2^d is flushed to 0, and d itself is clamped where it is multiplied by that 0 (-inf * 0 is NaN).
constexpr float kMinExponent = -126.f;

// Distinct types of 16 bits, converted by hand: the compiler vectorises this for every target.
enum class bf16 : uint16_t {};
enum class f16 : uint16_t {};

MGRPO_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
MGRPO_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

MGRPO_INLINE float load(const float* x, int64_t i) { return x[i]; }
MGRPO_INLINE float load(const bf16* x, int64_t i) { return float_of(static_cast<uint32_t>(x[i]) << 16); }
MGRPO_INLINE float load(const f16* x, int64_t i) {
  const uint32_t bits = static_cast<uint32_t>(x[i]);
  // The exponents' biases differ by 112; the product also normalises subnormals. 2^16 and more were inf and NaN.
  const float magnitude = float_of((bits & 0x7fffu) << 13) * 0x1p112f;
  const uint32_t exponent = magnitude >= 65536.f ? 0x7f800000u : 0u;
  return float_of(bits_of(magnitude) | exponent | (bits & 0x8000u) << 16);
}

MGRPO_INLINE void store(float* y, int64_t i, float value) { y[i] = value; }
MGRPO_INLINE void store(bf16* y, int64_t i, float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  y[i] = static_cast<bf16>(value != value ? 0x7fc0u : rounded);           // rounding could carry a NaN into a number
}
MGRPO_INLINE void store(f16* y, int64_t i, float value) {
  const uint32_t sign = bits_of(value) & 0x80000000u, bits = bits_of(value) ^ sign;
  const uint32_t normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;  // to nearest, ties to even
  const uint32_t subnormal = bits_of(float_of(bits) + 0.5f) - bits_of(0.5f);  // the sum's last bit is 2^-24, as f16's
  uint32_t rounded = bits < (113u << 23) ? subnormal : normal;
  rounded = bits < (143u << 23) ? rounded : 0x7c00u;  // 2^16 and more is infinite
  rounded = bits > 0x7f800000u ? 0x7e00u : rounded;   // NaN
  y[i] = static_cast<f16>(rounded | sign >> 16);
}

// 2^d for d <= 0, relative error 2e-7; 0 below 2^-126; NaN stays NaN. No branch, no call: it vectorises.
MGRPO_INLINE float exp2_nonpositive(float d) {
  const float x = d < kMinExponent ? kMinExponent : d;
  // Adding 1.5 * 2^23 rounds to an integer and leaves that integer in the low bits.
  constexpr float kRound = 12582912.f;
  const float shifted = x + kRound;
  const float r = x - (shifted - kRound);  // in [-0.5, 0.5]
  // 2^r = 1 + r q(r), a least-maximum-relative-error fit (2.0e-9 before rounding to fp32).
  float q = 1.535336191e-04f;
  q = q * r + 1.339887441e-03f;
  q = q * r + 9.618437358e-03f;
  q = q * r + 5.550332471e-02f;
  q = q * r + 2.402264791e-01f;
  q = q * r + 6.931472029e-01f;
  q = q * r + 1.f;
  const float scale = float_of((bits_of(shifted) << 23) + 0x3f800000u);
  return d < kMinExponent ? 0.f : q * scale;
}

struct RowStats {
  float m, s, w;
};

// m, s, w of one row. Per block: the maximum, a rescale of the sums so far, then one exponential per element.
template <class T, bool kEntropy>
MGRPO_INLINE RowStats row_stats(const T* x, int64_t cols, float inv_temp) {
  const float scale = inv_temp * kLog2E;
  float m = -kInf, s = 0.f, w = 0.f;  // w in units of log 2 until the end
  for (int64_t start = 0; start < cols; start += kBlock) {
    const T* block = x + start;
    const int64_t size = std::min(kBlock, cols - start);

    float block_max = -kInf;
#pragma omp simd reduction(max : block_max)
    for (int64_t i = 0; i < size; ++i) {
      const float value = load(block, i);
      block_max = value > block_max ? value : block_max;
    }

    if (block_max > m) {
      if (m > -kInf) {
        const float d = (m - block_max) * scale;
        const float k = std::exp2(d);
        if constexpr (kEntropy) w = k > 0.f ? k * (w + d * s) : 0.f;
        s *= k;
      }
      m = block_max;
    }

    // While every logit so far is -inf, 0 replaces m: -inf then adds nothing, and NaN still propagates.
    const float reference = m > -kInf ? m : 0.f;
    float block_s = 0.f, block_w = 0.f;
#pragma omp simd reduction(+ : block_s, block_w)
    for (int64_t i = 0; i < size; ++i) {
      const float d = (load(block, i) - reference) * scale;
      const float e = exp2_nonpositive(d);
      block_s += e;
      if constexpr (kEntropy) block_w += e * (d < kMinExponent ? kMinExponent : d);
    }
    s += block_s;
    w += block_w;
  }
  return {m, s, w * kLn2};
}

// y = e^(b (x - m)) (k0 + k1 b (x - m)), plus `add` in the target's column.
struct RowGrad {
  float m, scale, k0, k1, add;
  int64_t target;  // local column, -1 when another slice owns it
};

template <bool kEntropy>
MGRPO_INLINE float grad_of_logit(float logit, RowGrad g) {
  const float d = (logit - g.m) * g.scale;
  const float e = exp2_nonpositive(d);
  if constexpr (kEntropy) return e * (g.k0 + g.k1 * kLn2 * (d < kMinExponent ? kMinExponent : d));
  return e * g.k0;
}

// y may be x.
template <class T, bool kEntropy>
MGRPO_INLINE void row_grad(const T* x, T* y, int64_t cols, RowGrad g) {
  const float target_logit = g.target >= 0 ? load(x, g.target) : 0.f;  // before y overwrites it
#pragma omp simd
  for (int64_t i = 0; i < cols; ++i) store(y, i, grad_of_logit<kEntropy>(load(x, i), g));
  if (g.target >= 0) store(y, g.target, grad_of_logit<kEntropy>(target_logit, g) + g.add);
}

}  // namespace

// Ordinary functions around the templates, since only ordinary functions can be cloned.
#define MGRPO_ROW_FUNCTIONS(T, kEntropy, suffix)                                                    \
  MGRPO_MULTIVERSION static RowStats row_stats_##suffix(const T* x, int64_t cols, float inv_temp) { \
    return row_stats<T, kEntropy>(x, cols, inv_temp);                                               \
  }                                                                                                 \
  MGRPO_MULTIVERSION static void row_grad_##suffix(const T* x, T* y, int64_t cols, RowGrad g) {     \
    row_grad<T, kEntropy>(x, y, cols, g);                                                           \
  }
MGRPO_ROW_FUNCTIONS(float, false, f32)
MGRPO_ROW_FUNCTIONS(float, true, f32_entropy)
MGRPO_ROW_FUNCTIONS(bf16, false, bf16)
MGRPO_ROW_FUNCTIONS(bf16, true, bf16_entropy)
MGRPO_ROW_FUNCTIONS(f16, false, f16)
MGRPO_ROW_FUNCTIONS(f16, true, f16_entropy)
#undef MGRPO_ROW_FUNCTIONS

namespace {

// The column of a global token id in this slice, -1 when another slice (or only padding) holds it.
int64_t local_target(const Slice& slice, int64_t target) {
  const int64_t column = target - slice.vocab_start;
  return column >= 0 && column < slice.valid_cols ? column : -1;
}

template <class T, class RowStatsFn>
void stats_of_rows(const StatsArgs& args, int64_t begin, int64_t end, RowStatsFn row_stats_fn) {
  const Slice& slice = args.slice;
  const int64_t n = args.n;
  for (int64_t i = begin; i < end; ++i) {
    const T* x = static_cast<const T*>(slice.data) + (args.rows ? args.rows[i] : i) * slice.row_stride;
    const RowStats row = row_stats_fn(x, slice.valid_cols, args.inv_temp.data[i * args.inv_temp.stride]);
    const int64_t target = local_target(slice, args.targets[i]);
    args.out[i] = row.m;
    args.out[n + i] = row.s;
    args.out[2 * n + i] = row.w;
    args.out[3 * n + i] = target >= 0 ? load(x, target) : -kInf;
  }
}

template <class T, class RowGradFn>
void grad_of_rows(const GradArgs& args, int64_t begin, int64_t end, RowGradFn row_grad_fn) {
  const Slice& slice = args.slice;
  const int64_t n = args.n;
  for (int64_t row = begin; row < end; ++row) {
    T* y = static_cast<T*>(args.out) + row * args.out_row_stride;
    const int64_t i = args.inv_rows ? args.inv_rows[row] : row;
    const float g_logprob = i >= 0 ? args.g_logprob[i] : 0.f;
    const float g_entropy = i >= 0 && args.g_entropy ? args.g_entropy[i] : 0.f;
    if (g_logprob == 0.f && g_entropy == 0.f) {
      std::fill(y, y + slice.cols, T{0});
      continue;
    }
    const float inv_temp = args.inv_temp.data[i * args.inv_temp.stride];
    const float s = args.stats[n + i], w = args.stats[2 * n + i];
    RowGrad g;
    g.m = args.stats[i];
    g.scale = inv_temp * kLog2E;
    g.k0 = inv_temp * (g_entropy * (w / s) - g_logprob) / s;
    g.k1 = -inv_temp * g_entropy / s;
    g.add = inv_temp * g_logprob;
    g.target = local_target(slice, args.targets[i]);
    row_grad_fn(static_cast<const T*>(slice.data) + row * slice.row_stride, y, slice.valid_cols, g);
    std::fill(y + slice.valid_cols, y + slice.cols, T{0});
  }
}

}  // namespace

void stats(const StatsArgs& args, int64_t begin, int64_t end) {
  switch (args.slice.dtype) {
    case DType::kFloat32:
      return stats_of_rows<float>(args, begin, end, args.entropy ? row_stats_f32_entropy : row_stats_f32);
    case DType::kBFloat16:
      return stats_of_rows<bf16>(args, begin, end, args.entropy ? row_stats_bf16_entropy : row_stats_bf16);
    case DType::kFloat16:
      return stats_of_rows<f16>(args, begin, end, args.entropy ? row_stats_f16_entropy : row_stats_f16);
  }
}

void merge(const MergeArgs& args, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) merge_entry(args, i);
}

void grad(const GradArgs& args, int64_t begin, int64_t end) {
  switch (args.slice.dtype) {
    case DType::kFloat32:
      return grad_of_rows<float>(args, begin, end, args.g_entropy ? row_grad_f32_entropy : row_grad_f32);
    case DType::kBFloat16:
      return grad_of_rows<bf16>(args, begin, end, args.g_entropy ? row_grad_bf16_entropy : row_grad_bf16);
    case DType::kFloat16:
      return grad_of_rows<f16>(args, begin, end, args.g_entropy ? row_grad_f16_entropy : row_grad_f16);
  }
}

}  // namespace mgrpo::cpu
