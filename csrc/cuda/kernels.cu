#include "kernels.h"

#include <algorithm>
#include <limits>

namespace hybridkv::cuda {
namespace {

constexpr std::uint32_t kCopyThreads = 512;

template <std::uint32_t kWidth>
struct WordOf;
template <>
struct WordOf<1> { using Type = unsigned char; };
template <>
struct WordOf<2> { using Type = unsigned short; };
template <>
struct WordOf<4> { using Type = unsigned int; };
template <>
struct WordOf<8> { using Type = uint2; };
template <>
struct WordOf<16> { using Type = uint4; };

// Every byte is read once and written once, so these accesses must not evict the data of compute from the caches.
struct StreamingMemory {
  template <std::uint32_t kWidth>
  __device__ void copy(std::uint64_t source, std::uint64_t destination) {
    using Word = typename WordOf<kWidth>::Type;
    __stcs(reinterpret_cast<Word*>(destination), __ldcs(reinterpret_cast<const Word*>(source)));
  }

  template <std::uint32_t kWidth>
  __device__ void copy_many(std::uint64_t source, std::uint64_t destination) {
    using Word = typename WordOf<kWidth>::Type;
    const Word* from = reinterpret_cast<const Word*>(source);
    Word* to = reinterpret_cast<Word*>(destination);
    Word words[kWordsInFlight];
#pragma unroll
    for (std::uint32_t i = 0; i < kWordsInFlight; ++i) words[i] = __ldcs(from + i * kLanes);
#pragma unroll
    for (std::uint32_t i = 0; i < kWordsInFlight; ++i) __stcs(to + i * kLanes, words[i]);
  }
};

__global__ void __launch_bounds__(kCopyThreads)
    copy_kernel(const FragmentRun* __restrict__ runs, std::uint32_t num_runs, std::uint64_t num_tiles,
                std::uint64_t tile_bytes) {
  constexpr std::uint32_t kWarps = kCopyThreads / kLanes;
  StreamingMemory memory;
  copy_fragments(runs, num_runs, num_tiles, tile_bytes, blockIdx.x * kWarps + threadIdx.x / kLanes,
                 gridDim.x * kWarps, threadIdx.x % kLanes, memory);
}

// The copy engines could copy a table too, but a store's table would wait there for the bytes of loads.
constexpr std::uint32_t kTableThreads = 1024;

__global__ void __launch_bounds__(kTableThreads)
    table_kernel(const uint4* __restrict__ from, uint4* __restrict__ to, std::uint32_t num_words) {
  for (std::uint32_t word = threadIdx.x; word < num_words; word += kTableThreads) to[word] = from[word];
}

std::uint32_t blocks_for(std::uint64_t warps, std::uint32_t num_blocks) {
  constexpr std::uint64_t kPerBlock = kCopyThreads / kLanes;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>((warps + kPerBlock - 1) / kPerBlock, num_blocks));
}

}  // namespace

Status load_kernels() {
  cudaFuncAttributes attributes;
  const Status status = check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&table_kernel)),
                              "cudaFuncGetAttributes(table_kernel)");
  if (!status.ok()) return status;
  return check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&copy_kernel)),
               "cudaFuncGetAttributes(copy_kernel)");
}

Status launch_table(const FragmentRun* from, FragmentRun* to, std::uint64_t num_runs, cudaStream_t stream) {
  static_assert(sizeof(FragmentRun) % sizeof(uint4) == 0);
  auto num_words = static_cast<std::uint32_t>(num_runs * (sizeof(FragmentRun) / sizeof(uint4)));
  void* arguments[] = {&from, &to, &num_words};
  return check(cudaLaunchKernel(reinterpret_cast<const void*>(&table_kernel), dim3(1), dim3(kTableThreads), arguments,
                                0, stream),
               "cudaLaunchKernel(table_kernel)");
}

Status launch_copy(const FragmentRun* runs, std::uint64_t num_runs, std::uint64_t num_tiles, std::uint64_t tile_bytes,
                   std::uint32_t num_blocks, cudaStream_t stream) {
  if (num_tiles == 0) return {};
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint32_t>::max();
  if (num_runs == 0 || num_runs > num_tiles || num_tiles > kMost || tile_bytes == 0 || num_blocks == 0) {
    return {"launch_copy", "expected 1 <= rows <= tiles < 2^32, a tile size and thread blocks"};
  }
  auto rows = static_cast<std::uint32_t>(num_runs);
  void* arguments[] = {&runs, &rows, &num_tiles, &tile_bytes};
  const dim3 grid(blocks_for(num_tiles, num_blocks));
  return check(cudaLaunchKernel(reinterpret_cast<const void*>(&copy_kernel), grid, dim3(kCopyThreads), arguments, 0,
                                stream),
               "cudaLaunchKernel(copy_kernel)");
}

}  // namespace hybridkv::cuda
