// The digests of all lengths and all levels equal those of the plain code and those of Python's xxhash.
#include "hybridkv/xxh3.h"

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/cpu/copy.h"
#include "csrc/tests/expect.h"

namespace {

using hybridkv::Digest128;
using hybridkv::testing::expect;

struct Known {
  std::size_t num_bytes;
  Digest128 digest;  // low, high
};

// `xxhash.xxh3_128(bytes((131 * i + 7 * (i >> 8)) % 256 for i in range(num_bytes)))`
const Known kKnown[] = {
    {0, {0x6001c324468d497f, 0x99aa06d3014798d8}},     {1, {0xc44bdff4074eecdb, 0xa6cd5e9392000f6a}},
    {2, {0x433ce72a5f67ae52, 0xdf65e9c86b3bd8eb}},     {3, {0x6811538b444fc6dc, 0xc925ae1797c3998f}},
    {4, {0xdb9cecd5eb59a7f1, 0x6ae518c60df23fca}},     {8, {0x5b3f49d0f38f9d7d, 0x63f350efc0ba3e2e}},
    {9, {0xd8a20b5b7aa68a37, 0x83c871b1014e6f76}},     {16, {0xadebb1d9d080b69c, 0x248181305d3c1039}},
    {17, {0xcfea252f6b7ed7e9, 0x825a0db7d0afe2c0}},    {32, {0x03504df8fe9f5aee, 0x49412a76e9b6a226}},
    {33, {0x17580ff25b93b223, 0xd1fad6434c06e9ad}},    {64, {0xcfa5d95a3b689b2c, 0xecceaabe1fb6f9ff}},
    {65, {0x11609fe0d1f6230f, 0x188e082b3b260ab5}},    {128, {0x5cfea347ea4bb687, 0x08df79f520370b52}},
    {129, {0x821740ece8839b64, 0xfc1d02037be48a62}},   {130, {0x063d51e219f5cd1b, 0x4485e595d5bf1170}},
    {240, {0x687f00a7f64e46db, 0x8406fbd017acdf4e}},   {241, {0x44dbd3180a664e27, 0xd894c74b1b3ea28f}},
    {256, {0x266a2c816cbb31c5, 0xb997d11012dfe96d}},   {1024, {0xd1abb5dbd52032f9, 0x54680c079a49361c}},
    {1025, {0xa3908b116ddf0191, 0x4010f40cb0ea5efd}},  {1088, {0x73a4a4f20d1ada67, 0x9fd7bb6d659184e3}},
    {2048, {0x597cefa098478059, 0x7d5e551fefb47c21}},  {2049, {0xe09d2fe2edf7e1d5, 0xfa697cf0f7451322}},
    {65537, {0x6cf6317c06d3e0a3, 0x3a58d0f34b5b4cef}}, {1000000, {0x03333208595c5337, 0x5abace3fe9dd4164}},
};

std::vector<unsigned char> input_of(std::size_t num_bytes) {
  std::vector<unsigned char> input(num_bytes);
  for (std::size_t byte = 0; byte < num_bytes; ++byte) {
    input[byte] = static_cast<unsigned char>(131 * byte + 7 * (byte >> 8));
  }
  return input;
}

}  // namespace

int main() {
  for (const Known& known : kKnown) {
    const std::vector<unsigned char> input = input_of(known.num_bytes);
    expect(hybridkv::xxh3::digest(input.data(), input.size()) == known.digest,
           "the digest of " + std::to_string(known.num_bytes) + " bytes equals that of xxhash");
  }
  const std::vector<unsigned char> input = input_of(9000);
  for (const hybridkv::cpu::Level level : hybridkv::cpu::supported_levels()) {
    for (std::size_t num_bytes = 0; num_bytes <= 4200; ++num_bytes) {
      const unsigned char* start = input.data() + num_bytes % 67;
      expect(hybridkv::cpu::digest(start, num_bytes, level) == hybridkv::xxh3::digest(start, num_bytes),
             "digest of " + std::to_string(num_bytes) + " bytes, " + hybridkv::cpu::name_of(level));
    }
  }
}
