// CPU kernels of token logprobs. Each call handles entries (or rows) [begin, end), so that the caller owns threading.
#pragma once

#include "core/logprob.h"

namespace mgrpo::cpu {

void stats(const StatsArgs& args, int64_t begin, int64_t end);
void merge(const MergeArgs& args, int64_t begin, int64_t end);
void grad(const GradArgs& args, int64_t begin, int64_t end);  // over logits rows

}  // namespace mgrpo::cpu
