// A warp on the CPU: 32 lanes in an array, one after the other. The counterpart of DeviceWarp in
// kernels.cu; each sum below is written in the order of the shuffles there.
#ifndef HYBRIDKV_CUDA_HOST_WARP_H_
#define HYBRIDKV_CUDA_HOST_WARP_H_

#include <array>
#include <cstdint>

#include "fragments.h"
#include "warp_checksum.h"

namespace hybridkv::cuda {

struct HostWarp {
  template <class State>
  using PerLane = std::array<State, kLanes>;

  template <class Lanes, class Function>
  void each(Lanes& lanes, Function function) {
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) function(lane, lanes[lane]);
  }

  WordPair read_pair(std::uint64_t address) const {
    const auto* bytes = reinterpret_cast<const unsigned char*>(address);
    return {xxh3::read64(bytes), xxh3::read64(bytes + 8)};
  }

  // Lanes of one pair lie kPairs apart: exchange with the lane whose number differs in one bit, for each bit.
  void sum_over_groups(PerLane<LaneState>& lanes, std::uint32_t block) const {
    for (std::uint32_t mask = kPairs; mask < kLanes; mask *= 2) {
      for (std::uint32_t half = 0; half < 2; ++half) {
        std::array<std::uint64_t, kLanes> other;
        for (std::uint32_t lane = 0; lane < kLanes; ++lane) other[lane] = lanes[lane ^ mask].sums[block][half];
        for (std::uint32_t lane = 0; lane < kLanes; ++lane) lanes[lane].sums[block][half] += other[lane];
      }
    }
  }

  std::uint64_t sum_over_pairs(const PerLane<LaneState>& lanes) const {
    std::uint64_t sum = 0;
    for (std::uint32_t pair = 0; pair < kPairs; ++pair) sum += lanes[pair].sums[0][0];
    return sum;
  }
};

}  // namespace hybridkv::cuda

#endif  // HYBRIDKV_CUDA_HOST_WARP_H_
