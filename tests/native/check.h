// A counter of failed expectations: enough of a test framework for these tests, and no dependency.
#pragma once

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
