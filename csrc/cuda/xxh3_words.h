// The words that XXH3-128 is made of, and its scalar formulas for inputs of up to 240 bytes.
// The constants and formulas are those of the algorithm's specification.
#ifndef HYBRIDKV_CUDA_XXH3_WORDS_H_
#define HYBRIDKV_CUDA_XXH3_WORDS_H_

#include <cstdint>

#include "fragments.h"

namespace hybridkv::cuda {

// Written big-endian, high half first, these are the 16 bytes of xxhash's `digest()`.
struct Digest {
  std::uint64_t low;
  std::uint64_t high;
};

struct WordPair {
  std::uint64_t low;
  std::uint64_t high;
};

inline constexpr std::uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
inline constexpr std::uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F;
inline constexpr std::uint64_t kPrime64_3 = 0x165667B19E3779F9, kPrime64_4 = 0x85EBCA77C2B2AE63;
inline constexpr std::uint64_t kPrime64_5 = 0x27D4EB2F165667C5;
inline constexpr std::uint64_t kAvalanchePrime = 0x165667919E3779F9, kMixPrime = 0x9FB21C651E98DF25;

inline constexpr std::uint32_t kSecretBytes = 192;

#define HYBRIDKV_XXH3_SECRET \
  0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, \
  0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, \
  0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, \
  0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, \
  0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, \
  0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, \
  0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, \
  0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, \
  0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, \
  0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, \
  0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, \
  0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e

// Bytes, not words: inputs and keys may lie at any address.
HYBRIDKV_HOST_DEVICE inline std::uint64_t read64(const std::uint8_t* bytes) {
  std::uint64_t value = 0;
  for (int i = 0; i < 8; ++i) value |= static_cast<std::uint64_t>(bytes[i]) << (8 * i);
  return value;
}

HYBRIDKV_HOST_DEVICE inline std::uint32_t read32(const std::uint8_t* bytes) {
  std::uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value |= static_cast<std::uint32_t>(bytes[i]) << (8 * i);
  return value;
}

HYBRIDKV_HOST_DEVICE inline std::uint32_t swap32(std::uint32_t x) {
  return x << 24 | (x & 0xff00) << 8 | (x >> 8 & 0xff00) | x >> 24;
}

HYBRIDKV_HOST_DEVICE inline std::uint64_t swap64(std::uint64_t x) {
  return static_cast<std::uint64_t>(swap32(static_cast<std::uint32_t>(x))) << 32 |
         swap32(static_cast<std::uint32_t>(x >> 32));
}

HYBRIDKV_HOST_DEVICE inline std::uint64_t multiply_halves(std::uint64_t x) { return (x & 0xffffffff) * (x >> 32); }

HYBRIDKV_HOST_DEVICE inline Digest multiply_long(std::uint64_t a, std::uint64_t b) {
#if defined(__CUDA_ARCH__)
  return {a * b, __umul64hi(a, b)};
#else
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return {static_cast<std::uint64_t>(product), static_cast<std::uint64_t>(product >> 64)};
#endif
}

HYBRIDKV_HOST_DEVICE inline std::uint64_t multiply_fold(std::uint64_t a, std::uint64_t b) {
  const Digest product = multiply_long(a, b);
  return product.low ^ product.high;
}

HYBRIDKV_HOST_DEVICE inline std::uint64_t avalanche(std::uint64_t x) {
  x = (x ^ (x >> 37)) * kAvalanchePrime;
  return x ^ (x >> 32);
}

HYBRIDKV_HOST_DEVICE inline std::uint64_t avalanche_short(std::uint64_t x) {
  x = (x ^ (x >> 33)) * kPrime64_2;
  x = (x ^ (x >> 29)) * kPrime64_3;
  return x ^ (x >> 32);
}

HYBRIDKV_HOST_DEVICE inline std::uint64_t mix16(const std::uint8_t* input, const std::uint8_t* secret) {
  return multiply_fold(read64(input) ^ read64(secret), read64(input + 8) ^ read64(secret + 8));
}

HYBRIDKV_HOST_DEVICE inline void mix32(Digest& sums, const std::uint8_t* first, const std::uint8_t* second,
                                       const std::uint8_t* secret) {
  sums.low = (sums.low + mix16(first, secret)) ^ (read64(second) + read64(second + 8));
  sums.high = (sums.high + mix16(second, secret + 16)) ^ (read64(first) + read64(first + 8));
}

HYBRIDKV_HOST_DEVICE inline Digest checksum_to_3(const std::uint8_t* input, std::uint64_t n, const std::uint8_t* key) {
  const std::uint32_t joined = static_cast<std::uint32_t>(input[0]) << 16 |
                               static_cast<std::uint32_t>(input[n >> 1]) << 24 |
                               static_cast<std::uint32_t>(input[n - 1]) | static_cast<std::uint32_t>(n) << 8;
  const std::uint32_t swapped = swap32(joined);
  const std::uint32_t turned = swapped << 13 | swapped >> 19;
  return {avalanche_short(joined ^ static_cast<std::uint64_t>(read32(key) ^ read32(key + 4))),
          avalanche_short(turned ^ static_cast<std::uint64_t>(read32(key + 8) ^ read32(key + 12)))};
}

HYBRIDKV_HOST_DEVICE inline Digest checksum_to_8(const std::uint8_t* input, std::uint64_t n, const std::uint8_t* key) {
  const std::uint64_t joined = read32(input) | static_cast<std::uint64_t>(read32(input + n - 4)) << 32;
  Digest sums = multiply_long(joined ^ read64(key + 16) ^ read64(key + 24), kPrime64_1 + (n << 2));
  sums.high += sums.low << 1;
  sums.low ^= sums.high >> 3;
  sums.low = (sums.low ^ (sums.low >> 35)) * kMixPrime;
  return {sums.low ^ (sums.low >> 28), avalanche(sums.high)};
}

HYBRIDKV_HOST_DEVICE inline Digest checksum_to_16(const std::uint8_t* input, std::uint64_t n, const std::uint8_t* key) {
  const std::uint64_t first = read64(input);
  std::uint64_t last = read64(input + n - 8);
  Digest sums = multiply_long(first ^ last ^ read64(key + 32) ^ read64(key + 40), kPrime64_1);
  sums.low += (n - 1) << 54;
  last ^= read64(key + 48) ^ read64(key + 56);
  sums.high += last + (last & 0xffffffff) * (kPrime32_2 - 1);
  sums.low ^= swap64(sums.high);
  Digest wide = multiply_long(sums.low, kPrime64_2);
  wide.high += sums.high * kPrime64_2;
  return {avalanche(wide.low), avalanche(wide.high)};
}

HYBRIDKV_HOST_DEVICE inline Digest finish_sums(const Digest& sums, std::uint64_t n) {
  const std::uint64_t high = sums.low * kPrime64_1 + sums.high * kPrime64_4 + n * kPrime64_2;
  return {avalanche(sums.low + sums.high), 0 - avalanche(high)};
}

HYBRIDKV_HOST_DEVICE inline Digest checksum_to_128(const std::uint8_t* input, std::uint64_t n,
                                                   const std::uint8_t* key) {
  Digest sums{n * kPrime64_1, 0};
  if (n > 96) mix32(sums, input + 48, input + n - 64, key + 96);
  if (n > 64) mix32(sums, input + 32, input + n - 48, key + 64);
  if (n > 32) mix32(sums, input + 16, input + n - 32, key + 32);
  mix32(sums, input, input + n - 16, key);
  return finish_sums(sums, n);
}

HYBRIDKV_HOST_DEVICE inline Digest checksum_to_240(const std::uint8_t* input, std::uint64_t n,
                                                   const std::uint8_t* key) {
  Digest sums{n * kPrime64_1, 0};
  for (std::uint64_t i = 32; i < 160; i += 32) mix32(sums, input + i - 32, input + i - 16, key + i - 32);
  sums = {avalanche(sums.low), avalanche(sums.high)};
  for (std::uint64_t i = 160; i <= n; i += 32) mix32(sums, input + i - 32, input + i - 16, key + 3 + i - 160);
  mix32(sums, input + n - 16, input + n - 32, key + 136 - 17 - 16);
  return finish_sums(sums, n);
}

HYBRIDKV_HOST_DEVICE inline Digest short_checksum(const std::uint8_t* input, std::uint64_t n, const std::uint8_t* key) {
  if (n > 128) return checksum_to_240(input, n, key);
  if (n > 16) return checksum_to_128(input, n, key);
  if (n > 8) return checksum_to_16(input, n, key);
  if (n > 3) return checksum_to_8(input, n, key);
  if (n > 0) return checksum_to_3(input, n, key);
  return {avalanche_short(read64(key + 64) ^ read64(key + 72)), avalanche_short(read64(key + 80) ^ read64(key + 88))};
}

}  // namespace hybridkv::cuda

#endif  // HYBRIDKV_CUDA_XXH3_WORDS_H_
