// XXH3-128 computed by one warp: how the lanes share the work. What is computed is csrc/include/hybridkv/xxh3.h's, so
// the digest is the one that `hybridkv.tiers` seals what it holds with.
//
// XXH3 feeds eight 64-bit accumulators with stripes of 64 bytes and scrambles them after every 16
// stripes. Within those 16 the contributions are plain sums, so the lanes share them: lane 4g + p
// reads 16 bytes of stripe g, then of stripe g + 8, for accumulators 2p and 2p + 1. Only the
// scrambling is a chain, of a few instructions for each KiB.
//
// The algorithm is written over a `Warp`, so the host plays the same code with 32 lanes in
// an array (host_warp.h). Inputs of up to 240 bytes take other formulas, which each lane computes for itself.
#ifndef HYBRIDKV_CUDA_WARP_CHECKSUM_H_
#define HYBRIDKV_CUDA_WARP_CHECKSUM_H_

#include <cstdint>

#include "fragments.h"
#include "hybridkv/host_device.h"
#include "hybridkv/xxh3.h"

namespace hybridkv::cuda {

inline constexpr std::uint32_t kPairs = xxh3::kLanes / 2;
inline constexpr std::uint32_t kStripeGroups = kLanes / kPairs;
inline constexpr std::uint32_t kBlocksInFlight = 4;

static_assert(2 * kStripeGroups == xxh3::kStripesPerBlock, "a warp reads a block in two turns");

// 16 bytes of a stripe, as little-endian words.
struct WordPair {
  std::uint64_t low;
  std::uint64_t high;
};

struct LaneState {
  std::uint64_t accumulators[2];
  std::uint64_t sums[kBlocksInFlight][2];
  std::uint64_t stripe_keys[2][2];
  std::uint64_t scramble_keys[2];
};

HYBRIDKV_HOST_DEVICE inline void start_lane(std::uint32_t lane, LaneState& state) {
  const std::uint32_t first = 2 * (lane % kPairs), group = lane / kPairs;
  for (std::uint32_t half = 0; half < 2; ++half) {
    const std::uint32_t accumulator = first + half;
    state.accumulators[half] = xxh3::tables().accumulators[accumulator];
    state.stripe_keys[0][half] = xxh3::secret64(8 * (group + accumulator));
    state.stripe_keys[1][half] = xxh3::secret64(8 * (group + kStripeGroups + accumulator));
    state.scramble_keys[half] = xxh3::secret64(xxh3::kScrambleSecret + 8 * accumulator);
  }
}

HYBRIDKV_HOST_DEVICE inline void add_pair(const WordPair& data, const std::uint64_t (&keys)[2],
                                          std::uint64_t (&sums)[2]) {
  sums[0] += data.high + xxh3::multiplied_halves(data.low ^ keys[0]);
  sums[1] += data.low + xxh3::multiplied_halves(data.high ^ keys[1]);
}

HYBRIDKV_HOST_DEVICE inline void scramble(LaneState& state) {
  for (std::uint32_t half = 0; half < 2; ++half) {
    state.accumulators[half] = xxh3::scrambled(state.accumulators[half], state.scramble_keys[half]);
  }
}

// `kCount` whole blocks from `address`: reads first, then sums, then the chain.
template <std::uint32_t kCount, class Warp, class Lanes>
HYBRIDKV_HOST_DEVICE void add_blocks(Warp& warp, Lanes& lanes, std::uint64_t address) {
  warp.each(lanes, [&](std::uint32_t lane, LaneState& state) {
    const std::uint64_t mine = address + xxh3::kStripeBytes * (lane / kPairs) + 16 * (lane % kPairs);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (std::uint32_t block = 0; block < kCount; ++block) {
      const std::uint64_t at = mine + block * xxh3::kBlockBytes;
      const WordPair first = warp.read_pair(at), second = warp.read_pair(at + kStripeGroups * xxh3::kStripeBytes);
      state.sums[block][0] = state.sums[block][1] = 0;
      add_pair(first, state.stripe_keys[0], state.sums[block]);
      add_pair(second, state.stripe_keys[1], state.sums[block]);
    }
  });
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (std::uint32_t block = 0; block < kCount; ++block) {
    warp.sum_over_groups(lanes, block);
    warp.each(lanes, [&](std::uint32_t, LaneState& state) {
      state.accumulators[0] += state.sums[block][0];
      state.accumulators[1] += state.sums[block][1];
      scramble(state);
    });
  }
}

// What is left after the last whole block: some stripes, and the last 64 bytes once more with a key of their own.
template <class Warp, class Lanes>
HYBRIDKV_HOST_DEVICE void add_rest(Warp& warp, Lanes& lanes, std::uint64_t address, std::uint64_t end) {
  const auto num_stripes = static_cast<std::uint32_t>((end - address - 1) / xxh3::kStripeBytes);
  warp.each(lanes, [&](std::uint32_t lane, LaneState& state) {
    const std::uint32_t group = lane / kPairs, offset = 16 * (lane % kPairs);
    std::uint64_t(&sums)[2] = state.sums[0];
    sums[0] = sums[1] = 0;
    if (group < num_stripes) {
      add_pair(warp.read_pair(address + xxh3::kStripeBytes * group + offset), state.stripe_keys[0], sums);
    }
    if (group + kStripeGroups < num_stripes) {
      const std::uint64_t second = address + xxh3::kStripeBytes * (group + kStripeGroups);
      add_pair(warp.read_pair(second + offset), state.stripe_keys[1], sums);
    }
    if (group == 0) {
      const std::uint32_t key = xxh3::kLastStripeSecret + offset;
      const std::uint64_t keys[2] = {xxh3::secret64(key), xxh3::secret64(key + 8)};
      add_pair(warp.read_pair(end - xxh3::kStripeBytes + offset), keys, sums);
    }
  });
  warp.sum_over_groups(lanes, 0);
  warp.each(lanes, [&](std::uint32_t, LaneState& state) {
    state.accumulators[0] += state.sums[0][0];
    state.accumulators[1] += state.sums[0][1];
  });
}

// One half of the digest: what each pair adds, summed over the pairs.
template <class Warp, class Lanes>
HYBRIDKV_HOST_DEVICE std::uint64_t merge(Warp& warp, Lanes& lanes, std::size_t secret_offset, std::uint64_t start) {
  warp.each(lanes, [&](std::uint32_t lane, LaneState& state) {
    state.sums[0][0] =
        xxh3::merged_pair(state.accumulators[0], state.accumulators[1], secret_offset, 2 * (lane % kPairs));
  });
  return xxh3::avalanche(start + warp.sum_over_pairs(lanes));
}

template <class Warp>
HYBRIDKV_HOST_DEVICE Digest128 long_checksum(Warp& warp, std::uint64_t address, std::uint64_t num_bytes) {
  typename Warp::template PerLane<LaneState> lanes;
  warp.each(lanes, [&](std::uint32_t lane, LaneState& state) { start_lane(lane, state); });

  const std::uint64_t end = address + num_bytes;
  std::uint64_t blocks_left = xxh3::num_folded_blocks(num_bytes);
  for (; blocks_left >= kBlocksInFlight; blocks_left -= kBlocksInFlight) {
    add_blocks<kBlocksInFlight>(warp, lanes, address);
    address += kBlocksInFlight * xxh3::kBlockBytes;
  }
  for (; blocks_left > 0; --blocks_left) {
    add_blocks<1>(warp, lanes, address);
    address += xxh3::kBlockBytes;
  }
  add_rest(warp, lanes, address, end);

  const std::uint64_t low = merge(warp, lanes, xxh3::kLowMergeSecret, xxh3::low_start(num_bytes));
  const std::uint64_t high = merge(warp, lanes, xxh3::kHighMergeSecret, xxh3::high_start(num_bytes));
  return {low, high};
}

template <class Warp>
HYBRIDKV_HOST_DEVICE Digest128 checksum(Warp& warp, std::uint64_t address, std::uint64_t num_bytes) {
  if (num_bytes > xxh3::kMaxShortBytes) return long_checksum(warp, address, num_bytes);
  return xxh3::digest_of_short(reinterpret_cast<const unsigned char*>(address), num_bytes);
}

}  // namespace hybridkv::cuda

#endif  // HYBRIDKV_CUDA_WARP_CHECKSUM_H_
