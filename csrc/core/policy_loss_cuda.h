// CUDA kernels of the policy loss: one launch each on `stream`, nothing allocated, nothing synchronised.
// Every pointer in the arguments is a device pointer. Returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include "core/policy_loss.h"

namespace mgrpo::cuda {

cudaError_t policy_loss(const PolicyLossArgs& args, cudaStream_t stream);
cudaError_t segment_sums(const SegmentSumsArgs& args, cudaStream_t stream);

}  // namespace mgrpo::cuda
