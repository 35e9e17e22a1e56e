// MGRPO_HOST_DEVICE: a function that the CPU and the CUDA kernels share.
#pragma once

#ifdef __CUDACC__
#define MGRPO_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MGRPO_HOST_DEVICE inline
#endif
