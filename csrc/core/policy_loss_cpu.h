// CPU kernels of the policy loss. Each call handles sequences [begin, end), so that the caller owns threading.
#pragma once

#include "core/policy_loss.h"

namespace mgrpo::cpu {

void policy_loss(const PolicyLossArgs& args, int64_t begin, int64_t end);
void segment_sums(const SegmentSumsArgs& args, int64_t begin, int64_t end);

}  // namespace mgrpo::cpu
