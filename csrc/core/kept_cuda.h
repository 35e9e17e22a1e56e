// CUDA kernels of kept sets: one launch each on `stream`, nothing allocated, nothing synchronised.
// Every pointer in the arguments is a device pointer. Returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include "core/kept.h"

namespace mgrpo::cuda {

cudaError_t kept_stats(const KeptStatsArgs& args, cudaStream_t stream);
cudaError_t kept_grad(const KeptGradArgs& args, cudaStream_t stream);

}  // namespace mgrpo::cuda
