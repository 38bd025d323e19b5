// Copies by the GPU's copy engines, for pages so large that a descriptor for each is cheap.
#ifndef HYBRIDKV_CUDA_BATCH_COPY_H_
#define HYBRIDKV_CUDA_BATCH_COPY_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "status.h"

namespace hybridkv::cuda {

// Copies `sizes[i]` bytes from `sources[i]` to `destinations[i]`, for each i, in no particular order: one
// driver call for every 4,096 copies if the driver has cuMemcpyBatchAsync (CUDA 12.8), otherwise one for each copy.
// Never waits. `stream` is not the legacy default stream. The arrays may be freed when this returns.
Status copy_batch(const std::uint64_t* sources, const std::uint64_t* destinations, const std::uint64_t* sizes,
                  std::size_t count, cudaStream_t stream);

// True if the driver of this process takes many copies in one call.
bool has_batch_copy();

}  // namespace hybridkv::cuda

#endif  // HYBRIDKV_CUDA_BATCH_COPY_H_
