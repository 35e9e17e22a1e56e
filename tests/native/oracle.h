// Token logprob, entropy and gradient of one row in double precision, written for clearness and not for speed; and
// inputs for it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

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

inline uint16_t bf16_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float float_of(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float float_of(float value) { return value; }

// Logits around 0 with a standard deviation of 5: some columns matter, most underflow towards 0, as in training.
template <class T>
std::vector<T> random_logits(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.f, 5.f);
  std::vector<T> x(static_cast<size_t>(count));
  for (T& value : x) {
    if constexpr (sizeof(T) == 4)
      value = normal(generator);
    else
      value = bf16_of(normal(generator));
  }
  return x;
}
