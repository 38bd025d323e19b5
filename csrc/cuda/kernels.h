// Launches of the kernels. Nothing waits: each call enqueues on `stream` and returns.
//
// Tables and digests lie in device memory, or in pinned host memory that the device can address, and
// must stay as they are until the stream has passed. `num_blocks` bounds the thread blocks, hence
// the multiprocessors that are taken from compute.
#ifndef HYBRIDKV_CUDA_KERNELS_H_
#define HYBRIDKV_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fragments.h"
#include "status.h"

namespace hybridkv::cuda {

// Loads the code of both kernels onto the current device. CUDA would load it at the first launch, and
// then wait for what runs.
Status load_kernels();

// Copies all fragments of a table of `num_runs` rows, which hold `num_tiles` tiles of at most
// `tile_bytes`. Source and destination may each be device memory or pinned host memory.
Status launch_copy(const FragmentRun* runs, std::uint64_t num_runs, std::uint64_t num_tiles, std::uint64_t tile_bytes,
                   std::uint32_t num_blocks, cudaStream_t stream);

// XXH3-128 of each range (address, num_bytes) into `digests` (low, high). One warp reads a range.
Status launch_checksums(const std::uint64_t* ranges, std::uint64_t num_ranges, std::uint64_t* digests,
                        std::uint32_t num_blocks, cudaStream_t stream);

}  // namespace hybridkv::cuda

#endif  // HYBRIDKV_CUDA_KERNELS_H_
