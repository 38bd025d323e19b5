// XXH3-128 (seed 0, default secret), computed by one warp. The digest is the one that xxhash's
// `xxh3_128` gives on the host, by which `hybridkv.tiers` seals what it holds.
//
// XXH3 feeds eight 64-bit accumulators with stripes of 64 bytes and scrambles them after every 16
// stripes. Within those 16 the contributions are plain sums, so the lanes share them: lane 4g + p
// reads 16 bytes of stripe g, then of stripe g + 8, for accumulators 2p and 2p + 1. Only the
// scrambling is a chain, of a few instructions for each KiB.
//
// The algorithm is written over a `Warp`, so the host plays the same code with 32 lanes in
// an array (host_warp.h). Inputs of up to 240 bytes take other formulas, which are scalar.
#ifndef HYBRIDKV_CUDA_XXH3_H_
#define HYBRIDKV_CUDA_XXH3_H_

#include <cstdint>

#include "xxh3_words.h"

namespace hybridkv::cuda {

inline constexpr std::uint64_t kStripeBytes = 64;
inline constexpr std::uint32_t kStripesPerBlock = 16;
inline constexpr std::uint64_t kChecksumBlockBytes = kStripeBytes * kStripesPerBlock;
inline constexpr std::uint32_t kPairs = 4;
inline constexpr std::uint32_t kStripeGroups = 8;
inline constexpr std::uint32_t kBlocksInFlight = 4;
inline constexpr std::uint64_t kLongestShortInput = 240;

struct LaneState {
  std::uint64_t accumulators[2];
  std::uint64_t sums[kBlocksInFlight][2];
  std::uint64_t stripe_keys[2][2];
  std::uint64_t scramble_keys[2];
};

HYBRIDKV_HOST_DEVICE inline void start_lane(std::uint32_t lane, const std::uint8_t* secret, LaneState& state) {
  constexpr std::uint64_t initial[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                        kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  const std::uint32_t pair = lane % kPairs, group = lane / kPairs;
  for (std::uint32_t half = 0; half < 2; ++half) {
    const std::uint32_t offset = 16 * pair + 8 * half;
    // Selected, not indexed, so that the table stays out of local memory.
    std::uint64_t value = 0;
    for (std::uint32_t i = 0; i < 8; ++i) value = 2 * pair + half == i ? initial[i] : value;
    state.accumulators[half] = value;
    state.stripe_keys[0][half] = read64(secret + 8 * group + offset);
    state.stripe_keys[1][half] = read64(secret + 8 * (group + kStripeGroups) + offset);
    state.scramble_keys[half] = read64(secret + kSecretBytes - kStripeBytes + offset);
  }
}

HYBRIDKV_HOST_DEVICE inline void add_pair(const WordPair& data, const std::uint64_t (&keys)[2],
                                          std::uint64_t (&sums)[2]) {
  sums[0] += data.high + multiply_halves(data.low ^ keys[0]);
  sums[1] += data.low + multiply_halves(data.high ^ keys[1]);
}

HYBRIDKV_HOST_DEVICE inline void scramble(LaneState& state) {
  for (std::uint32_t half = 0; half < 2; ++half) {
    std::uint64_t& value = state.accumulators[half];
    value = ((value ^ (value >> 47)) ^ state.scramble_keys[half]) * kPrime32_1;
  }
}

// `kCount` whole blocks from `address`: reads first, then sums, then the chain.
template <std::uint32_t kCount, class Warp, class Lanes>
HYBRIDKV_HOST_DEVICE void add_blocks(Warp& warp, Lanes& lanes, std::uint64_t address) {
  warp.each(lanes, [&](std::uint32_t lane, LaneState& state) {
    const std::uint64_t mine = address + kStripeBytes * (lane / kPairs) + 16 * (lane % kPairs);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (std::uint32_t block = 0; block < kCount; ++block) {
      const std::uint64_t at = mine + block * kChecksumBlockBytes;
      const WordPair first = warp.read_pair(at), second = warp.read_pair(at + kStripeGroups * kStripeBytes);
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
HYBRIDKV_HOST_DEVICE void add_rest(Warp& warp, Lanes& lanes, std::uint64_t address, std::uint64_t end,
                                   const std::uint8_t* secret) {
  const auto num_stripes = static_cast<std::uint32_t>((end - address - 1) / kStripeBytes);
  warp.each(lanes, [&](std::uint32_t lane, LaneState& state) {
    const std::uint32_t group = lane / kPairs, offset = 16 * (lane % kPairs);
    std::uint64_t(&sums)[2] = state.sums[0];
    sums[0] = sums[1] = 0;
    if (group < num_stripes) {
      add_pair(warp.read_pair(address + kStripeBytes * group + offset), state.stripe_keys[0], sums);
    }
    if (group + kStripeGroups < num_stripes) {
      const std::uint64_t second = address + kStripeBytes * (group + kStripeGroups);
      add_pair(warp.read_pair(second + offset), state.stripe_keys[1], sums);
    }
    if (group == 0) {
      const std::uint8_t* key = secret + kSecretBytes - kStripeBytes - 7 + offset;
      const std::uint64_t keys[2] = {read64(key), read64(key + 8)};
      add_pair(warp.read_pair(end - kStripeBytes + offset), keys, sums);
    }
  });
  warp.sum_over_groups(lanes, 0);
  warp.each(lanes, [&](std::uint32_t, LaneState& state) {
    state.accumulators[0] += state.sums[0][0];
    state.accumulators[1] += state.sums[0][1];
  });
}

// One half of the digest: each pair's product, summed over the pairs.
template <class Warp, class Lanes>
HYBRIDKV_HOST_DEVICE std::uint64_t merge(Warp& warp, Lanes& lanes, const std::uint8_t* secret, std::uint64_t start) {
  warp.each(lanes, [&](std::uint32_t lane, LaneState& state) {
    const std::uint8_t* key = secret + 16 * (lane % kPairs);
    state.sums[0][0] =
        multiply_fold(state.accumulators[0] ^ read64(key), state.accumulators[1] ^ read64(key + 8));
  });
  return avalanche(start + warp.sum_over_pairs(lanes));
}

template <class Warp>
HYBRIDKV_HOST_DEVICE Digest long_checksum(Warp& warp, std::uint64_t address, std::uint64_t num_bytes,
                                          const std::uint8_t* secret) {
  typename Warp::template PerLane<LaneState> lanes;
  warp.each(lanes, [&](std::uint32_t lane, LaneState& state) { start_lane(lane, secret, state); });

  const std::uint64_t end = address + num_bytes;
  std::uint64_t blocks_left = (num_bytes - 1) / kChecksumBlockBytes;
  for (; blocks_left >= kBlocksInFlight; blocks_left -= kBlocksInFlight) {
    add_blocks<kBlocksInFlight>(warp, lanes, address);
    address += kBlocksInFlight * kChecksumBlockBytes;
  }
  for (; blocks_left > 0; --blocks_left) {
    add_blocks<1>(warp, lanes, address);
    address += kChecksumBlockBytes;
  }
  add_rest(warp, lanes, address, end, secret);

  const std::uint64_t low = merge(warp, lanes, secret + 11, num_bytes * kPrime64_1);
  const std::uint64_t high =
      merge(warp, lanes, secret + kSecretBytes - kStripeBytes - 11, ~(num_bytes * kPrime64_2));
  return {low, high};
}

template <class Warp>
HYBRIDKV_HOST_DEVICE Digest checksum(Warp& warp, std::uint64_t address, std::uint64_t num_bytes,
                                     const std::uint8_t* secret) {
  if (num_bytes > kLongestShortInput) return long_checksum(warp, address, num_bytes, secret);
  return short_checksum(reinterpret_cast<const std::uint8_t*>(address), num_bytes, secret);
}

}  // namespace hybridkv::cuda

#endif  // HYBRIDKV_CUDA_XXH3_H_
