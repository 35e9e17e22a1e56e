// What the CPU and CUDA kernels of token logprobs share: the arguments of each op and the meaning of its numbers.
// No torch here: pointers, strides (in elements) and sizes only, so that native tests and other hosts can link it.
//
// A vocabulary shard (tensor parallel) and a vocabulary chunk are the same object: a slice of columns of the logits
// that starts at `vocab_start`. With x a row of logits, y the target and b = 1 / temperature, a slice is reduced to
//
//   m = max x          (-inf when the slice is empty or all -inf)
//   s = sum e^(b (x - m))
//   w = sum e^(b (x - m)) b (x - m)       (0 when no entropy is wanted)
//   t = x[y] when the slice owns y, else -inf
//
// and slices merge into the same four numbers of the whole row, from which
//
//   logprob = b (t - m) - log s
//   entropy = log s - w / s
//
// m stays a raw logit, so the error of b (x - m) is relative to itself and not to |b x|: logits near 1e4 lose nothing.
// A NaN or +inf logit makes s NaN, hence the loss, where the trainer sees it. A target that no slice owns gives
// logprob -inf, never a plausible number.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.h"

namespace mgrpo {

enum class DType { kFloat32, kBFloat16, kFloat16 };

// e^x is computed as 2^(x log2 e), the form both instruction sets have.
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// 1 / temperature, of every token (stride 1) or one for all (stride 0).
struct InverseTemperature {
  const float* data;
  int64_t stride;
};

// Logits [tokens, cols] of one slice. Columns from valid_cols on are vocabulary padding and are never read.
struct Slice {
  const void* data;
  DType dtype;
  int64_t tokens, cols, row_stride;
  int64_t vocab_start, valid_cols;
};

// Entry i in [0, n) scores targets[i] (global id) on logits row rows[i] (null: row i). out is [4, n]: m, s, w, t.
struct StatsArgs {
  Slice slice;
  const int64_t* targets;
  const int64_t* rows;
  InverseTemperature inv_temp;
  int64_t n;
  bool entropy;
  float* out;
};

// stats [parts, 4, n] -> logprob [n], entropy [n], merged [4, n]. Parts are added in their order: equal on every rank.
struct MergeArgs {
  const float* stats;
  int64_t parts, n;
  InverseTemperature inv_temp;
  float *logprob, *entropy, *merged;
};

// Entry i of a merge.
MGRPO_HOST_DEVICE void merge_entry(const MergeArgs& args, int64_t i) {
  const int64_t n = args.n;
  const float inv_temp = args.inv_temp.data[i * args.inv_temp.stride];
  const float* part = args.stats + i;
  float m = -INFINITY, t = -INFINITY;
  for (int64_t p = 0; p < args.parts; ++p, part += 4 * n) {
    m = fmaxf(m, part[0]);
    t = fmaxf(t, part[3 * n]);
  }
  part = args.stats + i;
  float s = 0.f, w = 0.f;
  for (int64_t p = 0; p < args.parts; ++p, part += 4 * n) {
    // A part has s = w = 0 when it is empty, and s = NaN when it contains a NaN, which must propagate.
    const float d = part[0] > -INFINITY ? inv_temp * (part[0] - m) : 0.f;
    const float k = expf(d);
    s += k * part[n];
    w += k > 0.f ? k * (part[2 * n] + d * part[n]) : 0.f;
  }
  const float log_s = logf(s);
  args.logprob[i] = inv_temp * (t - m) - log_s;
  args.entropy[i] = log_s - w / s;
  args.merged[i] = m;
  args.merged[n + i] = s;
  args.merged[2 * n + i] = w;
  args.merged[3 * n + i] = t;
}

// Writes every column of every row of out, which may be slice.data itself:
//   dx = b [ g_logprob (1[v=y] - p) - g_entropy p (log p + H) ]
//   p = e^(b (x - m)) / s,   log p + H = b (x - m) - w / s
// inv_rows [tokens] is the entry of each row, -1 for none (null: row i is entry i). Rows without an entry, rows whose
// cotangents are zero, and padding get zeros without being read. g_entropy may be null.
struct GradArgs {
  Slice slice;
  void* out;
  int64_t out_row_stride;
  const int64_t* targets;
  const int32_t* inv_rows;
  InverseTemperature inv_temp;
  int64_t n;
  const float* stats;  // [4, n], merged over all slices
  const float* g_logprob;
  const float* g_entropy;
};

}  // namespace mgrpo
