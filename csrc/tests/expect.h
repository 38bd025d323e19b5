// Helpers of tests: a check that ends the program on failure, and memory with guards around it.
#ifndef HYBRIDKV_TESTS_EXPECT_H_
#define HYBRIDKV_TESTS_EXPECT_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

namespace hybridkv::testing {

inline void expect(bool holds, const std::string& claim) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", claim.c_str());
  std::exit(EXIT_FAILURE);
}

// The same bytes in each run, without a pattern that a wrong copy could reproduce.
class Noise {
 public:
  explicit Noise(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15 + 1) {}
  std::uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }
  std::uint64_t below(std::uint64_t bound) { return next() % bound; }

 private:
  std::uint64_t state_;
};

inline constexpr unsigned char kPoison = 0xA5;
inline constexpr std::size_t kMemoryPageBytes = 4096;

// Memory that starts `misalignment` bytes after the start of a page. With 0 it suits O_DIRECT.
class Memory {
 public:
  Memory(std::size_t num_bytes, std::size_t misalignment)
      : bytes_(num_bytes + 2 * kMemoryPageBytes + misalignment, kPoison), num_bytes_(num_bytes) {
    const auto start = reinterpret_cast<std::uintptr_t>(bytes_.data());
    offset_ = kMemoryPageBytes - start % kMemoryPageBytes + misalignment;
  }

  unsigned char* data() { return bytes_.data() + offset_; }
  std::uint64_t address() { return reinterpret_cast<std::uint64_t>(data()); }
  std::size_t size() const { return num_bytes_; }

  void fill(std::uint64_t seed) {
    Noise noise(seed);
    for (std::size_t byte = 0; byte < num_bytes_; ++byte) data()[byte] = static_cast<unsigned char>(noise.next() >> 32);
  }
  void poison() { bytes_.assign(bytes_.size(), kPoison); }

  // All of it, including the guards.
  const std::vector<unsigned char>& everything() const { return bytes_; }

 private:
  std::vector<unsigned char> bytes_;
  std::size_t num_bytes_;
  std::size_t offset_;
};

}  // namespace hybridkv::testing

#endif  // HYBRIDKV_TESTS_EXPECT_H_
