// Token logprob, entropy and gradient of one row in double precision, written for clearness and not for speed; and
// inputs for it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "core/logprob.h"

struct RowOracle {
  double logprob, entropy;
  std::vector<double> grad;
};

inline RowOracle row_oracle(const std::vector<double>& x, int64_t target, double inv_temp, double g_logprob,
                            double g_entropy) {
  double m = -INFINITY, s = 0;
  for (double v : x) m = std::fmax(m, v);
  for (double v : x) s += std::exp(inv_temp * (v - m));
  RowOracle row{inv_temp * (x[target] - m) - std::log(s), 0, std::vector<double>(x.size())};
  std::vector<double> logp(x.size());
  for (size_t v = 0; v < x.size(); ++v) {
    logp[v] = inv_temp * (x[v] - m) - std::log(s);
    if (std::isfinite(logp[v])) row.entropy -= std::exp(logp[v]) * logp[v];
  }
  for (size_t v = 0; v < x.size(); ++v) {
    const double p = std::exp(logp[v]);
    const double dlogprob = (static_cast<int64_t>(v) == target ? 1.0 : 0.0) - p;
    const double dentropy = p > 0 ? -p * (logp[v] + row.entropy) : 0.0;
    row.grad[v] = inv_temp * (g_logprob * dlogprob + g_entropy * dentropy);
  }
  return row;
}

// Numbers as the kernels' `dtype` stores them. float16 through the compiler's own type, the kernels convert by hand.
struct F32 {
  using Stored = float;
  static constexpr mgrpo::DType dtype = mgrpo::DType::kFloat32;
  static constexpr double half_ulp = 6e-8;  // relative
  static float load(float x) { return x; }
  static float store(float x) { return x; }
};

struct BF16 {
  using Stored = uint16_t;
  static constexpr mgrpo::DType dtype = mgrpo::DType::kBFloat16;
  static constexpr double half_ulp = 4e-3;
  static float load(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  static uint16_t store(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

struct F16 {
  using Stored = uint16_t;
  static constexpr mgrpo::DType dtype = mgrpo::DType::kFloat16;
  static constexpr double half_ulp = 5e-4;
  static float load(uint16_t x) {
    _Float16 value;
    std::memcpy(&value, &x, 2);
    return static_cast<float>(value);
  }
  static uint16_t store(float value) {
    const auto rounded = static_cast<_Float16>(value);
    uint16_t x;
    std::memcpy(&x, &rounded, 2);
    return x;
  }
};

// Logits around 0 with a standard deviation of 5: some columns matter, most underflow towards 0, as in training.
template <class Format>
std::vector<typename Format::Stored> random_logits(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.f, 5.f);
  std::vector<typename Format::Stored> x(static_cast<size_t>(count));
  for (auto& value : x) value = Format::store(normal(generator));
  return x;
}
