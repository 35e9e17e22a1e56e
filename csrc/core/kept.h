// What the CPU and CUDA kernels of kept sets share: the arguments, and the formula of one entry's gradient.
//
// Top-k, top-p and min-p cut the distribution that a token was sampled from down to a set of tokens, its kept set. Its
// logprob and entropy are then over the logits of that set only, which somebody has picked out of whole rows or
// computed alone: `values`, one for each entry of the sets in CSR form, -inf where another vocabulary shard owns it.
// From these come the four numbers of core/logprob.h, with the set in place of the row, so that shards merge as without
// sets. A target outside its set has t = -inf, hence logprob -inf.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "core/logprob.h"

namespace mgrpo {

// Entries [offsets[i], offsets[i + 1]) are the set of targets[i]. Offsets [n + 1] never decrease.
struct KeptSets {
  const float* values;
  const int32_t* ids;
  const int32_t* offsets;
  const int64_t* targets;
  InverseTemperature inv_temp;
  int64_t n;
};

// out is [4, n]: m, s, w, t. w is 0 unless `entropy`.
struct KeptStatsArgs {
  KeptSets sets;
  bool entropy;
  float* out;
};

// Writes the gradient in every value:
//   dv = b [ g_logprob (1[id=y] - p) - g_entropy p (log p + H) ]
//   p = e^(b (v - m)) / s,   log p + H = b (v - m) - w / s
// Sets whose cotangents are zero get zeros without being read. g_entropy may be null.
struct KeptGradArgs {
  KeptSets sets;
  const float* stats;  // [4, n], merged over all shards
  const float* g_logprob;
  const float* g_entropy;
  float* out;
};

// What e^(b (v - m)) adds to s, and to w when multiplied by b (v - m). 0 for -inf; NaN for NaN.
struct KeptTerm {
  float e, shifted;
};

MGRPO_HOST_DEVICE KeptTerm kept_term(float value, float m, float inv_temp) {
  // While the whole set is -inf, 0 replaces the maximum: -inf then adds nothing, and NaN still propagates.
  const float shifted = inv_temp * (value - (m > -INFINITY ? m : 0.f));
  const float e = expf(shifted);
  return {e, e == 0.f ? 0.f : shifted};
}

// One set's part of the gradient.
struct KeptRowGrad {
  float m, s, mean, inv_temp, g_logprob, g_entropy;
  int64_t target;
};

MGRPO_HOST_DEVICE KeptRowGrad kept_row_grad(const KeptGradArgs& args, int64_t i) {
  const int64_t n = args.sets.n;
  const float s = args.stats[n + i];
  return {args.stats[i],
          s,
          args.stats[2 * n + i] / s,
          args.sets.inv_temp.data[i * args.sets.inv_temp.stride],
          args.g_logprob[i],
          args.g_entropy ? args.g_entropy[i] : 0.f,
          args.sets.targets[i]};
}

MGRPO_HOST_DEVICE float kept_grad_entry(const KeptRowGrad& row, float value, int32_t id) {
  if (row.g_logprob == 0.f && row.g_entropy == 0.f) return 0.f;
  const KeptTerm term = kept_term(value, row.m, row.inv_temp);
  const float p = term.e / row.s;
  const float of_logprob = row.g_logprob * ((id == row.target ? 1.f : 0.f) - p);
  // Without a cotangent of the entropy, w was perhaps not computed either.
  const float of_entropy = row.g_entropy == 0.f ? 0.f : row.g_entropy * p * (term.shifted - row.mean);
  return row.inv_temp * (of_logprob - of_entropy);
}

}  // namespace mgrpo
