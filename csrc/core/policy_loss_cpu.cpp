#include "core/policy_loss_cpu.h"

#include <algorithm>
#include <limits>

namespace mgrpo::cpu {

// Sums are double here: that costs nothing for this many tokens, and a long sequence is summed one token at a time.
void policy_loss(const PolicyLossArgs& args, int64_t begin, int64_t end) {
  for (int64_t s = begin; s < end; ++s) {
    double sums[kNumColumns] = {}, seq_grad = 0;
    sums[kMismatchMax] = -std::numeric_limits<double>::infinity();
    for (int64_t i = args.cu_seqlens[s]; i < args.cu_seqlens[s + 1]; ++i) {
      args.grad[i] = 0.f;
      if (args.weights[i] == 0.f) continue;
      float token[kNumColumns] = {};
      const Dual loss = token_loss(args, i, s, token);
      args.grad[i] = loss.d_token;
      seq_grad += loss.d_seq;
      for (int column = 0; column < kMismatchMax; ++column) sums[column] += token[column];
      if (token[kKnownRollout] != 0.f)
        sums[kMismatchMax] = std::max(sums[kMismatchMax], static_cast<double>(token[kMismatchMax]));
    }
    args.seq_grad[s] = static_cast<float>(seq_grad);
    for (int column = 0; column < kNumColumns; ++column)
      args.sums[s * kNumColumns + column] = static_cast<float>(sums[column]);
  }
}

void segment_sums(const SegmentSumsArgs& args, int64_t begin, int64_t end) {
  for (int64_t s = begin; s < end; ++s) {
    double total = 0, weight = 0;
    for (int64_t i = args.cu_seqlens[s]; i < args.cu_seqlens[s + 1]; ++i) {
      if (args.weights[i] == 0.f) continue;
      total += static_cast<double>(args.weights[i]) * args.x[i];
      weight += args.weights[i];
    }
    args.out[s] = static_cast<float>(total);
    args.out[args.num_seqs + s] = static_cast<float>(weight);
  }
}

}  // namespace mgrpo::cpu
