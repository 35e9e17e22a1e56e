// CUDA kernels of token logprobs: one launch each on `stream`, nothing allocated, nothing synchronised.
// Every pointer in the arguments is a device pointer. Returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include "core/logprob.h"

namespace mgrpo::cuda {

cudaError_t stats(const StatsArgs& args, cudaStream_t stream);
cudaError_t merge(const MergeArgs& args, cudaStream_t stream);
cudaError_t grad(const GradArgs& args, cudaStream_t stream);

}  // namespace mgrpo::cuda
