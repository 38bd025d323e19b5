// Launches of the kernels. No call waits: each one enqueues on `stream` and returns.
//
// Tables are in device memory, or in pinned host memory that the device can address, and must not
// change until the launch has ended. `num_blocks` limits the thread blocks, and so the
// multiprocessors that compute cannot use.
#ifndef HYBRIDKV_CUDA_KERNELS_H_
#define HYBRIDKV_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fragments.h"
#include "status.h"

namespace hybridkv::cuda {

// Loads the code of the kernels onto the current device. CUDA would load it at the first launch, and
// wait for running work.
Status load_kernels();

// Copies a table from pinned host memory to device memory.
Status launch_table(const FragmentRun* from, FragmentRun* to, std::uint64_t num_runs, cudaStream_t stream);

// Copies all fragments of a table of `num_runs` rows, which hold `num_tiles` tiles of at most
// `tile_bytes`. Source and destination may each be device memory or pinned host memory.
Status launch_copy(const FragmentRun* runs, std::uint64_t num_runs, std::uint64_t num_tiles, std::uint64_t tile_bytes,
                   std::uint32_t num_blocks, cudaStream_t stream);

}  // namespace hybridkv::cuda

#endif  // HYBRIDKV_CUDA_KERNELS_H_
