// Kept sets for the native tests: sizes around a warp's, some entries of another shard, a target outside its set.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

struct KeptCase {
  std::vector<float> values, inv_temps, g_logprob, g_entropy;
  std::vector<int32_t> ids, offsets{0};
  std::vector<int64_t> targets;
  // The set without a target in it, and the one without cotangents, which holds a NaN.
  int64_t without_target, without_cotangent;
};

inline KeptCase make_kept_case() {
  KeptCase test;
  std::mt19937 generator(0);
  std::normal_distribution<float> normal(0.f, 4.f);
  for (int32_t size : {1, 2, 7, 31, 32, 33, 64, 65, 300, 8, 5}) {
    const int64_t i = static_cast<int64_t>(test.targets.size());
    for (int32_t k = 0; k < size; ++k) {
      test.values.push_back(k > 1 && k % 5 == 0 ? -INFINITY : normal(generator));
      test.ids.push_back(3 * k + static_cast<int32_t>(i));
    }
    test.offsets.push_back(static_cast<int32_t>(test.ids.size()));
    test.targets.push_back(3 * (size / 2 == 5 ? 4 : size / 2) + i);
    test.inv_temps.push_back(0.5f + 0.2f * static_cast<float>(i));
    test.g_logprob.push_back(normal(generator));
    test.g_entropy.push_back(normal(generator));
  }
  test.without_target = 9;
  test.targets[9] = 1000;
  test.without_cotangent = 10;
  test.g_logprob[10] = test.g_entropy[10] = 0.f;
  test.values.back() = NAN;
  return test;
}
