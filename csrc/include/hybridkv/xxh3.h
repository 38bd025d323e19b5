// XXH3-128 with seed 0, from its published specification, in scalar code. It is the reference of the vectorised kernels
// of csrc/cpu, and has the parts that they share. It equals Python's xxhash.xxh3_128.
//
// No library serves here, because the copy kernels add each stripe to the checksum while it is in a register. Blocks
// may be summed out of order: the stripes of a block only add to the accumulators. So `block_sum` may run for many
// blocks in any order, on many threads, and `fold_block` folds the sums in order afterwards.
#ifndef HYBRIDKV_XXH3_H_
#define HYBRIDKV_XXH3_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace hybridkv {

// The digest as two numbers. Its canonical bytes are `high` and then `low`, both big-endian.
struct Digest128 {
  std::uint64_t low;
  std::uint64_t high;

  friend constexpr bool operator==(const Digest128&, const Digest128&) = default;
};

static_assert(std::is_trivially_copyable_v<Digest128> && sizeof(Digest128) == 16);

namespace xxh3 {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

inline constexpr std::size_t kStripeBytes = 64;
inline constexpr std::size_t kStripesPerBlock = 16;
inline constexpr std::size_t kBlockBytes = kStripeBytes * kStripesPerBlock;
inline constexpr std::size_t kLanes = 8;
inline constexpr std::size_t kSecretBytes = 192;
// Longer inputs are hashed in stripes.
inline constexpr std::size_t kMaxShortBytes = 240;

inline constexpr u64 kPrime32_1 = 0x9E3779B1;
inline constexpr u64 kPrime32_2 = 0x85EBCA77;
inline constexpr u64 kPrime32_3 = 0xC2B2AE3D;
inline constexpr u64 kPrime64_1 = 0x9E3779B185EBCA87;
inline constexpr u64 kPrime64_2 = 0xC2B2AE3D27D4EB4F;
inline constexpr u64 kPrime64_3 = 0x165667B19E3779F9;
inline constexpr u64 kPrime64_4 = 0x85EBCA77C2B2AE63;
inline constexpr u64 kPrime64_5 = 0x27D4EB2F165667C5;
inline constexpr u64 kPrimeMix1 = 0x165667919E3779F9;
inline constexpr u64 kPrimeMix2 = 0x9FB21C651E98DF25;

// Default secret as little-endian words, and start values of the accumulators.
struct Tables {
  u64 secret[kSecretBytes / 8];
  u64 accumulators[kLanes];
};

inline constexpr Tables kTables{
    {0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
     0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088,
     0x4ef90da297486471, 0xd8acdea946ef1938, 0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a,
     0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
     0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af},
    {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1},
};

// Offsets in the secret for the last stripe of an input, and for the two halves of the digest.
inline constexpr std::size_t kLastStripeSecret = kSecretBytes - 71;
inline constexpr std::size_t kScrambleSecret = kSecretBytes - 64;
inline constexpr std::size_t kLowMergeSecret = 11;
inline constexpr std::size_t kHighMergeSecret = kSecretBytes - 75;

// Eight bytes of the secret, from byte `offset` on.
inline u64 secret64(std::size_t offset) {
  const std::size_t word = offset / 8;
  const unsigned shift = static_cast<unsigned>(offset % 8) * 8;
  const u64* secret = kTables.secret;
  if (shift == 0) return secret[word];
  return secret[word] >> shift | secret[word + 1] << (64 - shift);
}

inline u64 secret32(std::size_t offset) { return secret64(offset) & 0xFFFFFFFF; }

// Numbers are little-endian, and so is every machine that this is compiled for.
inline u64 read64(const unsigned char* bytes) {
  u64 value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

inline u32 read32(const unsigned char* bytes) {
  u32 value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

struct Product {
  u64 low;
  u64 high;
};

constexpr Product multiply(u64 one, u64 other) {
  const unsigned __int128 product = static_cast<unsigned __int128>(one) * other;
  return {static_cast<u64>(product), static_cast<u64>(product >> 64)};
}

constexpr u64 folded_product(u64 one, u64 other) {
  const Product product = multiply(one, other);
  return product.low ^ product.high;
}

constexpr u32 swapped_bytes(u32 value) {
  return value >> 24 | (value >> 8 & 0xFF00) | (value << 8 & 0xFF0000) | value << 24;
}

constexpr u64 swapped_bytes(u64 value) {
  return static_cast<u64>(swapped_bytes(static_cast<u32>(value))) << 32 | swapped_bytes(static_cast<u32>(value >> 32));
}

constexpr u64 avalanche(u64 value) {
  value = (value ^ value >> 37) * kPrimeMix1;
  return value ^ value >> 32;
}

constexpr u64 avalanche64(u64 value) {
  value = (value ^ value >> 33) * kPrime64_2;
  value = (value ^ value >> 29) * kPrime64_3;
  return value ^ value >> 32;
}

// --- inputs of at most 240 bytes ---

inline Digest128 digest_up_to_16(const unsigned char* input, std::size_t num_bytes) {
  if (num_bytes == 0) return {avalanche64(secret64(64) ^ secret64(72)), avalanche64(secret64(80) ^ secret64(88))};
  if (num_bytes <= 3) {
    const u32 combined = static_cast<u32>(input[num_bytes - 1]) | static_cast<u32>(num_bytes) << 8 |
                         static_cast<u32>(input[0]) << 16 | static_cast<u32>(input[num_bytes >> 1]) << 24;
    const u32 swapped = swapped_bytes(combined);
    return {avalanche64((secret32(0) ^ secret32(4)) ^ combined),
            avalanche64((secret32(8) ^ secret32(12)) ^ (swapped << 13 | swapped >> 19))};
  }
  if (num_bytes <= 8) {
    const u64 combined = read32(input) | static_cast<u64>(read32(input + num_bytes - 4)) << 32;
    const u64 value = (secret64(16) ^ secret64(24)) ^ combined;
    Product product = multiply(value, kPrime64_1 + (num_bytes << 2));
    product.high += product.low << 1;
    product.low ^= product.high >> 3;
    product.low = (product.low ^ product.low >> 35) * kPrimeMix2;
    return {product.low ^ product.low >> 28, avalanche(product.high)};
  }
  const u64 first = read64(input);
  const u64 last = read64(input + num_bytes - 8);
  const u64 one = (secret64(32) ^ secret64(40)) ^ first ^ last;
  const u64 other = (secret64(48) ^ secret64(56)) ^ last;
  Product product = multiply(one, kPrime64_1);
  product.low += static_cast<u64>(num_bytes - 1) << 54;
  product.high += other + (other & 0xFFFFFFFF) * (kPrime32_2 - 1);
  product.low ^= swapped_bytes(product.high);
  const Product mixed = multiply(product.low, kPrime64_2);
  return {avalanche(mixed.low), avalanche(mixed.high + product.high * kPrime64_2)};
}

struct ShortSums {
  u64 low;
  u64 high;
};

inline ShortSums mixed(ShortSums sums, const unsigned char* one, const unsigned char* other,
                                            std::size_t secret_offset) {
  const u64 one_low = read64(one);
  const u64 one_high = read64(one + 8);
  const u64 other_low = read64(other);
  const u64 other_high = read64(other + 8);
  sums.low += folded_product(one_low ^ secret64(secret_offset), one_high ^ secret64(secret_offset + 8));
  sums.high += folded_product(other_low ^ secret64(secret_offset + 16), other_high ^ secret64(secret_offset + 24));
  sums.low ^= other_low + other_high;
  sums.high ^= one_low + one_high;
  return sums;
}

inline Digest128 digest_17_to_240(const unsigned char* input, std::size_t num_bytes) {
  ShortSums sums{num_bytes * kPrime64_1, 0};
  if (num_bytes <= 128) {
    for (std::size_t round = (num_bytes - 1) / 32 + 1; round-- > 0;) {
      sums = mixed(sums, input + round * 16, input + num_bytes - round * 16 - 16, round * 32);
    }
  } else {
    for (std::size_t chunk = 0; chunk < 4; ++chunk) {
      sums = mixed(sums, input + chunk * 32, input + chunk * 32 + 16, chunk * 32);
    }
    sums = {avalanche(sums.low), avalanche(sums.high)};
    for (std::size_t chunk = 4; chunk < num_bytes / 32; ++chunk) {
      sums = mixed(sums, input + chunk * 32, input + chunk * 32 + 16, (chunk - 4) * 32 + 3);
    }
    sums = mixed(sums, input + num_bytes - 16, input + num_bytes - 32, 103);
  }
  const u64 high = sums.low * kPrime64_1 + sums.high * kPrime64_4 + num_bytes * kPrime64_2;
  return {avalanche(sums.low + sums.high), 0 - avalanche(high)};
}

inline Digest128 digest_of_short(const unsigned char* input, std::size_t num_bytes) {
  return num_bytes <= 16 ? digest_up_to_16(input, num_bytes) : digest_17_to_240(input, num_bytes);
}

// --- longer inputs ---

constexpr u64 multiplied_halves(u64 value) { return (value & 0xFFFFFFFF) * (value >> 32); }

// Adds one stripe of 64 bytes to the accumulators, or to the sum of its block.
inline void add_stripe(u64* accumulators, const unsigned char* stripe, std::size_t secret_offset) {
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const u64 word = read64(stripe + lane * 8);
    const u64 value = word ^ secret64(secret_offset + lane * 8);
    accumulators[lane ^ 1] += word;
    accumulators[lane] += multiplied_halves(value);
  }
}

constexpr u64 scrambled(u64 accumulator, u64 key) {
  return (accumulator ^ accumulator >> 47 ^ key) * kPrime32_1;
}

inline void scramble(u64* accumulators) {
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    accumulators[lane] = scrambled(accumulators[lane], secret64(kScrambleSecret + lane * 8));
  }
}

// Sum of a whole block. It does not depend on other blocks.
inline void block_sum(u64* sum, const unsigned char* block) {
  for (std::size_t lane = 0; lane < kLanes; ++lane) sum[lane] = 0;
  for (std::size_t stripe = 0; stripe < kStripesPerBlock; ++stripe) {
    add_stripe(sum, block + stripe * kStripeBytes, stripe * 8);
  }
}

// Folds the sum of the next block into the accumulators, in order.
inline void fold_block(u64* accumulators, const u64* sum) {
  for (std::size_t lane = 0; lane < kLanes; ++lane) accumulators[lane] += sum[lane];
  scramble(accumulators);
}

// Part of a half of the digest from accumulators `lane` and `lane + 1`; `lane` is even.
inline u64 merged_pair(u64 one, u64 other, std::size_t secret_offset, std::size_t lane) {
  return folded_product(one ^ secret64(secret_offset + lane * 8), other ^ secret64(secret_offset + lane * 8 + 8));
}

inline u64 merged(const u64* accumulators, u64 start, std::size_t secret_offset) {
  for (std::size_t lane = 0; lane < kLanes; lane += 2) {
    start += merged_pair(accumulators[lane], accumulators[lane + 1], secret_offset, lane);
  }
  return avalanche(start);
}

// Start values of the two halves of a long input's digest.
constexpr u64 low_start(u64 num_bytes) { return num_bytes * kPrime64_1; }
constexpr u64 high_start(u64 num_bytes) { return ~(num_bytes * kPrime64_2); }

// Digest from the accumulators, after all stripes and the last 64 bytes.
inline Digest128 digest_of_accumulators(const u64* accumulators, u64 num_bytes) {
  return {merged(accumulators, low_start(num_bytes), kLowMergeSecret),
          merged(accumulators, high_start(num_bytes), kHighMergeSecret)};
}

// Number of whole blocks of a long input that are folded. The last block is not among them, even if it is full.
constexpr u64 num_folded_blocks(u64 num_bytes) { return (num_bytes - 1) / kBlockBytes; }

// The digest of `num_bytes` at `input`.
inline Digest128 digest(const unsigned char* input, std::size_t num_bytes) {
  if (num_bytes <= kMaxShortBytes) return digest_of_short(input, num_bytes);
  u64 accumulators[kLanes];
  for (std::size_t lane = 0; lane < kLanes; ++lane) accumulators[lane] = kTables.accumulators[lane];
  const u64 num_blocks = num_folded_blocks(num_bytes);
  for (u64 block = 0; block < num_blocks; ++block) {
    u64 sum[kLanes];
    block_sum(sum, input + block * kBlockBytes);
    fold_block(accumulators, sum);
  }
  const unsigned char* last_block = input + num_blocks * kBlockBytes;
  const std::size_t num_stripes = (num_bytes - num_blocks * kBlockBytes - 1) / kStripeBytes;
  for (std::size_t stripe = 0; stripe < num_stripes; ++stripe) {
    add_stripe(accumulators, last_block + stripe * kStripeBytes, stripe * 8);
  }
  add_stripe(accumulators, input + num_bytes - kStripeBytes, kLastStripeSecret);
  return digest_of_accumulators(accumulators, num_bytes);
}

}  // namespace xxh3
}  // namespace hybridkv

#endif  // HYBRIDKV_XXH3_H_
