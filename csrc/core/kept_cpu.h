// CPU kernels of kept sets. Each call handles the sets [begin, end), so that the caller owns threading.
#pragma once

#include "core/kept.h"

namespace mgrpo::cpu {

void kept_stats(const KeptStatsArgs& args, int64_t begin, int64_t end);
void kept_grad(const KeptGradArgs& args, int64_t begin, int64_t end);

}  // namespace mgrpo::cpu
