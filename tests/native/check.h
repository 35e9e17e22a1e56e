// A counter of failed expectations: enough of a test framework for these tests, and no dependency.
#pragma once

#include <cmath>
#include <cstdio>

inline int failures = 0;

#define EXPECT(condition, ...)                                             \
  do {                                                                     \
    if (!(condition)) {                                                    \
      ++failures;                                                          \
      std::printf("%s:%d: %s is false: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                            \
      std::printf("\n");                                                   \
    }                                                                      \
  } while (false)

// Relative to 1 + |want|. An infinite number is close to itself only.
inline bool is_close(double got, double want, double tolerance) {
  return got == want || (std::isfinite(want) && std::fabs(got - want) <= tolerance * (1 + std::fabs(want)));
}
