#include "kernels.h"

#include <algorithm>
#include <limits>

#include "warp_checksum.h"

namespace hybridkv::cuda {
namespace {

constexpr std::uint32_t kCopyThreads = 512;
constexpr std::uint32_t kChecksumThreads = 128;
constexpr std::uint32_t kEveryLane = 0xffffffff;

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

// Every byte is read once and written once, so neither may push out what compute keeps in the caches.
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

// The counterpart of HostWarp in host_warp.h.
template <bool kAligned>
struct DeviceWarp {
  template <class State>
  using PerLane = State;

  std::uint32_t lane;

  template <class State, class Function>
  __device__ void each(State& state, Function function) {
    function(lane, state);
  }

  __device__ WordPair read_pair(std::uint64_t address) const {
    if constexpr (kAligned) {
      const ulonglong2 words = __ldcs(reinterpret_cast<const ulonglong2*>(address));
      return {words.x, words.y};
    } else {
      const auto* bytes = reinterpret_cast<const unsigned char*>(address);
      return {xxh3::read64(bytes), xxh3::read64(bytes + 8)};
    }
  }

  __device__ void sum_over_groups(LaneState& state, std::uint32_t block) const {
#pragma unroll
    for (std::uint32_t mask = kPairs; mask < kLanes; mask *= 2) {
#pragma unroll
      for (std::uint32_t half = 0; half < 2; ++half) {
        state.sums[block][half] += exchange(state.sums[block][half], mask);
      }
    }
  }

  __device__ std::uint64_t sum_over_pairs(const LaneState& state) const {
    std::uint64_t sum = state.sums[0][0];
#pragma unroll
    for (std::uint32_t mask = 1; mask < kPairs; mask *= 2) sum += exchange(sum, mask);
    return sum;
  }

 private:
  __device__ static std::uint64_t exchange(std::uint64_t value, std::uint32_t mask) {
    return __shfl_xor_sync(kEveryLane, static_cast<unsigned long long>(value), mask);
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

__global__ void __launch_bounds__(kChecksumThreads)
    checksum_kernel(const std::uint64_t* __restrict__ ranges, std::uint64_t num_ranges,
                    std::uint64_t* __restrict__ digests) {
  constexpr std::uint32_t kWarps = kChecksumThreads / kLanes;
  const std::uint32_t lane = threadIdx.x % kLanes;
  const std::uint64_t num_warps = static_cast<std::uint64_t>(gridDim.x) * kWarps;
  for (std::uint64_t i = blockIdx.x * kWarps + threadIdx.x / kLanes; i < num_ranges; i += num_warps) {
    const std::uint64_t address = ranges[2 * i], num_bytes = ranges[2 * i + 1];
    Digest128 digest;
    // The last 64 bytes of a long range are read from its end, so that must be aligned as well.
    if ((address | num_bytes) % kWidestWord == 0) {
      DeviceWarp<true> warp{lane};
      digest = checksum(warp, address, num_bytes);
    } else {
      DeviceWarp<false> warp{lane};
      digest = checksum(warp, address, num_bytes);
    }
    if (lane == 0) {
      digests[2 * i] = digest.low;
      digests[2 * i + 1] = digest.high;
    }
  }
}

std::uint32_t blocks_for(std::uint64_t warps, std::uint32_t threads, std::uint32_t num_blocks) {
  const std::uint64_t per_block = threads / kLanes;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>((warps + per_block - 1) / per_block, num_blocks));
}

}  // namespace

Status load_kernels() {
  cudaFuncAttributes attributes;
  const Status status = check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&copy_kernel)),
                              "cudaFuncGetAttributes(copy_kernel)");
  if (!status.ok()) return status;
  return check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&checksum_kernel)),
               "cudaFuncGetAttributes(checksum_kernel)");
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
  const dim3 grid(blocks_for(num_tiles, kCopyThreads, num_blocks));
  return check(cudaLaunchKernel(reinterpret_cast<const void*>(&copy_kernel), grid, dim3(kCopyThreads), arguments, 0,
                                stream),
               "cudaLaunchKernel(copy_kernel)");
}

Status launch_checksums(const std::uint64_t* ranges, std::uint64_t num_ranges, std::uint64_t* digests,
                        std::uint32_t num_blocks, cudaStream_t stream) {
  if (num_ranges == 0) return {};
  if (num_blocks == 0) return {"launch_checksums", "expected thread blocks"};
  void* arguments[] = {&ranges, &num_ranges, &digests};
  const dim3 grid(blocks_for(num_ranges, kChecksumThreads, num_blocks));
  return check(cudaLaunchKernel(reinterpret_cast<const void*>(&checksum_kernel), grid, dim3(kChecksumThreads),
                                arguments, 0, stream),
               "cudaLaunchKernel(checksum_kernel)");
}

}  // namespace hybridkv::cuda
